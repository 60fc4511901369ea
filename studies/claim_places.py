"""Whether each claim has a statement in our words, a place, a measure and limits, and whether its
place exists.

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
    "section": r"^\s*{}\.?\s+[A-Z]",
    "table": r"\bTable {}\b",
    "figure": r"\b(?:Figure|Fig\.) {}\b",
    "eq": r"\({}[a-z]?\)",
    "row": r"(?<![\d.]){}(?![\d.])",
}
"""Numbered parts of a paper, and the expression that finds a number of each in its text."""
COPIED_WORDS = 9
"""Number of consecutive words that count as a copy. Names of methods and terms have up to 8."""
NUMBER = r"\d+(?:\.\d+)*"
LOCATED = re.compile(
    rf"\b({'|'.join(LOCATORS)})s?\.? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)", re.IGNORECASE
)


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
    paper = claim["paper"]
    place = claim["place"]
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
    located = located_numbers(place)
    if not quoted and not located:
        yield f"{place!r} names no section, table, figure, equation or heading"
    if texts is None:
        return
    text = (texts / TEXTS[paper]).read_text()
    flat = " ".join(text.split())
    yield from missing_numbers(located, text)
    yield from (f"{words!r} is not in the paper" for words in quoted if words not in flat)
    if copied := copied_words(claim["statement"], flat):
        yield f"{copied!r} is in words of the paper. State the claim in other words"
    for figure in re.findall(r"\d+\.\d+", claim["published"]):
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", flat):
            yield f"{figure} is not in the paper"


def copied_words(statement: str, text: str) -> str:
    """The first words of a statement that its paper has in the same order, or nothing."""
    ours, printed = (re.findall(r"\w+", words.lower()) for words in (statement, text))
    spaced = f" {' '.join(printed)} "
    parts = (" ".join(ours[i : i + COPIED_WORDS]) for i in range(len(ours) - COPIED_WORDS + 1))
    return next((part for part in parts if f" {part} " in spaced), "")


def located_numbers(place: str) -> list[tuple[str, str]]:
    """Each part and its number that a place names outside of quotation marks."""
    return [
        (match[1].lower(), number)
        for match in LOCATED.finditer(re.sub(r'"[^"]*"', "", place))
        for number in re.findall(NUMBER, match[2])
    ]


def missing_numbers(located: Iterable[tuple[str, str]], text: str) -> Iterator[str]:
    """Each named part that the text of a paper does not have."""
    for part, number in located:
        if not re.search(LOCATORS[part].format(re.escape(number)), text, re.MULTILINE):
            yield f"{part} {number} is not in the paper"


def _exists_here(place: str) -> bool:
    """Whether a page has a heading, or an objective a section of its docstring."""
    if match := re.fullmatch(r"docstring of (\w+), (\w+)", place):
        return f"{match[2]}:" in (getattr(objectives, match[1]).__doc__ or "")
    match = re.fullmatch(r'(docs/\S+\.md), "(.+)"', place)
    return match is not None and bool(
        re.search(rf"^#+ {re.escape(match[2])}$", (PROJECT / match[1]).read_text(), re.MULTILINE)
    )
