"""Words of synthetic captions, a little English grammar, and styles: the same things in other
colors and with other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Words of each shape in the styles "paper" and "glass".
_SHAPES = {
    "circle": (("circle", "disc", "ball"), ("coin",)),
    "star": (("star", "star", "five-pointed star"), ("spark",)),
    "square": (("square", "square", "box"), ("block",)),
    "heart": (("heart",), ("valentine",)),
    "triangle": (("triangle", "triangle", "pyramid"), ("wedge",)),
    "ring": (("ring", "hoop", "donut"), ("wreath",)),
    "flower": (("flower", "blossom"), ("bloom",)),
    "diamond": (("diamond", "rhombus"), ("lozenge",)),
    "crescent": (("crescent", "crescent moon", "sickle moon"), ("banana",)),
    "hexagon": (("hexagon", "six-sided tile"), ("honeycomb",)),
    "drop": (("drop", "teardrop", "raindrop"), ("bead",)),
    "cross": (("cross", "plus sign"), ("windmill",)),
}
GENERIC_NOUNS = ("thing", "shape", "object")
# Red, green and blue from 0 to 1, and words of each color, in the styles "paper" and "glass".
_COLORS = {
    "red": (
        ((0.88, 0.16, 0.18), ("red", "red", "crimson", "scarlet")),
        ((0.93, 0.38, 0.24), ("vermilion",)),
    ),
    "blue": (
        ((0.15, 0.36, 0.85), ("blue", "blue", "cobalt blue")),
        ((0.32, 0.70, 0.95), ("azure",)),
    ),
    "yellow": (
        ((0.99, 0.82, 0.16), ("yellow", "yellow", "golden", "lemon yellow")),
        ((0.93, 0.70, 0.10), ("saffron",)),
    ),
    "green": (
        ((0.18, 0.64, 0.28), ("green", "green", "emerald")),
        ((0.44, 0.52, 0.20), ("olive",)),
    ),
    "orange": (
        ((0.98, 0.52, 0.10), ("orange", "orange", "tangerine")),
        ((0.98, 0.74, 0.52), ("apricot",)),
    ),
    "purple": (((0.52, 0.24, 0.72), ("purple", "violet")), ((0.68, 0.52, 0.70), ("mauve",))),
    "white": (
        ((0.97, 0.97, 0.98), ("white", "white", "ivory")),
        ((0.88, 0.85, 0.76), ("chalk-colored",)),
    ),
    "pink": (
        ((0.98, 0.56, 0.74), ("pink", "pink", "rose-colored")),
        ((0.93, 0.42, 0.50), ("salmon",)),
    ),
    "teal": (((0.10, 0.70, 0.70), ("teal", "turquoise")), ((0.04, 0.44, 0.52), ("petrol",))),
    "black": (
        ((0.13, 0.13, 0.16), ("black", "black", "jet-black")),
        ((0.32, 0.32, 0.36), ("charcoal",)),
    ),
    "brown": (
        ((0.50, 0.30, 0.16), ("brown", "brown", "chestnut")),
        ((0.72, 0.48, 0.34), ("umber",)),
    ),
}
PATTERNS = {
    "plain": ("plain", "unpatterned"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted", "polka-dot"),
    "shiny": ("shiny", "glossy", "polished"),
    "checkered": ("checkered", "chequered"),
    "glowing": ("glowing", "luminous"),
}
PATTERN_SUFFIXES = {
    "striped": ("with stripes",),
    "dotted": ("with dots", "full of spots"),
    "checkered": ("with a checkered pattern",),
}
SIZES = {"large": ("large", "big", "huge"), "small": ("small", "little", "tiny")}
RELATIONS = {
    "left": ("to the left of", "left of", "on the left side of"),
    "above": ("above", "above", "higher up than"),
    "front": ("in front of", "partly covering", "covering a part of"),
    "inside": ("inside", "within"),
}
INVERSE_RELATIONS = {
    "left": ("to the right of", "right of", "on the right side of"),
    "above": ("below", "underneath", "lower down than"),
    "front": ("behind", "partly hidden by"),
    "inside": ("around", "surrounding"),
}
BACKGROUND_PHRASES = {
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
OPENINGS = (
    "",
    "",
    "",
    "a picture of ",  # language: quoted
    "there you see ",
    "we can see ",
    "look, ",
    "an image with ",
)
IDIOMS = (
    "as you find it once in a blue moon",
    "worth five gold stars",
    "drawn with a lot of heart",
    "fair and square",
    "what a day",
    "just like in a picture book",  # language: quoted
    "green with envy",
    "seen through rose-tinted glasses",
    "and nobody around",
    "a sight to remember",
)
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}


def with_article(phrase: str) -> str:
    """Put "a" or "an" before a phrase."""
    return f"{'an' if phrase[0] in 'aeio' or phrase.startswith('un') else 'a'} {phrase}"


def pluralize(noun: str) -> str:
    """Return the plural of the last word.

    Args:
        noun: The noun.

    Returns:
        Its plural.

    Example:
        >>> pluralize("plus sign"), pluralize("box"), pluralize("rhombus")
        ('plus signs', 'boxes', 'rhombuses')
    """
    return noun + ("es" if noun.endswith(("s", "x", "sh", "ch")) else "s")


def join_phrases(phrases: Sequence[str]) -> str:
    """Join phrases as a list: "a, b and c"."""
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


Words = Mapping[str, Sequence[str]]
Palette = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Style:
    """Colors and words of a synthetic data set.

    Attributes:
        palette: Red, green and blue of each color, from 0 to 1.
        shapes: Words of each shape.
        colors: Words of each color.
    """

    palette: Palette
    shapes: Words
    colors: Words


# Styles by name. "glass" has the positions, sizes, patterns and relations of "paper", but no common
# word for a color or shape.
STYLES = {
    name: Style(
        {color: styles[number][0] for color, styles in _COLORS.items()},
        {shape: styles[number] for shape, styles in _SHAPES.items()},
        {color: styles[number][1] for color, styles in _COLORS.items()},
    )
    for number, name in enumerate(("paper", "glass"))
}
DEFAULT_STYLE = STYLES["paper"]
