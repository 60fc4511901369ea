"""The few names that a pickle of plain values may mention, and what they stand for: functions of this file, never the things themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CODE = "is a pickle with code in it: {}, and only plain containers and arrays are read"
"""The end of the sentence about a pickle that would run something."""

_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|O8?|[SaU]\d{1,6})")
_ORDERS: dict[Any, Any] = {"<": "<", ">": ">", "|": "|", "=": "="}
_LARGEST_KEY = 2**32  # numbers of any size could be chosen so that all have one hash
_SAME_MODULES = {
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
    "__builtin__": "builtins",
}
_TYPES = ("numpy.ndarray", *(f"builtins.{name}" for name in ("int", "float", "str", "unicode", "long", "bool", "tuple")))


class Refused(Exception):
    """Why a pickle is not read, as the end of a sentence."""


@dataclass(frozen=True)
class Name:
    """A name that a pickle mentions. call: what it stands for here; None for a type that is only mentioned."""

    name: str
    call: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Pending:
    """An array or a dtype that was begun and waits for its state. places: where the pickle remembers it."""

    build: Callable[[Any], Any]
    places: list[int] = field(default_factory=list)


def look_up(module: Any, name: Any) -> Name:
    """What a name of a module stands for. Raises Refused for all names but a few."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("no name")
    full = f"{_SAME_MODULES.get(module, module)}.{name}"
    if full not in _CALLS and full not in _TYPES:
        raise Refused(CODE.format(f"it names {full[:80]!r}"))
    return Name(full, _CALLS.get(full))


def plain_key(key: Any) -> Any:
    """What a dict or a set is looked up by: a text or a small number, never a nested value, whose hash could be without end."""
    if isinstance(key, str | bytes) or key is None or (isinstance(key, int) and abs(key) < _LARGEST_KEY):
        return key
    raise Refused(f"has a {type(key).__name__} for a key, expected a text or a whole number below 2^32")


def _dtype(code: Any, *_: Any) -> Pending:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise Refused(f"holds an array of {str(code)[:40]!r}, expected numbers, texts or plain objects")

    def with_order(state: Any) -> np.dtype[Any]:
        order, fields = state[1], state[2:5]
        if fields != (None, None, None) or order not in _ORDERS:
            raise Refused("holds an array of records, expected numbers, texts or plain objects")
        dtype = np.dtype(code)
        return dtype if dtype.hasobject else dtype.newbyteorder(_ORDERS[order])

    return Pending(with_order)


def _reconstruct(kind: Any, *_: Any) -> Pending:
    if not isinstance(kind, Name) or kind.name != "numpy.ndarray":
        raise Refused("is a pickle with code in it: it makes an array that is not one of numpy's own")

    def with_state(state: Any) -> Any:
        shape, dtype, fortran, data = state[-4:]
        return _array(data, dtype, shape, "F" if fortran else "C")

    return Pending(with_state)


def _array(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    if not isinstance(dtype, np.dtype):
        raise TypeError("no dtype")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(type(size) is int and 0 <= size < 2**48 for size in shape) or len(shape) > 8:
        raise ValueError("an impossible shape")
    count = math.prod(shape)
    if dtype.hasobject:
        if type(data) is not list or len(data) != count or len(shape) > 1:
            raise Refused("holds an array of objects of several dimensions, expected a list of them")
        return data[0] if not shape else data
    data = data.encode() if isinstance(data, str) else data
    if len(data) != count * dtype.itemsize:
        raise ValueError("another size than its shape says")
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: Any = None) -> Any:
    if isinstance(dtype, np.dtype) and dtype.hasobject:
        return data
    return _array(data, dtype, (), "C").item()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("another encoding")
    return text.encode("latin1")


def _ordered(items: Any = ()) -> dict[Any, Any]:
    return {plain_key(key): value for key, value in (items.items() if type(items) is dict else items)}


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _array,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda _factory=None, items=(): _ordered(items),
    "builtins.set": lambda items=(): set(map(plain_key, items)),
    "builtins.frozenset": lambda items=(): set(map(plain_key, items)),
    "builtins.list": lambda items=(): list(items),
    "builtins.dict": _ordered,
    "builtins.bytes": lambda items=b"": b"".join([items]),
    "builtins.bytearray": lambda items=b"", encoding="latin1": items.encode(encoding) if isinstance(items, str) else b"".join([items]),
}
