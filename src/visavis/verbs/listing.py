"""The catalogs as rows of names and sentences: the source of ``visavis catalog`` and of the reference pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any

from visavis.errors import VisavisError, nearest

CatalogRow = dict[str, Any]
"""An entry of a catalog: its name, what it is, and further texts by label; for recipes also nested values."""
LABELS = ("Formula:", "dL/ds", "Advice:", "Source:", "Special cases:", "Memory:", "Differs from:")
"""The labels that begin a part of a docstring."""


def objectives() -> list[CatalogRow]:
    """Every objective with its formula, source and defaults."""
    from visavis.objectives import CATALOG

    return [
        {
            "name": kind.__name__,
            "what": sentence(kind),
            "formula": paragraph(kind, "Formula:"),
            "advice": paragraph(kind, "Advice:"),
            "source": paragraph(kind, "Source:"),
            "defaults": repr(kind()),
        }
        for kind in CATALOG
    ]


def models() -> list[CatalogRow]:
    """Every matching model with what it reads and the defaults of its architecture."""
    from visavis.models import CATALOG

    return [
        {
            "name": name,
            "what": sentence(kind),
            "reads": f"images as {' or '.join(kind.visual_views)}; texts as {' or '.join(kind.text_views)}",
            "defaults": f"{name}({_defaults(kind.Config)})",
        }
        for name, kind in CATALOG.items()
    ]


def metrics() -> list[CatalogRow]:
    """Every metric by its key in results."""
    from visavis.metrics import CATALOG

    return [
        {
            "name": metric.name,
            "what": metric.definition,
            "formula": metric.formula,
            "unit": f"{metric.unit}, {'more' if metric.higher_is_better else 'less'} is better",
        }
        for metric in CATALOG
    ]


def layouts() -> list[CatalogRow]:
    """Every layout of data sets with the files by which it is recognized."""
    from visavis.data.catalog import CATALOG

    return [{"name": layout.name, "what": layout.files, "recognized by": ", ".join(layout.patterns)} for layout in CATALOG]


def protocols() -> list[CatalogRow]:
    """Every named protocol."""
    from visavis.evaluation import CATALOG

    return [{"name": protocol.name, "what": protocol.description} for protocol in CATALOG]


def supervisions() -> list[CatalogRow]:
    """Every supervision with its source and defaults."""
    from visavis.supervision import CATALOG

    return [
        {"name": kind.__name__, "what": sentence(kind), "source": paragraph(kind, "Source:"), "defaults": repr(kind())} for kind in CATALOG
    ]


def degrees() -> list[CatalogRow]:
    """Every estimator of degrees of relevance, with its source and defaults."""
    from visavis.degrees import CATALOG

    return [
        {"name": kind.__name__, "what": sentence(kind), "source": paragraph(kind, "Source:"), "defaults": _defaults(kind)}
        for kind in CATALOG
    ]


def recipes() -> list[CatalogRow]:
    """Every recipe file that ships, one recipe or a grid with its rows, each as training resolves it; then every row of every table."""
    from visavis.training.recipe_files import read_file, shipped

    entries = []
    for name in shipped():
        file = read_file(name)
        rows = {row: file.recipe(row, {}).to_dict() for row in file.rows}
        entry = {"name": name, "what": str(file.content.get("about", ""))}
        entries.append(entry | ({"rows": rows} if rows else {"recipe": file.recipe(None, {}).to_dict()}))
    return entries + table_rows()


def table_rows(paper: str | None = None) -> list[CatalogRow]:
    """Every row of every table of the papers, or of one, with its figures, what it needs, and its recipe as training resolves it.

    Raises VisavisError for a paper without tables.
    """
    from visavis.runs.published import published_rows
    from visavis.training.recipe_files import read_file, tables

    papers = {name.partition("/")[0] for name in tables()}
    if paper is not None and paper not in papers:
        raise VisavisError(f"there are no tables of a paper {paper}: {nearest(paper, papers)}")
    entries = []
    for table in tables():
        file = read_file(table)
        for name in (f"{table}/{row}" for row in file.rows if paper in (None, table.partition("/")[0])):
            row = published_rows()[name]
            recipe = None if row.absent else file.recipe(row.row, {}).to_dict()
            needs = recipe["data"]["needs"] if recipe else ""
            towers = [recipe[side]["tower"] for side in ("visual", "text")] if recipe else []
            encoders = [tower for tower in dict.fromkeys(towers) if tower not in ("", "vocabulary")]
            told = {"needs": needs, "encoders": encoders, "recipe": recipe}
            entries.append({"name": name, "what": str(file.content["about"])} | row.to_json() | told)
    return entries


KINDS: dict[str, Callable[[], list[CatalogRow]]] = {
    "objectives": objectives,
    "models": models,
    "metrics": metrics,
    "layouts": layouts,
    "supervisions": supervisions,
    "degrees": degrees,
    "recipes": recipes,
    "protocols": protocols,
}


def sentence(thing: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def paragraph(thing: Any, opening: str) -> str:
    """The part of a docstring that begins with ``opening``, up to the next such label or blank line, without the label."""
    inside, lines = False, []
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line.startswith(opening):
            inside, line = True, line.removeprefix(opening)
        elif not line.strip() or line.startswith(LABELS):
            inside = False
        if inside:
            lines.append(line.strip())
    return " ".join(lines)


def _defaults(kind: Any) -> str:
    return ", ".join(f"{field.name}={field.default!r}" for field in fields(kind) if not _required(field))


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
