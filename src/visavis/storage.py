"""The only place that writes files: completely or not at all, and never over a file of the user's.

Every file is written beside its final name, flushed to disk and then renamed, so that a process killed at any
step leaves the old file or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import DataError, RefusedOverwrite, RunError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


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


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``; on success it becomes ``path`` in one step, on failure it vanishes."""
    path = Path(path)
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
    """A temporary folder beside ``path`` that becomes ``path`` in one step; ``path`` must not exist yet."""
    path = Path(path)
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


def append_json_line(path: str | Path, row: Any) -> None:
    """Add one line to a log; ``read_json_lines`` drops a last line that a crash cut short."""
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_toml(path: str | Path, content: dict[str, Any]) -> None:
    import tomli_w

    write_text(path, tomli_w.dumps(content, multiline_strings=True))


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    with replacing(path) as part:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part, metadata)


def write_array(path: str | Path, array: np.ndarray) -> None:
    import numpy as np

    with replacing(path) as part, open(part, "wb") as file:
        np.save(file, array, allow_pickle=False)


def open_array(path: str | Path, *, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """A memory-mapped ``.npy`` to be filled in parts; an existing one of this shape and dtype is continued."""
    import numpy as np

    path = Path(path)
    if path.exists():
        array = np.lib.format.open_memmap(path, mode="r+")
        if array.shape == shape and array.dtype == np.dtype(dtype):
            return array
        raise RefusedOverwrite(f"{path} holds {array.shape} {array.dtype}, expected {shape} {dtype}: remove it or name another folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.lib.format.open_memmap(path, mode="w+", shape=shape, dtype=np.dtype(dtype))


@contextmanager
def database(path: str | Path) -> Iterator[sqlite3.Connection]:
    """An SQLite database in a cache, for several processes at once; the block is one transaction, undone if it fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(path, timeout=60)) as connection, connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} cannot be used: {error}; remove it, it will be made anew.") from None


def read_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def read_text(path: str | Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8.") from None


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None


def read_json_lines(path: str | Path) -> list[Any]:
    """All complete lines of a log; a last line without its newline was cut by a crash and is left out."""
    rows = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise DataError(f"{path}:{number} is not a line of JSON; the log was changed or damaged after it was written.") from None
    return rows


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path} is not TOML: {error}.") from None


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist.") from None
    except SafetensorError as error:
        raise RunError(f"{path} is not a readable safetensors file: {error}.") from None


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
