"""Recipes as files: those that ship, those that extend others, and grids of rows.

``extends = "heads-flickr8k"`` takes over a recipe that ships, or a file by its path relative to this one; only the
differences follow. ``[rows.NAME]`` tables make a file a grid: each row is a recipe with these differences, trained as
``FILE/NAME`` or by the row's own ``name``. How a difference is taken:

- tables merge key by key, but one with a ``kind`` (model, schedule) replaces what was there whole;
- ``[[phases]]`` replace all phases; ``[phases.0]`` changes the first one; ``objective`` and ``epochs`` are short as in overrides;
- anything else replaces what was there. ``name``, ``about`` and ``published``, also those of rows, are never taken over.

``extends`` may be a list, each entry over the ones before it, and a row may have one of its own, taken over before its
differences. Parts that are made to be extended ship as ``parts/NAME``; the tables of papers as ``PAPER/NUMBER``, a row of
which, trained as ``PAPER/NUMBER/ROW``, also holds facts about itself (see ``FACTS``) that no other recipe takes over.
"""

from __future__ import annotations

import os
import re
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.errors import FEW, RecipeError, nearest
from visavis.training.overrides import SHORT, phase_at, set_values
from visavis.training.recipe import Recipe, build_recipe, model_table
from visavis.training.renamed import with_new_names

Values = dict[str, Any]
"""Plain values of TOML."""
FACTS = ("published", "number", "protocol", "cited", "unstated", "misprint", "caution", "absent")
"""What a row says about itself and not about its training, in files with a ``[table]``; ``runs.published`` reads them."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe file with everything that it extends merged in.

    where: as it was named. content: what all its rows share. rows: by name, the differences of a row, one after the other;
    none: the file is one recipe. facts: of each row. table: what a paper's table says of all its rows.
    """

    where: str
    content: Values
    rows: dict[str, tuple[Values, ...]]
    facts: dict[str, Values] = field(default_factory=dict)
    table: Values = field(default_factory=dict)

    def row_content(self, row: str) -> Values:
        """The plain values of one row's recipe. Raises RecipeError if there is no such row."""
        if row not in self.rows:
            known = nearest(row, self.rows, _lists_rows(self.where)) if self.rows else "it is one recipe without rows."
            raise RecipeError(f"{self.where} has no row {row}: {known}")
        content = self.content
        for differences in self.rows[row]:
            content = merged(content, differences, f"{self.where}/{row}")
        published = {"published": f"{self.where}/{row}"} if "published" in self.facts[row] else {}
        return {**content, **published, "name": self.row_names[row]}

    @property
    def row_names(self) -> dict[str, str]:
        """The name of each row's recipe: its own ``name``, or the file's with the row's behind it."""
        return {row: str(differences[-1].get("name", f"{self.content['name']}-{row}")) for row, differences in self.rows.items()}

    def recipe(self, row: str | None, overrides: Values) -> Recipe:
        """The recipe of the file, or of one of its rows. Raises RecipeError."""
        if row is not None and (absent := self.facts.get(row, {}).get("absent")):
            raise RecipeError(f"{self.where}/{row} is there for its figures alone and cannot be trained: {absent}.")
        if row is not None:
            return build_recipe(self.row_content(row), overrides, f"{self.where}/{row}")
        if self.rows:
            listed = _lists_rows(self.where) if len(self.rows) > FEW else ""
            rows = f"{listed} lists them" if listed else f"rows: {', '.join(self.rows)}"
            raise RecipeError(f"{self.where} is a grid: name the row to train, such as {self.where}/{next(iter(self.rows))}; {rows}.")
        return build_recipe(deepcopy(self.content), overrides, self.where)


@cache
def shipped() -> dict[str, Path]:
    """The recipe files of the package, by name, but for those of papers' tables."""
    return {path.stem: path for path in sorted(_folder().glob("*.toml"), key=lambda path: path.stem)}


@cache
def tables() -> dict[str, Path]:
    """The files of papers' tables, as ``PAPER/NUMBER``."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(_folder().glob("*/[0-9].toml"))}


@cache
def _parts() -> dict[str, Path]:
    """The files that ship to be extended, as ``parts/NAME``."""
    return {f"parts/{path.stem}": path for path in sorted(_folder().glob("parts/*.toml"))}


def _folder() -> Path:
    return Path(str(resources.files("visavis") / "recipes"))


@cache
def shipped_names() -> dict[str, tuple[str, str | None]]:
    """Every recipe that ships by its name: its file and, in a grid, its row."""
    names: dict[str, tuple[str, str | None]] = {}
    for file in shipped():
        rows = read_file(file).row_names
        names |= {name: (file, row) for row, name in rows.items()} if rows else {file: (file, None)}
    return names


def read_recipe(name: str | Path, overrides: Values | None = None) -> Recipe:
    """The recipe of a TOML file, or one that ships, with ``{"dotted.key": value}`` set in it.

    name: a path, or the name of a recipe that ships; a row of a grid also as ``GRID/ROW``. Raises RecipeError.
    """
    file, row = _file_and_row(str(name))
    recipe = read_file(file).recipe(row, overrides or {})
    if not recipe.phases:
        raise RecipeError(f"{name}: phases is []: a training needs at least one.")
    return recipe


def read_file(name: str) -> RecipeFile:
    """A recipe file by its path, or by the name under which it ships. Raises RecipeError."""
    return _of_package(name) if name in _packaged() else _read(name, ())


def merged(parent: Values, child: Values, where: str) -> Values:
    """The parent's values with the child's differences."""
    short = {key: child[key] for key in SHORT if key in child}
    phases = child.get("phases")
    by_number = isinstance(phases, dict)
    result = _merged_tables(
        parent, {key: value for key, value in child.items() if key not in short and not (by_number and key == "phases")}
    )
    if isinstance(phases, dict):
        result["phases"] = _changed_phases(result.get("phases"), phases, where)
    set_values(result, short, where)
    return result


def _merged_tables(parent: Values, child: Values) -> Values:
    result = deepcopy(parent)
    for key, value in child.items():
        before = result.get(key)
        merge = isinstance(before, dict) and isinstance(value, dict) and "kind" not in value
        result[key] = _merged_tables(before, value) if merge else deepcopy(value)  # type: ignore[arg-type]
    return result


def _changed_phases(phases: Any, changes: Values, where: str) -> list[Any]:
    """Phases with differences in some of them, given by number."""
    if not isinstance(phases, list):
        raise RecipeError(f"{where}: [phases.{next(iter(changes), 0)}] changes a phase, and there is none yet: begin one with [[phases]].")
    phases = list(phases)
    for number, change in changes.items():
        phase = phase_at(phases, number, f"phases.{number}", where)
        for table in (phase, change):
            if not isinstance(table, dict):
                raise RecipeError(f"{where}: phases.{number} is {table!r}, expected a table of what is different in that phase.")
        phases[int(number)] = _merged_tables(phase, change)
    return phases


def _read(name: str, children: tuple[Path, ...]) -> RecipeFile:
    """A recipe file, complete. children: the files that extend it, the first one first."""
    path = _packaged().get(name, Path(name))
    content = as_merged(storage.read_toml(path))
    place = Path(os.path.realpath(path))
    if place in children:
        raise RecipeError(f"{name} extends itself, by way of {children[-1].name}: a recipe cannot be its own beginning.")
    table, children = content.pop("table", {}) if name in tables() else {}, (*children, place)
    own, facts = _rows(content.pop("rows", {}), name), dict[str, Values]()
    rows: dict[str, tuple[Values, ...]] = {}
    for row, differences in own.items():
        facts[row] = {key: differences.pop(key) for key in FACTS if key in differences} if table else {}
        bases = [_without_own_names(base.content) for base in _parents(differences.pop("extends", []), f"{name}/{row}", path, children)]
        rows[row] = (*bases, differences)
    inherited: dict[str, tuple[Values, ...]] = {}
    parents = Values()
    for parent in _parents(content.pop("extends", []), name, path, children):
        parents = merged(parents, _without_own_names(parent.content), name)
        inherited |= {row: tuple(map(_without_own_names, differences)) for row, differences in parent.rows.items()}
    content = merged(parents, content, name)
    rows = {row: (*inherited.get(row, ()), *rows.get(row, ({},))) for row in inherited | rows}
    if rows and "name" not in content:
        raise RecipeError(f"{name}: name is missing.")
    return RecipeFile(name, content, rows, {row: facts.get(row, {}) for row in rows}, table)


def _parents(extends: Any, name: str, path: Path, children: tuple[Path, ...]) -> list[RecipeFile]:
    """What a file or a row extends: whole files, or one row of a grid as if it were a file of its own."""
    named = extends if isinstance(extends, list) else [extends]
    if not all(isinstance(one, str) for one in named):
        raise RecipeError(
            f"{name}: extends is {extends!r}, expected the name of a recipe that ships or the path of a file, or a list of them."
        )
    return [_parent(one, name, path, children) for one in named]


def _parent(extends: str, name: str, path: Path, children: tuple[Path, ...]) -> RecipeFile:
    try:
        file, row = _file_and_row(str(path.parent / extends) if ".toml" in extends else extends)
    except RecipeError as error:
        raise RecipeError(f"{name}, extends: {error}") from None
    parent = _of_package(file) if file in _packaged() else _read(file, children)
    return parent if row is None else RecipeFile(extends, parent.row_content(row), {})


@cache
def _of_package(name: str) -> RecipeFile:
    """A file that ships: tables have dozens of rows, and hundreds of rows extend the same few parts."""
    return _read(name, ())


@cache
def _packaged() -> dict[str, Path]:
    return shipped() | tables() | _parts()


def _file_and_row(name: str) -> tuple[str, str | None]:
    """The file and, of a grid, the row that a name stands for. Raises RecipeError if there is neither."""
    packaged = _packaged()
    if name.endswith(".toml") or os.path.isfile(name) or name in packaged:
        return name, None
    grid, _, row = name.rpartition("/")
    if grid.endswith(".toml") or grid in packaged:
        return grid, row
    if name in shipped_names():
        return shipped_names()[name]
    of_table = name.partition("/")[0] in _papers() or re.fullmatch(r"[^/]+/\d+/[^/]+", name)
    known = nearest_row(name) if of_table else nearest(name, [*shipped_names(), *packaged], "visavis catalog recipes")
    raise RecipeError(f"{name} is neither a TOML file nor a recipe that ships: {known}")


def nearest_row(address: str) -> str:
    """The ending of a sentence about an address that is of no row of a table: the nearest one, or how they are listed."""
    paper, number, row = (*address.split("/", 2), "", "")[:3]
    rows = {table: list(read_file(table).rows) for table in tables()}
    if own := rows.get(f"{paper}/{number}"):
        table = f"{paper}/{number}"
        known = nearest(row, own, _lists_rows(table)).replace("did you mean ", f"did you mean {table}/")
        return known if row else f"name a row of {table}, such as {table}/{own[0]}."
    if paper in _papers():
        numbers = ", ".join(name for name in rows if name.startswith(f"{paper}/"))
        return f"the tables of {paper} are {numbers}; {_lists_rows(f'{paper}/')} lists their rows."
    addresses = [f"{table}/{row}" for table, own in rows.items() for row in own]
    known, papers = nearest(address, addresses, "nothing"), ", ".join(_papers())
    how = (
        f"expected PAPER/TABLE/ROW, such as {addresses[0]}; visavis catalog recipes --paper {_papers()[0]} lists those of one of {papers}."
    )
    return known if known.startswith("did you mean") else how


def _papers() -> list[str]:
    return sorted({table.partition("/")[0] for table in tables()})


def _lists_rows(file: str) -> str:
    """The command that lists the rows of a paper's table; nothing for another file."""
    paper, slash, _ = file.partition("/")
    return f"visavis catalog recipes --paper {paper}" if slash and paper in _papers() else ""


def _rows(rows: Any, where: str) -> dict[str, Values]:
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise RecipeError(f"{where}: rows is {rows!r}, expected tables such as [rows.large] of what is different in each row.")
    return {name: as_merged(row) for name, row in rows.items()}


def as_merged(content: Values) -> Values:
    """Values as differences are taken: keys under their names of today, a model that is written as a text as its table."""
    content = with_new_names(content)
    return content | {"model": model_table(content["model"])} if "model" in content else content


def _without_own_names(content: Values) -> Values:
    return {key: value for key, value in content.items() if key not in ("name", "about", "published")}
