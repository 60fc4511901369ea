"""What a paper printed beside what a run reached, and the rows of the papers' tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.types import DIRECTIONS

if TYPE_CHECKING:
    from visavis.evaluation import Evaluation
    from visavis.evaluation.published import Published


def print_report(result: Evaluation) -> None:
    """The further metrics that a recipe asks for, on one line."""
    told = (f"{_title(key)} {_number(key, result.metrics[key])}" for key in result.report)
    standard_output().print(", ".join(told), soft_wrap=True)


def print_differences(result: Evaluation) -> None:
    """Published, reached and their difference, figure by figure."""
    row, reached, console = result.published, result.as_published, standard_output()
    assert row is not None
    table = Table(box=None, pad_edge=False)
    for column in ("", "published", "reached", "difference"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for found in row.differences(reached.measured):
        reached_here = ["-", "-"]
        if found.reached is not None and found.difference is not None:
            reached_here = [
                _number(found.key, found.reached),
                f"{'+' if found.difference >= 0 else ''}{_number(found.key, found.difference)}",
            ]
        table.add_row(_title(found.key), _figure(found.key, found.published, found.deviation), *reached_here)
    console.print()
    console.print(table)
    console.print(f"Published: {escape(row.address)}{', cited there' if row.cited else ''}: {escape(row.source)}.", soft_wrap=True)
    if row.protocol != reached.protocol:
        told = f"The published figures are of protocol {row.protocol}, those reached of {reached.protocol}: other candidates."
        console.print(told, soft_wrap=True)
    _print_remarks(console, row)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The rows of tables, one a line: its figures, and what it needs."""
    console = standard_output()
    for row in rows:
        marks = [mark for mark in ("cited", "absent", "unstated", "misprint") if row[mark]]
        needed = [row["needs"].partition(",")[0], *row["encoders"]]
        needs = f"needs {', '.join(needed)}" if row["needs"] else f"no recipe: {row['absent']}"
        told = escape(f"{_figures(row['published'])}  ({', '.join([*marks, needs])})")
        console.print(f"  [cyan]{escape(row['name'])}[/cyan]  {told}", soft_wrap=True, highlight=False)


def _figures(published: dict[str, float]) -> str:
    """All figures of a row, each direction named once."""
    parts: dict[str, list[str]] = {}
    for key, mean in published.items():
        if not key.endswith("_std"):
            way = DIRECTIONS.get(key.partition("_")[0], "")
            parts.setdefault(way, []).append(f"{_label(key)} {_figure(key, mean, published.get(f'{key}_std'))}")
    return "; ".join(" ".join(filter(None, [way, ", ".join(told)])) for way, told in parts.items())


def _print_remarks(console: Console, row: Published) -> None:
    if row.unstated:
        console.print(f"Published nowhere: {escape(row.unstated)}.", soft_wrap=True)
    if row.misprint:
        console.print(f"Misprint of the paper: {escape(row.misprint)}.", soft_wrap=True)
    if row.caution:
        console.print(f"The published figures are as the released code counts: {escape(row.caution)}.", soft_wrap=True)


def _title(key: str) -> str:
    """A metric with its direction, as a person says it."""
    way = DIRECTIONS.get(key.partition("_")[0], "")
    return f"{way} {_label(key)}".strip()


def _label(key: str) -> str:
    from visavis.diagnosis.walk import MEASURES
    from visavis.evaluation.published import label_of

    return MEASURES.get(key.partition("_")[2]) or label_of(key)


def _figure(key: str, mean: float, deviation: float | None) -> str:
    return _number(key, mean) + ("" if deviation is None else f" ± {_number(key, deviation)}")


def _number(key: str, value: float) -> str:
    from visavis.diagnosis.walk import MEASURES
    from visavis.evaluation.published import metric_of

    if key.partition("_")[2] in MEASURES:
        return f"{value:.2f}"
    return f"{value:.1f}" if metric_of(key).unit in ("percent", "rank") else f"{value:.3f}"
