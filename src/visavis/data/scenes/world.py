"""The drawn world: what can be seen in it, how a scene is made up, and what is kept out of training.

A scene is a background and one to four things, each with a shape, color, pattern, size and place. How often a
shape or color occurs falls off as in Zipf's law, in the order of the lists below. Combinations in
`held_out_colors` and `held_out_relations` never occur in a training scene: a long tail to be tested on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from visavis.errors import DataError

BACKGROUNDS = ("meadow", "beach", "night", "snow", "table", "sea", "desert", "paper", "sunset", "forest")
SHAPES = ("circle", "star", "square", "heart", "triangle", "ring", "flower", "diamond", "crescent", "hexagon", "drop", "cross")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple", "white", "pink", "teal", "black", "brown")
PATTERNS = ("plain", "striped", "dotted", "shiny", "checkered", "glowing")
SIZES = ("large", "small")
ATTRIBUTES = {"shape": SHAPES, "color": COLORS, "pattern": PATTERNS, "size": SIZES}
RELATIONS = ("left", "above", "front", "inside")
"""a left: a is left of b; front: a covers a part of b; inside: a lies within b's outline."""

MOST_THINGS = 4
APART = 0.12
"""Share of the picture's side by which two centers must differ for one thing to be left of, or above, another."""

CONTAINERS = ("circle", "square", "ring", "hexagon")
CAMOUFLAGE = {
    "meadow": ("green",),
    "beach": (),
    "night": ("black", "purple"),
    "snow": ("white",),
    "table": ("brown", "orange"),
    "sea": ("blue", "teal"),
    "desert": ("orange", "brown"),
    "paper": ("white",),
    "sunset": ("orange", "purple"),
    "forest": ("green", "brown"),
}
"""Colors that would be lost on a background and are never put there."""


@dataclass(frozen=True)
class Thing:
    """One thing: what it is, its center and radius in shares of the picture's side, its angle in radians."""

    shape: str
    color: str
    pattern: str
    size: str
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.1
    angle: float = 0.0

    def __post_init__(self) -> None:
        for name, values in ATTRIBUTES.items():
            if (value := getattr(self, name)) not in values:
                raise DataError(f"a thing has the {name} {value!r}, expected one of {', '.join(values)}.")


@dataclass(frozen=True)
class Scene:
    """A background and things, drawn back to front; ``grain`` seeds the background's texture."""

    background: str
    things: tuple[Thing, ...]
    grain: int = 0

    def __post_init__(self) -> None:
        if self.background not in BACKGROUNDS or len(self.things) > MOST_THINGS:
            raise DataError(
                f"a scene has {len(self.things)} things on {self.background!r}, expected at most {MOST_THINGS} on a known background."
            )

    @cached_property
    def relations(self) -> frozenset[tuple[int, str, int]]:
        """All true relations: (index of a, relation, index of b)."""
        relations = set()
        for i, a in enumerate(self.things):
            for j, b in enumerate(self.things):
                distance = math.hypot(a.x - b.x, a.y - b.y)
                if b.x - a.x > APART:
                    relations.add((i, "left", j))
                if b.y - a.y > APART:
                    relations.add((i, "above", j))
                if i > j and distance < 0.25 * b.radius:
                    relations.add((i, "inside", j))
                elif i > j and distance < 0.98 * (a.radius + b.radius):
                    relations.add((i, "front", j))
        return frozenset(relations)

    @property
    def held_out(self) -> bool:
        """True if some combination in it never occurs in training."""
        if any((thing.shape, thing.color) in held_out_colors for thing in self.things):
            return True
        return any((self.things[i].shape, name, self.things[j].shape) in held_out_relations for i, name, j in self.relations)

    def to_json(self) -> dict[str, Any]:
        return {"background": self.background, "things": [asdict(thing) for thing in self.things], "grain": self.grain}


held_out_colors = frozenset((shape, COLORS[(5 * i + 3) % len(COLORS)]) for i, shape in enumerate(SHAPES))
"""(shape, color): one color of each shape, such as a green circle."""

held_out_relations = frozenset(
    (a, relation, b)
    for k, relation in enumerate(RELATIONS)
    for i, a in enumerate(SHAPES)
    for j, b in enumerate(SHAPES)
    if (5 * i + 7 * j + 3 * k) % 24 == 4
)
"""(shape, relation, shape): six ordered pairs of shapes for each relation."""


def zipf(count: int) -> np.ndarray:
    """Frequencies that fall off with rank: 1 / (rank + 1), rank from 1, summing to 1."""
    weights = 1.0 / np.arange(2, count + 2)
    return weights / weights.sum()


def draw_scene(rng: np.random.Generator, *, training: bool) -> Scene:
    """A random scene. In training without held-out combinations; else a third of the scenes are drawn to contain one."""
    held_out = False if training else True if rng.random() < 1 / 3 else None
    while True:
        scene = _compose(rng)
        if held_out is None or scene.held_out == held_out:
            return scene


def redraw(scene: Scene, rng: np.random.Generator) -> Scene:
    """The same graph drawn anew: places, sizes and angles a little different, another grain of the background."""
    while True:
        things = tuple(
            replace(
                thing,
                x=_clip(thing.x + rng.uniform(-0.015, 0.015)),
                y=_clip(thing.y + rng.uniform(-0.015, 0.015)),
                radius=round(thing.radius * rng.uniform(0.97, 1.03), 4),
                angle=round(thing.angle + rng.uniform(-0.1, 0.1), 4),
            )
            for thing in scene.things
        )
        again = Scene(scene.background, things, int(rng.integers(2**31)))
        if again.relations == scene.relations:
            return again


def _compose(rng: np.random.Generator) -> Scene:
    background = _pick(rng, BACKGROUNDS)
    colors = [color for color in COLORS if color not in CAMOUFLAGE[background]]
    frequencies = zipf(len(COLORS))[[COLORS.index(color) for color in colors]]
    frequencies /= frequencies.sum()
    things: list[Thing] = []
    for _ in range(int(rng.choice(MOST_THINGS, p=(0.14, 0.34, 0.32, 0.2))) + 1):
        color = colors[int(rng.choice(len(colors), p=frequencies))]
        thing = Thing(_pick(rng, SHAPES, zipf(len(SHAPES))), color, _pattern(rng, background), _pick(rng, SIZES))
        if things and rng.random() < 0.2:
            thing = replace(thing, shape=things[-1].shape, color=things[-1].color, pattern=things[-1].pattern)
        things.append(thing)
    if len(things) > 1 and things[0].shape in CONTAINERS and things[0].color != things[1].color and rng.random() < 0.7:
        things[:2] = replace(things[0], size="large"), replace(things[1], size="small")
    return Scene(background, _arrange(things, rng), int(rng.integers(2**31)))


def _pattern(rng: np.random.Generator, background: str) -> str:
    if background == "night" and rng.random() < 0.25:
        return "glowing"
    return _pick(rng, PATTERNS, np.array([0.32, 0.17, 0.15, 0.15, 0.12, 0.09]))


def _arrange(things: Sequence[Thing], rng: np.random.Generator) -> tuple[Thing, ...]:
    """The things at places where none touches another, save one that lies in front of, or inside, the one before."""
    placed: list[Thing] = []
    while len(placed) < len(things):
        placed, touching = [], rng.random() < 0.6
        for thing in things:
            radius = rng.uniform(0.165, 0.205) if thing.size == "large" else rng.uniform(0.085, 0.105)
            angle = rng.normal(0.0, 0.18)
            free = placed
            for _ in range(30):
                x, y = rng.uniform(radius + 0.01, 0.99 - radius, 2)
                if touching and len(placed) == 1:
                    x, y, radius = _touch(placed[0], thing, radius, rng)
                    free = []
                outside = min(x, y) < radius or max(x, y) > 1 - radius
                if not outside and all(math.hypot(x - o.x, y - o.y) > radius + o.radius + 0.01 for o in free):
                    placed.append(replace(thing, x=_clip(x), y=_clip(y), radius=round(radius, 4), angle=round(angle, 4)))
                    break
            else:
                break
    return tuple(placed)


def _touch(under: Thing, thing: Thing, radius: float, rng: np.random.Generator) -> tuple[float, float, float]:
    """A place and radius inside ``under`` if it can hold the thing, else across its edge."""
    fits = under.size == "large" and thing.size == "small" and under.shape in CONTAINERS and under.color != thing.color
    if fits and rng.random() < 0.8:
        return under.x, under.y, 0.5 * under.radius if under.shape == "ring" else min(radius, 0.52 * under.radius)
    distance = 0.75 * max(radius, under.radius) + 0.6 * min(radius, under.radius)
    direction = rng.uniform(0, 2 * math.pi)
    return under.x + distance * math.cos(direction), under.y + distance * math.sin(direction), radius


def _pick(rng: np.random.Generator, words: Sequence[str], frequencies: np.ndarray | None = None) -> str:
    return words[int(rng.choice(len(words), p=frequencies))]


def _clip(place: float) -> float:
    return round(min(max(float(place), 0.05), 0.95), 4)
