"""Reading of files, each checked once against a declared schema.

JSON and TOML are read into a type: a dataclass, a pydantic model, ``dict[str, float]``,
``list[str]``. Arrays and tensors are checked against their dimensions, names, shapes and dtypes. An
error names the file, the position in it, the expected and the given value.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import stat
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from visavis.core.errors import DataError, VisavisError
from visavis.core.storage.outside_folders import IMAGE_ROOTS, is_inside

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")

MAX_DEPTH = 100
"""Maximum nesting of tables and lists."""
MAX_BYTES = 2**30
"""Maximum size of a file that is read as a whole. Larger files are sparse files, devices or
mistakes.
"""

MAX_CHECKED_KEYS_BYTES = 2**20
"""Maximum size of a JSON file whose keys are checked. The check doubles the time: 0.2 s for 40,000
captions (3 MB, two slow cores).
"""

TENSORS_HASH = "tensors_sha256"
"""Key of the hash in the metadata of a safetensors file."""
RESTORE_COPY = " Restore a copy of it, or make it again."
"""Fix at the end of an error about unreadable content. The warning about a damaged cache leaves it
out.
"""


@contextmanager
def reading_regular_file(
    path: str | Path, *, limit: int | None = None, error: type[VisavisError] = DataError
) -> Iterator[None]:
    """Check that a path is a regular file, and convert errors of reading it in this block. A pipe
    or a device would never end.
    """
    try:
        status = _status(path)
        if not stat.S_ISREG(status.st_mode):
            raise error(
                f"{path}: expected a regular file, got {file_kind(status.st_mode)}. Pass a file."
            )
        if limit is not None and status.st_size > limit:
            raise error(
                f"{path}: expected at most {limit:,} bytes, got {status.st_size:,}. Pass a smaller "
                "file."
            )
        yield
    except OSError as reason:
        raise error(
            f"{path} cannot be read: {reason.strerror or reason}. Check the path and its "
            "permissions."
        ) from None


def _status(path: str | Path) -> os.stat_result:
    try:
        return os.stat(path)
    except ValueError as error:  # a NUL, or half a surrogate, in the name
        raise OSError(str(error)) from None


@contextmanager
def open_file(
    path: str | Path,
    root: Path | None = None,
    *,
    limit: int | None = None,
    error: type[VisavisError] = DataError,
) -> Iterator[BufferedReader]:
    """Open a regular file, and convert errors of reading it in this block. With a root, the file
    without links must be inside it or a folder of ``VISAVIS_IMAGE_ROOTS``.
    """
    with reading_regular_file(path, limit=limit, error=error), open(path, "rb") as file:
        if root is not None and not is_inside(_opened_path(path, file), root):
            raise error(
                f"{path}: expected a file inside {root}, got one that points outside. Add its "
                f"folder to {IMAGE_ROOTS}."
            )
        yield file


def _opened_path(path: str | Path, file: BufferedReader) -> str:
    """Path of an open file without links. Links that are replaced while it is opened have no
    effect.
    """
    try:
        return os.readlink(f"/proc/self/fd/{file.fileno()}")
    except OSError:  # not on Linux
        target = os.path.realpath(path)
    if not os.path.samestat(os.fstat(file.fileno()), os.lstat(target)):
        raise OSError("it was replaced while it was opened")
    return target


def read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    """Read bytes at a position of an open file, which threads may share. Fewer at its end."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, offset)
    # Windows reads only at the position of the file.
    with _READS_AT_POSITION:
        file.seek(offset)
        return file.read(size)


_READS_AT_POSITION = threading.Lock()


def read_bytes(
    path: str | Path, root: Path | None = None, *, error: type[VisavisError] = DataError
) -> bytes:
    """Read a regular file of at most ``MAX_BYTES``."""
    with open_file(path, root, limit=MAX_BYTES, error=error) as file:
        return file.read()


def text_encoding(content: bytes) -> str:
    """Detect the encoding of a text: UTF-8, or UTF-16 as spreadsheets and PowerShell write it, with
    or without a byte order mark.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-32" if content.startswith(codecs.BOM_UTF32_LE) else "utf-16"
    first = content[:16:2]
    second = content[1:16:2]
    # Each second byte of ASCII characters, with which a table or list begins, is 0.
    for encoding, letters, zeros in (("utf-16-le", first, second), ("utf-16-be", second, first)):
        if len(second) >= 4 and all(letters) and not any(zeros):
            return encoding
    return "utf-8-sig"


def decode_text(content: bytes, source: object, errors: str = "strict") -> str:
    """Decode a text in the encoding that ``text_encoding`` detects."""
    encoding = text_encoding(content)
    try:
        return content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise DataError(
            f"{source} is not {name}: byte {error.start} is {error.object[error.start]:#04x}. Save "
            "it as UTF-8 (Excel: CSV UTF-8)."
        ) from None


def read_text(path: str | Path) -> str:
    """Read a text in UTF-8 or UTF-16, without a byte order mark."""
    return decode_text(read_bytes(path), path)


def read_text_lines(path: str | Path) -> list[str]:
    """Read the lines of a text. Unlike ``str.splitlines``, other characters than line breaks, such as
    U+2028, do not end a line.
    """
    lines = _LINE_BREAK.split(read_text(path))
    return lines[:-1] if not lines[-1] else lines


_LINE_BREAK = re.compile(r"\r\n|\r|\n")


@overload
def read_json(path: str | Path, schema: type[T], *, error: type[VisavisError] = ...) -> T: ...
@overload
def read_json(path: str | Path, schema: Any = ..., *, error: type[VisavisError] = ...) -> Any: ...
def read_json(path: str | Path, schema: Any = Any, *, error: type[VisavisError] = DataError) -> Any:
    """Read a JSON file as a value of a type.

    Args:
        path: File to read.
        schema: Type of the value.
        error: Class of the errors.

    Returns:
        The value.

    Example:
        >>> read_json("progress.json", dict[str, int])    # doctest: +SKIP
        {'rows_written': 512}
    """
    return parse_json(read_bytes(path, error=error), schema, str(path), error=error)


def read_json_lines(
    path: str | Path, schema: Any = Any, *, error: type[VisavisError] = DataError
) -> list[Any]:
    """Read all complete lines of a log. A last line without a newline was cut short by a crash and
    is dropped.
    """
    lines = read_bytes(path, error=error).split(b"\n")[:-1]
    return [
        parse_json(line, schema, f"{path}:{number}", error=error)
        for number, line in enumerate(lines, 1)
    ]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    text = read_text(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(
            f"{path}: expected TOML, got an error: {error}. Correct this place."
        ) from None
    except RecursionError:
        raise DataError(
            f"{path}: expected TOML, got values that are nested too deeply. Remove levels."
        ) from None
    except ValueError as error:
        # Integers of thousands of digits, and impossible dates.
        raise DataError(
            f"{path}: expected TOML, got an impossible number or date: {error}. Correct this value."
        ) from None
    # Tables, lists and values of each level.
    nested: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        parents = [value for value in nested if isinstance(value, dict | list)]
        children = (value.values() if isinstance(value, dict) else value for value in parents)
        nested = list(chain.from_iterable(children))
    if nested:
        raise DataError(
            f"{path} is nested too deeply: expected at most {MAX_DEPTH} levels of tables and "
            "lists. Flatten it."
        )
    return tables


def read_array(
    path: str | Path,
    root: Path | None = None,
    *,
    dimensions: int | None = None,
    kinds: str = "f",
    memory_map: bool = False,
) -> np.ndarray:
    """Read the array of a ``.npy`` file of numbers, whose dtype has one of some kinds, as "iu". With
    ``memory_map`` it is read on demand, for arrays larger than memory.
    """
    import numpy as np

    path = Path(path)
    with open_file(path, root):
        try:
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # noqa: BLE001 - numpy's reader of headers raises errors of every kind on damaged bytes
            raise DataError(
                f"{path} is not a readable .npy of numbers: {error_reason(error)}.{RESTORE_COPY}"
            ) from None
    has_kind = array.dtype.kind in kinds and array.dtype.isnative and array.dtype.itemsize <= 8
    if not has_kind or not array.ndim or (dimensions is not None and array.ndim != dimensions):
        kind_names = " or ".join(_KINDS[kind] for kind in kinds)
        expected = (
            f"{kind_names} of {dimensions} dimensions"
            if dimensions
            else f"{kind_names} of one dimension or more"
        )
        raise DataError(
            f"{path}: expected {expected}, got {array.dtype} of shape {array.shape}.{RESTORE_COPY}"
        )
    return array if memory_map else np.array(array)


_KINDS = {
    "f": "floating-point numbers",
    "i": "integers",
    "u": "unsigned integers",
    "b": "truth values",
}


def read_tensors(
    path: str | Path,
    expected: Mapping[str, Tensor] | None = None,
    *,
    error: type[VisavisError] = DataError,
) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, and check them against the expected names, shapes and
    dtypes, and against the hash in its metadata.
    """
    tensors, written = _read_values(path, "pt", error)
    if expected is not None:
        _check_shapes(tensors, expected, path, error)
    _check_hash(tensors, written, path, error)
    return tensors


def read_arrays(
    path: str | Path, *, error: type[VisavisError] = DataError
) -> dict[str, np.ndarray]:
    """Read the tensors of a safetensors file as arrays, without torch, and check their hash."""
    arrays, written = _read_values(path, "np", error)
    _check_hash(arrays, written, path, error)
    return arrays


def _read_values(
    path: str | Path, framework: str, error: type[VisavisError]
) -> tuple[dict[str, Any], str | None]:
    """Read the tensors of a file, and the hash in its metadata."""
    with open_tensors(path, framework, error) as file:
        written = (file.metadata() or {}).get(TENSORS_HASH)
        return {name: file.get_tensor(name) for name in file.keys()}, written  # noqa: SIM118 - not a dictionary


def _check_hash(
    tensors: Mapping[str, Any], written: str | None, path: str | Path, error: type[VisavisError]
) -> None:
    if written not in (None, tensors_hash(tensors)):
        raise error(
            f"{path} is damaged: its tensors differ from those that were written. Restore a copy."
        )


def tensor_names(path: str | Path, *, error: type[VisavisError] = DataError) -> list[str]:
    """Read the names of the tensors of a safetensors file, without the tensors."""
    with open_tensors(path, "np", error) as file:
        return list(file.keys())


@contextmanager
def open_tensors(
    path: str | Path, framework: str = "pt", error: type[VisavisError] = DataError
) -> Iterator[Any]:
    """Open a safetensors file, to read some of its tensors as torch ("pt") or numpy ("np") has them."""
    from safetensors import SafetensorError, safe_open

    # Windows neither replaces nor removes a mapped file, and maps need as much memory there as copies.
    # Elsewhere, maps are faster: 0.9 instead of 1.3 s for 600 MB with their hash.
    backend = "pread" if sys.platform == "win32" else "mmap"
    with reading_regular_file(path, error=error):
        try:
            with safe_open(path, framework, backend=backend) as file:
                _check_tensor_names(path, error)
                yield file
        except (SafetensorError, ValueError, KeyError, OverflowError) as reason:
            raise error(
                f"{path} is not a readable safetensors file: {error_reason(reason)}.{RESTORE_COPY}"
            ) from None


def _check_tensor_names(path: str | Path, error: type[VisavisError]) -> None:
    """Check that the header of a safetensors file has each name once. Its library reads the last."""
    with open(path, "rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) <= MAX_CHECKED_KEYS_BYTES:
            _check_unique_keys(file.read(size), str(path), error)


def is_transient_error(error: VisavisError) -> bool:
    """Return whether a file could not be read for a reason that may pass. Such a result is not
    cached.
    """
    return isinstance(error.__context__, OSError | MemoryError)


def content_hash(
    path: str | Path, *, limit: int | None = None, error: type[VisavisError] = DataError
) -> str:
    """Compute the SHA-256 of a regular file."""
    with open_file(path, limit=limit, error=error) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor | np.ndarray]) -> str:
    """Compute the SHA-256 of tensors or arrays and their names."""
    import numpy as np

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        if isinstance(tensor, np.ndarray):
            content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        else:
            import torch

            # As bytes, because numpy has no bfloat16.
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(content.data)
    return digest.hexdigest()


def parse_json(
    content: bytes, schema: Any, source: str, *, error: type[VisavisError] = DataError
) -> Any:
    """Parse JSON as a value of a type. Keys must be unique, which is checked up to
    ``MAX_CHECKED_KEYS_BYTES``.
    """
    try:
        value = _adapter(schema).validate_json(content.removeprefix(codecs.BOM_UTF8), strict=True)
    except ValidationError as reason:
        raise error(f"{source}{_first_error(reason)}{RESTORE_COPY}") from None
    if len(content) <= MAX_CHECKED_KEYS_BYTES:
        _check_unique_keys(content, source, error)
    return value


def _check_unique_keys(content: bytes, source: str, error: type[VisavisError]) -> None:
    """Check that valid JSON has no key twice in an object."""

    def check_keys(pairs: list[tuple[str, Any]]) -> None:
        keys = Counter(key for key, _ in pairs)
        if len(keys) < len(pairs):
            raise error(
                f"{source}: duplicate key {keys.most_common(1)[0][0]!r}. Remove one of them."
            )

    json.loads(content, object_pairs_hook=check_keys, parse_int=str, parse_float=str)


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _first_error(reason: ValidationError) -> str:
    """The first validation error, as the end of a sentence with its period."""
    first = reason.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "its content"
    if first["type"] == "json_invalid":
        return f" is not JSON: {first['ctx']['error']}."
    if first["type"] == "missing":
        return f": {field} is missing. The file is damaged or of another version."
    value = repr(first["input"])
    return f": {field} is {value[:60]}{'...' * (len(value) > 60)}: {first['msg'][0].lower()}{first['msg'][1:]}."


def _check_shapes(
    tensors: Mapping[str, Tensor],
    expected_tensors: Mapping[str, Tensor],
    path: str | Path,
    error: type[VisavisError],
) -> None:
    for name in sorted(expected_tensors.keys() | tensors.keys()):
        actual = _describe(tensors.get(name))
        expected = _describe(expected_tensors.get(name))
        if actual != expected:
            raise error(
                f"{path}: {name}: expected {expected}, got {actual}. The file is incomplete or of "
                "another version."
            )


def file_kind(mode: int) -> str:
    """Name the kind of a path that is not a regular file."""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for is_one, kind in kinds.items() if is_one(mode)), "a device")


def error_reason(error: Exception) -> str:
    """Return the first line of the message of a library's error, as the end of a sentence."""
    text = _ADDRESS.sub("", str(error)).strip()
    return text.partition("\n")[0].rstrip(".") or type(error).__name__


# Python's description of an object that has none: <ast.Name object at 0x7f2d3c>.
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "no tensor"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
