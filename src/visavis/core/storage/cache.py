"""Cached results: their folder, keys that change with files, and JSON with a checksum. A damaged
file is reported and computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from visavis.core.errors import DataError, StorageError, VisavisError
from visavis.core.storage.reading import RESTORE_COPY, parse_json, read_json
from visavis.core.storage.writing import storage_errors, write_json

TIME_RESOLUTION_NS = 2 * 10**9
"""Coarsest resolution of modification times: FAT rounds them to 2 s, HFS+ to 1 s."""


class DamagedCacheError(DataError):
    """A part of a cache differs from what was written."""


class _ChecksummedContent(BaseModel):
    sha256: str
    content: Any


def cache_folder() -> Path:
    """Return the folder of caches: ``VISAVIS_CACHE``, else ``visavis`` in the user's cache folder.

    Returns:
        The path. The folder may not exist yet.

    Raises:
        StorageError: If the user has no home folder.
    """
    return user_folder("VISAVIS_CACHE", "XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, xdg_variable: str, home_name: str) -> Path:
    """Return a folder of visavis for the current user.

    Args:
        variable: Environment variable of visavis with the folder itself.
        xdg_variable: Environment variable with the parent folder. As the XDG Base Directory
            Specification requires, a relative or empty value is ignored.
        home_name: Name of the parent folder in the home folder, if neither variable is set.

    Returns:
        The path. The folder may not exist yet.

    Raises:
        StorageError: If neither variable is set and the user has no home folder, as in a container
            or a system service.
    """
    if folder := os.environ.get(variable):
        return Path(folder)
    parent = os.environ.get(xdg_variable, "")
    if not os.path.isabs(parent):
        # The path stays as it is for a user id that is not in the list of users.
        parent = os.path.join(os.path.expanduser("~"), home_name)
    if not os.path.isabs(parent):
        raise StorageError(
            f"{variable}: expected a folder, got none, and this user has no home folder. Set "
            f"{variable}=FOLDER or HOME."
        )
    return Path(parent) / "visavis"


def file_stats(paths: Iterable[Path]) -> dict[Path, list[str | int]]:
    """Return what identifies the content of files without reading them.

    Args:
        paths: The files.

    Returns:
        Full path, size in bytes and time of change in ns of each file. Size and time are -1 if the
        file does not exist.
    """
    return {path: _stat(os.path.realpath(path)) for path in sorted(paths)}


def stat_hash(paths: Iterable[Path], *extra: Any) -> str:
    """Hash the sizes and times of files, as a key for cached results that depend on their content.

    Args:
        paths: The files.
        extra: More JSON data of the key.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.sha256(
        json.dumps([list(file_stats(paths).values()), *extra]).encode()
    ).hexdigest()[:32]


def modified_ns(status: os.stat_result) -> int:
    """Return a modification time that changes if the content of a file changes.

    Some file systems round times to 1 or 2 s. A file with such a recent time may change again at
    the same time. Until then, it gets a new time at each call, up to 1 ms later.

    Args:
        status: Status of the file.

    Returns:
        Modification time in ns since the epoch.
    """
    modified = status.st_mtime_ns
    age = time.time_ns() - modified
    if modified % 10**9 or abs(age) >= TIME_RESOLUTION_NS:
        return modified
    # Calls that are 4 us apart give different times.
    return modified + 1 + (age + TIME_RESOLUTION_NS) // 4096


def _stat(path: str) -> list[str | int]:
    try:
        status = os.stat(path)
    except OSError:  # the reader of the file reports the reason
        return [path, -1, -1]
    return [path, status.st_size, modified_ns(status)]


def write_checksummed_json(path: str | Path, content: Any) -> None:
    """Write a JSON value with its checksum.

    Args:
        path: File to write.
        content: Value that ``json`` can write.

    Raises:
        StorageError: If the file cannot be written.
    """
    write_json(path, {"sha256": _checksum(content), "content": content})


def read_checksummed_json(
    path: str | Path, schema: Any, *, error: type[VisavisError] | None = None
) -> Any | None:
    """Read a JSON value that ``write_checksummed_json`` wrote.

    A damaged file is reported and removed, or raises an error.

    Args:
        path: File to read.
        schema: Type of the value.
        error: Class of the error for a damaged file, which is kept. None: the file is removed.

    Returns:
        The value, or None if the file does not exist or was damaged.

    Raises:
        VisavisError: ``error`` if the file is damaged.
    """
    path = Path(path)
    if not os.path.exists(path):
        return None
    try:
        stored = read_json(path, _ChecksummedContent)
        if stored.sha256 == _checksum(stored.content):
            return parse_json(json.dumps(stored.content).encode(), schema, str(path))
        reason = "checksum mismatch"
    except DataError as damage:
        reason = str(damage)
    if error is not None:
        raise error(f"{path} is damaged: {_without_fix(reason)}. Restore a copy of it.")
    remove_damaged(path, [path], reason)
    return None


def remove_damaged(path: Path, files: Iterable[Path], reason: str) -> None:
    """Remove the files of a damaged part of a cache, and log a warning.

    Args:
        path: The part, for the warning.
        files: Files to remove.
        reason: The damage.

    Raises:
        StorageError: If a file cannot be removed.
    """
    logging.getLogger(__name__).warning(
        "%s is damaged and is computed again: %s.", path, _without_fix(reason)
    )
    for file in files:
        with storage_errors(file):
            file.unlink(missing_ok=True)


def _without_fix(reason: str) -> str:
    """A reason without the fix and the period at its end."""
    return reason.removesuffix(RESTORE_COPY).removesuffix(".")


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
