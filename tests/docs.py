"""Code blocks and commands of the README and of the pages in docs."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
PAGES = [
    "README.md",
    *sorted(path.relative_to(PROJECT).as_posix() for path in DOCS.rglob("*.md")),
]
"""README and all pages, relative to the project."""

_PATTERN = re.compile(
    r'^(?P<level>##|###) (?P<heading>[^\n]+)$|^=== "(?P<tab>[^"\n]+)"$'
    r'|^ *```(?P<language>\w*)(?: title="(?P<file>[^"\n]+)")?\n(?P<text>.*?)^ *```$',
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: Its language. Empty for output.
        text: Its content.
        file: The file that it shows or changes, if it has a title.
        section: The heading of level 2 above it.
        subsection: The heading of level 3 above it.
        tab: The tab that holds it.
        output: Output of the code: the block without language that follows directly.
    """

    language: str
    text: str
    file: str
    section: str
    subsection: str
    tab: str
    output: str | None = None


def read_blocks(page: str, *languages: str) -> list[Block]:
    """Read the blocks of a page in order. Without languages: all of them."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    blocks, section, subsection, tab, end = list[Block](), "", "", "", -1
    for match in _PATTERN.finditer(text):
        if match["heading"]:
            is_section = match["level"] == "##"
            section, subsection = (
                (match["heading"], "") if is_section else (section, match["heading"])
            )
            tab = ""
        elif match["tab"]:
            tab = match["tab"]
        elif match["language"] == "" and match.start() == end + 1:
            blocks[-1] = blocks[-1]._replace(output=match["text"])
        else:
            content, file = textwrap.dedent(match["text"]), match["file"] or ""
            blocks.append(Block(match["language"], content, file, section, subsection, tab))
            end = match.end()
    return [block for block in blocks if not languages or block.language in languages]


def split_commands(text: str) -> list[list[str]]:
    """The visavis commands of a shell block, as lists of words after the name."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines]
    return [
        shlex.split(line, comments=True)[1:] for line in commands if line.startswith("visavis ")
    ]


def console_commands(page: str) -> list[list[str]]:
    """The commands that a page shows with their output, in order."""
    return [words for block in read_blocks(page, "console") for words in split_commands(block.text)]


def patch_file(text: str, diff: str) -> str:
    """A file after a diff without line numbers. The replaced lines must occur once."""
    lines = diff.splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-"
    )
    assert text.count(before) == 1, before
    return text.replace(before, after)
