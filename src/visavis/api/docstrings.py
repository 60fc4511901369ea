"""Parts of Google-style docstrings: the summary, a named section, and the entries of ``Args``."""

from __future__ import annotations

import inspect
import re
from typing import Any

INLINE_SECTIONS = ("Formula:", "dL/ds", "Advice:", "Source:", "Special cases:", "Memory:", "Differs from:")
"""Labels that may begin a section in the middle of a paragraph."""


def docstring_summary(thing: Any) -> str:
    """Return the first paragraph of a docstring on one line.

    Args:
        thing: Function or class.

    Returns:
        The summary, empty without a docstring.
    """
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def docstring_section(thing: Any, label: str) -> str:
    """Return one section of a docstring on one line.

    Args:
        thing: Function or class.
        label: First words of the section, such as ``"Source:"``.

    Returns:
        Text of the section without the label, empty without such a section.
    """
    return " ".join(" ".join(_section_lines(thing, label)).split())


def docstring_arguments(function: Any) -> dict[str, str]:
    """Return the entries of the ``Args`` section.

    Args:
        function: Function with a Google-style docstring.

    Returns:
        Description of each parameter on one line, without literal backticks.
    """
    entries: dict[str, str] = {}
    name = ""
    for line in _section_lines(function, "Args:"):
        if entry := re.match(r" {4}(\w+): +(.*)", line):
            name, entries[entry[1]] = entry[1], entry[2]
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return {name: text.replace("``", "") for name, text in entries.items()}


def _section_lines(thing: Any, label: str) -> list[str]:
    """Lines of a section: those indented below its label, or those up to a blank line or another label."""
    section: list[str] = []
    inside = indented = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line.startswith(label):
            inside, line = True, line.removeprefix(label)
            indented = not line.strip()
        elif indented:
            inside = inside and (not line.strip() or line.startswith(" "))
        elif not line.strip() or line.startswith(INLINE_SECTIONS):
            inside = False
        if inside:
            section.append(line)
    return section
