"""What three experts say of a clip: appearance of each frame, motion between frames, sound; noisy, and blind to what is not theirs.

Each says what a recognizer would of the truth, in coordinates of its own (a fixed rotation), with noise of deviation ``NOISE``:
appearance who is where, how large and of which shape; motion which way, growing, vanishing or changing, and where, but not who; sound
which, and how loud. The noise belongs to a frame, so that the same frames in another order are the same vectors in another order.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np

from visavis.data.scenes.moving.clips import CHANGED, COLORS, REACH, SHAPES, SOUNDS, Clip
from visavis.data.scenes.world import Scene, Thing

WIDTHS = {"appearance": 128, "motion": 48, "sound": 16}
NOISE = 0.05
_PAINTS = (*COLORS, CHANGED)
_CELLS = np.array([(x, y) for x in (0.1, 0.5, 0.9) for y in (0.1, 0.5, 0.9)])
_CELL = 0.4


def sense(clip: Clip, noise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The vectors of each expert: ``[frames, width]``, of motion one fewer. noise: of the same shapes, deviation 1."""
    frames = clip.frames
    clean = {
        "appearance": [_appearance(scene) for scene in frames],
        "motion": [_motion(before, after) for before, after in pairwise(frames)],
        "sound": [volume * (np.array(SOUNDS) == sound) for sound, volume in clip.sounds],
    }
    return {name: (_rotated(name, np.array(facts)) + NOISE * noise[name]).astype(np.float32) for name, facts in clean.items()}


def draw_noise(clip: Clip, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Of deviation 1, for ``sense``."""
    return {name: rng.standard_normal((len(clip.frames) - (name == "motion"), width)) for name, width in WIDTHS.items()}


def noise_of_partner(clip: Clip, noise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The noise of a clip's frames, in the order in which its partner shows them."""
    order = clip.order_of_partner
    between = order[order < len(order) - 1]
    return {name: part[between if name == "motion" else order] for name, part in noise.items()}


def _appearance(scene: Scene) -> np.ndarray:
    """For each color: where it is, how large, of which shape."""
    facts = np.zeros((len(_PAINTS), len(_CELLS) + 1 + len(SHAPES)))
    for thing in scene.things:
        shape = np.array(SHAPES) == thing.shape
        facts[_PAINTS.index(thing.color)] += np.concatenate([_place(thing), [thing.radius / 0.1 - 1], shape])
    return facts.ravel()


def _motion(before: Scene, after: Scene) -> np.ndarray:
    """For each quarter of the picture: how much goes left, right, up, down, grows, shrinks, vanishes, appears, changes."""
    facts = np.zeros((4, 9))
    for old in before.things:
        new = next((thing for thing in after.things if _same(old, thing)), None)
        facts[_quarter(old), 6] += new is None
        if new is not None:
            x, y, grown = (new.x - old.x) / REACH, (new.y - old.y) / REACH, (new.radius - old.radius) / 0.03
            facts[_quarter(old)] += np.maximum([-x, x, -y, y, grown, -grown, 0, 0, new.color != old.color], 0)
    for new in after.things:
        facts[_quarter(new), 7] += not any(_same(old, new) for old in before.things)
    return facts.ravel()


def _same(old: Thing, new: Thing) -> bool:
    """Whether two things of frames side by side are one; it may have moved, grown, or changed its color at its place."""
    return old.shape == new.shape and (old.color == new.color or (CHANGED in (old.color, new.color) and (old.x, old.y) == (new.x, new.y)))


def _place(thing: Thing) -> np.ndarray:
    """How much of a thing is in each of nine places."""
    return np.prod(np.maximum(1 - np.abs(np.array([thing.x, thing.y]) - _CELLS) / _CELL, 0), -1)


def _quarter(thing: Thing) -> int:
    return 2 * (thing.x > 0.5) + (thing.y > 0.5)


def _rotated(name: str, facts: np.ndarray) -> np.ndarray:
    return facts @ _rotation(name, facts.shape[1])


@cache
def _rotation(name: str, facts: int) -> np.ndarray:
    """Orthonormal rows: the same in every world."""
    square = np.random.default_rng([len(name), facts]).standard_normal((WIDTHS[name], facts))
    return np.linalg.qr(square)[0].T
