"""Minimal pairs of captions: a true caption, and the same caption with one edit that makes it
false.

Minimal pairs of synthetic scenes are written from the ground truth (``synthetic.captions``).
Here, captions of the user are edited with short word lists, only where the words leave little
doubt, and never into another caption of the image. It is not guaranteed that the edited caption is
false, because nobody checks the image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from visavis.data.dataset import Dataset
from visavis.data.vocabulary import tokenize

COLORS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "orange",
    "purple",
    "pink",
    "gray",
)
"""Color words."""
NUMBERS = ("two", "three", "four", "five", "six")
"""Number words."""
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
"""Each relation with its opposite."""
ACTORS = (
    "man",
    "woman",
    "boy",
    "girl",
    "dog",
    "cat",
    "horse",
    "child",
    "baby",
    "person",
    "lady",
    "bird",
    "bike",
    "ball",
)
"""People, animals and things that can exchange roles."""
ASYMMETRIC_WORDS = (
    *(
        "behind",
        "in front of",
        "on top of",
        "under",
        "above",
        "below",
        "chases",
        "chasing",
        "carries",
        "carrying",
        "holds",
        "holding",
    ),
    *(
        "rides",
        "riding",
        "follows",
        "following",
        "throws",
        "throwing",
        "pulls",
        "pulling",
        "pushes",
        "pushing",
        "feeds",
        "feeding",
    ),
)
"""Relations that hold between two actors in one direction only."""
SYMMETRIC_WORDS = frozenset(
    {"and", "with", "while", "other", "together", "near", "beside", "as"}
)  # language: quoted
"""Words that suggest a symmetric relation, in which an exchange of roles changes nothing."""


@dataclass(frozen=True)
class MinimalPair:
    """A true and a false caption of an image.

    Attributes:
        kind: Kind of edit.
        image: Index of the image.
        true: The true caption.
        edited: The edited caption, which is false.
    """

    kind: str
    image: int
    true: str
    edited: str


def make_minimal_pairs(data: Dataset, seed: int = 0) -> list[MinimalPair]:
    """Edit captions of a data set.

    Args:
        data: The data set.
        seed: Random seed.

    Returns:
        At most one pair for each image and kind of edit, from the first caption that can be edited.
    """
    pairs = []
    for image, indices in enumerate(data.captions_of):
        captions = [data.captions[index] for index in indices]
        existing = {" ".join(tokenize(caption)) for caption in captions}
        words = {word for caption in existing for word in caption.split()}
        for number, (kind, edit) in enumerate(EDITS.items()):
            rng = np.random.default_rng([seed, number, image])
            for caption in captions:
                edited = edit(caption[:1].lower() + caption[1:], words, rng)
                if edited and " ".join(tokenize(edited)) not in existing:
                    pairs.append(
                        MinimalPair(
                            kind,
                            image,
                            caption,
                            edited if caption[0].islower() else edited[0].upper() + edited[1:],
                        )
                    )
                    break
    return pairs


def replace_word(
    caption: str, words: tuple[str, ...], excluded: set[str], rng: np.random.Generator
) -> str:
    """Replace the only listed word of a caption by another one.

    Args:
        caption: The caption.
        words: Listed words, such as colors.
        excluded: Words of all captions of the image, which are not used.
        rng: Samples the new word.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> replace_word("a red ball", ("red", "blue"), {"a", "red", "ball"}, np.random.default_rng(0))
        'a blue ball'
    """
    match = _find_single(caption, words)
    candidates = [
        word
        for word in words
        if match and word not in excluded and _article(word) == _article(match[0])
    ]
    return (
        _replace(match, candidates[int(rng.integers(len(candidates)))])
        if match and candidates
        else ""
    )


def swap_colors(caption: str) -> str:
    """Exchange two colors, if a different word follows each: not in "a black and white dog".

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> swap_colors("a red ball on a blue box")
        'a blue ball on a red box'
    """
    matches = _find_words(caption, COLORS)
    followers = {
        word[1] for color in matches if (word := re.match(r" ([a-z]+)", caption[color.end() :]))
    }
    if len(matches) != 2 or len(followers) != 2 or followers & {*COLORS, "and", "or"}:
        return ""
    first, second = (match[0] for match in matches)
    return (
        _swap(caption, *matches) if first != second and _article(first) == _article(second) else ""
    )


def swap_roles(caption: str) -> str:
    """Exchange the two actors of an asymmetric relation.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> swap_roles("a dog behind a man")
        'a man behind a dog'
    """
    matches = _find_words(caption, ACTORS)
    if len(matches) != 2 or matches[0][0] == matches[1][0]:
        return ""
    between = caption[matches[0].end() : matches[1].start()]
    if not _find_words(between, ASYMMETRIC_WORDS) or SYMMETRIC_WORDS & set(tokenize(caption)):
        return ""
    return _swap(caption, *matches)


def replace_relation(caption: str) -> str:
    """Replace the only relation of a caption by its opposite.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> replace_relation("a dog under the table")
        'a dog over the table'
    """
    match = _find_single(caption, sorted(OPPOSITES, key=len, reverse=True))
    return _replace(match, OPPOSITES[match[0]]) if match else ""


def negate(caption: str) -> str:
    """Negate the only "is" or "are" of a caption.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> negate("a dog is running")
        'a dog is not running'
    """
    match = _find_single(caption, ("is", "are"))
    return (
        _replace(match, f"{match[0]} not")
        if match and {"not", "no"}.isdisjoint(tokenize(caption))
        else ""
    )


def add_typo(caption: str, rng: np.random.Generator) -> str:
    """Exchange two neighboring letters inside the longest word. The caption remains true and
    readable.

    Args:
        caption: The caption.
        rng: Samples the letters.

    Returns:
        The caption with the typo. Unchanged without a word of at least four letters.
    """
    words = [match for match in re.finditer(r"[A-Za-z]{4,}", caption) if len(set(match[0][1:])) > 1]
    if not words:
        return caption
    word = max(words, key=lambda match: len(match[0]))
    positions = [i for i in range(word.start() + 1, word.end() - 1) if caption[i] != caption[i + 1]]
    position = positions[int(rng.integers(len(positions)))] if positions else word.start()
    return caption[:position] + caption[position + 1] + caption[position] + caption[position + 2 :]


EDITS: dict[str, Callable[[str, set[str], np.random.Generator], str]] = {
    "color replaced": lambda caption, excluded, rng: replace_word(caption, COLORS, excluded, rng),
    "colors swapped": lambda caption, *_: swap_colors(caption),
    "relation replaced": lambda caption, *_: replace_relation(caption),
    "roles swapped": lambda caption, *_: swap_roles(caption),
    "number replaced": lambda caption, excluded, rng: replace_word(caption, NUMBERS, excluded, rng),
    "negated": lambda caption, *_: negate(caption),
}
"""Edits that make a caption false, by name. An edit returns an empty text if it is not possible."""


def _find_words(text: str, words: Sequence[str]) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", text))


def _find_single(text: str, words: Sequence[str]) -> re.Match[str] | None:
    matches = _find_words(text, words)
    return matches[0] if len(matches) == 1 else None


def _replace(match: re.Match[str], text: str) -> str:
    return match.string[: match.start()] + text + match.string[match.end() :]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _swap(caption: str, first: re.Match[str], second: re.Match[str]) -> str:
    between = caption[first.end() : second.start()]
    return caption[: first.start()] + second[0] + between + first[0] + caption[second.end() :]
