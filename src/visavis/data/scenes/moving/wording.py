"""Sentences about a clip: every one says what happens in which order, or in which direction, and is false of the clip's partner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visavis.data.scenes.moving.clips import Clip, Event
from visavis.data.scenes.words import article

DOES = {
    "left": ("steps left and back", "dodges to the left"),
    "right": ("steps right and back", "dodges to the right"),
    "up": ("steps up and back", "jumps"),
    "down": ("steps down and back", "ducks"),
    "vanish": ("vanishes and returns", "blinks"),
    "grow": ("grows and shrinks", "swells"),
    "change": ("turns white and back", "pales"),
    "meet": ("meets {other}", "visits {other}"),
}
CROSSES = {
    "left": ("crosses from right to left", "travels all the way to the left"),
    "right": ("crosses from left to right", "travels all the way to the right"),
    "up": ("rises from the bottom to the top", "travels all the way up"),
    "down": ("sinks from the top to the bottom", "travels all the way down"),
}
SOUND = ("with a {sound}", "to the sound of a {sound}")
IN_ORDER = ("{0}, then {1}", "first {0}, then {1}", "{0} before {1}", "after {0}, {1}", "{1} after {0}")
"""Of the last one the later event comes first."""


def clip_captions(clip: Clip, count: int, rng: np.random.Generator, *, heard: bool) -> list[str]:
    """So many different captions. heard: whether sounds may be mentioned."""
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions.setdefault(_caption(clip, rng, heard=heard))
    return list(captions)


def _caption(clip: Clip, rng: np.random.Generator, *, heard: bool) -> str:
    happenings = [_happening(clip, event, rng, heard=heard) for event in clip.events]
    if len(happenings) == 1:
        return _pick(("{0}", "{0} slowly", "we see how {0}"), rng).format(*happenings)
    return _pick(IN_ORDER, rng).format(*happenings)


def _happening(clip: Clip, event: Event, rng: np.random.Generator, *, heard: bool) -> str:
    does = _pick((CROSSES if clip.crossing else DOES)[event.doing], rng).format(other=_name(clip, 1 - event.thing, rng))
    sound = f" {_pick(SOUND, rng).format(sound=event.sound)}" if heard and event.sound and rng.random() < 0.5 else ""
    return f"{_name(clip, event.thing, rng)} {does}{sound}"


def _name(clip: Clip, index: int, rng: np.random.Generator) -> str:
    thing = clip.things[index]
    noun = f"{thing.color} {thing.shape}"
    return f"the {noun}" if rng.random() < 0.5 else article(noun)


def _pick(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
