"""Writing of files: completely or not at all, and never over a file of the user.

A file is written under a temporary name, flushed to disk and then renamed. A process that is killed
at any time leaves the old or the new file, never a part. A full disk raises a StorageError.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import sqlite3
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from itertools import takewhile
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, BinaryIO

from visavis.core.errors import DataError, StorageError
from visavis.core.storage.disk import current_disk
from visavis.core.storage.reading import TENSORS_HASH, read_text, read_toml, tensors_hash

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


_DISK_FULL_CODES = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    None,
)  # None: errors of numpy, which reports only the number of bytes
_RESUMED: ContextVar[Path | None] = ContextVar("folder to resume", default=None)
WINDOWS_MAX_PATH = 260
"""Characters of a path from which Windows needs the setting of ``LONG_PATH``. A folder needs 12
fewer.
"""
LONG_PATH = (
    "its path is too long for Windows. Enable long paths in Windows (LongPathsEnabled), or choose "
    "a shorter folder"
)
# 1 s in all.
RENAME_DELAYS_S = (0.01, 0.04, 0.15, 0.3, 0.5)
CHANGE_FOLDER = "Choose another folder, or change its permissions"
"""Fix of a file that cannot be written, without its period."""


def cannot_write(path: str | Path, reason: str) -> StorageError:
    """Make the error about a file or folder that cannot be written."""
    return StorageError(f"{path} cannot be written: {reason}.")


def disk_full(path: str | Path) -> StorageError:
    """Make the error about a full disk."""
    folder = _RESUMED.get()
    again = "run the command again" if folder is None else f"continue with --resume {folder}"
    return cannot_write(path, f"{os.strerror(errno.ENOSPC)}. Free space and {again}")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Within this block, a full disk leaves a folder that the command resumes. An outer block has
    precedence.
    """
    token = _RESUMED.set(_RESUMED.get() or folder)
    try:
        yield
    finally:
        _RESUMED.reset(token)


@contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of writing in this block to StorageError."""
    path = Path(path)
    if re.search("[\0\ud800-\udc7f\udd00-\udfff]", str(path)) or _is_windows_device(path):
        raise StorageError(f"{str(path)!r} cannot be a file name. Choose another name.")
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_CODES:
            raise disk_full(path) from None
        if os.name == "nt" and len(os.path.abspath(path)) >= WINDOWS_MAX_PATH:
            raise cannot_write(path, LONG_PATH) from None
        failed = path if error.filename is None else Path(os.fsdecode(error.filename))
        # A folder above the path can fail only because it was to be created for it.
        if (
            failed == path
            or failed in path.parents
            or failed.parent in (path, path.parent, path.parent.parent)
        ):
            raise cannot_write(path, f"{error.strerror or error}. {CHANGE_FOLDER}") from None
        raise


def _is_windows_device(path: PurePath) -> bool:
    """Whether Windows would write to a device, such as NUL for nul.txt, or under another name."""
    return isinstance(path, PureWindowsPath) and any(
        name != name.rstrip(" .") or _DEVICE_NAME.fullmatch(name)
        for name in path.parts[bool(path.anchor) :]
        if name not in {".", ".."}
    )


_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])\s*(\..*)?", re.IGNORECASE)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Write a file under a temporary name. On success it replaces ``path`` in one step, on failure
    it is removed.
    """
    path = Path(path)
    with storage_errors(path):
        create_folder(path.parent)
        disk = current_disk()
        part = part_of(path)
        try:
            disk.open(part, "xb").close()
            yield part
            disk.sync_path(part)
            move(part, path)
        finally:
            disk.unlink(part)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Fill a temporary folder, which becomes ``path`` in one step on success."""
    path = Path(path)
    with storage_errors(path):
        create_folder(path.parent)
        disk = current_disk()
        part = part_of(path)
        try:
            disk.mkdir(part, exist_ok=False)
            yield part
            for file in part.rglob("*"):
                disk.sync_path(file)
            disk.sync_path(part)
            move(part, path)
        finally:
            disk.rmtree(part)


def part_of(path: Path) -> Path:
    """Choose a name in the folder of a path, for what is not complete yet or is being removed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def name_of_part(name: str) -> str | None:
    """Return the name of the file for which ``part_of`` chose a name. None: another program did."""
    return matched[1] if (matched := _PART_NAME.fullmatch(name)) else None


_PART_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part", re.DOTALL)


def create_folder(path: Path, *, flush: bool = False) -> None:
    """Create a folder and those above it, if they are missing, also on the disk. With ``flush``, an
    existing one is flushed, too.
    """
    folders = (path, *path.absolute().parents)
    num_missing = len(list(takewhile(lambda folder: not os.path.isdir(folder), folders)))
    if num_missing or flush:
        # From an existing one on: a process that was killed may have created it without a flush.
        for folder in reversed(folders[: num_missing + 1]):
            # A file in its place is reported by the next call.
            if folder == path or not os.path.lexists(folder):
                current_disk().mkdir(folder)
            current_disk().sync_path(folder.parent)


def move(source: Path, target: Path) -> None:
    """Rename a file over an existing one, or a folder over an empty one, also on the disk."""
    disk = current_disk()
    # Windows refuses this while a program has one of the files open, such as a reader or a virus
    # scanner. Most programs close it within a second.
    for seconds in RENAME_DELAYS_S:
        try:
            disk.replace(source, target)
            break
        except PermissionError:
            # Windows does not replace even an empty folder.
            if os.path.isdir(target):
                disk.rmdir(target)
            else:
                disk.sleep(seconds)
    else:
        disk.replace(source, target)
    disk.sync_path(target.parent)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file."""
    with atomic_file(path) as part, current_disk().open(part, "wb") as file:
        file.write(content)


def write_text(path: str | Path, content: str) -> None:
    """Write a text in UTF-8."""
    write_bytes(path, content.encode())


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Any]) -> None:
    """Write a log with one JSON value per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_json_line(path: str | Path, row: Any) -> None:
    """Append one line to a log, completely or not at all. Only one process at a time may append."""
    # A last line that a crash cut short is removed first. `read_json_lines` drops such a line, too.
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with storage_errors(path), current_disk().open(path, "a+b", buffering=0) as log:
        end = _remove_incomplete_line(log)
        try:
            # A write that meets a full disk may write a part of its bytes and report no error.
            written = 0
            while written < len(line):
                written += log.write(line[written:])
            current_disk().sync_file(log)
        except BaseException:
            log.truncate(end)
            raise


def _remove_incomplete_line(log: BinaryIO) -> int:
    """Truncate a log after its last newline. Returns its size, at which the next line starts."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(size - 1, 0))
    if size and log.read(1) != b"\n":
        log.seek(0)
        size = log.read().rfind(b"\n") + 1
        log.truncate(size)
    log.seek(size)
    return size


def write_toml(path: str | Path, content: dict[str, Any]) -> None:
    """Write a TOML file."""
    import tomli_w

    write_text(path, tomli_w.dumps(content, multiline_strings=True))


def set_toml_value(path: str | Path, key: str, value: Any) -> None:
    """Set a key of a TOML file of the user, above its tables. All other keys and all comments are
    kept.
    """
    import tomli_w

    exists = os.path.exists(path)
    line = tomli_w.dumps({key: value})
    before, text = (read_toml(path), read_text(path)) if exists else ({}, "")
    text = (
        re.sub(rf"^{key}[ \t]*=.*\n?", lambda _: line, text, count=1, flags=re.MULTILINE)
        if key in before
        else line + text
    )
    try:
        is_changed = tomllib.loads(text) == {**before, key: value}
    except tomllib.TOMLDecodeError:
        is_changed = False
    if not is_changed:
        raise DataError(
            f"{path}: {key}: expected a line {key} = VALUE above all tables, got another form. "
            f"Write {line.strip()} yourself."
        )
    write_text(path, text)


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], *, for_transformers: bool = False
) -> None:
    """Write tensors with their hash, by which ``read_tensors`` detects damage. Equal tensors give
    equal files.
    """
    from safetensors.torch import save_file

    with _file_of_safetensors(path) as part:
        metadata = {"format": "pt"} if for_transformers else {TENSORS_HASH: tensors_hash(tensors)}
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part, metadata
        )


def write_arrays(path: str | Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as ``write_tensors`` writes tensors, without torch. ``read_arrays`` reads them."""
    import numpy as np
    from safetensors.numpy import save_file

    with _file_of_safetensors(path) as part:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            part,
            {TENSORS_HASH: tensors_hash(arrays)},
        )


@contextmanager
def _file_of_safetensors(path: str | Path) -> Iterator[Path]:
    """Let safetensors write a file, which replaces ``path`` in one step."""
    from safetensors import SafetensorError

    path = Path(path)
    disk = current_disk()
    with storage_errors(path):
        create_folder(path.parent)
        # In a folder of its own, because the library first writes another file next to it, which
        # stays if the process is killed.
        folder = part_of(path)
        part = folder / path.name
        try:
            disk.mkdir(folder, exist_ok=False)
            yield part
            # The library lets no other user read its files.
            disk.chmod(part, 0o644)
            disk.sync_path(part)
            move(part, path)
        except SafetensorError as error:
            if os.name == "posix" and (code := re.search(r"\(os error (\d+)\)", str(error))):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
            raise disk_full(path) from None
        finally:
            disk.rmtree(folder)


def write_array(path: str | Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file."""
    import numpy as np

    with atomic_file(path) as part, current_disk().open(part, "wb") as file:
        np.save(file, array, allow_pickle=False)


def create_array(path: str | Path, *, shape: tuple[int, ...], dtype: str) -> None:
    """Create a ``.npy`` file of zeros that is filled in parts. Its disk space is reserved now, so
    that filling cannot fail.
    """
    import numpy as np

    path = Path(path)
    with storage_errors(path):
        create_folder(path.parent)
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        with current_disk().open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            current_disk().allocate(file, math.prod(shape) * np.dtype(dtype).itemsize)


@contextmanager
def sqlite_database(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Open an SQLite database of a cache for several processes. The block is one transaction,
    undone on failure.
    """
    path = Path(path)
    with storage_errors(path):
        create_folder(path.parent)
    with (
        sqlite_errors(path),
        closing(current_disk().connect(path, timeout=SQLITE_SECONDS)) as connection,
        connection,
    ):
        yield connection


@contextmanager
def sqlite_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of the disk and of other processes in this block to a StorageError."""
    try:
        yield
    except UnicodeDecodeError as error:  # a damaged text, also one that the message quotes
        raise sqlite3.DatabaseError(f"a text is not UTF-8: {error}") from None
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise disk_full(path) from None
        reason = _SQLITE_REASONS.get(code)
        if reason is None:
            raise
        raise cannot_write(path, reason) from None


SQLITE_SECONDS = 60
"""Longest time that SQLite waits for another process."""
_SQLITE_REASONS = {
    sqlite3.SQLITE_READONLY: f"{os.strerror(errno.EROFS)}. {CHANGE_FOLDER}",
    sqlite3.SQLITE_CANTOPEN: f"it cannot be opened. {CHANGE_FOLDER}",
    sqlite3.SQLITE_PERM: f"{os.strerror(errno.EACCES)}. {CHANGE_FOLDER}",
    sqlite3.SQLITE_BUSY: "it is locked by another process. Wait until it ends, or stop it first",
    sqlite3.SQLITE_IOERR: f"{os.strerror(errno.EIO)}. Check the disk, or choose another folder",
}
