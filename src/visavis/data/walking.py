"""All files under a folder, however deep, links followed; what is neither a file nor a folder is told apart and never opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from visavis import storage


def files_under(folder: Path, *, hidden: bool = False) -> Iterator[tuple[Path, str | None]]:
    """Every path under ``folder`` with None for a regular file, else what is wrong with it; no folder is entered again through a link.

    Folder by folder, names in alphabetical order. hidden: also what begins with a dot.
    """
    waiting, seen = [folder], set[tuple[int, int]]()
    while waiting:
        parent = waiting.pop()
        try:
            with os.scandir(parent) as listed:
                entries = sorted((entry for entry in listed if hidden or not entry.name.startswith(".")), key=lambda entry: entry.name)
            seen.add(_identity(os.stat(parent)))
        except OSError as error:
            yield parent, f"the folder cannot be read: {error.strerror}"
            continue
        folders: dict[Path, tuple[int, int]] = {}
        for entry in entries:
            path = parent / entry.name
            if entry.is_file(follow_symlinks=False):
                yield path, None
                continue
            try:
                status = os.stat(path)
            except OSError as error:
                yield path, f"it is a link that leads to no file: {error.strerror}"
                continue
            if stat.S_ISDIR(status.st_mode):
                folders[path] = _identity(status)
            else:
                yield (
                    path,
                    None if stat.S_ISREG(status.st_mode) else f"it is {storage.kind_of_file(status.st_mode)}, expected a regular file",
                )
        waiting += reversed([path for path, identity in folders.items() if identity not in seen])
        seen.update(folders.values())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
