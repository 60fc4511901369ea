"""A table of a paper made anew: every row a setting of a comparison, what it reached beside what was published.

Its folder is that of a comparison, with ``table.json`` (which row is which setting) and what came out in ``reproduction.json`` and
``reproduction.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.comparison.comparing import Plan, begun, cache_inputs, make_runs, read_plan
from visavis.comparison.reproduction import Reproduction
from visavis.comparison.settings import Setting
from visavis.comparison.workers import Workers
from visavis.errors import RecipeError, RunError, nearest
from visavis.evaluation.published import Published
from visavis.progress import Progress
from visavis.runs.folder import with_whole_paths
from visavis.runs.published import published_rows
from visavis.spec import whole_number
from visavis.training.recipe import Recipe, build_recipe
from visavis.training.recipe_files import read_recipe, tables

SEEDS = {"goal": 3, "cocos": 5}
"""How many runs the papers average; one where they do not say."""


@dataclass(frozen=True)
class TablePlan:
    """Which rows of a table are made by which settings. base: the recipe that stands for theirs, in words; "" for their own."""

    table: str
    base: str
    rows: dict[str, str]


def begin_reproduction(
    table: str,
    patterns: Sequence[str],
    base: str,
    overrides: dict[str, Any],
    seeds: int | None,
    out: Path | None,
    workers: Workers,
    progress: Progress,
) -> Reproduction:
    """A table in a new folder, ``runs/<paper>-<table>-<n>`` without ``out``. Raises RecipeError for no such table or rows."""
    rows = chosen_rows(table, patterns)
    for row in rows:
        if row.absent:
            progress.say(f"{row.address} is left out, as it cannot be trained: {row.absent}.")
    trained = [row for row in rows if not row.absent]
    if not trained:
        raise RecipeError(f"none of the rows asked for of {table} can be trained: {rows[0].absent}.")
    of_base = read_recipe(base, overrides) if base else None
    settings = _on_base(trained, of_base) if of_base else _as_published(trained, overrides)
    number = whole_number(SEEDS.get(rows[0].paper, 1) if seeds is None else seeds, "seeds", 1)
    unique = {setting.name: setting for setting in settings.values()}
    plan = Plan(table, tuple(unique.values()), number)
    with begun(plan, out, table.replace("/", "-"), progress) as folder:
        in_words = _in_words(of_base, overrides) if of_base else ""
        kept = TablePlan(table, in_words, {address: setting.name for address, setting in settings.items()})
        storage.write_json(folder / "table.json", asdict(kept))
        return _go_on(folder, plan, kept, workers, progress)


def continue_reproduction(folder: Path, seeds: int | None, workers: Workers, progress: Progress) -> Reproduction:
    """Go on with a table, with more seeds if so many are asked for. Raises RunError if the folder is none."""
    if not (folder / "table.json").exists():
        raise RunError(f"{folder} is no table of a paper: expected table.json in it, as visavis reproduce writes it.")
    kept = storage.read_json(folder / "table.json", TablePlan, error=RunError)
    plan = read_plan(folder, seeds, race=False, made_by="reproduce")
    cache_inputs(plan, progress)
    return _go_on(folder, plan, kept, workers, progress)


def chosen_rows(table: str, patterns: Sequence[str] = ()) -> list[Published]:
    """The rows of a table whose names match one of the patterns, ``r152-*``; all without any. Raises RecipeError."""
    if table not in tables():
        raise RecipeError(f"{table} is no table of a paper: {nearest(table, tables())}")
    rows = [row for row in published_rows().values() if f"{row.paper}/{row.table}" == table]
    if not rows[0].protocol:
        raise RecipeError(f"{table} counts trainings and measures no models: visavis diagnose sets its figures beside those of a run.")
    for pattern in patterns:
        if not any(fnmatch(row.row, pattern) for row in rows):
            raise RecipeError(
                f"{table} has no row {pattern}: {nearest(pattern, [row.row for row in rows], f'visavis catalog recipes --paper {rows[0].paper}')}"
            )
    return [row for row in rows if not patterns or any(fnmatch(row.row, pattern) for pattern in patterns)]


def _as_published(rows: Iterable[Published], overrides: dict[str, Any]) -> dict[str, Setting]:
    """Each row by its own recipe."""
    return {row.address: Setting(row.row, content=with_whole_paths(read_recipe(row.address, overrides)).to_dict()) for row in rows}


def _in_words(base: Recipe, overrides: dict[str, Any]) -> str:
    about = f" ({base.about.rstrip('.')})" if base.about else ""
    changed = "".join(f", {key}={value}" for key, value in overrides.items())
    return f"{base.name}{about}{changed}, protocol {' and '.join(base.evaluation.protocols)}"


def _on_base(rows: Iterable[Published], base: Recipe) -> dict[str, Setting]:
    """What each row trains with, on another recipe: its objective and supervision in every phase. Rows that differ in nothing else are one."""
    settings = dict[str, Setting]()
    for row in rows:
        recipe = read_recipe(row.address)
        of_row = {
            "objective": recipe.phases[-1].objective,
            "evaluation.degrees": recipe.evaluation.degrees,
            "evaluation.report": recipe.evaluation.report,
        }
        of_row |= {f"phases.{number}.supervision": recipe.phases[-1].supervision for number in range(len(base.phases))}
        content = build_recipe(with_whole_paths(base).to_dict(), of_row, f"{base.name} with {row.address}").to_dict()
        same = next((setting for setting in settings.values() if setting.content == content), None)
        settings[row.address] = same or Setting(row.row, content=content)
    return settings


def _go_on(folder: Path, plan: Plan, kept: TablePlan, workers: Workers, progress: Progress) -> Reproduction:
    outcomes = make_runs(folder, plan, workers, progress)
    rows = published_rows()
    made = {address: (rows[address], [one for one in outcomes if one.setting == name]) for address, name in kept.rows.items()}
    reproduction = Reproduction.of(folder, kept.table, kept.base, made)
    storage.write_json(folder / "reproduction.json", reproduction.to_json())
    storage.write_text(folder / "reproduction.md", reproduction.markdown())
    return reproduction
