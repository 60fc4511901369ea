"""Options that all commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from visavis.cli.terminal import tell

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


@contextmanager
def stoppable(command: str) -> Iterator[None]:
    """After a signal that a training heard: how to go on, and the shell's code."""
    from visavis.environment import program
    from visavis.training.stopping import Stopped

    try:
        yield
    except Stopped as stopped:
        tell(f"Stopped; everything is saved. Go on with: {program()} {command} --resume {stopped}")
        raise typer.Exit(128 + stopped.by) from None
