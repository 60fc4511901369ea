"""Figures that papers print, row by row, from the tables that ship as recipes: for a run to be set beside.

>>> row = published_rows()["goal/3/r152-cir-sig-ms"]
>>> row.values["i2t_r1"]
(35.3, 0.4)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from visavis import storage
from visavis.errors import RecipeError, nearest
from visavis.evaluation import Evaluation
from visavis.evaluation.published import Published
from visavis.training.recipe import Recipe
from visavis.training.recipe_files import RecipeFile, read_file, tables

_Figure = float | tuple[float, float]
"""A mean, or a mean and its deviation."""
_FIGURES: TypeAdapter[dict[str, _Figure]] = TypeAdapter(dict[str, _Figure])


@cache
def published_rows() -> dict[str, Published]:
    """Every row of every table by its address, ``PAPER/TABLE/ROW``."""
    return {row.address: row for table in tables() for row in _rows(table, read_file(table))}


def beside_published(result: Evaluation, recipe: Recipe) -> Evaluation:
    """A result of a recipe with what the recipe asks to print beside it: further metrics, and the row of a table that it stands for."""
    return replace(result, report=recipe.evaluation.report, published=published_rows().get(recipe.published))


def _rows(table: str, file: RecipeFile) -> list[Published]:
    paper, _, number = table.partition("/")
    rows = []
    for row, facts in file.facts.items():
        said = file.table | facts
        figures = _FIGURES.validate_python(facts["published"])
        texts = {key: said[key] for key in ("unstated", "misprint", "absent") if key in said}
        rows.append(
            Published(
                paper=paper,
                table=int(number),
                row=row,
                source=file.table["source"],
                protocol=_protocol(file, row),
                values={key: (figure, None) if isinstance(figure, float) else figure for key, figure in figures.items()},
                cited=said.get("cited", False),
                **texts,
            )
        )
    return rows


def _protocol(file: RecipeFile, row: str) -> str:
    """What a row's figures were measured by: as it says, else the table where the row is evaluated so, else what it is evaluated by first."""
    named: Any = file.row_content(row).get("evaluation", {}).get("protocol", "")
    evaluated = named if isinstance(named, list) else [named]
    of_table = file.table.get("protocol", "")
    return str(file.facts[row].get("protocol") or (of_table if of_table in evaluated else evaluated[0]))


@dataclass(frozen=True)
class Figures:
    """One row of a table: what a paper measured with one objective, model and data set.

    place: the table and the row. values: mean and deviation by ``<way>_<measure>``, the names of a diagnosis. caution: how
    the released code counts otherwise than the paper defines, if it does.
    """

    source: str
    place: str
    model: str
    data: str
    objective: str
    values: dict[str, tuple[float, float]]
    caution: str

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("source", "place", "model", "data", "objective", "caution")}
        means = {f"{key}_mean": mean for key, (mean, _) in self.values.items()}
        return facts | means | {f"{key}_std": deviation for key, (_, deviation) in self.values.items()}


@cache
def published() -> dict[str, tuple[Figures, ...]]:
    """All figures by the names that a recipe may give: ``<paper>/<model>/<data set>``."""
    figures: dict[str, tuple[Figures, ...]] = {}
    for path in sorted(Path(str(resources.files("visavis") / "published")).glob("*.toml")):
        paper = storage.read_toml(path)
        for row in paper["rows"]:
            name = "/".join((paper["paper"], row["model"], row["data"]))
            figures[name] = (*figures.get(name, ()), _figures(paper, row))
    return figures


def check_published(name: str) -> None:
    """Refuse, with a RecipeError, a name in a recipe that names no figures."""
    if name and name not in published() and name not in published_rows():
        raise RecipeError(f"published is {name!r}, which names no figures of a paper: {nearest(name, [*published(), *published_rows()])}")


def _figures(paper: dict[str, Any], row: dict[str, Any]) -> Figures:
    return Figures(
        source=paper["source"],
        place=row["place"],
        model=paper["models"][row["model"]],
        data=row["data"],
        objective=row["objective"],
        values={f"{way}_{measure}": (mean, deviation) for way in ("i2t", "t2i") for measure, (mean, deviation) in row[way].items()},
        caution=paper["cautions"].get(row["objective"].partition("(")[0], ""),
    )
