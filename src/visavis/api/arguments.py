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
    """Return the values as a list, also a single one.

    Args:
        values: One text or number, or several. An object of a catalog counts as its text.
    """
    # A number of numpy is not an int.
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return [as_text(value) for value in (values if several else [values])]  # type: ignore[union-attr]


def as_text(value: Any) -> Any:
    """Return the text of an objective, estimator or another part. Other values stay.

    Args:
        value: A part, a text, a number, or None.
    """
    if not is_dataclass(value):
        return value
    require_dataclass(name_part(type(value)))
    return repr(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check an argument of which other values would give a result, but not the requested one.

    Args:
        name: Name of the argument.
        value: The argument.
        choices: Valid values.

    Raises:
        SpecError: If the value is not valid.
    """
    if value not in choices:
        raise SpecError(
            f"{name}: expected {' or '.join(map(repr, choices))}, got {format_value(value)}."
        )


def to_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths as a list, also a single one.

    Args:
        paths: One path of a run or an index, or several.

    Raises:
        RunError: If there is none.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    if not paths:
        raise RunError(
            "run, index: expected at least one folder, got none. Pass the folder of a run or an "
            "index."
        )
    return [Path(path) for path in paths]


def optional_text(value: str | Path | None) -> str | None:
    """Return a path or name as text, or None.

    Args:
        value: A path or name, or None.

    Raises:
        RunError: If it is not UTF-8.
    """
    if value is not None and re.search("[\ud800-\udfff]", str(value)):
        raise RunError(
            f"path: expected a name in UTF-8, as the files of a run require, got {str(value)!a}. "
            "Rename it."
        )
    return None if value is None else str(value)


def optional_path(value: str | Path | None) -> Path | None:
    """Return a path, or None.

    Args:
        value: A path, or None.
    """
    return None if value is None else Path(value)


def read_lines(file: str | Path) -> list[str]:
    """Read the lines of a text file, without empty ones and surrounding spaces.

    Args:
        file: The file.

    Returns:
        The lines.

    Raises:
        DataError: If the file cannot be read.
    """
    from visavis.core import storage

    return [text for line in storage.read_text(file).splitlines() if (text := line.strip())]


def read_bank(bank: str | Path) -> str | list[str]:
    """Read the queries that a correction of scores learns from.

    Args:
        bank: Name of a split, or .txt file with one text per line.

    Returns:
        The name, or the texts.

    Raises:
        DataError: If the file cannot be read, or is empty.
    """
    if Path(bank).suffix != ".txt":
        return str(bank)
    if not (texts := read_lines(bank)):
        raise DataError(f"{bank}: expected one text per line, got an empty file. Add texts.")
    return texts


def parse_workers(workers: int | str | None) -> tuple[Engine, int | None]:
    """Parse how many processes share the work, and where they run.

    Args:
        workers: A number of processes, also as text, ``"ray"`` for a Ray cluster, or ``"ray:8"``
            for 8 processes on it. None: the default.

    Returns:
        The engine, and the number of processes, or None for its default.

    Raises:
        VisavisError: If the text has another form.
    """
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
    """Parse the conditions of a search.

    Args:
        conditions: Values by name: ``path``, ``kind``, ``after``, ``before`` and ``duplicates``.
            Another name is a name of metadata, and so is the rest of ``metadata.NAME``.

    Returns:
        The conditions on items, and whether near-duplicates are one result.

    Raises:
        DataError: If a time cannot be parsed.
        SpecError: If the kind is unknown, or duplicates are neither grouped nor shown.
    """
    from visavis.retrieval.items import ItemFilter, ItemKind, parse_filter_time

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
    """Parse recipe overrides.

    Args:
        overrides: ``{"training.batch_size": 64}`` or ``["training.batch_size=64"]``.

    Returns:
        A new dict from dotted keys to values.

    Raises:
        RecipeError: If a text is not of the form key=value, or a key occurs twice.
    """
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
    """Return the model that made the item vectors of a path.

    Args:
        path: Index or file.

    Returns:
        Run folder, or folder or name of a pretrained model. None for vectors that are not in an
        index of a model.

    Raises:
        RunError: If the path is a folder without a valid index.
    """
    from visavis.data.features.item_vectors import holds_item_vectors
    from visavis.retrieval.index_folder import VECTOR_SUFFIXES, is_index, read_manifest

    if not os.path.isdir(path) or (holds_item_vectors(path) and not is_index(path)):
        return None

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
    """Combine a recipe with overrides and the options that set recipe keys.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: chosen for the data, and reported to
            ``progress``.
        overrides: Recipe overrides.
        progress: Receives the reason for a default recipe.
        data: Value of ``data.path``.
        index: Item vectors. Replaces the section ``visual``.
        feedback: Value of ``data.feedback``.
        skip_bad: Sets ``data.skip_bad``.
        can_download: Whether the default recipe may fine-tune a pretrained CLIP, which is
            downloaded if necessary.

    Returns:
        The recipe and all overrides.

    Raises:
        RecipeError: If a key is set twice, an option is empty, or no recipe suits the data.
    """
    from visavis.training.recipes.default_recipe import choose_recipe, choose_text_recipe

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
