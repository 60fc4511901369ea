"""Paths of data sets: as they are given, or by a name under ``VISAVIS_DATA``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from visavis.core.errors import MAX_LISTED_NAMES, DataError, closest_name
from visavis.data.dataset import require
from visavis.data.file_names import escape_surrogates, is_shard_pattern, is_valid_unicode
from visavis.data.hub_files import DATASET_NAME, download_dataset


def data_folder() -> Path | None:
    """Return the folder in ``VISAVIS_DATA``, under which data sets are found by name. None: it is
    not set.
    """
    chosen = os.environ.get("VISAVIS_DATA")
    return Path(chosen) if chosen else None


def resolve_path(path: str | Path, expected: str = "") -> Path:
    """Find a file or folder by its path, or by its name under ``VISAVIS_DATA``. ``expected`` is a
    sentence that ends the error.
    """
    path = Path(os.path.expanduser(path))
    require(
        is_valid_unicode(str(path)),
        f"{escape_surrogates(str(path))}: expected a path in UTF-8, which the files of a run "
        "require, got another. Rename it.",
    )
    if path.parts and path.parts[0].startswith("hf:") and not os.path.exists(path):
        return download_dataset(str(path))
    if os.path.exists(path):
        return path
    if is_shard_pattern(path.name):
        # The folder of a pattern exists, the pattern itself does not.
        return resolve_path(path.parent, expected) / path.name
    root = data_folder()
    names = [entry.name for entry in root.iterdir()] if root and os.path.isdir(root) else []
    # The most similar of these names and the paths in the same folder.
    neighbors = list[str]()
    with suppress(OSError):  # no folder, or one that cannot be read
        neighbors = sorted(str(path.parent / name) for name in os.listdir(path.parent))
    close = closest_name(str(path), [*names, *neighbors])
    if root is None:
        raise DataError(
            f"{path}: expected an existing path, got none, and VISAVIS_DATA, where it is searched "
            "next, is not set. "
            f"{f'Use {close}.' if close else 'Correct the path, or set VISAVIS_DATA.'}"
            f"{expected}"
        )
    if os.path.exists(root / path):
        return root / path
    listed = ", ".join(sorted(names))
    others = f", or use one of {listed}" if 0 < len(names) <= MAX_LISTED_NAMES else ""
    fix = f"Use {close}." if close else f"Correct the path{others}."
    raise DataError(
        f"{path}: expected an existing path, here or under VISAVIS_DATA ({root}), got none. "
        f"{fix}{expected}"
    )


def path_exists(path: str | Path) -> bool:
    """Return whether ``resolve_path`` finds a path."""
    path = Path(os.path.expanduser(path))
    root = data_folder()
    return (
        os.path.exists(path)
        or (root is not None and os.path.exists(root / path))
        or DATASET_NAME.fullmatch(str(path)) is not None
    )
