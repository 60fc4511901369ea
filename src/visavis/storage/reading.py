"""The one door for everything that is read: a file is checked once, as it enters, against a declared shape.

JSON and TOML are read into a type (a dataclass, a pydantic model, ``dict[str, float]``, ``list[str]``) and arrays and tensors
against their dimensions, names, shapes and dtypes, so that the code behind the door never meets a value of another kind. What
does not fit is one sentence that names the file, the place in it, what was found and what was expected.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from visavis.errors import DataError, VisavisError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")

MAX_DEPTH = 100
"""The deepest nesting of tables and lists that is read."""
MAX_BYTES = 2**30
"""The largest file that is read whole; larger ones are sparse files, devices or mistakes."""

TENSORS_HASH = "tensors_sha256"
"""Where the hash of its tensors stands in the metadata of a safetensors file."""


@contextmanager
def regular_file(path: str | Path, *, limit: int | None = None, error: type[VisavisError] = DataError) -> Iterator[None]:
    """Open a file in this block only if it is a regular one: a pipe or a device would never end.

    limit: the most bytes that it may have. Raises ``error``, also where the block cannot read the file.
    """
    try:
        status = _status(path)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is {kind_of_file(status.st_mode)}, expected a regular file.")
        if limit is not None and status.st_size > limit:
            raise error(f"{path} is of {status.st_size:,} bytes, expected at most {limit:,}.")
        yield
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}.") from None


def _status(path: str | Path) -> os.stat_result:
    try:
        return os.stat(path)
    except ValueError as error:  # a NUL, or half a surrogate, in the name
        raise OSError(str(error)) from None


def read_bytes(path: str | Path, *, limit: int = MAX_BYTES, error: type[VisavisError] = DataError) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises ``error``."""
    with regular_file(path, limit=limit, error=error):
        return Path(path).read_bytes()


def read_part(path: str | Path, offset: int, size: int, *, limit: int = MAX_BYTES) -> bytes:
    """At most ``size`` bytes of a regular file, from ``offset`` on. Raises DataError, also for more than ``limit`` bytes."""
    if size > limit:
        raise DataError(f"{path} holds a part of {size:,} bytes, expected at most {limit:,}.")
    with regular_file(path), open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def read_text(path: str | Path) -> str:
    """A text in UTF-8; a byte order mark is not part of it. Raises DataError."""
    try:
        return read_bytes(path).removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8.") from None


@overload
def read_json(path: str | Path, shape: type[T], *, error: type[VisavisError] = ...) -> T: ...
@overload
def read_json(path: str | Path, shape: Any = ..., *, error: type[VisavisError] = ...) -> Any: ...
def read_json(path: str | Path, shape: Any = Any, *, error: type[VisavisError] = DataError) -> Any:
    """The content of a JSON file as a value of a type; ``error`` is raised if it is none.

    >>> read_json("progress.json", dict[str, int])    # doctest: +SKIP
    {'done': 512}
    """
    return parse_json(read_bytes(path, error=error), shape, str(path), error=error)


def read_json_lines(path: str | Path, shape: Any = Any, *, error: type[VisavisError] = DataError) -> list[Any]:
    """All complete lines of a log, each of a type; a last line without its newline was cut by a crash and is left out."""
    lines = read_bytes(path, error=error).split(b"\n")[:-1]
    return [parse_json(line, shape, f"{path}:{number}", error=error) for number, line in enumerate(lines, 1)]


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, whose shape a recipe checks. Raises DataError."""
    text = read_text(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path} is not TOML: {error}.") from None
    except (RecursionError, ValueError):  # ValueError: integers of thousands of digits, impossible dates
        raise DataError(f"{path} is not TOML that can be read: it is nested too deeply, or holds an impossible number or date.") from None
    if _is_deeper(tables, MAX_DEPTH):
        raise DataError(f"{path} is nested too deeply: expected at most {MAX_DEPTH} tables and lists in each other.")
    return tables


def read_array(path: str | Path, *, dimensions: int | None = None, kinds: str = "f", mapped: bool = False) -> np.ndarray:
    """The array of a ``.npy`` of numbers.

    dimensions: how many it must have. kinds: of numpy's dtypes, such as "f" and "iu". mapped: read-only and read on demand, for
    arrays larger than memory. Raises DataError.
    """
    import numpy as np

    path = Path(path)
    with regular_file(path):
        try:
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # noqa: BLE001 - numpy's reader of headers raises errors of every kind on damaged bytes
            raise DataError(f"{path} is not a readable .npy of numbers: {_reason(error)}.") from None
    known = array.dtype.kind in kinds and array.dtype.isnative and array.dtype.itemsize <= 8
    if not known or (dimensions is not None and array.ndim != dimensions):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        expected = f"{wanted} of {dimensions} dimensions" if dimensions else wanted
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}, expected {expected}.")
    return array if mapped else np.array(array)


_KINDS = {"f": "floating-point numbers", "i": "integers", "u": "unsigned integers", "b": "truth values"}


def read_tensors(path: str | Path, like: Mapping[str, Tensor] | None = None, *, error: type[VisavisError] = DataError) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    like: what must be in it and nothing else, by names, shapes and dtypes. Raises ``error`` naming the first that does not fit, and
    for tensors that are no longer those that ``write_tensors`` wrote.
    """
    from safetensors import SafetensorError, safe_open

    with regular_file(path, error=error):
        try:
            with safe_open(path, "pt") as file:
                written = (file.metadata() or {}).get(TENSORS_HASH)
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        except (SafetensorError, ValueError, KeyError, OverflowError) as reason:
            raise error(f"{path} is not a readable safetensors file: {_reason(reason)}.") from None
    if like is not None:
        _compare(tensors, like, path, error)
    if written not in (None, tensors_hash(tensors)):
        raise error(f"{path} is damaged: its tensors are not those that were written; bring back a whole copy of it.")
    return tensors


def tensor_names(path: str | Path, *, error: type[VisavisError] = DataError) -> list[str]:
    """The names of the tensors of a safetensors file, none of which is read. Raises ``error``."""
    from safetensors import SafetensorError, safe_open

    with regular_file(path, error=error):
        try:
            with safe_open(path, "np") as file:
                return list(file.keys())
        except (SafetensorError, ValueError, KeyError, OverflowError) as reason:
            raise error(f"{path} is not a readable safetensors file: {_reason(reason)}.") from None


def momentary(error: VisavisError) -> bool:
    """Whether a file could not be read by a fault that may pass, and not for what is in it: nothing to be remembered."""
    return isinstance(error.__context__, OSError | MemoryError)


def content_hash(path: str | Path, *, limit: int | None = None, error: type[VisavisError] = DataError) -> str:
    """The SHA-256 of the content of a regular file of at most ``limit`` bytes, in hexadecimal. Raises ``error``."""
    with regular_file(path, limit=limit, error=error), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors by their names, in hexadecimal."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parse_json(content: bytes, shape: Any, where: str, *, error: type[VisavisError] = DataError) -> Any:
    """JSON that was read already, as a value of a type. Raises ``error`` with a sentence that begins with ``where``."""
    try:
        return _adapter(shape).validate_json(content.removeprefix(codecs.BOM_UTF8), strict=True)
    except ValidationError as reason:
        raise error(f"{where}{_first(reason)}") from None


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether tables and lists are nested deeper than this."""
    parts = [value]
    for _ in range(levels):
        parts = [
            part for outer in parts for part in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    return bool(parts)


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _first(reason: ValidationError) -> str:
    """The first thing that does not fit, as the end of a sentence."""
    first = reason.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "its content"
    if first["type"] == "json_invalid":
        return f" is not JSON: {first['ctx']['error']}."
    if first["type"] == "missing":
        return f": {place} is missing: the file is damaged or of another version."
    found = repr(first["input"])
    return f": {place} is {found[:60]}{'...' * (len(found) > 60)}: {first['msg'][0].lower()}{first['msg'][1:]}."


def _compare(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], path: str | Path, error: type[VisavisError]) -> None:
    for name in sorted(like.keys() | tensors.keys()):
        found, wanted = (_shape_of(side[name]) if name in side else None for side in (tensors, like))
        if found != wanted:
            raise error(
                f"{path}: {name} is {found or 'missing'}, expected {wanted or 'none of that name'}: the file is incomplete or of another version."
            )


def kind_of_file(mode: int) -> str:
    """In words what a path is that is no regular file."""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for is_one, kind in kinds.items() if is_one(mode)), "a device")


def _reason(error: Exception) -> str:
    """What a library says, as the end of a sentence."""
    return str(error).strip().rstrip(".") or type(error).__name__


def _shape_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
