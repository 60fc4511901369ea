"""Files are written completely or not at all, and never over a file of the user's.

Every file is written beside its final name, flushed to disk and then renamed, so that a process killed at any
step leaves the old file or the new one, never half of one. A full disk is a StorageError.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import StorageError
from visavis.storage.reading import TENSORS_HASH, tensors_hash

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: of numpy, which says only how much it could write
_FULL = f"{os.strerror(errno.ENOSPC)}; make room, and what was begun can go on"


@contextmanager
def storing(path: str | Path) -> Iterator[None]:
    """Write ``path`` in this block: a full disk, or a folder that may not be written to, is a StorageError that names it."""
    path = Path(path)
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageError(f"{path} cannot be written: {_FULL}.") from None
        if error.filename is None or Path(os.fsdecode(error.filename)).parent in (path, path.parent, path.parent.parent):
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None
        raise


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``; on success it becomes ``path`` in one step, on failure it vanishes. Raises StorageError."""
    path = Path(path)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        part = Path(name)
        try:
            yield part
            _flush(part)
            part.chmod(0o644)
            part.replace(path)
            _flush(path.parent)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that becomes ``path`` in one step; ``path`` must not exist yet. Raises StorageError."""
    path = Path(path)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            yield part
            for file in part.rglob("*"):
                _flush(file)
            _flush(part)
            part.chmod(0o755)
            part.rename(path)
            _flush(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def write_text(path: str | Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(path: str | Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Any]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_json_line(path: str | Path, row: Any, *, durable: bool = False) -> None:
    """Add one line to a log; ``read_json_lines`` drops a last line that a crash cut short. durable: it is on the disk on return."""
    with storing(path), open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(row, ensure_ascii=False) + "\n")
        if durable:
            log.flush()
            os.fsync(log.fileno())


def cut_last_line(path: str | Path) -> None:
    """Take out the last line of a log if a crash cut it short, so that a next one begins a line of its own."""
    with storing(path), open(path, "r+b") as log:
        whole = log.read()
        log.truncate(whole.rfind(b"\n") + 1)


def write_toml(path: str | Path, content: dict[str, Any]) -> None:
    import tomli_w

    write_text(path, tomli_w.dumps(content, multiline_strings=True))


def write_tensors(path: str | Path, tensors: dict[str, Tensor], *, for_transformers: bool = False) -> None:
    """Tensors by name, with their hash, by which ``read_tensors`` tells a damaged file; equal tensors are equal files.

    for_transformers: say instead that they are of torch, without which transformers reads no file (two entries have no fixed order).
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as part:
        try:
            metadata = {"format": "pt"} if for_transformers else {TENSORS_HASH: tensors_hash(tensors)}
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part, metadata)
        except SafetensorError:
            raise StorageError(f"{path} cannot be written: {_FULL}.") from None


def write_array(path: str | Path, array: np.ndarray) -> None:
    import numpy as np

    with replacing(path) as part, open(part, "wb") as file:
        np.save(file, array, allow_pickle=False)


def create_array(path: str | Path, *, shape: tuple[int, ...], dtype: str) -> None:
    """A ``.npy`` of zeros, to be filled in parts; its room on the disk is taken now, so that filling it cannot fail. Raises StorageError."""
    import numpy as np

    path = Path(path)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        array = np.lib.format.open_memmap(path, mode="w+", shape=shape, dtype=np.dtype(dtype))
        with open(path, "r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(path.stat().st_size, 1))
            else:
                file.seek(array.offset)
                file.writelines(bytes(array[:1].nbytes) for _ in range(len(array)))


@contextmanager
def database(path: str | Path) -> Iterator[sqlite3.Connection]:
    """An SQLite database in a cache, for several processes at once; the block is one transaction, undone if it fails.

    Raises StorageError if it cannot be written or opened, sqlite3.DatabaseError if it is damaged.
    """
    path = Path(path)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(path, timeout=60)) as connection, connection:
            yield connection
    except sqlite3.OperationalError as error:
        reason = _UNWRITABLE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        if reason is None:
            raise
        raise StorageError(f"{path} cannot be written: {reason}.") from None


_UNWRITABLE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: os.strerror(errno.EROFS),
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: os.strerror(errno.EACCES),
    sqlite3.SQLITE_BUSY: "another process holds it",
    sqlite3.SQLITE_IOERR: os.strerror(errno.EIO),
}
