"""Words of synthetic captions, a little English grammar, and styles: the same things in other colors and with other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from visavis.synthetic.rendering import DEFAULT_PALETTE, Palette

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
GENERIC_NOUNS = ("thing", "shape", "object")
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
PATTERN_SUFFIXES = {"striped": ("with stripes",), "dotted": ("with dots", "full of spots"), "checkered": ("with a checkered pattern",)}
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
OPENINGS = ("", "", "", "a picture of ", "there you see ", "we can see ", "look, ", "an image with ")  # language: quoted
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
    """Put "a" or "an" before a phrase.

    Args:
        phrase: The phrase.

    Returns:
        The phrase with its article.
    """
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
    """Join phrases as a list: "a, b and c".

    Args:
        phrases: The phrases.

    Returns:
        The list as a text.
    """
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


Words = Mapping[str, Sequence[str]]


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


# Styles by name. "glass" has the positions, sizes, patterns and relations of "paper", but no common word for a color or shape.
STYLES = {
    "paper": Style(DEFAULT_PALETTE, SHAPES, COLORS),
    "glass": Style(
        {
            "red": (0.93, 0.38, 0.24),
            "blue": (0.32, 0.70, 0.95),
            "yellow": (0.93, 0.70, 0.10),
            "green": (0.44, 0.52, 0.20),
            "orange": (0.98, 0.74, 0.52),
            "purple": (0.68, 0.52, 0.70),
            "white": (0.88, 0.85, 0.76),
            "pink": (0.93, 0.42, 0.50),
            "teal": (0.04, 0.44, 0.52),
            "black": (0.32, 0.32, 0.36),
            "brown": (0.72, 0.48, 0.34),
        },
        {
            "circle": ("coin",),
            "star": ("spark",),
            "square": ("block",),
            "heart": ("valentine",),
            "triangle": ("wedge",),
            "ring": ("wreath",),
            "flower": ("bloom",),
            "diamond": ("lozenge",),
            "crescent": ("banana",),
            "hexagon": ("honeycomb",),
            "drop": ("bead",),
            "cross": ("windmill",),
        },
        {
            "red": ("vermilion",),
            "blue": ("azure",),
            "yellow": ("saffron",),
            "green": ("olive",),
            "orange": ("apricot",),
            "purple": ("mauve",),
            "white": ("chalk-colored",),
            "pink": ("salmon",),
            "teal": ("petrol",),
            "black": ("charcoal",),
            "brown": ("umber",),
        },
    ),
}
DEFAULT_STYLE = STYLES["paper"]
