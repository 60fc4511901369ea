"""What all commands share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from visavis.cli.output import Bars

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Memory = Annotated[str | None, typer.Option(help="What blocks of scores may take, as 2GiB; default the recipe's, else a share.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Go on without what is broken, and say what was left out.")]


def bars() -> Bars:
    from visavis.cli.output import Bars

    return Bars()


def print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, ensure_ascii=False))
