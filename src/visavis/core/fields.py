"""Values of frozen dataclasses: types of their fields, and checks.

A value that passes is finite and plain, so that ``repr`` of the object is a text that `spec.parse`
reads.
"""

from __future__ import annotations

import functools
import numbers
import operator
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Interval

from visavis.core.errors import SpecError, format_value

MAX_INTEGER = 2**32 - 1
"""Largest magnitude of an integer in a field or recipe, the largest seed."""
MAX_SEED = 2**63 - 1
"""Largest seed of numpy and torch."""
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
LayerCount = Annotated[int, Interval(ge=1, le=1000)]
OptionalLayerCount = Annotated[int, Interval(ge=0, le=1000)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
DropoutRate = Annotated[float, Interval(ge=0, lt=1)]
AUTO: Literal["auto"] = "auto"
Auto: TypeAlias = Literal["auto"]
"""A value that is measured before the training."""

PARAMETER_RANGE = (1e-12, 1e12)
"""Magnitudes of parameters. Products of two of them with scores stay far from the limits of
float32.
"""
EXPECTED_PARAMETER = "a magnitude from {:g} to {:g}".format(*PARAMETER_RANGE)

EXPECTED = {
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "bool_type": "True or False",
    "string_type": "a text in quotes",
    "string_unicode": "a text of valid Unicode",
    "tuple_type": "a list",
    "dict_type": "a table of keys",
    "model_type": "a table of keys",
}
"""What a value should have been, by pydantic's name of the error."""
BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
"""Key of the bound in pydantic's errors about a number outside its range, and its sign."""


def is_number(value: Any) -> bool:
    """Return whether a value is a real number that a float can hold. A bool is not a number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real)


def require_dataclass(kind: type) -> None:
    """Check that the values of an own class are fields, which texts set and runs record."""
    annotations = vars(kind).get("__annotations__", {})
    values = {
        name
        for name, annotation in annotations.items()
        if not re.search(r"\b(Class|Init)Var\b", str(annotation))
    }
    if not is_dataclass(kind) or not values <= {field.name for field in fields(kind)}:
        raise SpecError(
            f"{class_title(kind)}: expected a dataclass, because a run records the fields, got a class "
            "without fields of its own. Add the line @dataclass(frozen=True, kw_only=True) above "
            f"class {kind.__name__}."
        )


def validate_fields(value: Any) -> None:
    """Check the field values of a frozen dataclass against their types. Call it from
    ``__post_init__``.

    Numbers must be finite, and integers at most `MAX_INTEGER`. An int in a float field becomes a
    float, a list becomes a tuple, and a number of numpy one of Python, so that equal specs are equal
    values.

    Args:
        value: The dataclass instance. Its fields are converted in place.

    Raises:
        SpecError: If a value has the wrong type or is out of range.
    """
    from pydantic import ValidationError

    kind: Any = type(value)
    given = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    try:
        checked = _field_validator(kind).validate_python(given)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        field_name, *path = map(str, first["loc"])
        alternatives = typing.get_args(typing.get_type_hints(kind)[field_name])
        # After the name of a union, pydantic names its type.
        name = field_name if Auto in alternatives else ".".join((field_name, *path))
        or_auto = f", or {AUTO!r}" if Auto in alternatives else ""
        or_none = f"{or_auto}, or None" if type(None) in alternatives else or_auto
        raise SpecError(
            f"{class_title(kind)}.{name}: expected {expected_value(first)}{or_none}, got "
            f"{format_value(first['input'])}."
        ) from None
    for name, entry in checked.items():
        if isinstance(entry, int) and abs(entry) > MAX_INTEGER:
            raise SpecError(
                f"{class_title(kind)}.{name}: expected an integer up to {MAX_INTEGER:,}, got "
                f"{format_value(entry)}."
            )
        # The dataclass is frozen, and this is still its construction.
        object.__setattr__(value, name, entry)


@functools.cache
def _field_validator(kind: type) -> Any:
    """The pydantic validator of the fields of a class, built for its first instance: most classes
    of a catalog are never used by a process.
    """
    from pydantic import ConfigDict, TypeAdapter
    from typing_extensions import TypedDict

    hints = typing.get_type_hints(kind, include_extras=True)
    table = TypedDict(kind.__name__, {field.name: hints[field.name] for field in fields(kind)})  # type: ignore[misc]
    table.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
        strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )
    return TypeAdapter(table)


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python, and a list as a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    is_number = isinstance(value, numbers.Number) and hasattr(value, "item")
    return value.item() if is_number else value


def expected_value(error: Mapping[str, Any]) -> str:
    """Describe what an invalid value should have been, from an entry of ``errors()`` of pydantic."""
    if error["type"] in BOUNDS:
        key, sign = BOUNDS[error["type"]]
        bound = error["ctx"][key]
        return f"{'an integer' if isinstance(bound, int) else 'a number'} {sign} {bound:g}"
    return EXPECTED.get(error["type"], error["msg"].removeprefix("Input should be "))


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
            f"{class_title(type(value))}.{field}: expected {expected}, got "
            f"{format_value(getattr(value, field))}. Change {field}."
        )


def is_valid_parameter(number: float) -> bool:
    """Return whether a number can be a parameter: 0, or of a magnitude in `PARAMETER_RANGE`."""
    return number == 0 or PARAMETER_RANGE[0] <= abs(number) <= PARAMETER_RANGE[1]


def validate_int(value: Any, name: str, minimum: int = 0, maximum: int | None = None) -> int:
    """Check an integer argument and limit it to 2**53, which is exact in comparisons with floats."""
    try:
        # A truth value is an integer of Python, and too small here.
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


def class_title(kind: type) -> str:
    """Name a class in an error. A Config is named after its owner."""
    return kind.__qualname__.rpartition("<locals>.")[2].removesuffix(".Config")
