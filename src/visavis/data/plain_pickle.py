"""Pickles read as data: numbers, texts, plain containers and arrays of numpy come out, and nothing in the file is ever called.

A pickle is a program. This is a machine of its own that knows only the instructions which build plain values; the few names that such a
pickle may mention (``numpy.dtype``, ``collections.OrderedDict``, ...) stand for functions of this file. Any other name is refused as code.
Large bytes are not copied: arrays lie in the mapped file. Protocols 0 to 5, and strings of Python 2 (UTF-8 if they are, else bytes).
"""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.data.plain_names import CODE, Name, Pending, Refused, look_up, plain_key
from visavis.errors import DataError

_COPIED = 2**16  # bytes up to which a string of bytes is copied out of the file
_DAMAGED = "is no readable pickle: it is damaged, cut short, or another kind of file"


def read_plain_pickle(path: str | Path) -> Any:
    """The value in a pickle, or in a ``.npy`` of objects: None, bool, int, float, str, bytes, list, tuple, dict, set, or an array of numbers.

    Arrays of objects come as lists, or as the object where there is one; numpy's scalars as Python's numbers. Raises DataError for
    anything else, naming the first name that would be called, and for a file that is damaged.
    """
    path = Path(path)
    with storage.regular_file(path), open(path, "rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty, expected a pickle.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Machine(memoryview(content), _after_npy_header(path, content)).run()
    except DataError:
        raise
    except Refused as reason:
        raise DataError(f"{path} {reason}.") from None
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError, struct.error):
        raise DataError(f"{path} {_DAMAGED}.") from None


def _after_npy_header(path: Path, content: mmap.mmap) -> int:
    """Where the pickle begins: at 0, or behind the header of a ``.npy`` of objects."""
    if content[:6] != b"\x93NUMPY":
        return 0
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    if read(content)[2] != np.dtype(object):
        raise DataError(f"{path} is a .npy of numbers, expected one of objects, or a pickle: there is no name for its rows.")
    return content.tell()


class _Machine:
    def __init__(self, content: memoryview, start: int):
        self.content, self.at = content, start
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.left = 16 * len(content) + 2**16  # items that may still be copied

    def run(self) -> Any:
        while (opcode := self.take(1)[0]) != ord("."):
            step = _STEPS.get(opcode)
            if step is None:
                raise Refused(_REFUSED.get(opcode, _DAMAGED))
            step(self)
        return self.stack.pop()

    def take(self, size: int) -> memoryview:
        """The next bytes of the file."""
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
        return bytes(part) if len(part) <= _COPIED else part

    def since_mark(self) -> list[Any]:
        place = self.marks.pop()
        items = self.stack[place:]
        del self.stack[place:]
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
            table[plain_key(key)] = value

    def add(self, items: list[Any], *new: Any) -> None:
        self.stack += new
        if type(self.stack[-1]) is not set:
            raise TypeError("no set")
        self.stack[-1].update(map(plain_key, items))

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]
        if isinstance(self.stack[-1], Pending):
            self.stack[-1].places.append(place)

    def reduce(self) -> None:
        name, arguments = self.last(2)
        if not isinstance(name, Name) or name.call is None:
            raise Refused(CODE.format(f"it calls {name if isinstance(name, Name) else type(name).__name__}"))
        self.spend(arguments)
        self.push(name.call(*arguments))

    def build(self) -> None:
        pending, state = self.last(2)
        if not isinstance(pending, Pending):
            raise Refused(CODE.format(f"it sets what is inside of a {type(pending).__name__}"))
        self.spend(state)
        self.push(pending.build(state))
        for place in pending.places:
            self.memo[place] = self.stack[-1]

    def spend(self, arguments: tuple[Any, ...]) -> None:
        """Count what a call may copy, so that a small file cannot ask for the same copy without end."""
        if type(arguments) is not tuple or any(isinstance(argument, np.ndarray) for argument in arguments):
            raise TypeError("no arguments")
        self.left -= sum(len(argument) for argument in arguments if isinstance(argument, Sized))
        if self.left < 0:
            raise Refused("copies the same values over and over, as no pickle of features does")


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

_STEPS: dict[int, Callable[[_Machine], Any]] = {
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
    # the stack and what is remembered
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
    ord("c"): lambda m: m.push(look_up(m.line().decode(), m.line().decode())),
    0x93: lambda m: m.push(look_up(*m.last(2))),
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}

_OBJECTS = CODE.format("it makes objects of a class")
_ELSEWHERE = "refers to values outside the pickle, which are not here"
_REFUSED = {
    **dict.fromkeys([ord("i"), ord("o"), 0x81, 0x92, 0x82, 0x83, 0x84], _OBJECTS),
    **dict.fromkeys([ord("P"), ord("Q"), 0x97, 0x98], _ELSEWHERE),
}
