"""Opens indexes for searching: the model of the queries, the store, and a check of both."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch

from visavis.core.errors import RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.models.retriever import Retriever
from visavis.retrieval.index_folder import (
    VECTOR_SUFFIXES,
    Index,
    IndexManifest,
    IndexModel,
    open_index_store,
    read_manifest,
)
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.query_model import GivenVectors, PairedModel, open_query_model
from visavis.retrieval.search import SearchQuery, SearchResults, attach_images, search_collection

if TYPE_CHECKING:
    from visavis.core.environment import EnvironmentCheck


def open_index(
    folder: str | Path,
    *,
    store: str | Path | Sequence[str | Path] | None = None,
    device: str | torch.device | None = None,
    memory: MemoryLimit = None,
) -> Index:
    """Open the index in a folder for searching. This never creates or changes a store.

    Args:
        folder: Folder of the index.
        store: Confirmed location of the store of this index, or of the stores of several
            indexes.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
        memory: Memory limit of a search.

    Returns:
        The index.

    Raises:
        RunError: If there is no index, the model is missing or a different one, or the store is
            damaged, not confirmed, or not the confirmed one.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    query_model = open_index_model(folder, manifest, device, memory)
    try:
        vectors = open_index_store(folder, manifest, memory, confirmed=store)
    except RunError:
        # An update may have changed the store since the manifest was read.
        if read_manifest(folder) == manifest:
            raise
        manifest = read_manifest(folder)
        vectors = open_index_store(folder, manifest, memory, confirmed=store)
    index = Index(folder, manifest, query_model, vectors)
    if index.is_unfinished:
        logging.getLogger(__name__).warning(
            "%s: the index is unfinished, so items are missing. Its update was interrupted or "
            "is still running. "
            "Run visavis index again to complete it.",
            folder,
        )
    return index


class SharedIndex:
    """An index for several threads, which search one after another. A copy, and an unpickled one in
    another process, opens the index again.

    Args:
        folder: Folder of the index.
        store: Confirmed location of a store outside the folder.

    Raises:
        RunError: If the folder is not an index, or its model or store cannot be opened.
    """

    def __init__(self, folder: str | Path, store: str | Path | None = None):
        self._arguments = os.path.abspath(folder), store
        self._index = open_index(folder, store=store)
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[SharedIndex], tuple[str, str | Path | None]]:
        return SharedIndex, self._arguments

    def search(self, query: SearchQuery, top: int, item_filter: ItemFilter) -> SearchResults:
        """Search the index.

        Args:
            query: The query.
            top: Maximum number of results.
            item_filter: Conditions on the items.

        Returns:
            Results with their images, best first.
        """
        with self._lock:
            results = search_collection(self._index, query, top, item_filter)
            return attach_images(self._index, results)


def open_index_model(
    folder: Path,
    manifest: IndexManifest,
    device: str | torch.device | None = None,
    memory: MemoryLimit = None,
) -> Retriever:
    """Open the model of an index: texts are encoded by its query model, images by the model of the
    items.

    Args:
        folder: Folder of the index.
        manifest: Its manifest.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
        memory: Memory limit of a search.

    Returns:
        The model, parts of which are loaded when they are needed.

    Raises:
        RunError: If the query model is missing or another one.
    """
    active = manifest.query_model
    of_items = manifest.all_queries[0]

    def load(expected: IndexModel, name: str, advice: str) -> Retriever:
        if name.endswith(VECTOR_SUFFIXES):
            return GivenVectors(name, expected.fingerprint)
        try:
            retriever = Retriever.load(name, device=device, memory=memory)
        except RunError as error:
            raise RunError(
                f"{folder}: the model of the index cannot be opened: {error} {advice}"
            ) from None
        if manifest.full_decoding and expected == of_items:
            retriever = retriever.with_full_decoding()
        check_model(folder, expected.fingerprint, name, retriever)
        return retriever.truncated_to(manifest.embedding_dim)

    move = (
        f"visavis indexes move {folder} --model MODEL"
        if active == of_items
        else f"visavis indexes use-queries {folder} RUN"
    )
    load_active = partial(load, active, active.model, f"If it was moved, run {move}.")
    queries = open_query_model(
        active.model, active.fingerprint, manifest.embedding_dim, load_active
    )
    if active == of_items:
        return queries
    advice = "Restore it to search with an image, or search with text."
    return PairedModel(queries, partial(load, of_items, of_items.model, advice))


def check_index(folder: Path, stores: Sequence[str | Path] = ()) -> EnvironmentCheck:
    """Open an index, and compare all items and vectors with their checksums.

    Args:
        folder: Folder of the index.
        stores: Confirmed locations of stores outside the folder.

    Returns:
        One line of ``visavis doctor``.
    """
    from visavis.core.environment import EnvironmentCheck

    name = f"index {folder}"
    try:
        index = open_index(folder, store=stores)
        with closing(index.store):
            index.store.verify()
            value = f"{index.store.count():,} items, verified by their checksums"
    except VisavisError as error:
        return EnvironmentCheck(name, str(error), ok=False)
    if not index.is_unfinished:
        return EnvironmentCheck(name, value)
    fix = f"visavis index RUN {index.root} --out {folder}"
    return EnvironmentCheck(name, f"{value}, unfinished", ok=False, fix=fix)


def check_model(folder: Path, fingerprint: str, name: str, model: Retriever) -> None:
    """Check that a model is the expected one of an index.

    Args:
        folder: Folder of the index.
        fingerprint: Fingerprint of the model in the manifest.
        name: Location of the model.
        model: The model.

    Raises:
        RunError: If the fingerprints differ.
    """
    if model.fingerprint == fingerprint:
        return
    advice = "Pass the model that made the index, or make another index with --out."
    if model.processor.items is not None:
        advice = f"{name} encodes text queries only. Use it with visavis indexes use-queries {folder} {name}."
    raise RunError(
        f"{folder}: expected a model with fingerprint {fingerprint}, got {name} with "
        f"{model.fingerprint}. Scores of different models are not comparable. {advice}"
    )
