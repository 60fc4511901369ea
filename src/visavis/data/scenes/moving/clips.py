"""Clips of the drawn world: things at home, and what they do one after another.

An event takes a thing away from how it is at home and back again, so that events can change places: the clip has the same frames then,
in another order. A crossing goes from one side to the other and does not come back; played backwards it is the opposite crossing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from visavis.data.scenes.world import Scene, Thing
from visavis.errors import DataError

SHAPES = ("circle", "star", "square", "heart")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple")
BACKGROUNDS = ("paper", "snow", "table", "night")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITES = {"left": "right", "right": "left", "up": "down", "down": "up"}
DOINGS = (*DIRECTIONS, "vanish", "grow", "change", "meet")
SOUNDS = ("bell", "drum", "whistle", "buzz", "splash")

HOMES = tuple((x, y) for x in (0.35, 0.5, 0.65) for y in (0.35, 0.5, 0.65))
RADIUS, REACH, GROWN, CHANGED = 0.1, 0.25, 1.6, "white"
AMOUNTS = (0.0, 0.5, 1.0)
"""How far an event has gone, frame by frame; the frame after is at home again."""
CROSSING = 7
"""Frames of a crossing."""


@dataclass(frozen=True)
class Event:
    """What one thing does for a moment, by its index, and with which sound ("": none)."""

    thing: int
    doing: str
    sound: str = ""

    def __post_init__(self) -> None:
        if self.doing not in DOINGS or self.sound not in ("", *SOUNDS):
            raise DataError(f"an event is {self.doing!r} with the sound {self.sound!r}, expected one of {', '.join(DOINGS)}.")


@dataclass(frozen=True)
class Clip:
    """Things at home on a background, and two events; or one thing that crosses the picture in a direction."""

    background: str
    things: tuple[Thing, ...]
    events: tuple[Event, ...]
    crossing: bool = False
    grain: int = 0

    @cached_property
    def frames(self) -> tuple[Scene, ...]:
        """The scene at each time."""
        if self.crossing:
            return tuple(self._crossing(step / (CROSSING - 1)) for step in range(CROSSING))
        return (*(self._during(event, amount) for event in self.events for amount in AMOUNTS), self._scene(self.things))

    @cached_property
    def sounds(self) -> tuple[tuple[str, float], ...]:
        """What is heard at each time, and how loud."""
        if self.crossing:
            return ((self.events[0].sound, 1.0),) * CROSSING
        return (*((event.sound, amount) for event in self.events for amount in AMOUNTS), ("", 0.0))

    @property
    def partner(self) -> Clip:
        """The same frames in another order: events in the opposite order, or a crossing backwards."""
        if self.crossing:
            (event,) = self.events
            return replace(self, events=(replace(event, doing=OPPOSITES[event.doing]),))
        return replace(self, events=self.events[::-1])

    @property
    def order_of_partner(self) -> np.ndarray:
        """Which frame of this clip each frame of the partner is."""
        if self.crossing:
            return np.arange(CROSSING)[::-1]
        blocks = np.arange(len(self.events) * len(AMOUNTS)).reshape(len(self.events), -1)
        return np.append(blocks[::-1], blocks.size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def _scene(self, things: tuple[Thing, ...]) -> Scene:
        return Scene(self.background, things, self.grain)

    def _with(self, index: int, *changed: Thing) -> Scene:
        return self._scene((*self.things[:index], *changed, *self.things[index + 1 :]))

    def _during(self, event: Event, amount: float) -> Scene:
        thing = self.things[event.thing]
        if event.doing in DIRECTIONS:
            x, y = DIRECTIONS[event.doing]
            return self._with(event.thing, _at(thing, thing.x + amount * REACH * x, thing.y + amount * REACH * y))
        if event.doing == "meet":
            other = self.things[1 - event.thing]
            share = amount * max(0.0, 1 - 2 * RADIUS / float(np.hypot(other.x - thing.x, other.y - thing.y)))
            return self._with(event.thing, _at(thing, thing.x + share * (other.x - thing.x), thing.y + share * (other.y - thing.y)))
        if event.doing == "grow":
            return self._with(event.thing, replace(thing, radius=round(thing.radius * (1 + amount * (GROWN - 1)), 4)))
        if event.doing == "vanish":
            return self._with(event.thing) if amount else self._scene(self.things)
        return self._with(event.thing, replace(thing, color=CHANGED if amount else thing.color))

    def _crossing(self, share: float) -> Scene:
        (event,) = self.events
        x, y = DIRECTIONS[event.doing]
        thing, way = self.things[event.thing], round(0.8 * (share - 0.5), 6)
        return self._with(event.thing, _at(thing, 0.5 + way * x if x else thing.x, 0.5 + way * y if y else thing.y))


def draw_clip(rng: np.random.Generator, *, crossing: bool) -> Clip:
    """A random clip of two things of different colors; no event comes twice."""
    places = rng.choice(len(HOMES), 2, replace=False)
    colors, shapes = rng.choice(len(COLORS), 2, replace=False), rng.integers(len(SHAPES), size=2)
    things = tuple(
        Thing(SHAPES[shape], COLORS[color], "plain", "small", HOMES[place][0], HOMES[place][1], RADIUS)
        for shape, color, place in zip(shapes, colors, places, strict=True)
    )
    doings = [(thing, doing) for thing in range(2) for doing in (DIRECTIONS if crossing else DOINGS)]
    chosen = rng.choice(len(doings), 1 if crossing else 2, replace=False)
    sounds = [SOUNDS[int(rng.integers(len(SOUNDS)))] if rng.random() < 0.7 else "" for _ in chosen]
    events = tuple(Event(doings[index][0], doings[index][1], sound) for index, sound in zip(chosen, sounds, strict=True))
    return Clip(BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))], things, events, crossing, int(rng.integers(2**31)))


def _at(thing: Thing, x: float, y: float) -> Thing:
    return replace(thing, x=round(x, 4), y=round(y, 4))
