"""Specs: parsing and checking of frozen dataclasses, such as "Unified(margin=0.2)".

A spec is the call that makes a frozen dataclass, with literals only. It is parsed with ``ast`` and
never evaluated. ``repr`` of such a value is its spec, so run folders, reports and command lines
share one notation.
"""

from __future__ import annotations

import ast
import numbers
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from visavis.core.errors import SpecError, format_value, suggest_name

T = TypeVar("T")


@dataclass(frozen=True)
class Constraint:
    """Allowed values of a field, annotated next to its type. `validate_fields` rejects all others.

    Attributes:
        accepts: Returns whether a value is allowed.
        expected: Description of the allowed values for error messages.
    """

    accepts: Callable[[Any], bool]
    expected: str


MAX_INTEGER = 2**32 - 1
"""Largest magnitude of an integer in a field or recipe, the largest seed."""
MAX_SEED = 2**63 - 1
"""Largest seed of numpy and torch."""
PositiveInt = Annotated[int, Constraint(lambda number: number >= 1, "an integer >= 1")]
NonNegativeInt = Annotated[int, Constraint(lambda number: number >= 0, "an integer >= 0")]
LayerCount = Annotated[
    int, Constraint(lambda number: 1 <= number <= 1000, "an integer from 1 to 1,000")
]
OptionalLayerCount = Annotated[
    int, Constraint(lambda number: 0 <= number <= 1000, "an integer from 0 to 1,000")
]
PositiveFloat = Annotated[float, Constraint(lambda number: number > 0, "a number > 0")]
NonNegativeFloat = Annotated[float, Constraint(lambda number: number >= 0, "a number >= 0")]
UnitFloat = Annotated[float, Constraint(lambda number: 0 <= number <= 1, "a number from 0 to 1")]
DropoutRate = Annotated[float, Constraint(lambda number: 0 <= number < 1, "a number >= 0 and < 1")]

PARAMETER_RANGE = (1e-12, 1e12)
"""Magnitudes of parameters. Products of two of them with scores stay far from the limits of
float32.
"""
EXPECTED_PARAMETER = "a magnitude from {:g} to {:g}".format(*PARAMETER_RANGE)

EXPECTED_KINDS: dict[type, str] = {
    int: "an integer",
    bool: "True or False",
    str: "a text in quotes",
}


def is_number(value: Any) -> bool:
    """Return whether a value is a real number that a float can hold. A bool is not a number.

    Args:
        value: The value.
    """
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real)


def parse(text: str, catalog: Iterable[type[T]]) -> T:
    """Parse a spec. A name without parentheses takes all defaults.

    Args:
        text: The spec, such as "Unified(margin=0.2)".
        catalog: Classes that a spec may name.

    Returns:
        The object.

    Raises:
        SpecError: For an unknown name or field, a value that is not a literal, or a value that the
            class rejects.
    """
    by_name = {entry.__name__: entry for entry in catalog}
    name, values = parse_call(text)
    if name not in by_name:
        raise SpecError(
            f"{name!r} in {_short(text)} is not in the catalog: {suggest_name(name, by_name)}"
        )
    return build_object(by_name[name], values)


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into its name and its fields.

    Args:
        text: The spec.

    Returns:
        The name, and the values by field.

    Raises:
        SpecError: For text of another form, or a value that is not a literal.

    Example:
        >>> parse_call("VSE++(embedding_dim=512)")
        ('VSE++', {'embedding_dim': 512})
    """
    if not isinstance(text, str):
        raise SpecError(
            f"spec: expected a text of the form Name(field=value, ...), got {format_value(text)}."
        )
    match = re.fullmatch(r"\s*([^\W\d][\w+-]*)\s*(\(.*\))?\s*", text, re.DOTALL)
    try:
        call = ast.parse(f"_{match[2] or '()'}", mode="eval").body if match else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if match is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SpecError(f"{_short(text)} is not of the form Name(field=value, ...).")
    if call.args:
        raise SpecError(f"{text!r} has a value without a name. Write field=value.")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise SpecError(f"{text!r} uses **. Write field=value.")
        if keyword.arg in values:
            raise SpecError(f"{text!r} sets {keyword.arg} twice. Keep one.")
        values[keyword.arg] = _literal(keyword.value, text)
    return match[1], values


def build_object(kind: type[T], values: dict[str, Any]) -> T:
    """Make a dataclass from values by field.

    Args:
        kind: The dataclass.
        values: Values by field.

    Returns:
        ``kind(**values)``.

    Raises:
        SpecError: For an unknown field, with the nearest valid one, or a missing field.
    """
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SpecError(f"{_title(kind)} has no field {name!r}: {suggest_name(name, known)}")
    for field in fields(kind):  # type: ignore[arg-type]
        if (
            field.init
            and field.name not in values
            and field.default is MISSING
            and field.default_factory is MISSING
        ):
            raise SpecError(
                f"{_title(kind)} needs a value for its field {field.name}, got none. Set "
                f"{field.name}=VALUE."
            )
    return kind(**values)


def validate_fields(value: Any) -> None:
    """Check the field values of a frozen dataclass against their types and `Constraint`. Call it
    from ``__post_init__``.

    Numbers must be finite, and integers at most `MAX_INTEGER`. An int in a float field becomes a
    float and a list in a tuple field becomes a tuple, so that equal specs are equal values.

    Args:
        value: The dataclass instance. Its fields are converted in place.

    Raises:
        SpecError: If a value has the wrong type or violates its constraint.
    """
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in fields(value):
        given = getattr(value, field.name)
        try:
            object.__setattr__(value, field.name, _coerce(given, hints[field.name]))
        except TypeError as expected:
            raise SpecError(
                f"{_title(type(value))}.{field.name}: expected {expected}, got "
                f"{format_value(given)}."
            ) from None


def require_field(condition: bool, value: Any, field: str, expected: str) -> None:
    """Check a condition on a field of a dataclass.

    Args:
        condition: Whether the value is allowed.
        value: The dataclass instance.
        field: Name of the field.
        expected: Description of the allowed values.

    Raises:
        SpecError: If the condition does not hold.
    """
    if not condition:
        raise SpecError(
            f"{_title(type(value))}.{field}: expected {expected}, got "
            f"{format_value(getattr(value, field))}. Change {field}."
        )


def is_valid_parameter(number: float) -> bool:
    """Return whether a number can be a parameter: 0, or of a magnitude in `PARAMETER_RANGE`.

    Args:
        number: The number.
    """
    return number == 0 or PARAMETER_RANGE[0] <= abs(number) <= PARAMETER_RANGE[1]


def validate_int(value: Any, name: str, minimum: int = 0, maximum: int | None = None) -> int:
    """Check an integer argument and limit it to 2**53, which is exact in comparisons with floats.

    Args:
        value: The argument.
        name: Its name.
        minimum: Smallest allowed value.
        maximum: Largest allowed value, or None.

    Returns:
        The integer.

    Raises:
        SpecError: If it is not an integer, too small or too large.
    """
    try:
        number = minimum - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or (maximum is not None and number > maximum):
        expected, fix = (
            (f">= {minimum}", f"{minimum} or more")
            if maximum is None
            else (f"from {minimum} to {maximum:,}", "a number in this range")
        )
        raise SpecError(
            f"{name}: expected an integer {expected}, got {format_value(value)}. Set {name} to "
            f"{fix}."
        )
    return min(number, 2**53)


def _coerce(given: Any, hint: Any) -> Any:
    """Convert a value to its annotated type. The message of a TypeError describes what was
    expected.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        kind, constraint = get_args(hint)
        if not constraint.accepts(coerced := _coerce(given, kind)):
            raise TypeError(constraint.expected)
        return coerced
    if origin is Literal:
        if given not in get_args(hint):
            raise TypeError(" or ".join(repr(choice) for choice in get_args(hint)))
        return given
    if origin in (typing.Union, types.UnionType):
        if given is None and type(None) in get_args(hint):
            return None
        try:
            return _coerce(given, next(kind for kind in get_args(hint) if kind is not type(None)))
        except TypeError as expected:
            raise TypeError(f"{expected}, or None") from None
    if origin is tuple:
        if not isinstance(given, list | tuple):
            raise TypeError("a list of values")
        return tuple(_coerce(item, get_args(hint)[0]) for item in given)
    if origin is dict:
        if not isinstance(given, dict):
            raise TypeError("a table of names and values")
        return {name: _coerce(value, get_args(hint)[1]) for name, value in given.items()}
    if hint is float:
        if (
            isinstance(given, bool)
            or not isinstance(given, int | float)
            or not -sys.float_info.max <= given <= sys.float_info.max
        ):
            raise TypeError("a finite number")
        return float(given)
    if hint in EXPECTED_KINDS and (
        not isinstance(given, hint) or (hint is int and isinstance(given, bool))
    ):
        raise TypeError(EXPECTED_KINDS[hint])
    if hint is int and abs(given) > MAX_INTEGER:
        raise TypeError(f"an integer up to {MAX_INTEGER:,}")
    return given


def _title(kind: type) -> str:
    """Name of a class in error messages. A Config is named after its owner."""
    return kind.__qualname__.rpartition("<locals>.")[2].removesuffix(".Config")


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise SpecError(
            f"a value in {_short(text)} is not a plain value (a number, a text in quotes, a list, "
            "True, False, None)."
        ) from None


def _short(text: str) -> str:
    """Shorten a text for an error message."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
