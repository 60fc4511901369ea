"""Recipe files: shipped recipes, inheritance between files, and grids of variants.

``extends = "heads-flickr8k"`` inherits a shipped recipe, or a file by its path relative to this
one. Only the changes follow. ``[variants.NAME]`` tables make a file a grid: each variant is a
recipe with these changes, trained as ``FILE/NAME`` or by its own ``name``. Changes are merged as
follows:

- Tables merge key by key, but a table with a ``kind`` (model, schedule) replaces the whole table.
- ``[[phases]]`` replaces all phases. ``[phases.0]`` changes the first one. ``objective`` and
  ``epochs`` are short keys.
- Everything else replaces the inherited value. ``name``, ``about`` and ``published`` are not
  inherited.

``extends`` may be a list, in which later entries win. A variant may have its own ``extends``. Parts
that are meant to be extended ship as ``parts/NAME``, tables of papers as ``PAPER/NUMBER``, and
figures as ``PAPER/figure-NUMBER``. A row of a table, or a curve of a figure, trained as
``PAPER/NUMBER/ROW``, also has annotations (``ROW_ANNOTATIONS``) that no other recipe inherits.
"""

from __future__ import annotations

import os
import re
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from visavis.core import own_code, storage
from visavis.core.errors import MAX_LISTED_NAMES, RecipeError, format_value, suggest_name
from visavis.evaluation.published_row import PublishedRow
from visavis.training.recipes.recipe import (
    PHASE_SHORTCUTS,
    Recipe,
    apply_overrides,
    build_recipe,
    normalize_values,
    phase_at,
)

Values = dict[str, Any]  # plain values of TOML

# Keys of a row of a paper's table that do not describe its training, in files with a ``[table]``.
ROW_ANNOTATIONS = (
    "published",
    "protocol",
    *(each.name for each in fields(PublishedRow) if each.default is not MISSING),
)


@dataclass(frozen=True)
class RecipeFile:
    """Recipe file with everything that it extends merged in.

    Attributes:
        source: Name or path of the file.
        content: Plain values that all variants share.
        variants: Changes of each variant, in order. Empty: the file is one recipe.
        annotations: Annotations of each row of a paper's table.
        table: Annotations that all rows of a paper's table share.
    """

    source: str
    content: Values
    variants: dict[str, tuple[Values, ...]]
    annotations: dict[str, Values] = field(default_factory=dict)
    table: Values = field(default_factory=dict)

    def variant_content(self, variant: str) -> Values:
        """Merge the plain values of a variant."""
        if variant not in self.variants:
            suggestion = (
                suggest_name(variant, self.variants, _list_command(self.source))
                if self.variants
                else "it is one recipe."
            )
            raise RecipeError(f"{self.source}: {variant} is not a variant: {suggestion}")
        content = self.content
        for changes in self.variants[variant]:
            content = merge_values(content, changes, f"{self.source}/{variant}")
        published = (
            {"published": f"{self.source}/{variant}"}
            if "published" in self.annotations[variant]
            else {}
        )
        return {**content, **published, "name": self.variant_names[variant]}

    @property
    def variant_names(self) -> dict[str, str]:
        """Recipe name of each variant: its own ``name``, or that of the file with the variant
        appended.
        """
        return {
            variant: str(changes[-1].get("name", f"{self.content['name']}-{variant}"))
            for variant, changes in self.variants.items()
        }

    def recipe(self, variant: str | None, overrides: Values) -> Recipe:
        """Build the recipe of a variant, or of a file without variants."""
        if variant is not None:
            if reason := self.annotations.get(variant, {}).get("not_trainable"):
                raise RecipeError(
                    f"{self.source}/{variant}: listed for its results only, it cannot be trained: "
                    f"{reason}."
                )
            return build_recipe(
                self.variant_content(variant), overrides, f"{self.source}/{variant}"
            )
        if self.variants:
            command = _list_command(self.source) if len(self.variants) > MAX_LISTED_NAMES else ""
            listing = (
                f"{command} lists the variants"
                if command
                else f"Variants: {', '.join(self.variants)}"
            )
            raise RecipeError(
                f"{self.source}: expected a variant, got a grid. Name a variant, such as "
                f"{self.source}/{next(iter(self.variants))}. {listing}."
            )
        return build_recipe(self.content, overrides, self.source)


@cache
def shipped_files() -> dict[str, Path]:
    """List the shipped recipe files by name, without parts and tables of papers."""
    return {
        path.stem: path
        for path in sorted(_shipped_folder().glob("*.toml"), key=lambda path: path.stem)
    }


@cache
def paper_tables() -> dict[str, Path]:
    """List the files of papers' tables, by ``PAPER/NUMBER``."""
    return {
        f"{path.parent.name}/{path.stem}": path
        for path in sorted(_shipped_folder().glob("*/[0-9].toml"))
    }


@cache
def paper_figures() -> dict[str, Path]:
    """List the files of papers' figures, by ``PAPER/figure-NUMBER``. Their variants are the curves."""
    return {
        f"{path.parent.name}/{path.stem}": path
        for path in sorted(_shipped_folder().glob("*/figure-[0-9].toml"))
    }


@cache
def shipped_recipe_names() -> dict[str, tuple[str, str | None]]:
    """List the file and the variant of each shipped recipe, by name. None: the file is one recipe."""
    names: dict[str, tuple[str, str | None]] = {}
    for file in shipped_files():
        variants = read_recipe_file(file).variant_names
        names |= (
            {name: (file, variant) for variant, name in variants.items()}
            if variants
            else {file: (file, None)}
        )
    return names


def read_recipe(name: str | Path, overrides: Values | None = None) -> Recipe:
    """Read a recipe.

    Args:
        name: TOML file, or name of a shipped recipe. A variant of a grid also as ``GRID/VARIANT``.
        overrides: Values by dotted key.

    Returns:
        The recipe.

    Raises:
        RecipeError: If the recipe does not exist or is invalid.
        CodeNotNamed: If the recipe names own code that the user did not name.

    Example:
        >>> read_recipe("heads-flickr8k", {"training.batch_size": 64}).training.batch_size
        64
    """
    file, variant = _file_and_variant(str(name))
    # A recipe may be somebody else's: naming it does not name its code.
    texts = [str(value) for value in (overrides or {}).values()]
    with own_code.named_by_user(*texts) as refused:
        recipe = read_recipe_file(file).recipe(variant, overrides or {})
    if refused:
        error = refused[0]
        path = os.path.join(os.path.dirname(file), error.source)
        if not os.path.exists(error.source) and os.path.exists(path):
            raise own_code.CodeNotNamed(error.name, path)
        raise error
    if not recipe.phases:
        raise RecipeError(f"{name}: phases: expected at least one, got []. Add a [[phases]] table.")
    return recipe


def read_recipe_file(name: str) -> RecipeFile:
    """Read a recipe file with everything that it extends."""
    return _read_packaged(name) if name in _packaged_files() else _read(name, ())


def merge_values(parent: Values, child: Values, source: str) -> Values:
    """Merge changes into plain values of a recipe."""
    child = dict(child)
    shortcuts = {key: child.pop(key) for key in PHASE_SHORTCUTS if key in child}
    phase_changes = child.pop("phases") if isinstance(child.get("phases"), dict) else None
    result = _merge_tables(parent, child)
    if phase_changes is not None:
        result["phases"] = _change_phases(result.get("phases"), phase_changes, source)
    apply_overrides(result, shortcuts, source)
    return result


def suggest_row(row_id: str) -> str:
    """Suggest the nearest id of a row of a paper's table, as the end of a sentence."""
    paper, number, row = (*row_id.split("/", 2), "", "")[:3]
    tables = {table: list(read_recipe_file(table).variants) for table in paper_tables()}
    papers = _papers()
    table = f"{paper}/{number}"
    if rows := tables.get(table):
        if not row:
            return f"name a row of {table}, such as {table}/{rows[0]}."
        return suggest_name(row, rows, _list_command(table)).replace(
            "did you mean ", f"did you mean {table}/"
        )
    if paper in papers:
        tables_of_paper = ", ".join(name for name in tables if name.startswith(f"{paper}/"))
        return f"the tables of {paper} are {tables_of_paper}. {_list_command(f'{paper}/')} lists their rows."
    ids = [f"{name}/{row}" for name, rows in tables.items() for row in rows]
    if (suggestion := suggest_name(row_id, ids, "nothing")).startswith("did you mean"):
        return suggestion
    return f"expected PAPER/TABLE/ROW, such as {ids[0]}. visavis papers list {papers[0]} lists the rows of one of {', '.join(papers)}."


def _merge_tables(parent: Values, child: Values) -> Values:
    """Merge tables key by key. A table with a ``kind`` replaces the whole table."""
    result = deepcopy(parent)
    for key, value in child.items():
        before = result.get(key)
        merge = isinstance(before, dict) and isinstance(value, dict) and "kind" not in value
        result[key] = _merge_tables(before, value) if merge else deepcopy(value)  # type: ignore[arg-type]
    return result


def _change_phases(phases: Any, changes: Values, source: str) -> list[Any]:
    """Merge changes of phases, given by number."""
    if not isinstance(phases, list):
        raise RecipeError(
            f"{source}: [phases.{next(iter(changes), 0)}] changes a phase, but there is none. "
            "Begin one with [[phases]]."
        )
    phases = list(phases)
    for number, change in changes.items():
        phase = phase_at(phases, number, f"phases.{number}", source)
        for table in (phase, change):
            if not isinstance(table, dict):
                raise RecipeError(
                    f"{source}: phases.{number}: expected a table of changes, got "
                    f"{format_value(table)}."
                )
        # Another objective does not inherit the start that the former one names.
        former = (
            {key: value for key, value in phase.items() if key != "learned_start"}
            if "objective" in change
            else phase
        )
        phases[int(number)] = _merge_tables(former, change)
    return phases


def _read(name: str, children: tuple[Path, ...]) -> RecipeFile:
    """Read a file with everything that it extends. ``children`` are the files that extend it, the
    first one first.
    """
    path = _packaged_files().get(name, Path(name))
    content = normalize_values(storage.read_toml(path))
    real_path = Path(os.path.realpath(path))
    if real_path in children:
        raise RecipeError(
            f"{name}: extends itself through {children[-1].name}. Remove one of the extends."
        )
    children = (*children, real_path)
    # 1. Variants of the file, each with the files that it extends itself.
    table = content.pop("table", {}) if name in paper_tables() | paper_figures() else {}
    changes = content.pop("variants", {})
    if not isinstance(changes, dict) or not all(
        isinstance(values, dict) for values in changes.values()
    ):
        raise RecipeError(
            f"{name}: variants: expected tables of changes such as [variants.large], got "
            f"{format_value(changes)}."
        )
    annotations = dict[str, Values]()
    variants: dict[str, tuple[Values, ...]] = {}
    for variant, values in ((key, normalize_values(value)) for key, value in changes.items()):
        annotations[variant] = (
            {key: values.pop(key) for key in ROW_ANNOTATIONS if key in values} if table else {}
        )
        bases = [
            _inherited(base.content)
            for base in _parents(values.pop("extends", []), f"{name}/{variant}", path, children)
        ]
        variants[variant] = (*bases, values)
    # 2. Content and variants of the files that the file extends.
    inherited: dict[str, tuple[Values, ...]] = {}
    base_content = Values()
    for parent in _parents(content.pop("extends", []), name, path, children):
        base_content = merge_values(base_content, _inherited(parent.content), name)
        inherited |= {
            variant: tuple(map(_inherited, values)) for variant, values in parent.variants.items()
        }
    # 3. Changes of the file itself come last.
    content = merge_values(base_content, content, name)
    variants = {
        variant: (*inherited.get(variant, ()), *variants.get(variant, ({},)))
        for variant in inherited | variants
    }
    if variants and "name" not in content:
        raise RecipeError(
            f'{name}: name: expected the name of the grid, got none. Add name = "NAME".'
        )
    return RecipeFile(
        name,
        content,
        variants,
        {variant: annotations.get(variant, {}) for variant in variants},
        table,
    )


def _parents(extends: Any, name: str, path: Path, children: tuple[Path, ...]) -> list[RecipeFile]:
    """The files that a file or a variant extends. A variant of a grid counts as a file."""
    names = extends if isinstance(extends, list) else [extends]
    if not all(isinstance(one, str) for one in names):
        raise RecipeError(
            f"{name}: extends: expected the name of a shipped recipe, the path of a file, or a "
            f"list of them, got {format_value(extends)}."
        )
    parents = list[RecipeFile]()
    for one in names:
        try:
            file, variant = _file_and_variant(str(path.parent / one) if ".toml" in one else one)
        except RecipeError as error:
            raise RecipeError(f"{name}: extends: {error}") from None
        parent = read_recipe_file(file) if file in _packaged_files() else _read(file, children)
        parents.append(
            parent if variant is None else RecipeFile(one, parent.variant_content(variant), {})
        )
    return parents


# Tables have dozens of rows, and hundreds of rows extend the same few parts.
@cache
def _read_packaged(name: str) -> RecipeFile:
    return _read(name, ())


@cache
def _packaged_files() -> dict[str, Path]:
    parts = {f"parts/{path.stem}": path for path in sorted(_shipped_folder().glob("parts/*.toml"))}
    return shipped_files() | paper_tables() | paper_figures() | parts


def _shipped_folder() -> Path:
    return Path(str(resources.files("visavis.training.recipes") / "shipped"))


def _file_and_variant(name: str) -> tuple[str, str | None]:
    """The file and, of a grid, the variant of a name."""
    packaged = _packaged_files()
    if name.endswith(".toml") or os.path.isfile(name) or name in packaged:
        return name, None
    grid, _, variant = name.rpartition("/")
    if grid.endswith(".toml") or grid in packaged:
        return grid, variant
    if name in shipped_recipe_names():
        return shipped_recipe_names()[name]
    is_row = name.partition("/")[0] in _papers() or re.fullmatch(r"[^/]+/\d+/[^/]+", name)
    suggestion = (
        suggest_row(name)
        if is_row
        else suggest_name(name, [*shipped_recipe_names(), *packaged], "visavis catalog recipes")
    )
    raise RecipeError(
        f"{name}: expected a TOML file or the name of a shipped recipe, found neither: {suggestion}"
    )


def _papers() -> list[str]:
    return sorted({table.partition("/")[0] for table in paper_tables()})


def _list_command(file: str) -> str:
    """The command that lists the rows of a paper's table. "" for another file."""
    paper, slash, _ = file.partition("/")
    return f"visavis papers list {paper}" if slash and paper in _papers() else ""


def _inherited(content: Values) -> Values:
    """The values that another file inherits."""
    return {
        key: value for key, value in content.items() if key not in ("name", "about", "published")
    }
