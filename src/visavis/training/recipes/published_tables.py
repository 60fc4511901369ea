"""Published results of papers' tables, row by row, for comparison with runs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from visavis.core.errors import RecipeError
from visavis.evaluation import Evaluation
from visavis.evaluation.metrics.catalog import own_metric_keys
from visavis.evaluation.published_row import PublishedRow
from visavis.training.recipes.files import (
    ROW_ANNOTATIONS,
    RecipeFile,
    paper_figures,
    paper_tables,
    read_recipe,
    read_recipe_file,
    suggest_row,
)
from visavis.training.recipes.recipe import Recipe

_COPIED_ANNOTATIONS = (
    "source",
    *(key for key in ROW_ANNOTATIONS if key not in ("published", "protocol")),
)
# A mean, or a mean and its standard deviation.
_VALUES: TypeAdapter[dict[str, float | tuple[float, float]]] = TypeAdapter(
    dict[str, float | tuple[float, float]]
)


@cache
def published_results() -> dict[str, PublishedRow]:
    """Read every row of every table.

    Returns:
        Rows by id, ``PAPER/TABLE/ROW``.

    Example:
        >>> published_results()["goal/3/r152-cir-sig-ms"].values["i2t_r1"]
        (35.3, 0.4)
    """
    return {
        row.id: row
        for table in paper_tables()
        for row in _read_rows(table, read_recipe_file(table))
    }


@cache
def figure_curves() -> dict[str, PublishedRow]:
    """Read every curve of every figure, as rows without values."""
    return {
        row.id: row
        for figure in paper_figures()
        for row in _read_rows(figure, read_recipe_file(figure))
    }


def check_published_id(row_id: str) -> None:
    """Check the ``published`` key of a recipe."""
    if row_id and row_id not in published_results() and not contributing_sample_rows(row_id):
        raise RecipeError(
            f"published: {row_id!r} is not a row of a paper's table: {suggest_row(row_id)}"
        )


def with_published(result: Evaluation, recipe: Recipe) -> Evaluation:
    """Add the extra metrics of a recipe and the published row that it reproduces."""
    # Reading all tables takes half a second, which most recipes do not need.
    row = published_results().get(recipe.published) if recipe.published else None
    extra = (
        key
        for name in recipe.evaluation.extra_metrics
        for key in (own_metric_keys(name) if ":" in name else [name])
    )
    return replace(
        result,
        extra_metrics=tuple(extra),
        published=row if row and row.protocol else None,
    )


def measured_result(row_id: str) -> PublishedRow:
    """Return a row that measures a model, to compare any result with."""
    check_published_id(row_id)
    row = published_results().get(row_id)
    if row is None or not row.protocol:
        raise RecipeError(
            f"{row_id!r}: expected a row that measures a model, got one that counts samples of a "
            "training. Compare it with visavis papers diagnose."
        )
    return row


def contributing_sample_rows(row_id: str) -> list[PublishedRow]:
    """Return the rows with counts of contributing samples of the same experiment."""
    rows = published_results()
    if experiment := re.fullmatch(r"COCOS/(.+)/(?:MS-)?(.+)", row_id):
        prefix = f"{'-'.join(experiment.groups()).lower()}-"
        return [
            row
            for row in rows.values()
            if not row.protocol and row.paper == "cocos" and row.row.startswith(prefix)
        ]
    row = rows.get(row_id)
    if row is None or not row.experiment_id:
        return []
    return [
        other
        for other in rows.values()
        if not other.protocol
        and (other.paper, other.experiment_id) == (row.paper, row.experiment_id)
    ]


@cache
def row_objective(row_id: str) -> str:
    """Return the objective that a row trains with in its last phase."""
    return repr(read_recipe(row_id).phases[-1].objective)


def _read_rows(table: str, file: RecipeFile) -> list[PublishedRow]:
    """The rows of a table, or the curves of a figure."""
    paper, _, number = table.partition("/")
    table_protocol = file.table.get("protocol")
    rows = []
    for row, noted in file.annotations.items():
        # The protocol of the row, else of the table if the recipe uses it, else the first one of the
        # recipe.
        protocol = ""
        if table_protocol != "":
            setting: Any = file.variant_content(row).get("evaluation", {}).get("protocol", "")
            protocols = setting if isinstance(setting, list) else [setting]
            default = table_protocol if table_protocol in protocols else protocols[0]
            protocol = str(noted.get("protocol") or default)
        published = _VALUES.validate_python(noted.get("published", {}))
        rows.append(
            PublishedRow(
                paper=paper,
                table=int(number) if number.isdecimal() else number,
                row=row,
                protocol=protocol,
                values={
                    key: (value, None) if isinstance(value, float) else value
                    for key, value in published.items()
                },
                **{
                    key: value
                    for key, value in (file.table | noted).items()
                    if key in _COPIED_ANNOTATIONS
                },
            )
        )
    return rows
