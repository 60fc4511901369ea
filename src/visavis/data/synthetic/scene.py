"""Synthetic scenes: their content, how they are sampled, and which combinations are held out of
training.

A scene is a background and one to four things, each with a shape, color, pattern, size and
position. Shapes and colors follow Zipf's law in the order of the lists below. Combinations in
``HELD_OUT_COLORS`` and ``HELD_OUT_RELATIONS`` never occur in a training scene: they test
generalization to a long tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from visavis.core.errors import DataError

T = TypeVar("T")

BACKGROUNDS = (
    "meadow",
    "beach",
    "night",
    "snow",
    "table",
    "sea",
    "desert",
    "paper",
    "sunset",
    "forest",
)
SHAPES = (
    "circle",
    "star",
    "square",
    "heart",
    "triangle",
    "ring",
    "flower",
    "diamond",
    "crescent",
    "hexagon",
    "drop",
    "cross",
)
COLORS = (
    "red",
    "blue",
    "yellow",
    "green",
    "orange",
    "purple",
    "white",
    "pink",
    "teal",
    "black",
    "brown",
)
PATTERNS = ("plain", "striped", "dotted", "shiny", "checkered", "glowing")
PATTERN_FREQUENCIES = np.array([0.32, 0.17, 0.15, 0.15, 0.12, 0.09])
SIZES = ("large", "small")
ATTRIBUTES = {"shape": SHAPES, "color": COLORS, "pattern": PATTERNS, "size": SIZES}
# left: a is left of b. above: a is above b. front: a covers a part of b. inside: a is within the
# outline of b.
RELATIONS = ("left", "above", "front", "inside")

MAX_OBJECTS = 4
# Share of the image's side by which two centers differ if one thing is left of, or above, another.
MIN_SEPARATION = 0.12

CONTAINERS = ("circle", "square", "ring", "hexagon")
# Colors that are hard to see on a background and are never used there.
EXCLUDED_COLORS = {
    "meadow": ("green",),
    "night": ("black", "purple"),
    "snow": ("white",),
    "table": ("brown", "orange"),
    "sea": ("blue", "teal"),
    "desert": ("orange", "brown"),
    "paper": ("white",),
    "sunset": ("orange", "purple"),
    "forest": ("green", "brown"),
}


@dataclass(frozen=True)
class SceneObject:
    """One thing.

    Attributes:
        shape: Its shape.
        color: Its color.
        pattern: Its pattern.
        size: Large or small.
        x: Horizontal center, as a share of the image's side.
        y: Vertical center, downwards, as a share of the image's side.
        radius: Radius, as a share of the image's side.
        angle: Rotation in radians.
    """

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
                raise DataError(
                    f"{name} of a thing: expected one of {', '.join(values)}, got {value!r}."
                )


@dataclass(frozen=True)
class Scene:
    """A background and things.

    Attributes:
        background: The background.
        things: The things from back to front.
        grain: Seed of the background's texture.
    """

    background: str
    things: tuple[SceneObject, ...]
    grain: int = 0

    def __post_init__(self) -> None:
        if self.background not in BACKGROUNDS or len(self.things) > MAX_OBJECTS:
            raise DataError(
                f"a scene: expected at most {MAX_OBJECTS} things on a known background, got "
                f"{len(self.things)} on {self.background!r}."
            )

    @cached_property
    def relations(self) -> frozenset[tuple[int, str, int]]:
        """All true relations: index of a, relation, index of b."""
        relations = set()
        for i, a in enumerate(self.things):
            for j, b in enumerate(self.things):
                distance = math.hypot(a.x - b.x, a.y - b.y)
                if b.x - a.x > MIN_SEPARATION:
                    relations.add((i, "left", j))
                if b.y - a.y > MIN_SEPARATION:
                    relations.add((i, "above", j))
                if i > j and distance < 0.25 * b.radius:
                    relations.add((i, "inside", j))
                elif i > j and distance < 0.98 * (a.radius + b.radius):
                    relations.add((i, "front", j))
        return frozenset(relations)

    @property
    def has_held_out_combination(self) -> bool:
        """Whether a combination in it never occurs in training."""
        return any((thing.shape, thing.color) in HELD_OUT_COLORS for thing in self.things) or any(
            (self.things[i].shape, name, self.things[j].shape) in HELD_OUT_RELATIONS
            for i, name, j in self.relations
        )


# Shape and color: one color of each shape, such as a green circle.
HELD_OUT_COLORS = frozenset(
    (shape, COLORS[(5 * i + 3) % len(COLORS)]) for i, shape in enumerate(SHAPES)
)

# Shape, relation, shape: six ordered pairs of shapes for each relation.
HELD_OUT_RELATIONS = frozenset(
    (a, relation, b)
    for k, relation in enumerate(RELATIONS)
    for i, a in enumerate(SHAPES)
    for j, b in enumerate(SHAPES)
    if (5 * i + 7 * j + 3 * k) % 24 == 4
)


def zipf_frequencies(count: int) -> np.ndarray:
    """Return frequencies proportional to 1 / (rank + 1), with ranks from 1 and a sum of 1."""
    weights = 1.0 / np.arange(2, count + 2)
    return weights / weights.sum()


def pick(
    rng: np.random.Generator, choices: Sequence[T], frequencies: np.ndarray | None = None
) -> T:
    """Sample one of several values. All are equally frequent by default."""
    return choices[int(rng.choice(len(choices), p=frequencies))]


def sample_scene(rng: np.random.Generator, *, training: bool) -> Scene:
    """Sample a scene.

    Args:
        rng: Random generator.
        training: Whether to avoid held-out combinations. Otherwise a third of the scenes is sampled
            to have one.

    Returns:
        The scene.
    """
    must_have_held_out = False if training else True if rng.random() < 1 / 3 else None
    while True:
        background = pick(rng, BACKGROUNDS)
        colors = [color for color in COLORS if color not in EXCLUDED_COLORS.get(background, ())]
        frequencies = zipf_frequencies(len(COLORS))[[COLORS.index(color) for color in colors]]
        # Without the excluded colors, the others keep their proportions.
        frequencies /= frequencies.sum()
        things: list[SceneObject] = []
        for _ in range(int(rng.choice(MAX_OBJECTS, p=(0.14, 0.34, 0.32, 0.2))) + 1):
            # The order of the calls of the generator is a part of a seed.
            color = pick(rng, colors, frequencies)
            shape = pick(rng, SHAPES, zipf_frequencies(len(SHAPES)))
            is_glowing = background == "night" and rng.random() < 0.25
            pattern = "glowing" if is_glowing else pick(rng, PATTERNS, PATTERN_FREQUENCIES)
            size = pick(rng, SIZES)
            if things and rng.random() < 0.2:
                last = things[-1]
                shape = last.shape
                color = last.color
                pattern = last.pattern
            things.append(SceneObject(shape, color, pattern, size))
        if (
            len(things) > 1
            and things[0].shape in CONTAINERS
            and things[0].color != things[1].color
            and rng.random() < 0.7
        ):
            things[:2] = replace(things[0], size="large"), replace(things[1], size="small")
        scene = Scene(background, _arrange(things, rng), int(rng.integers(2**31)))
        if must_have_held_out is None or scene.has_held_out_combination == must_have_held_out:
            return scene


def resample_layout(scene: Scene, rng: np.random.Generator) -> Scene:
    """Make a near-duplicate: slightly different positions, sizes and angles, and another texture of
    the background.

    Args:
        scene: The scene.
        rng: Random generator.

    Returns:
        A scene with the same relations.
    """
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
        duplicate = Scene(scene.background, things, int(rng.integers(2**31)))
        if duplicate.relations == scene.relations:
            return duplicate


def _arrange(things: Sequence[SceneObject], rng: np.random.Generator) -> tuple[SceneObject, ...]:
    """Place the things so that none touches another, except one that is in front of, or inside, the
    previous one.
    """
    placed: list[SceneObject] = []
    while len(placed) < len(things):
        placed = []
        touching = rng.random() < 0.6
        for thing in things:
            radius = (
                rng.uniform(0.165, 0.205) if thing.size == "large" else rng.uniform(0.085, 0.105)
            )
            angle = rng.normal(0.0, 0.18)
            free = placed
            # A crowded scene is begun again instead of trying for long.
            for _ in range(30):
                x, y = rng.uniform(radius + 0.01, 0.99 - radius, 2)
                if touching and len(placed) == 1:
                    x, y, radius = _touch(placed[0], thing, radius, rng)
                    free = []
                outside = min(x, y) < radius or max(x, y) > 1 - radius
                if not outside and all(
                    math.hypot(x - neighbor.x, y - neighbor.y) > radius + neighbor.radius + 0.01
                    for neighbor in free
                ):
                    placed.append(
                        replace(
                            thing,
                            x=_clip(x),
                            y=_clip(y),
                            radius=round(radius, 4),
                            angle=round(angle, 4),
                        )
                    )
                    break
            else:
                break
    return tuple(placed)


def _touch(
    under: SceneObject, thing: SceneObject, radius: float, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return a position and radius inside ``under`` if it can contain the thing, else across its
    edge.
    """
    can_contain = (
        under.size == "large"
        and thing.size == "small"
        and under.shape in CONTAINERS
        and under.color != thing.color
    )
    if can_contain and rng.random() < 0.8:
        return (
            under.x,
            under.y,
            0.5 * under.radius if under.shape == "ring" else min(radius, 0.52 * under.radius),
        )
    # Less than the sum of the radii, so that the two overlap.
    distance = 0.75 * max(radius, under.radius) + 0.6 * min(radius, under.radius)
    direction = rng.uniform(0, 2 * math.pi)
    return (
        under.x + distance * math.cos(direction),
        under.y + distance * math.sin(direction),
        radius,
    )


def _clip(position: float) -> float:
    return round(min(max(float(position), 0.05), 0.95), 4)
