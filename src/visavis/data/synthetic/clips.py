"""Synthetic clips: two things, and what they do one after another, with captions about order or
direction. And a data set of clips with features of three experts.

An event moves or changes a thing and then restores it. So events can be exchanged: the clip then
has the same frames in another order. In a crossing, a thing moves from one side to the other.
Played backwards it is the opposite crossing. Each caption is false for the clip with the other
order, its partner.

The experts are the appearance of each frame, the motion between frames, and the sound. Each encodes
what a recognition model could see, rotated by a fixed matrix, with Gaussian noise of standard
deviation ``NOISE_STD``. Appearance: position, size and shape by color. Motion: direction, growth,
changes and position, but not which thing. Sound: kind and volume. The noise belongs to a frame, so
that the same frames in another order have the same vectors in another order.

Files of the folder of a data set:

- ``dataset.json``: clips with splits and captions.
- ``experts/``: the features, some missing.
- ``clips.jsonl``: for each clip its content, the missing experts, and the clip with the same frames
  in another order.
- ``frames/clip000000.npy``: rendered frames ``[frames, size, size, 3]``, if a size is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RecipeError
from visavis.data.features.expert_store import create_expert_store
from visavis.data.synthetic.lexicon import with_article
from visavis.data.synthetic.rendering import render_scene
from visavis.data.synthetic.scene import Scene, SceneObject, pick
from visavis.data.synthetic.scene_dataset import check_ranges

SHAPES = ("circle", "star", "square", "heart")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple")
BACKGROUNDS = ("paper", "snow", "table", "night")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
OPPOSITES = {"left": "right", "right": "left", "up": "down", "down": "up"}
ACTIONS = (*DIRECTIONS, "vanish", "grow", "change", "meet")
SOUNDS = ("bell", "drum", "whistle", "buzz", "splash")

HOME_POSITIONS = tuple((x, y) for x in (0.35, 0.5, 0.65) for y in (0.35, 0.5, 0.65))
RADIUS = 0.1
MOVE_DISTANCE = 0.25
GROWTH_FACTOR = 1.6
CHANGED_COLOR = "white"
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
            shares = (step / (CROSSING_FRAMES - 1) for step in range(CROSSING_FRAMES))
            return tuple(self._frame(self.events[0], share) for share in shares)
        return (
            *(self._frame(event, amount) for event in self.events for amount in EVENT_PROGRESS),
            Scene(self.background, self.things, self.grain),
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

    def _frame(self, event: ClipEvent, progress: float) -> Scene:
        """The scene during an event. Numbers are rounded, so that they are equal in the files."""
        thing = self.things[event.thing]
        acting = list[SceneObject]()
        if event.action in DIRECTIONS:
            x, y = DIRECTIONS[event.action]
            if self.is_crossing:
                # From one side to the other along one axis.
                offset = round(0.8 * (progress - 0.5), 6)
                place = 0.5 + offset * x if x else thing.x, 0.5 + offset * y if y else thing.y
            else:
                distance = progress * MOVE_DISTANCE
                place = thing.x + distance * x, thing.y + distance * y
            acting = [replace(thing, x=round(place[0], 4), y=round(place[1], 4))]
        elif event.action == "meet":
            other = self.things[1 - event.thing]
            dx = other.x - thing.x
            dy = other.y - thing.y
            # Until the two touch.
            share = progress * max(0.0, 1 - 2 * RADIUS / float(np.hypot(dx, dy)))
            acting = [
                replace(thing, x=round(thing.x + share * dx, 4), y=round(thing.y + share * dy, 4))
            ]
        elif event.action == "grow":
            radius = round(thing.radius * (1 + progress * (GROWTH_FACTOR - 1)), 4)
            acting = [replace(thing, radius=radius)]
        elif event.action == "change":
            acting = [replace(thing, color=CHANGED_COLOR if progress else thing.color)]
        elif not progress:
            # A thing that vanishes is still there in the first frame.
            acting = [thing]
        things = (*self.things[: event.thing], *acting, *self.things[event.thing + 1 :])
        return Scene(self.background, things, self.grain)


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
    colors = rng.choice(len(COLORS), 2, replace=False)
    shapes = rng.integers(len(SHAPES), size=2)
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
    """Write different true captions of a clip."""
    verb_phrases = CROSSING_PHRASES if clip.is_crossing else ACTION_PHRASES
    captions: dict[str, None] = {}
    while len(captions) < count:
        phrases = []
        # The order of the calls of the generator is a part of a seed.
        for event in clip.events:
            verb_phrase = pick(rng, verb_phrases[event.action]).format(
                other=_thing_phrase(clip, 1 - event.thing, rng)
            )
            if mention_sound and event.sound and rng.random() < 0.5:
                verb_phrase += f" {pick(rng, SOUND_PHRASES).format(sound=event.sound)}"
            phrases.append(f"{_thing_phrase(clip, event.thing, rng)} {verb_phrase}")
        forms = ORDER_PHRASES if len(phrases) > 1 else ("{0}", "{0} slowly", "we see how {0}")
        captions.setdefault(pick(rng, forms).format(*phrases))
    return list(captions)


def _thing_phrase(clip: SyntheticClip, index: int, rng: np.random.Generator) -> str:
    thing = clip.things[index]
    noun = f"{thing.color} {thing.shape}"
    return f"the {noun}" if rng.random() < 0.5 else with_article(noun)


EXPERT_DIMS = {"appearance": 128, "motion": 48, "sound": 16}
NOISE_STD = 0.05
_ALL_COLORS = (*COLORS, CHANGED_COLOR)
_CELLS = np.array([(x, y) for x in (0.1, 0.5, 0.9) for y in (0.1, 0.5, 0.9)])
_CELL = 0.4


def expert_features(clip: SyntheticClip, noise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the features of each expert, ``[frames, D]``. Motion has one vector less."""
    frames = clip.frames
    clean = {
        "appearance": [_appearance(scene) for scene in frames],
        "motion": [_motion(before, after) for before, after in pairwise(frames)],
        "sound": [volume * (np.array(SOUNDS) == sound) for sound, volume in clip.sounds],
    }
    features = {}
    for name, values in clean.items():
        rows = np.array(values)  # [frames, values]
        rotated = rows @ _rotation(name, rows.shape[1])
        features[name] = (rotated + NOISE_STD * noise[name]).astype(np.float32)
    return features


def sample_noise(clip: SyntheticClip, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Sample standard normal noise for the features of a clip, by expert."""
    return {
        name: rng.standard_normal((len(clip.frames) - (name == "motion"), embedding_dim))
        for name, embedding_dim in EXPERT_DIMS.items()
    }


def partner_noise(clip: SyntheticClip, noise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Reorder the noise of a clip, by expert, for its partner."""
    order = clip.partner_frame_order
    # Motion is between frames, so it has one vector less.
    between = order[order < len(order) - 1]
    return {name: part[between if name == "motion" else order] for name, part in noise.items()}


def _appearance(scene: Scene) -> np.ndarray:
    """Encode for each color: position, size and shape."""
    # [colors, cells + size + shapes]
    values = np.zeros((len(_ALL_COLORS), len(_CELLS) + 1 + len(SHAPES)))
    for thing in scene.things:
        # How much of the thing is in each of nine cells.
        distances = np.abs(np.array([thing.x, thing.y]) - _CELLS)
        in_cells = np.prod(np.maximum(1 - distances / _CELL, 0), -1)
        values[_ALL_COLORS.index(thing.color)] += np.concatenate(
            [in_cells, [thing.radius / 0.1 - 1], np.array(SHAPES) == thing.shape]
        )
    return values.ravel()


def _motion(before: Scene, after: Scene) -> np.ndarray:
    """Encode for each quarter of the image the movement left, right, up and down, growth,
    shrinking, vanishing, appearance and change.
    """
    # [quarters, movements]
    values = np.zeros((4, 9))
    for old in before.things:
        new = next((thing for thing in after.things if _is_same_thing(old, thing)), None)
        values[_quarter(old), 6] += new is None
        if new is not None:
            x = (new.x - old.x) / MOVE_DISTANCE
            y = (new.y - old.y) / MOVE_DISTANCE
            grown = (new.radius - old.radius) / 0.03
            values[_quarter(old)] += np.maximum(
                [-x, x, -y, y, grown, -grown, 0, 0, new.color != old.color], 0
            )
    for new in after.things:
        values[_quarter(new), 7] += not any(_is_same_thing(old, new) for old in before.things)
    return values.ravel()


def _is_same_thing(old: SceneObject, new: SceneObject) -> bool:
    """Return whether two things of successive frames are the same. The thing may have moved, grown,
    or changed its color at its position.
    """
    return old.shape == new.shape and (
        old.color == new.color
        or (CHANGED_COLOR in (old.color, new.color) and (old.x, old.y) == (new.x, new.y))
    )


def _quarter(thing: SceneObject) -> int:
    return 2 * (thing.x > 0.5) + (thing.y > 0.5)


@cache
def _rotation(name: str, values: int) -> np.ndarray:
    """Return orthonormal rows, equal in all data sets."""
    # Not the hash of the name, which differs between processes.
    square = np.random.default_rng([len(name), values]).standard_normal((EXPERT_DIMS[name], values))
    return np.linalg.qr(square)[0].T


# Shares of clips without an expert. Appearance is never missing.
MISSING_RATIOS = {"motion": 0.2, "sound": 0.4}
CROSSING_RATIO = 1 / 3

# order: the partner has the same events in the opposite order, and the averages of all experts over
# time are equal. direction: the partner is the clip backwards, and the averages of appearance and
# sound are equal, but not those of motion.
Subset = Literal["order", "direction"]


def write_synthetic_clips(
    folder: str | Path,
    *,
    num_train: int = 2000,
    num_val: int = 200,
    num_test: int = 400,
    captions_per_clip: int = 4,
    size: int = 0,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write clips and their features into a new folder. The same arguments give the same bytes.

    The clips of a split come in successive pairs with the same frames in another order.

    Args:
        folder: The new folder.
        num_train: Number of training clips, even.
        num_val: Number of validation clips, even.
        num_test: Number of test clips, even.
        captions_per_clip: Number of captions per clip, 1 to 10.
        size: Width and height of rendered frames in pixels, 32 to 1024. 0: no frames.
        seed: Random seed.
        on_progress: Called with the number of written clips and of all clips.

    Returns:
        The folder.

    Raises:
        RecipeError: If a number is out of range.
    """
    counts = {"train": num_train, "val": num_val, "test": num_test}
    for name, count in counts.items():
        if count < 0 or count % 2:
            raise RecipeError(
                f"num_{name}: expected an even integer >= 0, because clips come in pairs, got "
                f"{count}."
            )
    check_ranges(
        captions_per_clip=(captions_per_clip, 1, 10),
        size=(size or 32, 32, 1024),
        seed=(seed, 0, math.inf),
    )
    folder = storage.prepare_empty_folder(folder, will_be_replaced=True)
    lines = []
    images = []
    done = 0
    with storage.atomic_folder(folder) as part:
        with create_expert_store(part / "experts", EXPERT_DIMS) as store:
            for number, (split, count) in enumerate(counts.items()):
                for line, captions, experts in _sample_split(
                    count, captions_per_clip, [seed, number], first=done
                ):
                    store.append(line.name, experts)
                    lines.append(asdict(line))
                    images.append(
                        {
                            "filename": line.name,
                            "split": split,
                            "sentences": [{"raw": text} for text in captions],
                        }
                    )
                    if size:
                        frames = np.stack(
                            [np.asarray(render_scene(scene, size)) for scene in line.clip.frames]
                        )
                        storage.write_array(part / "frames" / f"{line.name}.npy", frames)
                    done += 1
                    if on_progress:
                        on_progress(done, sum(counts.values()))
        storage.write_json(part / "dataset.json", {"images": images})
        storage.write_json_lines(part / "clips.jsonl", lines)
    return folder


@dataclass(frozen=True)
class ClipAnnotations:
    """Ground truth of a folder of clips, in their order.

    Attributes:
        names: Names of the clips.
        clips: The clips.
        partner_of: Index of the clip with the same frames in another order, shape ``[clips]``.
        subset: "order" or "direction", shape ``[clips]``.
        missing: Missing experts of each clip.
    """

    names: tuple[str, ...]
    clips: tuple[SyntheticClip, ...]
    partner_of: np.ndarray
    subset: np.ndarray
    missing: tuple[tuple[str, ...], ...]

    @classmethod
    def open(cls, folder: str | Path) -> ClipAnnotations:
        """Read ``clips.jsonl`` of a folder.

        Args:
            folder: The folder.

        Returns:
            The ground truth.

        Raises:
            DataError: If a clip or its partner is missing.
        """
        lines: list[_ClipLine] = storage.read_json_lines(Path(folder) / "clips.jsonl", _ClipLine)
        index_of = {line.name: i for i, line in enumerate(lines)}
        if not lines or any(line.partner not in index_of for line in lines):
            raise DataError(
                f"{Path(folder) / 'clips.jsonl'}: expected at least one clip, and the partner of "
                "each clip."
            )
        return cls(
            tuple(index_of),
            tuple(line.clip for line in lines),
            np.array([index_of[line.partner] for line in lines]),
            np.array(["direction" if line.clip.is_crossing else "order" for line in lines]),
            tuple(line.missing for line in lines),
        )


@dataclass(frozen=True)
class _ClipLine:
    """A line of ``clips.jsonl``."""

    name: str
    partner: str
    missing: tuple[str, ...]
    clip: SyntheticClip


def _sample_split(
    count: int, per_clip: int, seed: list[int], *, first: int
) -> Iterator[tuple[_ClipLine, list[str], dict[str, np.ndarray | None]]]:
    """Yield the clips of one split in pairs, with captions and features of experts. Each pair has
    its own random generator.
    """
    for pair in range(count // 2):
        rng = np.random.default_rng([*seed, pair])
        clip = sample_clip(rng, crossing=rng.random() < CROSSING_RATIO)
        noise = sample_noise(clip, rng)
        missing = tuple(name for name, share in MISSING_RATIOS.items() if rng.random() < share)
        names = [f"clip{first + 2 * pair + index:06d}" for index in range(2)]
        both = ((clip, noise, names), (clip.partner, partner_noise(clip, noise), names[::-1]))
        for clip, noise, (name, partner) in both:
            experts = {
                expert: None if expert in missing else vectors
                for expert, vectors in expert_features(clip, noise).items()
            }
            captions = write_clip_captions(
                clip, per_clip, rng, mention_sound="sound" not in missing
            )
            yield _ClipLine(name, partner, missing, clip), captions, experts
