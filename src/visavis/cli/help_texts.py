"""Panels and examples in the help of the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from visavis.api.catalog_entries import docstring_commands
from visavis.core.errors import VisavisError

PANELS = {
    "Start": ("index", "search", "serve", "train", "evaluate"),
    "Try and check": ("demo", "doctor", "catalog"),
    "Data and indexes": ("data", "features", "indexes"),
    "Compare and explain models": ("compare", "explain", "mteb", "papers"),
    "Use and exchange models": ("classify", "mcp", "export"),
}
"""Panels of ``visavis --help`` with their commands and groups of commands."""

MOVED = {
    "agreement": "papers agreement",
    "anatomy": "papers anatomy",
    "coherence": "papers coherence",
    "convert": "papers convert",
    "diagnose": "papers diagnose",
    "probe": "papers probe",
    "relevance": "papers relevance",
    "reproduce": "papers reproduce",
    "mine": "data mine",
    "index --queries": "indexes use-queries",
    "index --list-queries": "indexes list-queries",
    "index --restore-queries": "indexes restore-queries",
    "index --moved": "indexes move",
    "search --model": "index --model, or visavis indexes move for a moved model",
    "index --remove-missing": "indexes prune",
    "index --correction": "indexes correct",
    "index --bank": "indexes correct",
    "index --compression": "indexes measure",
    "index --item-bytes": "indexes compress",
    "index --set-default": "indexes default-model",
    "search --ignore-captions": "indexes calibrate",
    "serve --ignore-captions": "indexes calibrate",
    "evaluate --feedback": "indexes evaluate",
    "serve --feedback": "serve --votes",
    "mcp --feedback": "mcp --votes",
    "evaluate --classes": "classify",
    "evaluate --templates": "classify",
    "evaluate --class-names": "classify",
    "evaluate --published": "papers evaluate",
    "evaluate --average": "papers evaluate",
    "evaluate --no-average": "papers evaluate",
    "catalog --paper": "papers list",
    "search --path": "search --filter",
    "search --kind": "search --filter",
    "search --after": "search --filter",
    "search --before": "search --filter",
    "search --metadata": "search --filter",
    "search --no-group-duplicates": "search --filter duplicates=show",
    "compare --trec": "evaluate --trec",
    "compare --model": "compare --grid",
    "compare --budget": "compare --minutes",
    "index --engine": "index --workers ray",
    "compare --engine": "compare --workers ray",
    "features --engine": "features --workers ray",
}
"""New words of commands and options that had other ones."""


class MovedName(VisavisError):
    """A command or an option has another name now.

    Args:
        name: Its earlier words, of `MOVED`.
    """

    def __init__(self, name: str):
        super().__init__(f"{name}: expected its new name. Run visavis {MOVED[name]}.")
        self.name = name


def panel_of(name: str) -> str | None:
    """Return the panel of a command or group, or None within a group."""
    return next((panel for panel, names in PANELS.items() if name in names), None)


def examples_of(function: Callable[..., Any]) -> str:
    """Return the end of the help of a command: the section ``Command line:`` of its function, one
    command per line.
    """
    commands = docstring_commands(function)
    if not commands:
        return ""
    # Click keeps the line breaks of a paragraph that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


class CommandWithMovedOptions(TyperCommand):
    """Command whose errors name the new words of moved options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        words = ctx.command_path.split()[1:]
        for argument in args:
            if (name := " ".join([*words, argument.partition("=")[0]])) in MOVED:
                raise MovedName(name)
        return super().parse_args(ctx, args)


class CommandGroup(TyperGroup):
    """Group whose help lists the commands by panel, as plain text, and whose errors name the new
    words of moved commands.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in MOVED:
            raise MovedName(cmd_name)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel."""
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
