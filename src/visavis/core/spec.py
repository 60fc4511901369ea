"""Specs: texts of frozen dataclasses, such as "Unified(margin=0.2)", and their parsing.

A spec is the call that makes a frozen dataclass, with literals only. It is parsed with ``ast`` and
never evaluated. ``repr`` of such a value is its spec, so run folders, reports and command lines
share one notation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from visavis.core.errors import SpecError, format_value, suggest_name
from visavis.core.fields import class_title, require_dataclass
from visavis.core.own_code import find_part, installed_names

T = TypeVar("T")


def parse(text: str, catalog: Iterable[type[T]], kind: type[T] | None = None, group: str = "") -> T:
    """Parse a spec. A name without parentheses takes all defaults."""
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
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise SpecError(
                f"a value in {_short(text)} is not a plain value (a number, a text in quotes, a "
                "list, True, False, None)."
            ) from None
    return match[1], values


def build_object(kind: type[T], values: dict[str, Any]) -> T:
    """Make a dataclass from values by field."""
    require_dataclass(kind)
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SpecError(
                f"{class_title(kind)} has no field {name!r}: {suggest_name(name, known)}"
            )
    for field in fields(kind):  # type: ignore[arg-type]
        if (
            field.init
            and field.name not in values
            and field.default is MISSING
            and field.default_factory is MISSING
        ):
            raise SpecError(
                f"{class_title(kind)} needs a value for its field {field.name}, got none. Set "
                f"{field.name}=VALUE."
            )
    return kind(**values)


def _short(text: str) -> str:
    """Shorten a text for an error message."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
