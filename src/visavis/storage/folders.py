"""Folders and names: where caches lie, what may be created, whose turn it is, and what this program may remove."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from visavis.errors import RefusedOverwrite, RunError, StorageError
from visavis.storage.writing import storing


def cache_folder() -> Path:
    """Where computed features are kept: ``VISAVIS_CACHE``, else ``visavis`` in the user's cache folder."""
    if chosen := os.environ.get("VISAVIS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "visavis"


def new_folder(path: str | Path, *, replaced: bool = False) -> Path:
    """Create a folder that can be written in; an existing one is accepted if it is empty.

    replaced: ``replacing_folder`` will put another in its place, as none can in that of a link or a mount point.
    Raises RefusedOverwrite if the path is a file or holds anything, StorageError where nothing can be written.
    """
    path = Path(path)
    if re.search("[\0\ud800-\udfff]", str(path)):
        raise StorageError(f"{str(path)!r} cannot be written down as text: name another folder.")
    try:
        if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
            raise RefusedOverwrite(f"{path} already exists and is not an empty folder; nothing was changed: name another folder.")
        if replaced and (path.is_symlink() or os.path.ismount(path)):
            kind = "link" if path.is_symlink() else "mount point"
            raise RefusedOverwrite(f"{path} is a {kind}, which is never replaced; nothing was changed: name a folder in it.")
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None


@contextmanager
def begun_folder(path: str | Path | None, stem: str | Path) -> Iterator[Path]:
    """A new folder for what is made in this block, ``stem-1``, ``stem-2``, ... if ``path`` is None: made first, so that nothing is lost
    by a name that cannot be. If the block fails, the folders that were made for it are removed again, unless they hold something.

    Raises as ``new_folder``.
    """
    chosen = Path(stem if path is None else path)
    missing = [folder for folder in (chosen, *chosen.parents) if not os.path.lexists(folder)]
    folder = new_folder(numbered_folder(chosen)) if path is None else new_folder(chosen)
    try:
        yield folder
    except BaseException:
        for made in [folder, *missing] if path is None else missing:
            with suppress(OSError):
                made.rmdir()
        raise


def new_file(path: str | Path) -> Path:
    """A path at which no file exists yet. Raises RefusedOverwrite if one does."""
    path = Path(path)
    if path.exists():
        raise RefusedOverwrite(f"{path} already exists; nothing was changed: name another file.")
    return path


def numbered_file(path: str | Path) -> Path:
    """Claim, empty, the first of the files ``name-1.png``, ``name-2.png``, ... beside ``name.png`` that does not exist."""
    path, number = Path(path), 1
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            claimed = path.with_stem(f"{path.stem}-{number}")
            try:
                claimed.touch(exist_ok=False)
                return claimed
            except FileExistsError:
                number += 1


def numbered_folder(stem: str | Path) -> Path:
    """Create the first of the folders ``stem-1``, ``stem-2``, ... that does not exist."""
    stem, number = Path(stem), 1
    with storing(stem):
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
    lock = FileLock(_lock(path), timeout=-1 if wait else 0)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise RunError(f"another process is at work on {path}: wait for its end, or stop it first.") from None
    try:
        yield
    finally:
        lock.release()


def remove_lock(path: str | Path) -> None:
    """Remove the file that ``alone`` left of a lock, once nobody will work on ``path`` again."""
    with suppress(OSError):  # where a lock that is held cannot be removed, its release does
        _lock(Path(path)).unlink()


def _lock(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


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
