"""``key=value`` overrides: dotted keys set in the plain values of a recipe.

>>> content = {"phases": [{"epochs": 1, "objective": "VLC()"}, {"epochs": 2, "objective": "VLC()"}]}
>>> set_values(content, dict([parse_override("phases.1.epochs=5"), parse_override("objective=Unified()")]), "my.toml")
>>> content["phases"]
[{'epochs': 1, 'objective': 'Unified()'}, {'epochs': 5, 'objective': 'Unified()'}]
"""

from __future__ import annotations

import ast
import tomllib
from contextlib import suppress
from typing import Any

from visavis.errors import RecipeError
from visavis.training.renamed import new_name

SHORT = ("objective", "epochs")
"""Keys that reach into the phases: ``objective`` sets that of every phase, ``epochs`` that of a single phase."""


def parse_override(text: str) -> tuple[str, Any]:
    """``"phases.0.epochs=3"`` as key and value; a value that is neither a literal nor a table or list of TOML is taken as text.

    >>> parse_override("model.clusters={ audio = 16, speech = 32 }")
    ('model.clusters', {'audio': 16, 'speech': 32})
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"{text!r} is not of the form key=value, such as training.batch_size=64.")
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key.strip(), ast.literal_eval(value)
    if value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            (found,) = tomllib.loads(f"value = {value}").values()
            return key.strip(), found
    return key.strip(), {"true": True, "false": False}.get(value.lower(), value)


def set_values(content: dict[str, Any], overrides: dict[str, Any], where: str) -> None:
    """Set dotted keys in a recipe's plain values, in place. Raises RecipeError for a key that leads nowhere."""
    for key, value in overrides.items():
        for path in _full_keys(new_name(key), content):
            _set(content, path, value, where)


def _full_keys(key: str, content: dict[str, Any]) -> list[str]:
    """The full dotted keys that a short one stands for."""
    phases = content.get("phases")
    if key not in SHORT or not isinstance(phases, list):
        return [key]
    if key == "epochs" and len(phases) != 1:
        raise RecipeError(f"epochs= is for recipes of one phase, and this one has {len(phases)}: write phases.0.epochs=.")
    return [f"phases.{i}.{key}" for i in range(len(phases))]


def _set(content: dict[str, Any], path: str, value: Any, where: str) -> None:
    *parents, last = path.split(".")
    place: Any = content
    for step in parents:
        if isinstance(place, list):
            place = phase_at(place, step, path, where)
        else:
            place = place.setdefault(step, {})
        if not isinstance(place, dict | list):
            raise RecipeError(f"{where}: {path} goes into {step}, which is a plain value.")
    if isinstance(place, list):
        raise RecipeError(f"{where}: {path} names a whole list: write one of its entries, such as phases.0.epochs.")
    place[last] = value


def phase_at(phases: list[Any], number: str, key: str, where: str) -> Any:
    """The phase of a number in a key. Raises RecipeError if there is none."""
    if not number.isdecimal() or int(number) >= len(phases):
        raise RecipeError(f"{where}: {key} names no phase; there are {len(phases)}, the first is 0.")
    return phases[int(number)]
