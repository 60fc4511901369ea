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
    """Read every curve of every figure, as rows without values.

    Returns:
        Rows by id, ``PAPER/figure-NUMBER/CURVE``.
    """
    return {
        row.id: row
        for figure in paper_figures()
        for row in _read_rows(figure, read_recipe_file(figure))
    }


def check_published_id(row_id: str) -> None:
    """Check the ``published`` key of a recipe.

    Args:
        row_id: Id of a row, or "".

    Raises:
        RecipeError: If the row does not exist.
    """
    if row_id and row_id not in published_results() and not contributing_sample_rows(row_id):
        raise RecipeError(
            f"published: {row_id!r} is not a row of a paper's table: {suggest_row(row_id)}"
        )


def with_published(result: Evaluation, recipe: Recipe) -> Evaluation:
    """Add the extra metrics of a recipe and the published row that it reproduces.

    Args:
        result: Evaluation.
        recipe: Recipe.

    Returns:
        The evaluation with ``extra_metrics`` and ``published``.
    """
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
    """Return a row that measures a model, to compare any result with.

    Args:
        row_id: Id of the row.

    Returns:
        The row.

    Raises:
        RecipeError: If the row does not exist, or counts contributing samples of a training.
    """
    check_published_id(row_id)
    row = published_results().get(row_id)
    if row is None or not row.protocol:
        raise RecipeError(
            f"{row_id!r}: expected a row that measures a model, got one that counts samples of a "
            "training. Compare it with visavis papers diagnose."
        )
    return row


def contributing_sample_rows(row_id: str) -> list[PublishedRow]:
    """Return the rows with counts of contributing samples of the same experiment.

    Args:
        row_id: Id of a row, or ``COCOS/<model>/<data>`` for the rows of every objective.

    Returns:
        The rows of the same paper and experiment without a protocol.
    """
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
    """Return the objective that a row trains with in its last phase.

    Args:
        row_id: Id of the row.

    Returns:
        The objective as text.
    """
    return repr(read_recipe(row_id).phases[-1].objective)


def _read_rows(table: str, file: RecipeFile) -> list[PublishedRow]:
    paper, _, number = table.partition("/")
    return [
        PublishedRow(
            paper=paper,
            table=int(number) if number.isdecimal() else number,
            row=row,
            protocol=_protocol(file, row),
            values={
                key: (value, None) if isinstance(value, float) else value
                for key, value in _VALUES.validate_python(annotations.get("published", {})).items()
            },
            **{
                key: value
                for key, value in (file.table | annotations).items()
                if key in _COPIED_ANNOTATIONS
            },
        )
        for row, annotations in file.annotations.items()
    ]


def _protocol(file: RecipeFile, row: str) -> str:
    """The protocol of a row: its own, else that of the table if the recipe uses it, else the first
    of the recipe.
    """
    table_protocol = file.table.get("protocol")
    if table_protocol == "":
        return ""
    setting: Any = file.variant_content(row).get("evaluation", {}).get("protocol", "")
    protocols = setting if isinstance(setting, list) else [setting]
    return str(
        file.annotations[row].get("protocol")
        or (table_protocol if table_protocol in protocols else protocols[0])
    )
