"""Panels and examples in the help of the commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from visavis import api
from visavis.api.catalog_entries import docstring_commands
from visavis.core.errors import VisavisError

PANELS = {
    "Start": ("index", "search", "serve", "train", "evaluate"),
    "Try and check": ("demo", "doctor", "catalog"),
    "Data": ("data", "features"),
    "Compare and explain models": ("compare", "explain", "mteb", "papers"),
    "Use and exchange models": ("classify", "mcp", "export"),
}
"""Panels of ``visavis --help`` with their commands and groups of commands."""

MOVED = {
    "mine": "data mine",
    **{
        name: f"papers {name}"
        for name in (
            "agreement",
            "anatomy",
            "coherence",
            "convert",
            "diagnose",
            "probe",
            "relevance",
            "reproduce",
        )
    },
}
"""New words of commands that had another name."""


def panel_of(name: str) -> str | None:
    """Return the panel of a command or group, or None within a group.

    Args:
        name: Name of an API function or group.
    """
    return next((panel for panel, names in PANELS.items() if name in names), None)


def examples_of(name: str) -> str:
    """Return the end of the help of a command: the section ``Command line:`` of its API function,
    one command per line.

    Args:
        name: Name of an API function.
    """
    # Click keeps the line breaks of a paragraph that begins with this character.
    return "\n".join(
        ["\b", "Examples:", *(f"  {command}" for command in docstring_commands(getattr(api, name)))]
    )


class CommandGroup(TyperGroup):
    """Group whose help lists the commands by panel, as plain text, and whose errors name the new
    words of moved commands.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command.

        Args:
            ctx: Context of Typer.
            cmd_name: Name of the command.

        Returns:
            The command. None if there is none.

        Raises:
            VisavisError: If the command has another name now.
        """
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in MOVED:
            raise VisavisError(
                f"{cmd_name}: expected the new name of this command. Run visavis {MOVED[cmd_name]}."
            )
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel.

        Args:
            ctx: Context of Typer.
            formatter: Receives the text.
        """
        # In the order of PANELS, whatever the order of the commands.
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        width = formatter.width - max(map(len, self.commands)) - 6
        for name, command in self.commands.items():
            panel = str(getattr(command, "rich_help_panel", None) or "Other")
            panels.setdefault(panel, []).append((name, command.get_short_help_str(width)))
        for names in PANELS.values():
            panel_rows = panels[str(panel_of(names[0]))]
            panel_rows.sort(key=lambda row, order=names: order.index(row[0]))  # type: ignore[misc]
        for panel, rows in panels.items():
            if not rows:
                continue
            with formatter.section(panel):
                formatter.write_dl(rows)
