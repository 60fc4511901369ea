"""Specs: parsing and checking of frozen dataclasses, such as "Unified(margin=0.2)".

A spec is the call that makes a frozen dataclass, with literals only. It is parsed with ``ast`` and
never evaluated. ``repr`` of such a value is its spec, so run folders, reports and command lines
share one notation.
"""

from __future__ import annotations

import ast
import functools
import numbers
import operator
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Interval

from visavis.core.errors import SpecError, format_value, suggest_name
from visavis.core.own_code import find_part, installed_names

T = TypeVar("T")


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
    """Return whether a value is a real number that a float can hold. A bool is not a number.

    Args:
        value: The value.
    """
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real)


def parse(text: str, catalog: Iterable[type[T]], kind: type[T] | None = None, group: str = "") -> T:
    """Parse a spec. A name without parentheses takes all defaults.

    Args:
        text: The spec, such as "Unified(margin=0.2)", or "soft_hn.py:SoftHN(margin=0.1)".
        catalog: Classes that a spec may name.
        kind: Base class of own classes from outside the package. None: only the catalog.
        group: Name of the catalog for installed packages, see `own_code`.

    Returns:
        The object.

    Raises:
        SpecError: For an unknown name or field, a value that is not a literal, or a value that the
            class rejects.
    """
    by_name = {entry.__name__: entry for entry in catalog}
    name, values = parse_call(text)
    entry = by_name.get(name) if kind is None else find_part(name, by_name, kind, group)
    if entry is None:
        names = [*by_name, *(installed_names(group) if group else ())]
        raise SpecError(
            f"{name!r} in {_short(text)} is not in the catalog: {suggest_name(name, names)}"
        )
    return build_object(entry, values)


def parse_call(text: object) -> tuple[str, dict[str, Any]]:
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
        if type(text).__module__ != "builtins":
            require_dataclass(type(text))
        raise SpecError(
            f"spec: expected a text of the form Name(field=value, ...), got {format_value(text)}."
        )
    # The source of an own class is everything before the last colon of the name.
    match = re.fullmatch(r"\s*((?:[^()]*?:)?[^\W\d][\w+-]*)\s*(\(.*\))?\s*", text, re.DOTALL)
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
    require_dataclass(kind)
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


def require_dataclass(kind: type) -> None:
    """Check that the values of an own class are fields, which texts set and runs record.

    Args:
        kind: The class.

    Raises:
        SpecError: If the class is not a dataclass, or has further annotated values.
    """
    annotations = vars(kind).get("__annotations__", {})
    values = {
        name
        for name, annotation in annotations.items()
        if not re.search(r"\b(Class|Init)Var\b", str(annotation))
    }
    if not is_dataclass(kind) or not values <= {field.name for field in fields(kind)}:
        raise SpecError(
            f"{_title(kind)}: expected a dataclass, because a run records the fields, got a class "
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
        name = ".".join(map(str, first["loc"]))
        hint = typing.get_type_hints(kind)[str(first["loc"][0])]
        or_none = ", or None" if type(None) in typing.get_args(hint) else ""
        raise SpecError(
            f"{_title(kind)}.{name}: expected {expected_value(first)}{or_none}, got "
            f"{format_value(first['input'])}."
        ) from None
    for name, entry in checked.items():
        if isinstance(entry, int) and abs(entry) > MAX_INTEGER:
            raise SpecError(
                f"{_title(kind)}.{name}: expected an integer up to {MAX_INTEGER:,}, got "
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
    """Describe what an invalid value should have been.

    Args:
        error: One entry of ``errors()`` of a pydantic ``ValidationError``.

    Returns:
        The end of a sentence, such as "a number > 0".
    """
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
