"""The command that keeps a page open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import bars


def serve(
    index: Annotated[list[str], typer.Argument(metavar="INDEX [INDEX]", help="The folder of an index; two: side by side, by lot.")],
    host: Annotated[str, typer.Option(help="An address of this machine; one that others reach needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="VISAVIS_TOKEN", show_envvar=True, help="What a browser or program must bring.")
    ] = None,
    judgements: Annotated[Path | None, typer.Option(help="A file for the votes, new or to be continued; default: no votes.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """A page to search an index by words and pictures, or to compare two; Ctrl-C ends it."""
    from visavis import verbs

    verbs.serve(index, host=host, port=port, token=token, judgements=judgements, open_page=open_page, progress=bars())
