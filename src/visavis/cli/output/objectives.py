"""Tables about objectives alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from visavis.cli.output.console import standard_output

if TYPE_CHECKING:
    from visavis.diagnosis.anatomy import Anatomy


def print_anatomy(result: Anatomy) -> None:
    from visavis.diagnosis.circle import ANGLES, NAMES

    table = Table(box=None, pad_edge=False)
    table.add_column("tangent norm on", overflow="fold")
    for name, angle in zip(NAMES, ANGLES, strict=True):
        table.add_column(f"{name.removeprefix('negative ')} {angle:g}°", justify="right")
    for portrait in result.portraits:
        table.add_row(escape(portrait.name), *(f"{norm:.3f}" for norm in portrait.circle.norm.tolist()))
    standard_output().print(table)
    standard_output().print(
        f"A query, its positive and four negatives on a circle; triplets and weights of pairs: {escape(str(result.folder / 'report.html'))}",
        soft_wrap=True,
    )
