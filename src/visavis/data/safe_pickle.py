"""A safe reader of pickles with plain values: numbers, texts, containers and numpy arrays. Nothing
in the file is executed.

A pickle is a program. The standard library's unpickler in Python runs its instructions, except
those that import a name, call it, make an object or set its state. The few names that a plain
pickle may use (``numpy.dtype``, ``collections.OrderedDict``, ...) stand for functions of this file.
Any other name is refused as code. The usual restriction of ``pickle.Unpickler``, by ``find_class``,
is not enough: it calls methods of arrays, hashes nested keys, and copies without limit.

Large bytes are not copied: arrays stay in the memory-mapped file. Protocols 0 to 5 are supported,
and strings of Python 2 (decoded as UTF-8 if possible, else bytes).
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError

# End of the sentence about a pickle that would execute something.
CODE_IN_PICKLE = "is a pickle with code in it: {}, and only plain containers and arrays are read"

_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|O8?|[SaU]\d{1,6})")
_ORDERS: dict[Any, Any] = {"<": "<", ">": ">", "|": "|", "=": "="}
# Larger numbers could be chosen so that all of them have the same hash.
_LARGEST_KEY = 2**32
_MODULE_ALIASES = {
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
    "__builtin__": "builtins",
}
_TYPES = (
    "numpy.ndarray",
    *(f"builtins.{name}" for name in ("int", "float", "str", "unicode", "long", "bool", "tuple")),
)


class UnsafePickle(Exception):
    """A pickle is not read. The message is the end of a sentence."""


@dataclass(frozen=True)
class GlobalName:
    """A name that a pickle uses.

    Attributes:
        name: The name with its module.
        call: The function that it stands for. None for a type that is only mentioned.
    """

    name: str
    call: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class UnfinishedArray:
    """An array or dtype that was created and waits for its state.

    Attributes:
        build: Builds the value from the state.
        memo_slots: Positions of the array in the memo of the pickle.
    """

    build: Callable[[Any], Any]
    memo_slots: list[int] = field(default_factory=list)


def _require(condition: object, reason: str) -> None:
    """Do not read a pickle unless a condition holds."""
    if not condition:
        raise UnsafePickle(reason)


def _require_format(condition: object) -> None:
    """Report a damaged pickle unless a condition holds. ``read_plain_pickle`` writes the message."""
    if not condition:
        raise ValueError


def check_key(key: Any) -> Any:
    """Check a key of a dict or set. Nested values are refused, because their hash could take
    unlimited time.
    """
    if (
        isinstance(key, str | bytes)
        or key is None
        or (isinstance(key, int) and abs(key) < _LARGEST_KEY)
    ):
        return key
    raise UnsafePickle(
        f"has a {type(key).__name__} for a key, expected a text or a whole number below 2^32"
    )


def _dtype(code: Any, *_: Any) -> UnfinishedArray:
    _require(
        isinstance(code, str) and _DTYPE.fullmatch(code),
        f"has an array of {str(code)[:40]!r}, expected numbers, texts or plain objects",
    )

    def with_order(state: Any) -> np.dtype[Any]:
        order = state[1]
        fields = state[2:5]
        _require(
            fields == (None, None, None) and order in _ORDERS,
            "has an array of records, expected numbers, texts or plain objects",
        )
        dtype = np.dtype(code)
        return dtype if dtype.hasobject else dtype.newbyteorder(_ORDERS[order])

    return UnfinishedArray(with_order)


def _reconstruct(kind: Any, *_: Any) -> UnfinishedArray:
    # A subclass of an array could have methods of its own.
    _require(
        isinstance(kind, GlobalName) and kind.name == "numpy.ndarray",
        "is a pickle with code in it: it makes an array that is not one of numpy's own",
    )

    def with_state(state: Any) -> Any:
        shape, dtype, fortran, data = state[-4:]
        return _array(data, dtype, shape, "F" if fortran else "C")

    return UnfinishedArray(with_state)


def _array(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    _require_format(isinstance(dtype, np.dtype))
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    # Before the product, which could have unlimited digits.
    _require_format(len(shape) <= 8)
    _require_format(all(type(size) is int and 0 <= size < 2**48 for size in shape))
    count = math.prod(shape)
    if dtype.hasobject:
        _require(
            type(data) is list and len(data) == count and len(shape) < 2,
            "has an array of objects of several dimensions, expected a list of them",
        )
        # An array of objects becomes a list, or the object if there is only one.
        return data if shape else data[0]
    data = data.encode() if isinstance(data, str) else data
    _require_format(len(data) == count * dtype.itemsize)
    # numpy reads no array from an empty buffer.
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: Any = None) -> Any:
    if isinstance(dtype, np.dtype) and dtype.hasobject:
        return data
    # A Python number.
    return _array(data, dtype, (), "C").item()


def _encode(text: str, encoding: str) -> bytes:
    """Convert bytes that Python 3 wrote as a text for Python 2."""
    _require_format(encoding in ("latin1", "latin-1"))
    return text.encode("latin1")


def _to_dict(items: Any = ()) -> dict[Any, Any]:
    return {
        check_key(key): value for key, value in (items.items() if type(items) is dict else items)
    }


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _array,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _to_dict,
    "collections.Counter": _to_dict,
    "collections.defaultdict": lambda _factory=None, items=(): _to_dict(items),
    "builtins.set": lambda items=(): set(map(check_key, items)),
    "builtins.frozenset": lambda items=(): set(map(check_key, items)),
    "builtins.list": lambda items=(): list(items),
    "builtins.dict": _to_dict,
    "builtins.bytes": lambda items=b"": b"".join([items]),
    "builtins.bytearray": lambda items=b"", encoding="latin1": (
        items.encode(encoding) if isinstance(items, str) else b"".join([items])
    ),
}


# Larger strings of bytes are not copied out of the file.
_MAX_COPIED_BYTES = 2**16
# 350,000 tokenized captions (VATEX) are 11 million instructions. The limit bounds time and memory:
# 4 s and 2 GB on one core.
_MAX_INSTRUCTIONS = 12_000_000


def read_plain_pickle(path: str | Path) -> Any:
    """Read the value of a pickle, or of a ``.npy`` of objects: None, numbers, texts, bytes, containers
    and arrays of numbers.
    """
    path = Path(path)
    with storage.reading_regular_file(path), open(path, "rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty, expected a pickle. Download or save it again.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    collects_garbage = gc.isenabled()
    # Garbage collection would look at all values again and again, which doubles the time.
    gc.disable()
    try:
        _skip_npy_header(path, content)
        return _PlainUnpickler(_MappedFile(content)).load()
    except DataError:
        raise
    # Code, whose first name is in the message, or values that are not plain or take too long.
    except UnsafePickle as reason:
        raise DataError(
            f"{path} {reason}. Save plain containers and arrays instead, in several files if it is "
            "large."
        ) from None
    except (
        pickle.UnpicklingError,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        AttributeError,
        struct.error,
    ):
        problem = "it is damaged, truncated, or another kind of file"
        raise DataError(
            f"{path} is not a readable pickle: {problem}. Download or save it again."
        ) from None
    finally:
        if collects_garbage:
            gc.enable()


def _skip_npy_header(path: Path, content: mmap.mmap) -> None:
    """Move to the pickle in a ``.npy`` of objects."""
    if content[:6] != b"\x93NUMPY":
        return
    is_first_version = np.lib.format.read_magic(content) == (1, 0)
    read_header = (
        np.lib.format.read_array_header_1_0
        if is_first_version
        else np.lib.format.read_array_header_2_0
    )
    if read_header(content)[2] != np.dtype(object):
        raise DataError(
            f"{path} is a .npy of numbers, expected one of objects, or a pickle. Its rows have no "
            "names."
        )


class _MappedFile:
    """A file for the unpickler, which does not copy large parts and raises ValueError at its end."""

    def __init__(self, content: mmap.mmap):
        self.content = content
        self.num_steps = 0

    def _count_step(self) -> None:
        self.num_steps += 1
        # Not _require, which would format the message for each instruction.
        if self.num_steps > _MAX_INSTRUCTIONS:
            raise UnsafePickle(f"has more than {_MAX_INSTRUCTIONS:,} instructions")

    def readline(self) -> bytes:
        self._count_step()
        return self.content.readline()

    def read(self, size: int) -> bytes | memoryview:
        if size == 1:
            self._count_step()
        if size <= _MAX_COPIED_BYTES:
            part = self.content.read(size)
            if len(part) < size:
                raise ValueError("the file is truncated")
            return part
        start = self.content.tell()
        self.content.seek(size, os.SEEK_CUR)
        return memoryview(self.content)[start : start + size]


class _Memo(dict[int, Any]):
    """The memo of a pickle, with the positions of unfinished arrays."""

    def __setitem__(self, slot: int, value: Any) -> None:
        super().__setitem__(slot, value)
        if isinstance(value, UnfinishedArray):
            value.memo_slots.append(slot)


# The unpickler of the standard library in Python, because the one in C cannot replace single
# instructions. torch.load(weights_only=True) reads only files of torch.save, and numpy.load
# executes code in arrays of objects.
class _PlainUnpickler(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, file: _MappedFile):
        super().__init__(file)  # type: ignore[arg-type]
        self.memo = _Memo()
        # Items that may still be copied. Without a limit, a small file could request the same copy
        # many times.
        self.copy_budget = 16 * len(file.content) + 2**16

    def find_class(self, module: str, name: str) -> GlobalName:
        full = f"{_MODULE_ALIASES.get(module, module)}.{name}"
        _require(full in _CALLS or full in _TYPES, CODE_IN_PICKLE.format(f"it names {full[:80]!r}"))
        return GlobalName(full, _CALLS.get(full))

    def _decode_string(self, value: bytes) -> str | bytes:
        """Decode a string of Python 2."""
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        name = self.stack.pop()
        called = name if isinstance(name, GlobalName) else GlobalName(type(name).__name__)
        if called.call is None:
            raise UnsafePickle(CODE_IN_PICKLE.format(f"it calls {called}"))
        self._spend(arguments)
        self.append(called.call(*arguments))

    def load_build(self) -> None:
        state = self.stack.pop()
        pending = self.stack.pop()
        _require(
            isinstance(pending, UnfinishedArray),
            CODE_IN_PICKLE.format(f"it sets the state of a {type(pending).__name__}"),
        )
        self._spend(state)
        self.append(pending.build(state))
        # The memo still has the unfinished array, and later instructions may refer to it.
        for slot in pending.memo_slots:
            self.memo[slot] = self.stack[-1]

    def _spend(self, arguments: tuple[Any, ...]) -> None:
        """Subtract the items that a call may copy from the budget."""
        _require_format(type(arguments) is tuple)
        _require_format(not any(isinstance(argument, np.ndarray) for argument in arguments))
        self.copy_budget -= sum(
            len(argument) for argument in arguments if isinstance(argument, Sized)
        )
        _require(self.copy_budget >= 0, "copies the same values too often")

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        _require_format(type(self.stack[-1]) is dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][check_key(key)] = value

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(set(map(check_key, items)))

    def load_additems(self) -> None:
        items = self.pop_mark()
        _require_format(type(self.stack[-1]) is set)
        self.stack[-1].update(map(check_key, items))

    # The opcodes of protocols 0 to 5, which will never be more. These methods and refusals replace
    # the unsafe ones.
    dispatch: ClassVar[dict[int, Any]] = {
        **{
            ord(opcode.code): pickle._Unpickler.dispatch[ord(opcode.code)]
            for opcode in pickletools.opcodes
            if opcode.proto <= 5
        },
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.ADDITEMS[0]: load_additems,
        # Do not allocate memory by a declared length.
        pickle.FRAME[0]: lambda reader: reader.read(8),
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
        **dict.fromkeys(
            map(
                ord,
                (
                    pickle.INST,
                    pickle.OBJ,
                    pickle.NEWOBJ,
                    pickle.NEWOBJ_EX,
                    pickle.EXT1,
                    pickle.EXT2,
                    pickle.EXT4,
                ),
            ),
            lambda _: _require(False, CODE_IN_PICKLE.format("it makes objects of a class")),
        ),
        **dict.fromkeys(
            map(ord, (pickle.PERSID, pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)),
            lambda _: _require(
                False, "refers to values outside the pickle, which are not available"
            ),
        ),
    }


# 3,000 tensors with the state of their optimizer take 0.5 MB. The limit bounds the time of reading
# it.
_MAX_CHECKPOINT_PICKLE = 2**20


def check_torch_pickles(path: Path) -> None:
    """Check the pickles of a file of ``torch.save``, so that ``torch.load`` reads them in a time
    that their size determines.
    """
    # Damaged pickles raise errors of any other kind, which the caller handles.
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                for member in file.infolist():
                    _require(
                        member.compress_type == zipfile.ZIP_STORED,
                        "is compressed, as torch.save never does",
                    )
                    _check_content(file, member)
                    if member.filename.endswith("data.pkl"):
                        # Before the member is read into memory.
                        _require(
                            member.file_size <= _MAX_CHECKPOINT_PICKLE,
                            f"has a pickle of {member.file_size:,} bytes, more than the "
                            f"{_MAX_CHECKPOINT_PICKLE:,} allowed",
                        )
                        _check_pickles(file.read(member), 1)
        else:
            # The format before torch 1.6: magic number, version, system, object, and storage keys.
            with storage.open_file(path) as file:
                _check_pickles(file.read(_MAX_CHECKPOINT_PICKLE), 5)
    except UnsafePickle as reason:
        raise DataError(
            f"{path}: expected a checkpoint of tensors and plain values, got one that {reason}. "
            "Save the weights alone."
        ) from None


def _check_content(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Compare a member with its checksum, which torch does not: a changed weight would not be found.
    1.4 GB take a second.
    """
    # torch.serialization.set_crc32_options(False) writes 0. Without the attribute, none is checked.
    if not member.CRC:
        del member.CRC
        return
    try:
        with file.open(member) as content:
            while content.read(2**20):
                pass
    except zipfile.BadZipFile:
        raise UnsafePickle(f"is damaged: {member.filename!r:.80} has a wrong checksum") from None


def _check_pickles(content: bytes, number: int) -> None:
    """Run a number of successive pickles without making objects."""
    with mmap.mmap(-1, max(len(content), 1)) as mapped:
        mapped.write(content)
        mapped.seek(0)
        for _ in range(number):
            _CheckpointScanner(_MappedFile(mapped)).load()


class _CheckpointScanner(_PlainUnpickler):
    """Checks the keys of a checkpoint. Its objects are empty dicts here, and ``torch.load`` decides
    which of them may be made.
    """

    def find_class(self, module: str, name: str) -> GlobalName:
        full = f"{_MODULE_ALIASES.get(module, module)}.{name}"
        return GlobalName(full, _CALLS.get(full, lambda *_: {}))

    def persistent_load(self, reference: Any) -> Any:
        parts = reference if isinstance(reference, tuple) else (reference,)
        for part in parts:
            for key in part if isinstance(part, tuple) else [part]:
                if not isinstance(key, GlobalName):
                    check_key(key)
        return {}

    def load_build(self) -> None:
        self.stack.pop()

    def load_newobj(self) -> None:
        self.stack[-2:] = [{}]

    dispatch: ClassVar[dict[int, Any]] = {
        **_PlainUnpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        **{
            code[0]: pickle._Unpickler.dispatch[code[0]]
            for code in (pickle.PERSID, pickle.BINPERSID)
        },
    }
