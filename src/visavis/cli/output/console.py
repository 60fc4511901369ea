"""The consoles that all tables and sentences are printed to."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from rich import console
from rich.text import Text

from visavis.cli.terminal import hang_up, visible


class Console(console.Console):
    """A console of rich that shows control characters instead of sending them, and ends quietly where nobody reads on."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        hang_up()


def standard_output() -> Console:
    return Console(file=sys.stdout, highlight=False)
