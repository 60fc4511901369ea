"""Console of rich for output of the command line."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from visavis.cli.terminal import escape_control_characters, exit_quietly


class SafeConsole(Console):
    """Console that escapes control characters and exits quietly when its reader has left."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render markup after escaping control characters."""
        return super().render_str(escape_control_characters(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Exit without a message."""
        exit_quietly()
