"""Figures that papers print, for a run to be set beside: one TOML file a paper, in the folder ``published`` of the package.

>>> [figures.objective for figures in published()["COCOS/VSE++/Flickr30k"]][:2]
['Triplet(margin=0.2)', 'TripletHN(margin=0.2)']
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.errors import RecipeError, nearest


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
    if name and name not in published():
        raise RecipeError(f"published is {name!r}, which names no figures of a paper: {nearest(name, published())}")


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
