"""Commands about objectives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json
from visavis.cli.terminal import print_json


def anatomy(
    objective: Annotated[list[str], typer.Argument(metavar="OBJECTIVE...", help="Such as 'Unified(gamma=50)' 'TripletHN()'.")],
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/anatomy-<n>.")] = None,
    json: Json = False,
) -> None:
    """What the gradient of objectives does with a triplet and what it turns: pictures, without any data."""
    from visavis import verbs
    from visavis.cli.output import print_anatomy

    result = verbs.anatomy(objective, out=out)
    if json:
        print_json(result.to_json())
    else:
        print_anatomy(result)
