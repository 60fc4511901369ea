"""Conversion of the arguments that several API functions share: lists, run folders, recipes with
overrides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from visavis.core.errors import (
    DataError,
    RecipeError,
    RunError,
    SpecError,
    VisavisError,
    format_value,
)
from visavis.core.fields import require_dataclass
from visavis.core.own_code import name_part
from visavis.core.progress import Progress

if TYPE_CHECKING:
    from visavis.data.parallel import Engine
    from visavis.retrieval.items import ItemFilter

T = TypeVar("T", str, float)


def to_list(values: T | Sequence[T]) -> list[T]:
    """Return the values as a list, also a single one."""
    # A number of numpy is not an int.
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return [as_text(value) for value in (values if several else [values])]  # type: ignore[union-attr]


def as_text(value: Any) -> Any:
    """Return the text of an objective, estimator or another part. Other values stay."""
    if not is_dataclass(value):
        return value
    require_dataclass(name_part(type(value)))
    return repr(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check an argument of which other values would give a result, but not the requested one."""
    if value not in choices:
        raise SpecError(
            f"{name}: expected {' or '.join(map(repr, choices))}, got {format_value(value)}."
        )


def to_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths as a list, also a single one."""
    paths = [paths] if isinstance(paths, str | Path) else paths
    if not paths:
        raise RunError(
            "run, index: expected at least one folder, got none. Pass the folder of a run or an "
            "index."
        )
    return [Path(path) for path in paths]


def optional_text(value: str | Path | None) -> str | None:
    """Return a path or name as text, or None. A run stores it, as UTF-8."""
    if value is not None and re.search("[\ud800-\udfff]", str(value)):
        raise RunError(
            f"path: expected a name in UTF-8, as the files of a run require, got {str(value)!a}. "
            "Rename it."
        )
    return None if value is None else str(value)


def optional_path(value: str | Path | None) -> Path | None:
    """Return a path, or None."""
    return None if value is None else Path(value)


def read_lines(file: str | Path) -> list[str]:
    """Read the lines of a text file, without empty ones and surrounding spaces."""
    from visavis.core import storage

    return [text for line in storage.read_text_lines(file) if (text := line.strip())]


def read_bank(bank: str | Path) -> str | list[str]:
    """Read the queries that a correction of scores learns from: the name of a split, or texts."""
    if Path(bank).suffix != ".txt":
        return str(bank)
    if not (texts := read_lines(bank)):
        raise DataError(f"{bank}: expected one text per line, got an empty file. Add texts.")
    return texts


def parse_workers(workers: int | str | None) -> tuple[Engine, int | None]:
    """Parse where processes share the work, and how many. None: the default of the engine."""
    if not isinstance(workers, str):
        return "local", workers
    if workers == "ray":
        return "ray", None
    try:
        number = int(workers.removeprefix("ray:"))
    except ValueError:
        raise VisavisError(
            "workers: expected a number of processes such as 4, or ray or ray:4 for a Ray cluster, "
            f"got {format_value(workers)}."
        ) from None
    return ("ray" if workers.startswith("ray:") else "local"), number


def parse_item_filter(conditions: Mapping[str, str]) -> tuple[ItemFilter, bool]:
    """Parse the conditions of a search. Returns also whether near-duplicates are one result."""
    from visavis.retrieval.items import ItemFilter, ItemKind, parse_filter_time

    # Any other name is a name of metadata, also as `metadata.NAME`.
    metadata = dict(conditions)
    path = metadata.pop("path", "")
    kind: Any = metadata.pop("kind", None)
    after = parse_filter_time(metadata.pop("after", None))
    before = parse_filter_time(metadata.pop("before", None))
    duplicates = metadata.pop("duplicates", "group")
    check_choice("duplicates", duplicates, ("group", "show"))
    if kind is not None:
        check_choice("kind", kind, get_args(ItemKind))
    metadata = {name.removeprefix("metadata."): value for name, value in metadata.items()}
    return ItemFilter(path, kind, after, before, metadata), duplicates == "group"


def parse_overrides(overrides: dict[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Parse recipe overrides to values by dotted key."""
    from visavis.training.recipes.recipe import parse_override

    if isinstance(overrides, dict):
        return dict(overrides)
    settings = dict[str, Any]()
    for key, value in map(parse_override, overrides):
        if key in settings:
            raise RecipeError(
                f"{key}: expected one value, got {settings[key]} and {value}. Pass only one of "
                "them. Put quotes around braces, which the "
                "shell expands."
            )
        settings[key] = value
    return settings


def index_model(path: Path) -> str | None:
    """Return the model that made the item vectors of a path. None: it is unknown."""
    from visavis.data.features.item_vectors import holds_item_vectors
    from visavis.retrieval.index_folder import VECTOR_SUFFIXES, is_index, read_manifest

    if not os.path.isdir(path) or (holds_item_vectors(path) and not is_index(path)):
        return None

    # An index of given vectors names their file instead of a model.
    model = read_manifest(path).model
    return None if model.endswith(VECTOR_SUFFIXES) else model


def resolve_recipe(
    recipe: str | Path | None,
    overrides: dict[str, Any] | Sequence[str],
    progress: Progress,
    *,
    data: str | Path | None = None,
    index: str | Path | None = None,
    feedback: str | Path | None = None,
    skip_bad: bool = False,
    can_download: bool = False,
) -> tuple[str | Path, dict[str, Any]]:
    """Combine a recipe with overrides and the options that set recipe keys. Without a recipe, the
    default one is chosen for the data, and its reason reported.
    """
    from visavis.training.recipes.default_recipe import choose_recipe, choose_text_recipe

    settings = recipe_keys(overrides, data=data, index=index, feedback=feedback, skip_bad=skip_bad)
    if recipe is not None:
        return recipe, settings
    if index is not None:
        default = choose_text_recipe(settings, index_model(Path(index)))
    else:
        default = choose_recipe(settings, downloads=progress if can_download else None)
    # First, because computing features may take minutes.
    if default.warning:
        progress.message(default.warning)
    progress.message(default.reason)
    return default.name, default.overrides | settings


def recipe_keys(
    overrides: dict[str, Any] | Sequence[str],
    *,
    data: str | Path | None = None,
    index: str | Path | None = None,
    feedback: str | Path | None = None,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Combine overrides with the options that set recipe keys."""
    settings = parse_overrides(overrides)
    for option, key, value in (
        ("data", "data.path", data),
        ("feedback", "data.feedback", feedback),
    ):
        if value is None:
            continue
        if value == "":
            raise RecipeError(
                f"--{option}: expected a path or name, got an empty text. Leave the option out, or "
                "pass a value."
            )
        if key in settings:
            raise RecipeError(
                f"{key} is set twice: --{option} {value} and {key}={settings[key]}. Pass only one "
                "of them."
            )
        settings[key] = str(value)
    if skip_bad:
        settings["data.skip_bad"] = True
    if index is not None:
        for key in settings:
            if key.split(".")[0] == "visual":
                raise RecipeError(
                    f"{key}: expected no key of visual, because --index {index} replaces the images "
                    "by item vectors. Remove it."
                )
        settings["visual"] = {"features": str(index), "item_vectors": True}
    return settings
