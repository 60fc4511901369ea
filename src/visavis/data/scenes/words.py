"""The vocabulary of captions: every word of the world in several ways, and a little English grammar."""

from __future__ import annotations

from collections.abc import Sequence

SHAPES = {
    "circle": ("circle", "disc", "ball"),
    "star": ("star", "star", "five-pointed star"),
    "square": ("square", "square", "box"),
    "heart": ("heart",),
    "triangle": ("triangle", "triangle", "pyramid"),
    "ring": ("ring", "hoop", "donut"),
    "flower": ("flower", "blossom"),
    "diamond": ("diamond", "rhombus"),
    "crescent": ("crescent", "crescent moon", "sickle moon"),
    "hexagon": ("hexagon", "six-sided tile"),
    "drop": ("drop", "teardrop", "raindrop"),
    "cross": ("cross", "plus sign"),
}
ANYTHING = ("thing", "shape", "object")
COLORS = {
    "red": ("red", "red", "crimson", "scarlet"),
    "blue": ("blue", "blue", "cobalt blue"),
    "yellow": ("yellow", "yellow", "golden", "lemon yellow"),
    "green": ("green", "green", "emerald"),
    "orange": ("orange", "orange", "tangerine"),
    "purple": ("purple", "violet"),
    "white": ("white", "white", "ivory"),
    "pink": ("pink", "pink", "rose-colored"),
    "teal": ("teal", "turquoise"),
    "black": ("black", "black", "jet-black"),
    "brown": ("brown", "brown", "chestnut"),
}
PATTERNS = {
    "plain": ("plain", "unpatterned"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted", "polka-dot"),
    "shiny": ("shiny", "glossy", "polished"),
    "checkered": ("checkered", "chequered"),
    "glowing": ("glowing", "luminous"),
}
TAILS = {"striped": ("with stripes",), "dotted": ("with dots", "full of spots"), "checkered": ("with a checkered pattern",)}
SIZES = {"large": ("large", "big", "huge"), "small": ("small", "little", "tiny")}
RELATIONS = {
    "left": ("to the left of", "left of", "on the left side of"),
    "above": ("above", "above", "higher up than"),
    "front": ("in front of", "partly covering", "covering a part of"),
    "inside": ("inside", "within"),
}
CONVERSES = {
    "left": ("to the right of", "right of", "on the right side of"),
    "above": ("below", "underneath", "lower down than"),
    "front": ("behind", "partly hidden by"),
    "inside": ("around", "surrounding"),
}
PLACES = {
    "meadow": ("in a meadow", "in a green meadow", "among the grassy hills", "on a spring meadow"),
    "beach": ("on a beach", "on the beach", "at the seaside"),
    "night": ("in the night sky", "under the stars at night", "on a starry night"),
    "snow": ("in the snow", "on a snowy day", "in a winter landscape"),
    "table": ("on a wooden table", "on the table", "on wooden boards"),
    "sea": ("under water", "deep in the sea", "at the bottom of the sea"),
    "desert": ("in the desert", "among the sand dunes", "in a sandy desert"),
    "paper": ("on squared paper", "on a sheet of paper", "on a page of a notebook"),
    "sunset": ("at sunset", "in the evening light", "as the sun goes down"),
    "forest": ("in a forest", "in the woods", "among the trees"),
}
OPENINGS = ("", "", "", "a picture of ", "there you see ", "we can see ", "look, ", "an image with ")
IDIOMS = (
    "as you find it once in a blue moon",
    "worth five gold stars",
    "drawn with a lot of heart",
    "fair and square",
    "what a day",
    "just like in a picture book",
    "green with envy",
    "seen through rose-tinted glasses",
    "and nobody around",
    "a sight to remember",
)
NUMBERS = {2: "two", 3: "three", 4: "four"}


def article(phrase: str) -> str:
    """``phrase`` behind "a" or "an"."""
    return f"{'an' if phrase[0] in 'aeio' or phrase.startswith('un') else 'a'} {phrase}"


def plural(noun: str) -> str:
    """The plural of the last word.

    >>> plural("plus sign"), plural("box"), plural("rhombus")
    ('plus signs', 'boxes', 'rhombuses')
    """
    return noun + ("es" if noun.endswith(("s", "x", "sh", "ch")) else "s")


def join(phrases: Sequence[str]) -> str:
    """Phrases as a list: "a, b and c"."""
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)
