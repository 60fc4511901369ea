"""How a world looks and speaks: the same things in other paint and under other names, as another data set would have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from visavis.data.scenes.draw import PAINT, Paint
from visavis.data.scenes.words import COLORS, SHAPES

Words = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Style:
    """paint: red, green and blue of each color, from 0 to 1. shapes, colors: the words of a caption for each of the world's own."""

    paint: Paint
    shapes: Words
    colors: Words


STYLES = {
    "paper": Style(PAINT, SHAPES, COLORS),
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
"""By name. "paper" is the world as it was first drawn; "glass" shares its places, sizes, patterns and relations, and no color or shape's name."""
PAPER = STYLES["paper"]
