"""Minimal pairs: a caption that is true of an image, and the same with one edit that makes it false.

Of drawn scenes both are written from the truth (``data.scenes.minimal_pairs``); here the user's own captions are edited by short lists of
words. An edit is made only where the words leave little doubt, and never one that another caption of the image already says. It cannot be
guaranteed that the edited caption is false: nobody looked at the picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset

COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange", "purple", "pink", "gray")
NUMBERS = ("two", "three", "four", "five", "six")
OPPOSITES = {
    "above": "below",
    "below": "above",
    "behind": "in front of",
    "in front of": "behind",
    "inside": "outside",
    "outside": "inside",
    "on top of": "underneath",
    "over a": "under a",
    "over the": "under the",
    "under": "over",
    "underneath": "on top of",
}
ACTORS = ("man", "woman", "boy", "girl", "dog", "cat", "horse", "child", "baby", "person", "lady", "bird", "bike", "ball")
ONE_SIDED = (
    *("behind", "in front of", "on top of", "under", "above", "below", "chases", "chasing", "carries", "carrying", "holds", "holding"),
    *("rides", "riding", "follows", "following", "throws", "throwing", "pulls", "pulling", "pushes", "pushing", "feeds", "feeding"),
)
"""What holds of two actors in one direction, not in the other."""
BOTH_SIDED = frozenset({"and", "with", "while", "other", "together", "near", "beside", "as"})


@dataclass(frozen=True)
class MinimalPair:
    """One case. kind: what was edited. image: the index of the image of which ``true`` is true and ``edited`` is not."""

    kind: str
    image: int
    true: str
    edited: str


def pairs_of_captions(data: Dataset, seed: int = 0) -> list[MinimalPair]:
    """Of every image and kind of edit at most one case, of the first of its captions that can be edited so."""
    found = []
    for image, own in enumerate(data.captions_of):
        captions = [data.captions[index] for index in own]
        said = {" ".join(tokenize(caption)) for caption in captions}
        words = {word for caption in said for word in caption.split()}
        for number, (kind, edit) in enumerate(EDITS.items()):
            rng = np.random.default_rng([seed, number, image])
            for caption in captions:
                edited = edit(caption[:1].lower() + caption[1:], words, rng)
                if edited and " ".join(tokenize(edited)) not in said:
                    found.append(MinimalPair(kind, image, caption, edited if caption[0].islower() else edited[0].upper() + edited[1:]))
                    break
    return found


def replaced(caption: str, words: tuple[str, ...], taken: set[str], rng: np.random.Generator) -> str:
    """The only one of these words in a caption becomes another, one that is not taken: that no caption of the image has."""
    found = _found(caption, words)
    others = [word for word in words if word not in taken and found and _article(word) == _article(found[0][0])]
    if len(found) != 1 or not others:
        return ""
    return caption[: found[0].start()] + others[int(rng.integers(len(others)))] + caption[found[0].end() :]


def swapped_colors(caption: str) -> str:
    """Two colors change places, if each stands before a word of its own: not in "a black and white dog"."""
    found = _found(caption, COLORS)
    followers = [re.match(r" ([a-z]+)", caption[match.end() :]) for match in found]
    apart = all(match is not None and match[1] not in (*COLORS, "and", "or") for match in followers)
    if len(found) != 2 or found[0][0] == found[1][0] or not apart or followers[0][1] == followers[1][1]:  # type: ignore[index]
        return ""
    if _article(found[0][0]) != _article(found[1][0]):
        return ""
    return _swapped(caption, *found)


def swapped_roles(caption: str) -> str:
    """Who does something, or is somewhere, and to whom: "a dog behind a man" becomes "a man behind a dog"."""
    found = _found(caption, ACTORS)
    if len(found) != 2 or found[0][0] == found[1][0]:
        return ""
    between = caption[found[0].end() : found[1].start()]
    if not _found(between, ONE_SIDED) or BOTH_SIDED & set(tokenize(caption)):
        return ""
    return _swapped(caption, *found)


def replaced_relation(caption: str) -> str:
    """The only relation of a caption becomes its opposite."""
    found = _found(caption, sorted(OPPOSITES, key=len, reverse=True))
    if len(found) != 1:
        return ""
    return caption[: found[0].start()] + OPPOSITES[found[0][0]] + caption[found[0].end() :]


def negated(caption: str) -> str:
    """The only "is" or "are" becomes "is not" or "are not"."""
    found = _found(caption, ("is", "are"))
    if len(found) != 1 or {"not", "no"} & set(tokenize(caption)):
        return ""
    return f"{caption[: found[0].end()]} not{caption[found[0].end() :]}"


def with_typo(caption: str, rng: np.random.Generator) -> str:
    """Two neighboring letters inside one of the longest words change places; the caption stays true, whoever reads past it."""
    words = [match for match in re.finditer(r"[A-Za-z]{4,}", caption) if len(set(match[0][1:])) > 1]
    if not words:
        return caption
    word = max(words, key=lambda match: len(match[0]))
    places = [place for place in range(word.start() + 1, word.end() - 1) if caption[place] != caption[place + 1]]
    place = places[int(rng.integers(len(places)))] if places else word.start()
    return caption[:place] + caption[place + 1] + caption[place] + caption[place + 2 :]


EDITS: dict[str, Callable[[str, set[str], np.random.Generator], str]] = {
    "color replaced": lambda caption, taken, rng: replaced(caption, COLORS, taken, rng),
    "colors swapped": lambda caption, *_: swapped_colors(caption),
    "relation replaced": lambda caption, *_: replaced_relation(caption),
    "roles swapped": lambda caption, *_: swapped_roles(caption),
    "number replaced": lambda caption, taken, rng: replaced(caption, NUMBERS, taken, rng),
    "negated": lambda caption, *_: negated(caption),
}
"""What the edits of own captions are called; an edit gives "" where it cannot be made."""


def _found(text: str, words: tuple[str, ...] | list[str]) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", text))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _swapped(caption: str, first: re.Match[str], second: re.Match[str]) -> str:
    between = caption[first.end() : second.start()]
    return caption[: first.start()] + second[0] + between + first[0] + caption[second.end() :]
