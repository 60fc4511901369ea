"""Figures that papers print, row by row, from the tables that ship as recipes: for a run to be set beside.

>>> row = published_rows()["goal/3/r152-cir-sig-ms"]
>>> row.values["i2t_r1"]
(35.3, 0.4)
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from visavis.errors import RecipeError
from visavis.evaluation import Evaluation
from visavis.evaluation.published import Published
from visavis.training.recipe import Recipe
from visavis.training.recipe_files import RecipeFile, nearest_row, read_file, read_recipe, tables

_Figure = float | tuple[float, float]
"""A mean, or a mean and its deviation."""
_TOLD = ("source", "number", "cited", "unstated", "misprint", "caution", "absent")
_FIGURES: TypeAdapter[dict[str, _Figure]] = TypeAdapter(dict[str, _Figure])


@cache
def published_rows() -> dict[str, Published]:
    """Every row of every table by its address, ``PAPER/TABLE/ROW``."""
    return {row.address: row for table in tables() for row in _rows(table, read_file(table))}


def check_published(address: str) -> None:
    """Refuse, with a RecipeError, what a recipe names if it is no row of a table."""
    if address and address not in published_rows() and not counted_rows(address):
        raise RecipeError(f"published is {address!r}, which names no row of a paper's table: {nearest_row(address)}")


def beside_published(result: Evaluation, recipe: Recipe) -> Evaluation:
    """A result of a recipe with what the recipe asks to print beside it: further metrics, and the row of a table that it stands for."""
    row = published_rows().get(recipe.published)
    return replace(result, report=recipe.evaluation.report, published=row if row and row.protocol else None)


def measured_row(address: str) -> Published:
    """A row of a table that a result may be set beside, whatever made it. Raises RecipeError for no such row, and for one that measures nothing."""
    check_published(address)
    row = published_rows().get(address)
    if row is None or not row.protocol:
        raise RecipeError(f"{address} counts a training and measures no model: visavis diagnose sets its figures beside a run's.")
    return row


def counted_rows(address: str) -> list[Published]:
    """The rows with counts of a training that stand for what a recipe names: that row, or those of the paper with the same number.

    address: also ``COCOS/<model>/<data>``, as older runs have it, for the rows of every objective.
    """
    rows = published_rows()
    counted = [row for row in rows.values() if not row.protocol]
    if older := re.fullmatch(r"COCOS/(.+)/(?:MS-)?(.+)", address):
        return [row for row in counted if row.paper == "cocos" and row.row.startswith("-".join(older.groups()).lower() + "-")]
    named = rows.get(address)
    return [row for row in counted if named and named.number and (row.paper, row.number) == (named.paper, named.number)]


@cache
def objective_of(address: str) -> str:
    """What a row trains with, at last."""
    return read_recipe(address).phases[-1].objective


def _rows(table: str, file: RecipeFile) -> list[Published]:
    paper, _, number = table.partition("/")
    rows = []
    for row, facts in file.facts.items():
        said = file.table | facts
        figures = _FIGURES.validate_python(facts["published"])
        rows.append(
            Published(
                paper=paper,
                table=int(number),
                row=row,
                protocol=_protocol(file, row),
                values={key: (figure, None) if isinstance(figure, float) else figure for key, figure in figures.items()},
                **{key: said[key] for key in _TOLD if key in said},
            )
        )
    return rows


def _protocol(file: RecipeFile, row: str) -> str:
    """What a row's figures were measured by: as it says, else the table where the row is evaluated so, else what it is evaluated by first."""
    named: Any = file.row_content(row).get("evaluation", {}).get("protocol", "")
    evaluated = named if isinstance(named, list) else [named]
    of_table = file.table.get("protocol")
    if of_table == "":
        return ""
    return str(file.facts[row].get("protocol") or (of_table if of_table in evaluated else evaluated[0]))
