"""Cached results: their folder, keys that change with files, and JSON with a checksum. A damaged
file is reported and computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from visavis.core.errors import DataError, StorageError, VisavisError
from visavis.core.storage.disk import current_disk
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
    """Return the folder of caches: ``VISAVIS_CACHE``, else ``visavis`` in the user's cache folder."""
    return user_folder("VISAVIS_CACHE", "XDG_CACHE_HOME", ".cache")


MAX_BYTES_HASHED_AT_OPEN = 64 * 2**20
"""Files of this size or less are hashed each time they are opened, larger ones only if the size or
time of a file has changed.
"""


def user_folder(variable: str, xdg_variable: str, home_name: str) -> Path:
    """Return a folder of visavis for the current user."""
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
    """Real path, size in bytes and time in ns of each file. They identify its content without
    reading it.
    """
    stats: dict[Path, list[str | int]] = {}
    for path in sorted(paths):
        target = str(path)
        try:
            target = os.path.realpath(path)
            status = os.stat(target)
            stats[path] = [target, status.st_size, modified_ns(status)]
        except (OSError, ValueError):  # the reader of the file reports the reason, such as a NUL
            stats[path] = [target, -1, -1]
    return stats


def stat_hash(paths: Iterable[Path], *extra: Any) -> str:
    """Hash the sizes and times of files, as a key for cached results that depend on their content."""
    return hashlib.sha256(
        json.dumps([list(file_stats(paths).values()), *extra]).encode()
    ).hexdigest()[:32]


def modified_ns(status: os.stat_result) -> int:
    """Return a modification time that changes if the content of a file changes."""
    # Some file systems round times to 1 or 2 s. A file with such a recent time may change again at
    # the same time. Until then, it gets a new time at each call, up to 1 ms later.
    modified = status.st_mtime_ns
    age = current_disk().time_ns() - modified
    if modified % 10**9 or abs(age) >= TIME_RESOLUTION_NS:
        return modified
    # Calls that are 4 us apart give different times.
    return modified + 1 + (age + TIME_RESOLUTION_NS) // 4096


def write_checksummed_json(path: str | Path, content: Any) -> None:
    """Write a JSON value with its checksum."""
    write_json(path, {"sha256": _checksum(content), "content": content})


def read_checksummed_json(
    path: str | Path, schema: Any, *, error: type[VisavisError] | None = None
) -> Any | None:
    """Read a JSON value that ``write_checksummed_json`` wrote. None if there is none, or if it was
    damaged and is removed. With an error class, damage raises this error instead.
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


def verify_once(
    kind: str, files: Iterable[Path], checksum: str, num_bytes: int, verify: Callable[[], None]
) -> None:
    """Compare the content of files with their checksum, by a function that raises an error: at each
    call, or for large files once until a size or time changes.
    """
    is_large = num_bytes > MAX_BYTES_HASHED_AT_OPEN
    record = f"checks/{kind}-{stat_hash(files, checksum)}.json"
    # Without a cache that can be read and written, they are verified at each call.
    with suppress(StorageError):
        if is_large and read_checksummed_json(cache_folder() / record, str) == checksum:
            return
    verify()
    with suppress(StorageError):
        if is_large:
            write_checksummed_json(cache_folder() / record, checksum)


def remove_damaged(path: Path, files: Iterable[Path], reason: str) -> None:
    """Remove the files of a damaged part of a cache, and log a warning."""
    logging.getLogger(__name__).warning(
        "%s is damaged and is computed again: %s.", path, _without_fix(reason)
    )
    for file in files:
        with storage_errors(file):
            current_disk().unlink(file)


def _without_fix(reason: str) -> str:
    """A reason without the fix and the period at its end."""
    return reason.removesuffix(RESTORE_COPY).removesuffix(".")


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
