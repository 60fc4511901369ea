"""Folders outside a data set whose files may be read."""

from __future__ import annotations

import os
from pathlib import Path

IMAGE_ROOTS = "VISAVIS_IMAGE_ROOTS"
"""Environment variable with folders, separated as in PATH. Files of data sets may be links to files
in them.
"""


def image_roots() -> list[str]:
    """Return the folders in ``VISAVIS_IMAGE_ROOTS``."""
    return list(filter(None, os.environ.get(IMAGE_ROOTS, "").split(os.pathsep)))


def is_inside(path: str | Path, root: str | Path) -> bool:
    """Return whether a path leads into a folder, or into one of ``VISAVIS_IMAGE_ROOTS``, after all
    links are followed.
    """
    # Windows ignores case. Elsewhere normcase returns the path as it is.
    target = os.path.normcase(os.path.join(os.path.realpath(path), ""))
    folders = (root, *image_roots())
    # Try the folders as they are first, because resolving them is slow.
    return any(
        target.startswith(os.path.normcase(os.path.join(resolve(folder), "")))
        for resolve in (str, os.path.realpath)
        for folder in folders
    )
