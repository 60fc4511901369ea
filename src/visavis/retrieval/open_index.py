"""Opens indexes for searching: the model of the queries, the store, and a check of both."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from visavis.core.errors import RunError, VisavisError, log_debug
from visavis.core.memory_budget import MemoryLimit
from visavis.models.text_tower import (
    TextTower,
    damaged_tower,
    missing_reason,
    tower_folder,
    verify_tower,
)
from visavis.retrieval.index_folder import (
    VECTOR_SUFFIXES,
    Index,
    IndexManifest,
    IndexModel,
    open_index_store,
    read_manifest,
)
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.query_encoder import QueryEncoder
from visavis.retrieval.search import SearchQuery, SearchResults, attach_images, search_collection

if TYPE_CHECKING:
    import torch

    from visavis.core.environment import EnvironmentCheck
    from visavis.models.retriever import Retriever
    from visavis.retrieval.source_files import FileCollection


def open_index(
    folder: str | Path,
    *,
    store: str | Path | Sequence[str | Path] | None = None,
    device: str | torch.device | None = None,
    memory: MemoryLimit = None,
    encoder: QueryEncoder | None = None,
) -> Index:
    """Open the index in a folder for searching. This never creates or changes a store.

    Args:
        folder: Folder of the index.
        store: Confirmed location of the store of this index, or of the stores of several
            indexes.
        device: Device of the model. Default: CUDA or an Apple GPU if available, else the CPU.
        memory: Memory limit of a search.
        encoder: Opened model of the queries, which is used if it is the expected one.

    Returns:
        The index.

    Raises:
        RunError: If there is no index, the model is missing or a different one, or the store is
            damaged, not confirmed, or not the confirmed one.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    was_equal = False
    while True:
        if encoder is None or encoder.fingerprint != manifest.query_model.fingerprint:
            encoder = open_query_encoder(folder, manifest, device, memory)
        try:
            vectors = open_index_store(folder, manifest, memory, confirmed=store)
            break
        except RunError:
            # An update may have changed the store, and a switch the query model, since the manifest
            # was read. A second try, because the update may have ended with an equal manifest.
            newer = read_manifest(folder)
            if was_equal and newer == manifest:
                raise
            was_equal = newer == manifest
            manifest = newer
    index = Index(folder, manifest, encoder, vectors, _list_files)
    if index.is_unfinished:
        logging.getLogger(__name__).warning(
            "%s: the index is unfinished, so items are missing. Its update was interrupted or "
            "is still running. "
            "Run visavis index again to complete it.",
            folder,
        )
    return index


def _list_files(
    root: Path, exclude: Sequence[str], live_pairs: Mapping[str, bool]
) -> FileCollection:
    """List the files of a data set whose items are shown."""
    # Only here: the formats of data sets would delay each search.
    from visavis.retrieval.source_files import list_readable_files

    return list_readable_files(root, exclude, live_pairs)


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
        """Search the index. Results have their images."""
        with self._lock:
            results = search_collection(self._index, query, top, item_filter)
            return attach_images(self._index, results)


def open_query_encoder(
    folder: Path,
    manifest: IndexManifest,
    device: str | torch.device | None = None,
    memory: MemoryLimit = None,
) -> QueryEncoder:
    """Open the model of the queries of an index. Without a text tower, the whole model is loaded at
    once, so that a missing one is reported here.
    """
    active = manifest.query_model
    of_items = manifest.all_queries[0]
    move = (
        f"visavis indexes move {folder} --model MODEL"
        if active == of_items
        else f"visavis indexes use-queries {folder} RUN"
    )
    load = partial(_load_model, folder, manifest, device, memory)
    advice = "Restore it to search with an image, or search with text."
    has_model = not active.model.endswith(VECTOR_SUFFIXES)
    tower = (
        _open_text_tower(folder, active.fingerprint, manifest.embedding_dim) if has_model else None
    )
    model = QueryEncoder(
        active.fingerprint,
        partial(load, active, f"If it was moved, run {move}."),
        None if active == of_items else partial(load, of_items, advice),
        tower,
    )
    if tower is None and has_model:
        _ = model.whole
    return model


def _open_text_tower(folder: Path, fingerprint: str, embedding_dim: int) -> TextTower | None:
    """Open the text tower of a model. None: the index has none, or a package is not installed."""
    if reason := missing_reason(folder, fingerprint):
        log_debug(__name__, "%s: no text tower, the model encodes texts: %s", folder, reason)
        return None
    path = tower_folder(folder, fingerprint)
    tower = TextTower.open(path, embedding_dim)
    if tower.fingerprint != fingerprint:
        raise damaged_tower(path, f"of the model {tower.fingerprint}")
    return tower


def _describe_texts(folder: Path, manifest: IndexManifest) -> str:
    """Describe what encodes the texts of an index, and verify its text tower."""
    queries = manifest.query_model
    if queries.model.endswith(VECTOR_SUFFIXES):
        return ""
    if reason := missing_reason(folder, queries.fingerprint):
        return f". The model encodes texts, without a text tower: {reason.rstrip('.')}"
    verify_tower(tower_folder(folder, queries.fingerprint))
    return ", and so is the text tower"


def _load_model(
    folder: Path,
    manifest: IndexManifest,
    device: str | torch.device | None,
    memory: MemoryLimit,
    expected: IndexModel,
    advice: str,
) -> Retriever:
    """Load a model of an index, and check that it is the expected one."""
    if expected.model.endswith(VECTOR_SUFFIXES):
        raise RunError(
            f"{expected.model}: expected a model for the query, got an index of vectors from this "
            "file, which has none. Train one for texts with visavis train --index INDEX --data "
            "DATA, use it with visavis indexes use-queries INDEX RUN, or search for items similar "
            "to one with --like KEY."
        )
    from visavis.models.retriever import Retriever

    try:
        retriever = Retriever.load(expected.model, device=device, memory=memory)
    except RunError as error:
        raise RunError(
            f"{folder}: the model of the index cannot be opened: {error} {advice}"
        ) from None
    if manifest.full_decoding and expected == manifest.all_queries[0]:
        retriever = retriever.with_full_decoding()
    check_model(folder, expected.fingerprint, expected.model, retriever)
    return retriever.truncated_to(manifest.embedding_dim)


def check_index(folder: Path, stores: Sequence[str | Path] = ()) -> EnvironmentCheck:
    """Open an index, and compare all items and vectors with their checksums."""
    from visavis.core.environment import EnvironmentCheck

    name = f"index {folder}"
    try:
        index = open_index(folder, store=stores)
        with closing(index.store):
            index.store.verify()
            value = f"{index.store.count():,} items, verified by their checksums"
            if skipped := index.manifest.skipped:
                _, _, problem = next(iter(skipped.values()))
                value += f", {len(skipped):,} files left out, such as: {problem.removesuffix('.')}"
        texts = _describe_texts(folder, index.manifest)
    except VisavisError as error:
        return EnvironmentCheck(name, str(error), ok=False)
    if not index.is_unfinished:
        return EnvironmentCheck(name, value + texts)
    fix = f"visavis index RUN {index.root} --out {folder}"
    return EnvironmentCheck(name, f"{value}, unfinished", ok=False, fix=fix)


def check_model(folder: Path, fingerprint: str, name: str, model: Retriever) -> None:
    """Check that a model is the expected one of an index."""
    if model.fingerprint == fingerprint:
        return
    advice = "Pass the model that made the index, or make another index with --out."
    if model.processor.items is not None:
        advice = f"{name} encodes text queries only. Use it with visavis indexes use-queries {folder} {name}."
    raise RunError(
        f"{folder}: expected a model with fingerprint {fingerprint}, got {name} with "
        f"{model.fingerprint}. Scores of different models are not comparable. {advice}"
    )
