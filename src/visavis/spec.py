"""Text to object and back: ``parse("Unified(margin=0.2)", catalog)`` and ``describe(object)``.

A spec is the call that makes a frozen dataclass, written with literals only; it is read with ``ast`` and never
evaluated. ``repr`` of such a value is its spec, so that run folders, reports and command lines share one notation.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from visavis.errors import SpecError, nearest, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Only:
    """Which values of its type a field takes, and that in words; it stands beside the type, and ``check_fields`` refuses all others."""

    fits: Callable[[Any], bool]
    expected: str


Count = Annotated[int, Only(lambda number: number >= 1, "a whole number from 1 up")]
CountOrZero = Annotated[int, Only(lambda number: number >= 0, "a whole number from 0 up")]
Positive = Annotated[float, Only(lambda number: number > 0, "a number above 0")]
PositiveOrZero = Annotated[float, Only(lambda number: number >= 0, "a number from 0 up")]
Share = Annotated[float, Only(lambda number: 0 <= number <= 1, "a share from 0 to 1")]
Dropout = Annotated[float, Only(lambda number: 0 <= number < 1, "a share from 0 to below 1")]


def parse(text: str, catalog: Iterable[type[T]]) -> T:
    """The object that a spec names; a bare name takes all defaults.

    Raises SpecError for an unknown name or field, a value that is no literal, or one that the class refuses.
    """
    by_name = {entry.__name__: entry for entry in catalog}
    name, values = parse_call(text)
    if name not in by_name:
        raise SpecError(f"{name!r} in {_short(text)} is not in the catalog: {nearest(name, by_name)}")
    return build(by_name[name], values)


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the fields of a spec. Raises SpecError for text of another form, or for a value that is no literal.

    >>> parse_call("VSE++(width=512)")
    ('VSE++', {'width': 512})
    """
    if not isinstance(text, str):
        raise SpecError(f"{text!r} is no text: expected one of the form Name(field=value, ...).")
    written = re.fullmatch(r"\s*([^\W\d][\w+-]*)\s*(\(.*\))?\s*", text, re.DOTALL)
    try:
        call = ast.parse(f"_{written[2] or '()'}", mode="eval").body if written else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if written is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SpecError(f"{_short(text)} is not of the form Name(field=value, ...).")
    if call.args:
        raise SpecError(f"{text!r} gives a value without its name: write field=value.")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if (field := _field(keyword, text)) in values:
            raise SpecError(f"{text!r} gives {field} twice: keep one.")
        values[field] = _literal(keyword.value, text)
    return written[1], values


def build(kind: type[T], values: dict[str, Any]) -> T:
    """``kind(**values)``; raises SpecError naming the unknown or missing field and the nearest right one."""
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SpecError(f"{_title(kind)} has no field {name!r}: {nearest(name, known)}")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.init and field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise SpecError(f"{_title(kind)} needs a value for its field {field.name}.")
    return kind(**values)


def describe(value: Any) -> str:
    """The spec of a dataclass: its name and every field, in the order of declaration."""
    return f"{type(value).__name__}({', '.join(f'{field.name}={getattr(value, field.name)!r}' for field in fields(value))})"


def check_fields(value: Any) -> None:
    """Refuse field values of the wrong kind (call from ``__post_init__``): numbers finite and as ``Only`` says, literals among those declared.

    An int given for a float field becomes a float, a list for a tuple field a tuple, so that equal specs are equal values.
    """
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in fields(value):
        given = getattr(value, field.name)
        try:
            object.__setattr__(value, field.name, _coerce(given, hints[field.name]))
        except TypeError as expected:
            raise SpecError(f"{_title(type(value))}: {field.name} is {given!r}, expected {expected}.") from None


def check_seed(seed: int) -> None:
    """Raise SpecError for a seed that numpy or torch would not take."""
    if not 0 <= seed < 2**63:
        raise SpecError(f"seed is {seed}, expected a whole number from 0 to 2^63 - 1.")


def require(condition: bool, value: Any, field: str, expected: str) -> None:
    """Raise SpecError naming the field, its value and what was expected, unless ``condition`` holds."""
    if not condition:
        raise SpecError(f"{_title(type(value))}: {field} is {getattr(value, field)!r}, expected {expected}.")


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """A whole number from ``least`` up, at most 2**53, which is exact in every comparison. Raises SpecError, by ``name``, for anything else.

    >>> whole_number(3, "k")
    3
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise SpecError(f"{name} is {shown(value)}, expected a whole number from {least} up.")
    return min(number, 2**53)


def _coerce(given: Any, hint: Any) -> Any:
    """``given`` as ``hint`` says; TypeError carries a description of what was expected."""
    origin = get_origin(hint)
    if origin is Annotated:
        kind, only = get_args(hint)
        if not only.fits(coerced := _coerce(given, kind)):
            raise TypeError(only.expected)
        return coerced
    if origin is Literal:
        if given not in get_args(hint):
            raise TypeError(" or ".join(repr(choice) for choice in get_args(hint)))
        return given
    if origin in (typing.Union, types.UnionType):
        if given is None and type(None) in get_args(hint):
            return None
        return _coerce(given, next(kind for kind in get_args(hint) if kind is not type(None)))
    if origin is tuple:
        if not isinstance(given, list | tuple):
            raise TypeError("a list of values")
        return tuple(_coerce(item, get_args(hint)[0]) for item in given)
    if origin is dict:
        if not isinstance(given, dict):
            raise TypeError("a table of names and values")
        return {name: _coerce(value, get_args(hint)[1]) for name, value in given.items()}
    if hint is float:
        if isinstance(given, bool) or not isinstance(given, int | float) or not -sys.float_info.max <= given <= sys.float_info.max:
            raise TypeError("a finite number")
        return float(given)
    if hint is int and (isinstance(given, bool) or not isinstance(given, int)):
        raise TypeError("a whole number")
    if hint is bool and not isinstance(given, bool):
        raise TypeError("True or False")
    if hint is str and not isinstance(given, str):
        raise TypeError("a text in quotes")
    return given


def _title(kind: type) -> str:
    """What a sentence calls a class; a config by what it is of."""
    return kind.__qualname__.rpartition("<locals>.")[2].removesuffix(".Config")


def _field(keyword: ast.keyword, text: str) -> str:
    if keyword.arg is None:
        raise SpecError(f"{text!r}: write field=value, not **.")
    return keyword.arg


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise SpecError(
            f"a value in {_short(text)} is not a plain value (a number, a text in quotes, a list, True, False, None)."
        ) from None


def _short(text: str) -> str:
    """A text for an error sentence: its beginning if it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
