"""Whether each claim has a place, a measure and limits, and whether its place exists.

The texts of the papers are not part of this project. Without them, only the form is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from visavis.losses import objectives

PROJECT = Path(__file__).resolve().parents[1]
TEXTS = {
    "unified": "unified_loss_html.txt",
    "ladder": "ladder_loss.txt",
    "goal": "goal.txt",
    "cocos": "cocos.txt",
}
"""Files with the texts of the papers."""
OURS = "visavis"
REQUIRED = ("statement", "paper", "place", "published", "measure", "limits")
LOCATORS = {
    r"sections? (\d+(?:\.\d+)*)": r"^\s*{}\.?\s+[A-Z]",
    r"tables? (\d+)": r"\bTable {}\b",
    r"figures? (\d+)": r"\b(?:Figure|Fig\.) {}\b",
    r"eqs?\. (\d+)": r"\({}[a-z]?\)",
    r"rows? (\d+\.\d+)": r"(?<![\d.]){}(?![\d.])",
}
"""Parts of a place, and the expression that finds each in the text of its paper."""


def faults(claims: Iterable[Mapping[str, Any]], texts: Path | None) -> Iterator[str]:
    """Each missing field, and each place that its paper does not have.

    Args:
        claims: The entries of ``docs/evidence/claims.toml``.
        texts: Folder of the texts of the papers. None if it is not available.
    """
    for claim in claims:
        missing = [key for key in REQUIRED if not str(claim.get(key, "")).strip()]
        if missing:
            yield f"{claim['name']}: no {', '.join(missing)}"
            continue
        if (claim["measure"] == "none" or claim["measure"].startswith("none.")) == (
            "test" in claim
        ):
            yield f"{claim['name']}: a measure and a test belong together"
        yield from (f"{claim['name']}: {fault}" for fault in place_faults(claim, texts))


def place_faults(claim: Mapping[str, Any], texts: Path | None) -> Iterator[str]:
    """What is wrong with the place and the published figures of one claim."""
    paper, place = claim["paper"], claim["place"]
    if paper == OURS:
        if not _exists_here(place):
            yield f"{place} does not exist"
        return
    if paper not in TEXTS:
        yield f"unknown paper {paper}"
        return
    if paper == "ladder" and re.search(r"section \d", place):
        yield "the Ladder paper has no section numbers. Name the heading"
    quoted = re.findall(r'"([^"]+)"', place)
    located = [
        (match[0], pattern.format(re.escape(match[1])))
        for locator, pattern in LOCATORS.items()
        for match in re.finditer(locator, re.sub(r'"[^"]+"', "", place))
    ]
    if not quoted and not located:
        yield f"{place!r} names no section, table, figure, equation or heading"
    if texts is None:
        return
    text = (texts / TEXTS[paper]).read_text()
    flat = " ".join(text.split())
    yield from (
        f"{name} is not in the paper"
        for name, pattern in located
        if not re.search(pattern, text, re.MULTILINE)
    )
    yield from (f"{words!r} is not in the paper" for words in quoted if words not in flat)
    for figure in re.findall(r"\d+\.\d+", claim["published"]):
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", flat):
            yield f"{figure} is not in the paper"


def _exists_here(place: str) -> bool:
    """Whether a page has a heading, or an objective a section of its docstring."""
    if match := re.fullmatch(r"docstring of (\w+), (\w+)", place):
        return f"{match[2]}:" in (getattr(objectives, match[1]).__doc__ or "")
    match = re.fullmatch(r'(docs/\S+\.md), "(.+)"', place)
    return match is not None and bool(
        re.search(rf"^#+ {re.escape(match[2])}$", (PROJECT / match[1]).read_text(), re.MULTILINE)
    )
