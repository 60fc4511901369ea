"""Folders: new output folders, numbered names, locks and removal."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from visavis.core.errors import RefusedOverwrite, RunError, StorageError, closest_name
from visavis.core.storage.disk import current_disk
from visavis.core.storage.writing import (
    CHANGE_FOLDER,
    cannot_write,
    create_folder,
    move,
    name_of_part,
    part_of,
    storage_errors,
)


def prepare_empty_folder(path: str | Path, *, will_be_replaced: bool = False) -> Path:
    """Create a folder that can be written to. An existing folder is accepted if it is empty, except
    for temporary files of a killed process, which are removed. One that ``atomic_folder`` will create
    later is only checked.
    """
    path = Path(path)
    if re.search("[\0\ud800-\udfff]", str(path)):
        raise StorageError(f"{str(path)!r} cannot be a file name. Choose another folder.")
    try:
        if os.path.lexists(path) and not (
            os.path.isdir(path) and all(map(name_of_part, os.listdir(path)))
        ):
            raise RefusedOverwrite(
                f"{path} already exists and is not an empty folder. Nothing was changed. Choose "
                "another folder."
            )
        if will_be_replaced and (
            os.path.islink(path)
            or os.path.ismount(path)
            or (os.path.exists(path) and os.path.samefile(path, os.curdir))
        ):
            kind = "a link" if os.path.islink(path) else "a mount point or the current folder"
            raise RefusedOverwrite(
                f"{path} is {kind} and cannot be replaced. Nothing was changed. Choose a folder in "
                "it."
            )
        if os.path.isdir(path):
            remove_partial_files(path)
        if not will_be_replaced:
            create_folder(path)
        # The name appears with the content. Until then, its nearest folder shows what can be written.
        existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=existing):
            return path
    except OSError as error:
        raise cannot_write(path, f"{error.strerror or error}. {CHANGE_FOLDER}") from None


@contextmanager
def create_output_folder(
    path: str | Path | None, stem: str | Path, *, will_be_replaced: bool = False
) -> Iterator[Path]:
    """Create the folder for the results of this block before any work is done: ``path``, or a
    numbered one that begins with ``stem``.
    """
    chosen = Path(stem if path is None else path)
    missing = [folder for folder in (chosen, *chosen.parents) if not os.path.lexists(folder)]
    folder = (
        prepare_empty_folder(create_numbered_folder(chosen))
        if path is None
        else prepare_empty_folder(chosen, will_be_replaced=will_be_replaced)
    )
    try:
        yield folder
    except BaseException:
        # The folders that were created for it. A folder that holds something stays.
        for created in [folder, *missing] if path is None else missing:
            with suppress(OSError):
                current_disk().rmdir(created)
        raise


def require_new_file(path: str | Path) -> Path:
    """Check that no file exists at a path."""
    path = Path(path)
    if os.path.exists(path):
        raise RefusedOverwrite(f"{path} already exists. Nothing was changed. Choose another file.")
    return path


def save_new_file(
    path: str | Path | None, save: Callable[[Path], None], *, stem: str | Path = ""
) -> Path:
    """Save a result in a new file, whose name appears together with the content. Without a path, or
    if the file appeared during the work, its name is the first free ``stem-N``.
    """
    chosen = Path(stem if path is None else path)
    with storage_errors(chosen):
        create_folder(chosen.parent)
        part = part_of(chosen)
        try:
            current_disk().mkdir(part, exist_ok=False)
            content = part / chosen.name
            save(content)
            if path is not None and _place(content, chosen):
                return chosen
            numbered = (chosen.with_stem(f"{chosen.stem}-{number}") for number in count(1))
            file = next(candidate for candidate in numbered if _place(content, candidate))
        finally:
            current_disk().rmtree(part)
    if path is not None:
        raise RefusedOverwrite(
            f"{path} already exists. Nothing was changed. The result is in {file}."
        )
    return file


def _place(content: Path, target: Path) -> bool:
    """Give a complete file its name, unless a file has it already."""
    disk = current_disk()
    try:
        disk.link(content, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            disk.open(target, "xb").close()
        except FileExistsError:
            return False
        disk.replace(content, target)
    disk.sync_path(target.parent)
    return True


def similar_path(path: str | Path) -> Path | None:
    """Find the existing path that is most similar to a missing one, name by name: ``runs/mine`` for
    ``run/mine``. None if a folder has no similar name.
    """
    path = Path(path)
    found = Path(path.anchor)
    for name in path.parts[len(found.parts) :]:
        close: str | None = name
        if not os.path.exists(found / name):
            try:
                close = closest_name(name, sorted(os.listdir(found)))
            except OSError:
                return None
        if close is None:
            return None
        found = found / close
    return found


def create_numbered_folder(stem: str | Path) -> Path:
    """Create the first of the folders ``stem-1``, ``stem-2``, ... that does not exist."""
    stem = Path(stem)
    with storage_errors(stem):
        create_folder(stem.parent)
        for number in count(1):
            folder = stem.with_name(f"{stem.name}-{number}")
            with suppress(FileExistsError):
                current_disk().mkdir(folder, exist_ok=False)
                current_disk().sync_path(folder.parent)
                break
    return folder


@contextmanager
def folder_lock(
    path: str | Path, *, wait: bool, subject: str | Path | None = None
) -> Iterator[None]:
    """Hold the lock of a path, so that one process at a time works on it. A crash releases the
    lock.
    """
    path = Path(path)
    subject = subject or path
    with storage_errors(subject):
        create_folder(path.parent)
        lock = current_disk().lock(lock_file(path), wait=wait)
        if lock is None:
            raise RunError(
                f"{subject} is locked by another process. Wait until it ends, or stop it first."
            )
    try:
        # What a killed process did not complete: a reserved array of a cache can be large.
        _remove(part for part in path.parent.iterdir() if name_of_part(part.name) == path.name)
        yield
    finally:
        lock.release()


def remove_lock(path: str | Path) -> None:
    """Remove the lock file of a path once no process will work on it again."""
    # A lock that is held and cannot be removed now is removed by its release.
    with suppress(OSError):
        current_disk().unlink(lock_file(Path(path)))


def lock_file(path: Path) -> Path:
    """Return the lock file of a path."""
    return path.parent / f".{path.name}.lock"


def remove_partial_files(folder: str | Path) -> None:
    """Remove temporary files and folders that a killed process left behind."""
    _remove(part for part in Path(folder).rglob(".*.part") if name_of_part(part.name))


def _remove(parts: Iterable[Path]) -> None:
    for part in list(parts):
        if os.path.isdir(part):
            current_disk().rmtree(part)
        else:
            with suppress(PermissionError):  # Windows keeps files that another process has open
                current_disk().unlink(part)


def replace_folder(source: Path, target: Path) -> None:
    """Rename a folder over another one, also on the disk. A process that is killed between two
    renames leaves only the new one, under its old name.
    """
    removed = part_of(target)
    with storage_errors(target):
        if os.path.lexists(target):
            current_disk().replace(target, removed)
        move(source, target)
        current_disk().rmtree(removed)


def remove_folder(path: str | Path) -> None:
    """Remove a folder that visavis created, such as an old checkpoint or a part of a cache."""
    path = Path(path)
    # Under another name first, so that a folder that cannot be removed stays complete. Windows keeps
    # files that another process maps, and a later removal may succeed.
    removed = part_of(path)
    with suppress(OSError):
        current_disk().replace(path, removed)
        current_disk().rmtree(removed)
