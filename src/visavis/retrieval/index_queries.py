"""Query models of an index: models of texts that were trained on its vectors. They are added,
switched and rolled back without encoding an item.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.models.retriever import Retriever
from visavis.retrieval.index_builder import (
    calibrate_index,
    recorded_model,
    vector_length,
)
from visavis.retrieval.index_folder import (
    IndexManifest,
    IndexModel,
    read_manifest,
    write_manifest,
)
from visavis.retrieval.query_model import record_text_queries
from visavis.retrieval.run_data import OpenRunData, no_run_data

ITEMS = "items"
"""Name of the model of the items, where a query model is expected."""


@dataclass(frozen=True)
class QueryModels(Result):
    """Query models of an index.

    Attributes:
        folder: Folder of the index.
        manifest: Its manifest.
    """

    ROWS: ClassVar[str] = "models"

    folder: str
    manifest: IndexManifest

    def tables(self) -> list[Table]:
        """Return the query models, with the active and the previous one."""
        rows = []
        for model in self.to_json()["models"]:
            state = "active" if model["active"] else "previous" if model["previous"] else ""
            rows.append((model["queries"], model["items"], state, model["model"]))
        columns = (
            Column("queries", is_text=True),
            *map(Column, ("items", "", "model")),
        )
        return [Table(columns, tuple(rows), (f"Index: {self.folder}",))]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object. Each model has the fingerprints of itself (``queries``) and of the model
            of the items.
        """
        manifest = self.manifest
        models = [
            {
                "queries": each.fingerprint,
                "items": manifest.fingerprint,
                "model": each.model,
                "active": each == manifest.query_model,
                "previous": each.fingerprint == manifest.previous_queries,
            }
            for each in manifest.all_queries
        ]
        return {"folder": self.folder, "models": models}


def list_queries(folder: Path) -> QueryModels:
    """List the query models of an index.

    Args:
        folder: Folder of the index.

    Returns:
        The query models.

    Raises:
        RunError: If there is no index.
    """
    return QueryModels(str(folder), read_manifest(folder))


def use_queries(
    folder: Path,
    queries: str | Path,
    progress: Progress,
    *,
    open_data: OpenRunData = no_run_data,
) -> QueryModels:
    """Let a model encode the text queries of an index. A new one is added, and the others are kept.

    Args:
        folder: Folder of the index.
        queries: Run that was trained on the vectors of the index, "items" for the model of the
            items, or the fingerprint of a query model of the index.
        progress: Receives progress and messages.
        open_data: Opens the data of the run, which calibrate its scores. Default: no data.

    Returns:
        The query models.

    Raises:
        RunError: If there is no index, or the model was trained on other vectors.
    """
    with storage.folder_lock(folder / "index", wait=False, subject=folder):
        manifest = read_manifest(folder)
        known = {each.fingerprint: each for each in manifest.all_queries}
        if os.path.exists(queries):
            model = _open_queries(folder, manifest, queries, open_data, progress)
        elif str(queries) == ITEMS:
            model = known[manifest.fingerprint]
        elif str(queries) in known:
            model = known[str(queries)]
        else:
            raise RunError(
                f"{queries}: expected a run, {ITEMS!r}, or the fingerprint of a query model of "
                f"{folder}, got none of them. List its query models with visavis indexes "
                f"list-queries {folder}."
            )
        return _activate(folder, manifest, model)


def restore_queries(folder: Path) -> QueryModels:
    """Let the previous model encode the text queries of an index again. A second call undoes the
    first.

    Args:
        folder: Folder of the index.

    Returns:
        The query models.

    Raises:
        RunError: If there is no index, or no previous model.
    """
    with storage.folder_lock(folder / "index", wait=False, subject=folder):
        manifest = read_manifest(folder)
        known = {each.fingerprint: each for each in manifest.all_queries}
        if manifest.previous_queries not in known:
            raise RunError(
                f"{folder}: expected a previous query model, got none. Choose one with "
                f"visavis indexes use-queries {folder} RUN."
            )
        return _activate(folder, manifest, known[manifest.previous_queries])


def _activate(
    folder: Path,
    manifest: IndexManifest,
    model: IndexModel,
) -> QueryModels:
    """Record the model of text queries."""
    before = manifest.query_model.fingerprint
    previous = manifest.previous_queries
    queries = list(manifest.queries)
    if model.fingerprint != manifest.fingerprint:
        # A run that was moved, or trained again in its folder, takes the place of the earlier one.
        queries = [
            *(
                each
                for each in queries
                if each.fingerprint != model.fingerprint and each.model != model.model
            ),
            model,
        ]
    known = {manifest.fingerprint, *(each.fingerprint for each in queries)}
    if before != model.fingerprint:
        previous = before if before in known else manifest.fingerprint
    manifest = replace(
        manifest,
        queries=tuple(queries),
        active_queries=model.fingerprint,
        previous_queries=previous if previous in known else "",
    )
    write_manifest(folder, manifest)
    return QueryModels(str(folder), manifest)


def _open_queries(
    folder: Path,
    manifest: IndexManifest,
    run: str | Path,
    open_data: OpenRunData,
    progress: Progress,
) -> IndexModel:
    """Check that a run was trained on the vectors of an index, and calibrate its scores."""
    with progress.activity("loading the model"):
        retriever = Retriever.load(run)
    if retriever.fingerprint == manifest.fingerprint:
        return manifest.all_queries[0]
    trained_on = retriever.processor.items
    if trained_on != manifest.fingerprint:
        found = "images of its own" if trained_on is None else f"vectors of {trained_on}"
        raise RunError(
            f"{folder}: expected a run that was trained on the vectors of this index "
            f"({manifest.fingerprint}), got {run}, which was trained on {found}. Scores would not "
            f"be comparable. Train one with visavis train --index {folder} --data DATA."
        )
    if (length := vector_length(retriever)) != manifest.embedding_dim:
        raise RunError(
            f"{folder}: expected vectors of {manifest.embedding_dim} dimensions, got "
            f"{length} of {run}, which was trained on an index with another --embedding-dim. "
            f"Train one with visavis train --index {folder} --data DATA."
        )
    record_text_queries(str(run), retriever.fingerprint, retriever)
    calibration = calibrate_index(open_data(Path(run)), manifest.embedding_dim, progress)
    return IndexModel(recorded_model(run), retriever.fingerprint, calibration)
