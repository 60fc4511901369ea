"""Options that all commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from visavis.cli.output import Bars

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Memory = Annotated[
    str | None,
    typer.Option(help="The most that blocks of scores may take, such as 2GiB; default the recipe's, else a share of the free memory."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out broken images and captions, and list what was left out.")]


def bars() -> Bars:
    from visavis.cli.output import Bars

    return Bars()
