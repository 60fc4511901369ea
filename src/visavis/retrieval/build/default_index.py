"""Index of a folder or data set at its default place, with the user's default model."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from visavis.core.errors import DataError
from visavis.core.progress import Progress
from visavis.models.default_model import default_model
from visavis.retrieval.build.index_builder import IndexReport, build_index, recorded_model
from visavis.retrieval.index_folder import is_free_folder, is_index, read_manifest
from visavis.retrieval.source_files import list_source_files, source_root

INDEXES_FOLDER = Path("indexes")


def default_index_folder(source: str | Path, model: str | Path | None = None) -> Path:
    """Return the folder of the index of a source: the first of ``indexes/NAME``,
    ``indexes/NAME-2``, ... that is its index or new.
    """
    root = source_root(source)
    name = Path(os.path.realpath(os.path.expanduser(source))).name or "root"
    recorded = None if model is None else recorded_model(model)
    # Two sources of the same name in different folders have numbered indexes.
    for number in itertools.count(1):
        folder = INDEXES_FOLDER / (name if number == 1 else f"{name}-{number}")
        if not is_index(folder):
            if is_free_folder(folder):
                break
            continue
        manifest = read_manifest(folder)
        if manifest.source == str(root) and recorded in (None, manifest.model):
            break
    return folder


def index_source(
    source: str | Path,
    out: str | Path | None,
    model: str | Path | None,
    progress: Progress,
    **options: Any,
) -> IndexReport:
    """Index a source without a run, or update its index. An existing index keeps its model."""
    folder = default_index_folder(source, model) if out is None else Path(out)
    if model is None and is_index(folder):
        return update_index(folder, progress, source=source, **options)
    if not is_index(folder):
        # A wrong folder is reported before a model is downloaded.
        list_source_files(source, options.get("exclude", ()))
    with default_model(model, progress) as name:
        progress.message(f"Indexing {source} with {name} into {folder}.")
        return build_index(name, source, folder, progress=progress, **options)


def update_index(
    folder: Path, progress: Progress, *, source: str | Path | None = None, **options: Any
) -> IndexReport:
    """Update an index with its model, and with its source if no other is given."""
    manifest = read_manifest(folder)
    return build_index(
        manifest.model, source or manifest.source, folder, progress=progress, **options
    )


def update_default_index(
    source: str | Path, model: str | Path | None, progress: Progress, **options: Any
) -> Path:
    """Index a source at its default place before a search, or update its index. Files that are left
    out are reported.
    """
    report = index_source(source, None, model, progress, **options)
    if report.skipped:
        progress.message(
            f"Left out, {len(report.skipped):,}: {report.skipped[0]} List all with visavis index "
            f"{source}."
        )
    if report.other_files is not None:
        progress.message(f"{report.other_files}.")
    return Path(report.folder)


def index_if_images(
    folder: str | Path, model: str | Path | None, progress: Progress, **options: Any
) -> Path:
    """Index a folder of images without a run. An index, a run, a model and a folder without images
    are returned as they are.
    """
    if is_index(folder) or any(
        os.path.exists(Path(folder) / name) for name in ("run.toml", "config.json")
    ):
        return Path(folder)
    if not is_index(default_index_folder(folder, model)):
        if not os.path.isdir(folder):
            return Path(folder)
        try:
            list_source_files(folder)
        except DataError:
            return Path(folder)
    return update_default_index(folder, model, progress, **options)
