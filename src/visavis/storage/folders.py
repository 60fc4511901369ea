"""Folders and names: where caches lie, what may be created, whose turn it is, and what this program may remove."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from visavis.errors import RefusedOverwrite, RunError


def cache_folder() -> Path:
    """Where computed features are kept: ``VISAVIS_CACHE``, else ``visavis`` in the user's cache folder."""
    if chosen := os.environ.get("VISAVIS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "visavis"


def new_folder(path: str | Path) -> Path:
    """Create a folder; an existing one is accepted if it is empty.

    Raises RefusedOverwrite if the path is a file or holds anything.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RefusedOverwrite(f"{path} already exists and is not an empty folder; nothing was changed: name another folder.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def new_file(path: str | Path) -> Path:
    """A path at which no file exists yet. Raises RefusedOverwrite if one does."""
    path = Path(path)
    if path.exists():
        raise RefusedOverwrite(f"{path} already exists; nothing was changed: name another file.")
    return path


def numbered_folder(stem: str | Path) -> Path:
    """Create the first of the folders ``stem-1``, ``stem-2``, ... that does not exist."""
    stem, number = Path(stem), 1
    stem.parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


@contextmanager
def alone(path: str | Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of ``path``, so that one process at a time works on it; a crash releases it too.

    wait: wait for the other process to end; otherwise raise RunError at once.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock", timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(f"another process is at work on {path}: wait for its end, or stop it first.") from None
    try:
        yield
    finally:
        lock.release()


def remove_parts(folder: str | Path) -> None:
    """Remove the temporary files and folders that a killed process left behind in ``replacing``."""
    for part in list(Path(folder).rglob(".*.part")):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def remove_folder(path: str | Path) -> None:
    """Remove a folder that this program made (old checkpoints, parts of a cache)."""
    shutil.rmtree(path, ignore_errors=True)
