"""A safe reader of pickles with plain values: numbers, texts, containers and numpy arrays. Nothing in the file is executed.

A pickle is a program. This reader implements only the instructions that build plain values. The few names that such a
pickle may use (``numpy.dtype``, ``collections.OrderedDict``, ...) stand for functions of this file. Any other name is refused as code.
A restricted ``pickle.Unpickler`` is not enough: it calls methods of arrays, allocates memory by the declared shape, and copies without limit.

Large bytes are not copied: arrays stay in the memory-mapped file. Protocols 0 to 5 are supported, and strings of Python 2 (decoded as UTF-8 if
possible, else bytes).
"""

from __future__ import annotations

import codecs
import math
import mmap
import re
import struct
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.errors import DataError

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
_TYPES = ("numpy.ndarray", *(f"builtins.{name}" for name in ("int", "float", "str", "unicode", "long", "bool", "tuple")))


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


def resolve_global(module: Any, name: Any) -> GlobalName:
    """Return what a name of a module stands for.

    Args:
        module: Name of the module.
        name: The name.

    Returns:
        The function or type.

    Raises:
        TypeError: If the arguments are not texts.
        UnsafePickle: If the name is not allowed.
    """
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("expected names as texts")
    full = f"{_MODULE_ALIASES.get(module, module)}.{name}"
    if full not in _CALLS and full not in _TYPES:
        raise UnsafePickle(CODE_IN_PICKLE.format(f"it names {full[:80]!r}"))
    return GlobalName(full, _CALLS.get(full))


def check_key(key: Any) -> Any:
    """Check a key of a dict or set. Nested values are refused, because their hash could take unlimited time.

    Args:
        key: The key.

    Returns:
        The key.

    Raises:
        UnsafePickle: If the key is not a text or a small number.
    """
    if isinstance(key, str | bytes) or key is None or (isinstance(key, int) and abs(key) < _LARGEST_KEY):
        return key
    raise UnsafePickle(f"has a {type(key).__name__} for a key, expected a text or a whole number below 2^32")


def _dtype(code: Any, *_: Any) -> UnfinishedArray:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise UnsafePickle(f"has an array of {str(code)[:40]!r}, expected numbers, texts or plain objects")

    def with_order(state: Any) -> np.dtype[Any]:
        order, fields = state[1], state[2:5]
        if fields != (None, None, None) or order not in _ORDERS:
            raise UnsafePickle("has an array of records, expected numbers, texts or plain objects")
        dtype = np.dtype(code)
        return dtype if dtype.hasobject else dtype.newbyteorder(_ORDERS[order])

    return UnfinishedArray(with_order)


def _reconstruct(kind: Any, *_: Any) -> UnfinishedArray:
    if not isinstance(kind, GlobalName) or kind.name != "numpy.ndarray":
        raise UnsafePickle("is a pickle with code in it: it makes an array that is not one of numpy's own")

    def with_state(state: Any) -> Any:
        shape, dtype, fortran, data = state[-4:]
        return _array(data, dtype, shape, "F" if fortran else "C")

    return UnfinishedArray(with_state)


def _array(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    if not isinstance(dtype, np.dtype):
        raise TypeError("no dtype")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(type(size) is int and 0 <= size < 2**48 for size in shape) or len(shape) > 8:
        raise ValueError("invalid shape")
    count = math.prod(shape)
    if dtype.hasobject:
        if type(data) is not list or len(data) != count or len(shape) > 1:
            raise UnsafePickle("has an array of objects of several dimensions, expected a list of them")
        return data[0] if not shape else data
    data = data.encode() if isinstance(data, str) else data
    if len(data) != count * dtype.itemsize:
        raise ValueError("the size differs from the shape")
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: Any = None) -> Any:
    if isinstance(dtype, np.dtype) and dtype.hasobject:
        return data
    return _array(data, dtype, (), "C").item()


def _encode(text: str, encoding: str) -> bytes:
    """Convert bytes that Python 3 wrote as a text for Python 2."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("another encoding")
    return text.encode("latin1")


def _to_dict(items: Any = ()) -> dict[Any, Any]:
    return {check_key(key): value for key, value in (items.items() if type(items) is dict else items)}


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _array,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _to_dict,
    "collections.defaultdict": lambda _factory=None, items=(): _to_dict(items),
    "builtins.set": lambda items=(): set(map(check_key, items)),
    "builtins.frozenset": lambda items=(): set(map(check_key, items)),
    "builtins.list": lambda items=(): list(items),
    "builtins.dict": _to_dict,
    "builtins.bytes": lambda items=b"": b"".join([items]),
    "builtins.bytearray": lambda items=b"", encoding="latin1": items.encode(encoding) if isinstance(items, str) else b"".join([items]),
}


# Larger strings of bytes are not copied out of the file.
_MAX_COPIED_BYTES = 2**16
_DAMAGED = "is not a readable pickle: it is damaged, truncated, or another kind of file"


def read_plain_pickle(path: str | Path) -> Any:
    """Read the value of a pickle, or of a ``.npy`` of objects.

    Args:
        path: The file.

    Returns:
        None, bool, int, float, str, bytes, list, tuple, dict, set, or an array of numbers. An array of objects becomes a list, or the object if
        there is only one. A numpy scalar becomes a Python number.

    Raises:
        DataError: If the file would execute code (the message has the first name), is damaged, or is not a pickle.
    """
    path = Path(path)
    with storage.reading_regular_file(path), open(path, "rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty, expected a pickle.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _PickleReader(memoryview(content), _after_npy_header(path, content)).run()
    except DataError:
        raise
    except UnsafePickle as reason:
        raise DataError(f"{path} {reason}.") from None
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError, struct.error):
        raise DataError(f"{path} {_DAMAGED}.") from None


def _after_npy_header(path: Path, content: mmap.mmap) -> int:
    """Return where the pickle begins: at 0, or after the header of a ``.npy`` of objects."""
    if content[:6] != b"\x93NUMPY":
        return 0
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    if read(content)[2] != np.dtype(object):
        raise DataError(f"{path} is a .npy of numbers, expected one of objects, or a pickle. Its rows have no names.")
    return content.tell()


class _PickleReader:
    def __init__(self, content: memoryview, start: int):
        self.content, self.at = content, start
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # Items that may still be copied. Without a limit, a small file could request the same copy many times.
        self.copy_budget = 16 * len(content) + 2**16

    def run(self) -> Any:
        while (opcode := self.take(1)[0]) != ord("."):
            step = _INSTRUCTIONS.get(opcode)
            if step is None:
                raise UnsafePickle(_REFUSED.get(opcode, _DAMAGED))
            step(self)
        return self.stack.pop()

    def take(self, size: int) -> memoryview:
        """Read the next bytes of the file."""
        part = self.content[self.at : self.at + size]
        if len(part) != size:
            raise ValueError("the file ends here")
        self.at += size
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        step = 256
        while (end := bytes(self.content[self.at : self.at + step]).find(b"\n")) < 0:
            if self.at + step >= len(self.content):
                raise ValueError("the file ends here")
            step *= 4
        line = bytes(self.take(end))
        self.take(1)
        return line

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def string_of_bytes(self, form: str) -> bytes | memoryview:
        part = self.take(self.number(form))
        return bytes(part) if len(part) <= _MAX_COPIED_BYTES else part

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple([self.stack.pop() for _ in range(count)][::-1])

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError("no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any], *new: Any) -> None:
        self.stack += new
        table = self.stack[-1]
        if type(table) is not dict:
            raise TypeError("no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[check_key(key)] = value

    def add(self, items: list[Any], *new: Any) -> None:
        self.stack += new
        if type(self.stack[-1]) is not set:
            raise TypeError("no set")
        self.stack[-1].update(map(check_key, items))

    def put(self, slot: int) -> None:
        self.memo[slot] = self.stack[-1]
        if isinstance(self.stack[-1], UnfinishedArray):
            self.stack[-1].memo_slots.append(slot)

    def reduce(self) -> None:
        name, arguments = self.last(2)
        if not isinstance(name, GlobalName) or name.call is None:
            raise UnsafePickle(CODE_IN_PICKLE.format(f"it calls {name if isinstance(name, GlobalName) else type(name).__name__}"))
        self.spend(arguments)
        self.push(name.call(*arguments))

    def build(self) -> None:
        pending, state = self.last(2)
        if not isinstance(pending, UnfinishedArray):
            raise UnsafePickle(CODE_IN_PICKLE.format(f"it sets the state of a {type(pending).__name__}"))
        self.spend(state)
        self.push(pending.build(state))
        for slot in pending.memo_slots:
            self.memo[slot] = self.stack[-1]

    def spend(self, arguments: tuple[Any, ...]) -> None:
        """Subtract the items that a call may copy from the budget."""
        if type(arguments) is not tuple or any(isinstance(argument, np.ndarray) for argument in arguments):
            raise TypeError("no arguments")
        self.copy_budget -= sum(len(argument) for argument in arguments if isinstance(argument, Sized))
        if self.copy_budget < 0:
            raise UnsafePickle("copies the same values too often")


def _text_of_python_2(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _quoted(line: bytes) -> str | bytes:
    """A string of protocol 0, in quotes, with escapes."""
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("no quotes")
    return _text_of_python_2(codecs.escape_decode(line[1:-1])[0])


_INTEGERS = {b"00": False, b"01": True}

_INSTRUCTIONS: dict[int, Callable[[_PickleReader], Any]] = {
    # numbers
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("I"): lambda m: m.push(_INTEGERS[line] if (line := m.line()) in _INTEGERS else int(line)),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("L"): lambda m: m.push(int(m.line().rstrip(b"L"))),
    0x8A: lambda m: m.push(int.from_bytes(m.take(m.number("<B")), "little", signed=True)),
    0x8B: lambda m: m.push(int.from_bytes(m.take(m.number("<i")), "little", signed=True)),
    ord("F"): lambda m: m.push(float(m.line())),
    ord("G"): lambda m: m.push(m.number(">d")),
    # texts and bytes
    ord("S"): lambda m: m.push(_quoted(m.line())),
    ord("T"): lambda m: m.push(_text_of_python_2(bytes(m.take(m.number("<i"))))),
    ord("U"): lambda m: m.push(_text_of_python_2(bytes(m.take(m.number("<B"))))),
    ord("V"): lambda m: m.push(m.line().decode("raw-unicode-escape")),
    ord("X"): lambda m: m.push(str(m.take(m.number("<I")), "utf-8", "surrogatepass")),
    0x8C: lambda m: m.push(str(m.take(m.number("<B")), "utf-8", "surrogatepass")),
    0x8D: lambda m: m.push(str(m.take(m.number("<Q")), "utf-8", "surrogatepass")),
    ord("B"): lambda m: m.push(m.string_of_bytes("<I")),
    ord("C"): lambda m: m.push(m.string_of_bytes("<B")),
    0x8E: lambda m: m.push(m.string_of_bytes("<Q")),
    0x96: lambda m: m.push(m.string_of_bytes("<Q")),
    # containers
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.since_mark()),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.since_mark()),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    0x85: lambda m: m.push(m.last(1)),
    0x86: lambda m: m.push(m.last(2)),
    0x87: lambda m: m.push(m.last(3)),
    ord("}"): lambda m: m.push({}),
    ord("d"): lambda m: m.update(m.since_mark(), {}),
    ord("s"): lambda m: m.update(list(m.last(2))),
    ord("u"): lambda m: m.update(m.since_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: lambda m: m.add(m.since_mark()),
    0x91: lambda m: m.add(m.since_mark(), set()),
    # stack and memo
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("p"): lambda m: m.put(int(m.line())),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.put(len(m.memo)),
    ord("g"): lambda m: m.push(m.memo[int(m.line())]),
    ord("h"): lambda m: m.push(m.memo[m.number("<B")]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    0x80: lambda m: m.take(1),
    0x95: lambda m: m.take(8),
    # names
    ord("c"): lambda m: m.push(resolve_global(m.line().decode(), m.line().decode())),
    0x93: lambda m: m.push(resolve_global(*m.last(2))),
    ord("R"): _PickleReader.reduce,
    ord("b"): _PickleReader.build,
}

_OBJECTS = CODE_IN_PICKLE.format("it makes objects of a class")
_ELSEWHERE = "refers to values outside the pickle, which are not available"
_REFUSED = {
    **dict.fromkeys([ord("i"), ord("o"), 0x81, 0x92, 0x82, 0x83, 0x84], _OBJECTS),
    **dict.fromkeys([ord("P"), ord("Q"), 0x97, 0x98], _ELSEWHERE),
}
