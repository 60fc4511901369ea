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
        numbers = _figure(found.key, found.published, found.deviation), _number(found.key, found.reached)
        table.add_row(_title(found.key), *numbers, f"{'+' if found.difference >= 0 else ''}{_number(found.key, found.difference)}")
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
        figures = row["published"]
        keys = [key for key in figures if not key.endswith("_std")]
        told = ", ".join(f"{_title(key)} {_figure(key, figures[key], figures.get(f'{key}_std'))}" for key in keys)
        marks = [mark for mark in ("cited", "absent", "unstated", "misprint") if row[mark]]
        needs = f"needs {row['needs']}" if row["needs"] else f"no recipe: {row['absent']}" if row["absent"] else ""
        end = "; ".join(filter(None, [", ".join(marks), needs]))
        console.print(f"  [cyan]{escape(row['name'])}[/cyan]  {escape(told)}  ({escape(end)})", soft_wrap=True, highlight=False)


def _print_remarks(console: Console, row: Published) -> None:
    if row.unstated:
        console.print(f"Published nowhere: {escape(row.unstated)}.", soft_wrap=True)
    if row.misprint:
        console.print(f"Misprint of the paper: {escape(row.misprint)}.", soft_wrap=True)
    if row.caution:
        console.print(f"The published figures are as the released code counts: {escape(row.caution)}.", soft_wrap=True)


def _title(key: str) -> str:
    """A metric with its direction, as a person says it."""
    from visavis.evaluation.published import label_of

    way, _, _ = key.partition("_")
    return f"{DIRECTIONS[way]} {label_of(key)}" if way in DIRECTIONS else label_of(key)


def _figure(key: str, mean: float, deviation: float | None) -> str:
    return _number(key, mean) + ("" if deviation is None else f" ± {_number(key, deviation)}")


def _number(key: str, value: float) -> str:
    from visavis.evaluation.published import metric_of

    return f"{value:.1f}" if metric_of(key).unit in ("percent", "rank") else f"{value:.3f}"
