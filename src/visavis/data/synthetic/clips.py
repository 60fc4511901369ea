"""Synthetic clips: two things, and what they do one after another, with captions about order or
direction.

An event moves or changes a thing and then restores it. So events can be exchanged: the clip then
has the same frames in another order. In a crossing, a thing moves from one side to the other.
Played backwards it is the opposite crossing. Each caption is false for the clip with the other
order, its partner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from visavis.core.errors import DataError
from visavis.data.synthetic.lexicon import with_article
from visavis.data.synthetic.scene import Scene, SceneObject, pick

SHAPES = ("circle", "star", "square", "heart")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple")
BACKGROUNDS = ("paper", "snow", "table", "night")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITES = {"left": "right", "right": "left", "up": "down", "down": "up"}
ACTIONS = (*DIRECTIONS, "vanish", "grow", "change", "meet")
SOUNDS = ("bell", "drum", "whistle", "buzz", "splash")

HOME_POSITIONS = tuple((x, y) for x in (0.35, 0.5, 0.65) for y in (0.35, 0.5, 0.65))
RADIUS, MOVE_DISTANCE, GROWTH_FACTOR, CHANGED_COLOR = 0.1, 0.25, 1.6, "white"
# Progress of an event in its frames. In the following frame the thing is restored.
EVENT_PROGRESS = (0.0, 0.5, 1.0)
CROSSING_FRAMES = 7


@dataclass(frozen=True)
class ClipEvent:
    """An action of one thing.

    Attributes:
        thing: Index of the thing.
        action: The action.
        sound: The sound. Empty: none.
    """

    thing: int
    action: str
    sound: str = ""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS or self.sound not in ("", *SOUNDS):
            raise DataError(
                f"an event: expected one of {', '.join(ACTIONS)}, got {self.action!r} with sound "
                f"{self.sound!r}."
            )


@dataclass(frozen=True)
class SyntheticClip:
    """Two things with two events, or one thing that crosses the image.

    Attributes:
        background: The background.
        things: The things at their initial positions.
        events: The events in order.
        is_crossing: Whether the only event is a crossing.
        grain: Seed of the background's texture.
    """

    background: str
    things: tuple[SceneObject, ...]
    events: tuple[ClipEvent, ...]
    is_crossing: bool = False
    grain: int = 0

    @cached_property
    def frames(self) -> tuple[Scene, ...]:
        """The scene of each frame."""
        if self.is_crossing:
            return tuple(
                self._crossing(step / (CROSSING_FRAMES - 1)) for step in range(CROSSING_FRAMES)
            )
        return (
            *(
                self._event_frame(event, amount)
                for event in self.events
                for amount in EVENT_PROGRESS
            ),
            self._scene(self.things),
        )

    @cached_property
    def sounds(self) -> tuple[tuple[str, float], ...]:
        """The sound of each frame, and its volume."""
        if self.is_crossing:
            return ((self.events[0].sound, 1.0),) * CROSSING_FRAMES
        return (
            *((event.sound, amount) for event in self.events for amount in EVENT_PROGRESS),
            ("", 0.0),
        )

    @property
    def partner(self) -> SyntheticClip:
        """The same frames in another order: events in the opposite order, or the opposite crossing."""
        if self.is_crossing:
            (event,) = self.events
            return replace(self, events=(replace(event, action=OPPOSITES[event.action]),))
        return replace(self, events=self.events[::-1])

    @property
    def partner_frame_order(self) -> np.ndarray:
        """For each frame of the partner, the index of the same frame in this clip."""
        if self.is_crossing:
            return np.arange(CROSSING_FRAMES)[::-1]
        blocks = np.arange(len(self.events) * len(EVENT_PROGRESS)).reshape(len(self.events), -1)
        return np.append(blocks[::-1], blocks.size)

    def _scene(self, things: tuple[SceneObject, ...]) -> Scene:
        return Scene(self.background, things, self.grain)

    def _replace_thing(self, index: int, *changed: SceneObject) -> Scene:
        return self._scene((*self.things[:index], *changed, *self.things[index + 1 :]))

    def _event_frame(self, event: ClipEvent, progress: float) -> Scene:
        if event.action == "vanish":
            return self._replace_thing(event.thing) if progress else self._scene(self.things)
        return self._replace_thing(event.thing, self._acting_thing(event, progress))

    def _acting_thing(self, event: ClipEvent, progress: float) -> SceneObject:
        thing = self.things[event.thing]
        if event.action in DIRECTIONS:
            x, y = DIRECTIONS[event.action]
            return _move_to(
                thing,
                thing.x + progress * MOVE_DISTANCE * x,
                thing.y + progress * MOVE_DISTANCE * y,
            )
        if event.action == "meet":
            other = self.things[1 - event.thing]
            share = progress * max(
                0.0, 1 - 2 * RADIUS / float(np.hypot(other.x - thing.x, other.y - thing.y))
            )
            return _move_to(
                thing, thing.x + share * (other.x - thing.x), thing.y + share * (other.y - thing.y)
            )
        if event.action == "grow":
            return replace(
                thing, radius=round(thing.radius * (1 + progress * (GROWTH_FACTOR - 1)), 4)
            )
        return replace(thing, color=CHANGED_COLOR if progress else thing.color)

    def _crossing(self, share: float) -> Scene:
        (event,) = self.events
        x, y = DIRECTIONS[event.action]
        thing, offset = self.things[event.thing], round(0.8 * (share - 0.5), 6)
        return self._replace_thing(
            event.thing,
            _move_to(thing, 0.5 + offset * x if x else thing.x, 0.5 + offset * y if y else thing.y),
        )


def sample_clip(rng: np.random.Generator, *, crossing: bool) -> SyntheticClip:
    """Sample a clip of two things of different colors. All events differ.

    Args:
        rng: Random generator.
        crossing: Whether the clip is a crossing.

    Returns:
        The clip.
    """
    positions = [
        HOME_POSITIONS[index] for index in rng.choice(len(HOME_POSITIONS), 2, replace=False)
    ]
    colors, shapes = rng.choice(len(COLORS), 2, replace=False), rng.integers(len(SHAPES), size=2)
    things = tuple(
        SceneObject(SHAPES[shape], COLORS[color], "plain", "small", x, y, RADIUS)
        for shape, color, (x, y) in zip(shapes, colors, positions, strict=True)
    )
    candidates = [
        (thing, action) for thing in range(2) for action in (DIRECTIONS if crossing else ACTIONS)
    ]
    sampled = [
        candidates[i] for i in rng.choice(len(candidates), 1 if crossing else 2, replace=False)
    ]
    events = tuple(
        ClipEvent(thing, action, pick(rng, SOUNDS) if rng.random() < 0.7 else "")
        for thing, action in sampled
    )
    return SyntheticClip(pick(rng, BACKGROUNDS), things, events, crossing, int(rng.integers(2**31)))


def _move_to(thing: SceneObject, x: float, y: float) -> SceneObject:
    return replace(thing, x=round(x, 4), y=round(y, 4))


ACTION_PHRASES = {
    "left": ("steps left and back", "dodges to the left"),
    "right": ("steps right and back", "dodges to the right"),
    "up": ("steps up and back", "jumps"),
    "down": ("steps down and back", "ducks"),
    "vanish": ("vanishes and returns", "blinks"),
    "grow": ("grows and shrinks", "swells"),
    "change": ("turns white and back", "pales"),
    "meet": ("meets {other}", "visits {other}"),
}
CROSSING_PHRASES = {
    "left": ("crosses from right to left", "travels all the way to the left"),
    "right": ("crosses from left to right", "travels all the way to the right"),
    "up": ("rises from the bottom to the top", "travels all the way up"),
    "down": ("sinks from the top to the bottom", "travels all the way down"),
}
SOUND_PHRASES = ("with a {sound}", "to the sound of a {sound}")
# In the last phrase, the later event comes first.
ORDER_PHRASES = (
    "{0}, then {1}",
    "first {0}, then {1}",
    "{0} before {1}",
    "after {0}, {1}",
    "{1} after {0}",
)


def write_clip_captions(
    clip: SyntheticClip, count: int, rng: np.random.Generator, *, mention_sound: bool
) -> list[str]:
    """Write different true captions of a clip.

    Args:
        clip: The clip.
        count: Number of captions.
        rng: Random generator.
        mention_sound: Whether sounds may be mentioned.

    Returns:
        The captions.
    """
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions.setdefault(_caption(clip, rng, mention_sound=mention_sound))
    return list(captions)


def _caption(clip: SyntheticClip, rng: np.random.Generator, *, mention_sound: bool) -> str:
    phrases = [
        _event_phrase(clip, event, rng, mention_sound=mention_sound) for event in clip.events
    ]
    if len(phrases) == 1:
        return pick(rng, ("{0}", "{0} slowly", "we see how {0}")).format(*phrases)
    return pick(rng, ORDER_PHRASES).format(*phrases)


def _event_phrase(
    clip: SyntheticClip, event: ClipEvent, rng: np.random.Generator, *, mention_sound: bool
) -> str:
    verb_phrase = pick(
        rng, (CROSSING_PHRASES if clip.is_crossing else ACTION_PHRASES)[event.action]
    ).format(other=_thing_phrase(clip, 1 - event.thing, rng))
    sound = (
        f" {pick(rng, SOUND_PHRASES).format(sound=event.sound)}"
        if mention_sound and event.sound and rng.random() < 0.5
        else ""
    )
    return f"{_thing_phrase(clip, event.thing, rng)} {verb_phrase}{sound}"


def _thing_phrase(clip: SyntheticClip, index: int, rng: np.random.Generator) -> str:
    thing = clip.things[index]
    noun = f"{thing.color} {thing.shape}"
    return f"the {noun}" if rng.random() < 0.5 else with_article(noun)
