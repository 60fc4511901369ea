"""Tables of what a model does not understand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output
from visavis.types import DIRECTIONS

if TYPE_CHECKING:
    from visavis.diagnosis.probes import Probes


def print_probes(result: Probes) -> None:
    console = standard_output()
    console.width = max(console.width, 100)  # too wide is better than cut off
    table = Table(box=None, pad_edge=False)
    for column in ("what was edited", "cases", "understood", "95 %", "ties"):
        table.add_column(column, justify="left" if column.startswith("what") else "right", no_wrap=True)
    for one in result.slices:
        table.add_row(one.title, str(one.cases), f"{one.percent:.1f} %", f"{one.low:.1f} to {one.high:.1f}", str(one.ties))
    console.print(table)
    console.print(
        "Understood: the true caption scores above the edited one; a tie is none. Chance is 50 %. * the same words in another order, which a bag "
        f"of words cannot tell. False by {escape(result.source)}.",
        soft_wrap=True,
    )
    if result.costs:
        console.print(_costs(result))
        console.print(
            "Recalls in percent, before and after the edit, and the 95 % interval of the difference, paired over images.", soft_wrap=True
        )
    for sentence in result.left_out:
        console.print(escape(sentence), soft_wrap=True)
    console.print(f"{escape(result.model)}, {result.images:,} images of {escape(result.data)}.", soft_wrap=True)


def _costs(result: Probes) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("edit", "", "R@K", "before", "after", "difference, 95 %"):
        table.add_column(column, justify="left" if column in ("edit", "", "R@K") else "right", no_wrap=True)
    for cost in result.costs:
        change = f"{cost.difference:+.1f} ({cost.low:+.1f} to {cost.high:+.1f})"
        table.add_row(cost.edit, DIRECTIONS[cost.way], f"R@{cost.k}", f"{cost.before:.1f}", f"{cost.after:.1f}", change)
    return table
