"""What came out of a comparison, or of a paper's table made anew: the table, and how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.cli.terminal import print_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from visavis.comparison.reproduction import Reproduction
    from visavis.comparison.result import Comparison


def print_comparison(comparison: Comparison) -> None:
    table = comparison.table
    print_line(table.text())
    _print_sentences([table.caption(), "", *comparison.sentences, f"Report: {comparison.folder / 'report.html'}"])


def print_reproduction(reproduction: Reproduction) -> None:
    from visavis.comparison.reproduction import cells

    if reproduction.base:
        _print_sentences([reproduction.substitution, ""])
    table = Table(box=None, pad_edge=False)
    for column in ("", "metric", "published", "reached", "difference"):
        table.add_column(column, justify="left" if column in ("", "metric") else "right", no_wrap=True)
    for figure in reproduction.figures:
        table.add_row(*map(escape, cells(figure)))
    console = standard_output()
    console.width = max(console.width, 120)  # too wide is better than cut off
    console.print(table)
    _print_sentences([*reproduction.sentences, f"Table: {reproduction.folder}"])


def _print_sentences(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        standard_output().print(escape(sentence), soft_wrap=True)
