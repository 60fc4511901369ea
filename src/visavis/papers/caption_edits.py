"""Minimal pairs of texts from captions: a true text, and the same text with one edit that makes it
false.

Edits use short lists of words, only where the words leave little doubt. It is not guaranteed that
the edited text is false, because nothing checks the image. An edit of a true text that follows from
the caption is a pair, too: "a girl is not sitting" of a caption "a girl is running".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from visavis.data.synthetic.scene import SHAPES
from visavis.data.words import tokenize

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
    "left of": "right of",
    "left side": "right side",
    "right of": "left of",
    "right side": "left side",
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
EXCLUSIVE = (("man", "woman"), ("boy", "girl"), ("dog", "cat", "horse", "bird"), SHAPES)
"""Groups of things, of which one is not another one."""
ADDED = (("dog", "ball", "bike", "hat", "car", "horse", "guitar", "tree"), SHAPES)
"""Things that an edit can add to a caption, in groups, so that both texts are of the same kind."""
ACTIONS = (
    "running",
    "sitting",
    "standing",
    "jumping",
    "walking",
    "sleeping",
    "swimming",
    "climbing",
    "lying",
    "riding",
)
"""Actions of which one is not another one."""
_ACTION_PHRASES = tuple(f"(?:is|are) {action}" for action in ACTIONS)
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
    *SHAPES,
)
"""People, animals and things that can exchange roles."""
ASYMMETRIC_WORDS = (
    "behind",
    "in front of",
    "on top of",
    "under",
    "above",
    "below",
    "left of",
    "right of",
    "left side",
    "right side",
    "inside",
    "chases",
    "chasing",
    "carries",
    "carrying",
    "holds",
    "holding",
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
)
"""Relations that hold between two actors in one direction only."""
SYMMETRIC_WORDS = frozenset(
    {"and", "with", "while", "other", "together", "near", "beside", "as"}
)  # language: quoted
"""Words that suggest a symmetric relation, in which an exchange of roles changes nothing."""


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
    # The article before the word must also fit the new one.
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
    # In "a black and white dog" both colors describe one thing.
    followers = {
        word[1] for color in matches if (word := re.match(r" ([a-z]+)", caption[color.end() :]))
    }
    if len(matches) != 2 or len(followers) != 2 or followers & {*COLORS, "and", "or"}:
        return ""
    first, second = (match[0] for match in matches)
    # The article before each color must also fit the other one.
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
    # The relation must stand between the actors.
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
    # Longer relations first: a pattern matches the first alternative that fits.
    match = _find_single(caption, sorted(OPPOSITES, key=len, reverse=True))
    return _replace(match, OPPOSITES[match[0]]) if match else ""


def negate(caption: str) -> str:
    """Negate the only listed action of a caption.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> negate("a dog is running")
        'a dog is not running'
    """
    match = _find_single(caption, _ACTION_PHRASES)
    # Another negation would not make a negated caption false.
    return (
        _replace(match, match[0].replace(" ", " not "))
        if match and {"not", "no"}.isdisjoint(tokenize(caption))
        else ""
    )


def replace_thing(
    caption: str,
    excluded: set[str],
    rng: np.random.Generator,
    groups: Sequence[tuple[str, ...]] = EXCLUSIVE,
) -> str:
    """Replace the only listed thing of a caption by another one of its group.

    Args:
        caption: The caption.
        excluded: Words of all captions of the image, which are not used.
        rng: Samples the new thing.
        groups: Groups of things.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> replace_thing("a man on a bike", {"a", "man", "on", "bike"}, np.random.default_rng(0))
        'a woman on a bike'
    """
    edited = (replace_word(caption, group, excluded, rng) for group in groups)
    return next(filter(None, edited), "")


def negate_other_action(
    caption: str, excluded: set[str], rng: np.random.Generator
) -> tuple[str, str] | None:
    """Negate an action that the caption excludes. Here the true text has the negation, so that the
    word "not" does not show which text is false.

    Args:
        caption: The caption.
        excluded: Words of all captions of the image, which are not used.
        rng: Samples the other action.

    Returns:
        The true and the false text. None if the caption has no action.

    Example:
        >>> negate_other_action("a dog is running", {"a", "dog", "is", "running"}, np.random.default_rng(1))
        ('a dog is not sleeping', 'a dog is sleeping')
    """
    match = _find_single(caption, _ACTION_PHRASES)
    others = [action for action in ACTIONS if action not in excluded]
    if not match or not others or not {"not", "no"}.isdisjoint(tokenize(caption)):
        return None
    verb = match[0].split()[0]
    action = others[int(rng.integers(len(others)))]
    return _replace(match, f"{verb} not {action}"), _replace(match, f"{verb} {action}")


def add_thing(caption: str, excluded: set[str], rng: np.random.Generator) -> tuple[str, str] | None:
    """Add a thing of another caption of the image, or else one of no caption. Both texts have the
    same length.

    Args:
        caption: The caption.
        excluded: Words of all captions of the image.
        rng: Samples the things.

    Returns:
        The true and the false text. None if the other captions name no thing to add.

    Example:
        >>> add_thing("a man runs", {"a", "man", "runs", "with", "dog"}, np.random.default_rng(0))
        ('a man runs with a dog', 'a man runs with a guitar')
    """
    own = set(tokenize(caption))
    body = caption.rstrip(" .")
    for things in ADDED:
        present = [thing for thing in things if thing in excluded - own and f"{thing}s" not in own]
        absent = [thing for thing in things if excluded.isdisjoint((thing, f"{thing}s"))]
        if present and absent:
            true, false = (
                f"{body} with a {words[int(rng.integers(len(words)))]}"
                for words in (present, absent)
            )
            return true, false
    return None


Edit = Callable[[str, set[str], np.random.Generator], tuple[str, str] | None]


def _of_caption(edit: Callable[[str, set[str], np.random.Generator], str]) -> Edit:
    """An edit of the caption itself."""

    def make(caption: str, words: set[str], rng: np.random.Generator) -> tuple[str, str] | None:
        edited = edit(caption, words, rng)
        return (caption, edited) if edited else None

    return make


EDITS: tuple[tuple[str, Edit], ...] = (
    (
        "color replaced",
        _of_caption(lambda text, words, rng: replace_word(text, COLORS, words, rng)),
    ),
    ("colors swapped", _of_caption(lambda text, *_: swap_colors(text))),
    ("thing replaced", _of_caption(replace_thing)),
    ("relation replaced", _of_caption(lambda text, *_: replace_relation(text))),
    ("roles swapped", _of_caption(lambda text, *_: swap_roles(text))),
    (
        "number replaced",
        _of_caption(lambda text, words, rng: replace_word(text, NUMBERS, words, rng)),
    ),
    ("thing added", add_thing),
    ("negated", _of_caption(lambda text, *_: negate(text))),
    ("negated", negate_other_action),
)
"""Edits by their kind: swap, replace, add and negate. An edit returns a true and a false text, or None
if it is not possible.
"""


@dataclass(frozen=True)
class TextPair:
    """A true and a false text of an image.

    Attributes:
        kind: Kind of edit.
        caption: Position among the captions of the image.
        true: The true text: the caption, or a text that follows from the captions.
        edited: The edited text, which is false.
    """

    kind: str
    caption: int
    true: str
    edited: str


def make_text_pairs(captions: Sequence[str], seed: Sequence[int]) -> list[TextPair]:
    """Make all minimal pairs of the captions of one image, each kind of edit in the order of the
    captions.

    Args:
        captions: Captions of the image.
        seed: Seed of the image.

    Returns:
        The pairs. No edited text has the words of a caption of the image in the same order.

    Example:
        >>> make_text_pairs(["A dog is running"], [0])[0].edited
        'A bird is running'
    """
    existing = {" ".join(tokenize(caption)) for caption in captions}
    # Words of any caption of the image may be true of it.
    words = {word for caption in existing for word in caption.split()}
    pairs = []
    for number, (kind, edit) in enumerate(EDITS):
        # Independent of which other captions could be edited.
        rng = np.random.default_rng([*seed, number])
        for position, caption in enumerate(captions):
            # Word lists are in lower case.
            pair = edit(caption[:1].lower() + caption[1:], words, rng)
            if pair is None or " ".join(tokenize(pair[1])) in existing:
                continue
            if not caption[0].islower():
                pair = pair[0][0].upper() + pair[0][1:], pair[1][0].upper() + pair[1][1:]
            pairs.append(TextPair(kind, position, *pair))
    return pairs


def _find_words(text: str, words: Sequence[str]) -> list[re.Match[str]]:
    # Whole words only, and no part of a word with a hyphen.
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
