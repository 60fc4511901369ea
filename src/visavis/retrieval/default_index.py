"""Index of a folder at its default place, ``indexes/NAME`` in the current folder, with the default
model.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

from visavis.core.errors import DataError
from visavis.core.progress import Progress
from visavis.models.default_model import default_model
from visavis.retrieval.index_builder import IndexReport, build_index
from visavis.retrieval.index_folder import is_free_folder, is_index, read_manifest
from visavis.retrieval.source_files import list_source_files, source_root

INDEXES_FOLDER = Path("indexes")


def default_index_folder(source: str | Path, model: str | Path | None = None) -> Path:
    """Return the folder of the index of a source: the first of ``indexes/NAME``,
    ``indexes/NAME-2``, ... that is its index or new.

    Args:
        source: Folder of images and videos, or a data set.
        model: Model of the index. None: any model.

    Returns:
        The folder. It may not exist yet.
    """
    root, name = (
        source_root(source),
        Path(os.path.realpath(os.path.expanduser(source))).name or "root",
    )
    numbered = (
        INDEXES_FOLDER / (name if number == 1 else f"{name}-{number}") for number in count(1)
    )
    # Two sources of the same name in different folders have numbered indexes.
    return next(folder for folder in numbered if _is_free_or_of(folder, str(root), model))


def index_source(
    source: str | Path,
    out: str | Path | None,
    model: str | Path | None,
    progress: Progress,
    **options: Any,
) -> IndexReport:
    """Index a source without a run, or update its index. An existing index keeps its model.

    Args:
        source: Folder of images and videos, or a data set.
        out: Folder of the index. None: ``default_index_folder``.
        model: Run, or folder or hub name of a dual encoder. None: the model of the index, else the
            default model.
        progress: Receives progress and messages.
        **options: Further arguments of ``build_index``.

    Returns:
        Counts of the update.

    Raises:
        DataError: If the source has no files to index, or no model is available.
        RunError: If ``out`` is an index of another model, source or setting.
    """
    folder = default_index_folder(source, model) if out is None else Path(out)
    if model is None and is_index(folder):
        return build_index(
            read_manifest(folder).model, source, folder, progress=progress, **options
        )
    if not is_index(folder):
        # A wrong folder is reported before a model is downloaded.
        list_source_files(source, options.get("exclude", ()))
    with default_model(model, progress) as name:
        progress.message(f"Indexing {source} with {name} into {folder}.")
        return build_index(name, source, folder, progress=progress, **options)


def update_default_index(
    source: str | Path, model: str | Path | None, progress: Progress, **options: Any
) -> Path:
    """Index a source at its default place before a search, or update its index. Files that are left
    out are reported.

    Args:
        source: Folder of images and videos, or a data set.
        model: Folder or hub name of a dual encoder. None: the model of the index, else the default
            model.
        progress: Receives progress and messages.
        **options: Further arguments of ``build_index``.

    Returns:
        Folder of the index.

    Raises:
        DataError: If the source has no files to index and no index, or no model is available.
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


def index_if_images(folder: str | Path, model: str | Path | None, progress: Progress) -> Path:
    """Index a folder of images without a run. An index, a run, a model and a folder without images
    are returned as they are.

    Args:
        folder: Any folder, or the missing source of an index at its default place.
        model: Folder or hub name of a dual encoder. None: the default model.
        progress: Receives progress and messages.

    Returns:
        Folder of the index, or the folder itself.
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
    return update_default_index(folder, model, progress)


def _is_free_or_of(folder: Path, root: str, model: str | Path | None) -> bool:
    """Whether a folder is new or empty, or an index of this source and model."""
    if is_index(folder):
        manifest = read_manifest(folder)
        recorded = (
            None
            if model is None
            else os.path.abspath(model)
            if os.path.exists(model)
            else str(model)
        )
        return manifest.source == root and recorded in (None, manifest.model)
    return is_free_folder(folder)
