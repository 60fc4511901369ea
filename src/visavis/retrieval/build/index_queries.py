"""Query models of an index: models of texts that were trained on its vectors. They are added,
switched and rolled back without encoding an item.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from visavis.core.errors import RunError
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.models.retriever import Retriever
from visavis.models.text_tower_export import add_text_tower, quantize_text_tower, remove_text_towers
from visavis.retrieval.build.index_builder import (
    add_query_tower,
    calibrate_index,
    recorded_model,
    vector_length,
)
from visavis.retrieval.build.no_match import fit_scale, set_scale
from visavis.retrieval.calibrate.calibration import Moments, ScoreScale
from visavis.retrieval.index_folder import (
    Index,
    IndexManifest,
    IndexModel,
    index_lock,
    open_index_store,
    read_manifest,
    set_manifest,
)
from visavis.retrieval.open_index import open_query_encoder
from visavis.retrieval.run_data import OpenRunData, no_run_data
from visavis.retrieval.source_files import list_readable_files
from visavis.retrieval.stores.index_database import IndexDatabase

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
        """Convert to plain values."""
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
    """List the query models of an index."""
    return QueryModels(str(folder), read_manifest(folder))


def use_queries(
    folder: Path,
    queries: str | Path,
    progress: Progress,
    *,
    int8: bool = False,
    open_data: OpenRunData = no_run_data,
) -> QueryModels:
    """Let a model encode the text queries of an index. A new one is added, and the others are kept.
    ``int8``: its text tower has weights of 8 bits.
    """
    with index_lock(folder):
        manifest = read_manifest(folder)
        known = {each.fingerprint: each for each in manifest.all_queries}
        is_run = os.path.exists(queries)
        if is_run:
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
        manifest = _with_active(manifest, model)
        # First, because it may fail. The index then keeps its query model.
        if int8:
            with progress.activity("loading the model"):
                whole = open_query_encoder(folder, manifest).whole
            quantize_text_tower(folder, whole, progress)
        # The text tower of a run is added when it is opened.
        return _activate(folder, manifest, progress, adds_tower=not is_run)


def restore_queries(folder: Path, progress: Progress) -> QueryModels:
    """Let the previous model encode the text queries of an index again. A second call undoes the
    first.
    """
    with index_lock(folder):
        manifest = read_manifest(folder)
        known = {each.fingerprint: each for each in manifest.all_queries}
        if manifest.previous_queries not in known:
            raise RunError(
                f"{folder}: expected a previous query model, got none. Choose one with "
                f"visavis indexes use-queries {folder} RUN."
            )
        manifest = _with_active(manifest, known[manifest.previous_queries])
        return _activate(folder, manifest, progress, adds_tower=True)


def _activate(
    folder: Path, manifest: IndexManifest, progress: Progress, *, adds_tower: bool
) -> QueryModels:
    """Write a manifest with another query model, whose text tower may be missing, and the scale of
    its scores.
    """
    scale = None
    try:
        if adds_tower:
            add_query_tower(folder, manifest, open_query_encoder(folder, manifest), progress)
        scale = _missing_scale(folder, manifest, progress)
    except RunError as error:
        # Such as a store outside of the folder. The query model is chosen all the same.
        progress.message(f"Match probabilities are not available: {error}")
    # Last, and in one transaction: a process that is killed leaves an index whose query model has
    # its text tower and its scale.
    with closing(IndexDatabase(folder)) as database, database.change():
        set_manifest(database, manifest)
        if scale is not None:
            set_scale(database, *scale)
    remove_text_towers(folder, [each.fingerprint for each in manifest.all_queries])
    return QueryModels(str(folder), manifest)


def _missing_scale(
    folder: Path, manifest: IndexManifest, progress: Progress
) -> tuple[ScoreScale, Moments | None] | None:
    """Compute the scale of an index with another manifest. None: the index has it."""
    encoder = open_query_encoder(folder, manifest)
    with closing(open_index_store(folder, manifest)) as vectors:
        index = Index(folder, manifest, encoder, vectors, list_readable_files)
        if index.scale is not None:
            return None
        with progress.activity("calibrating match probabilities"):
            return fit_scale(index)


def _with_active(manifest: IndexManifest, model: IndexModel) -> IndexManifest:
    """The manifest of an index with another query model."""
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
    # Choosing the active model a second time keeps the previous one.
    if before != model.fingerprint:
        previous = before if before in known else manifest.fingerprint
    return replace(
        manifest,
        queries=tuple(queries),
        active_queries=model.fingerprint,
        previous_queries=previous if previous in known else "",
    )


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
        add_text_tower(folder, retriever, progress)
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
    calibration = calibrate_index(open_data(Path(run)), manifest.embedding_dim, progress)
    add_text_tower(folder, retriever, progress)
    return IndexModel(recorded_model(run), retriever.fingerprint, calibration)
