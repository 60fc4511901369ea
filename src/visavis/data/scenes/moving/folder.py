"""A folder of moving scenes: a data set like any other, a store of experts, and the truth beside them.

dataset.json      clips with splits and captions
experts/          appearance of each frame, motion between frames, sound; some missing
clips.jsonl       a line for each clip: what happens in it, which experts are missing, and which clip shows the same frames in another order
frames/clip000000.npy ...   the drawn frames, where a size is given: [frames, size, size, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from visavis import storage
from visavis.data.experts import new_experts
from visavis.data.scenes.draw import draw
from visavis.data.scenes.moving.clips import Clip, draw_clip
from visavis.data.scenes.moving.senses import WIDTHS, draw_noise, noise_of_partner, sense
from visavis.data.scenes.moving.wording import clip_captions
from visavis.errors import DataError, RecipeError

MISSING = {"motion": 0.2, "sound": 0.4}
"""The shares of clips that lack an expert; appearance is always there."""
CROSSINGS = 1 / 3

Subset = Literal["order", "direction"]
"""order: the partner has the same events in the opposite order; the averages of all experts over time are equal. direction: the partner is
the clip backwards; the averages of appearance and sound are equal, those of motion are not."""


def write_moving_scenes(
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
    """Make up clips and what experts say of them into a new folder; the same arguments give the same bytes.

    The clips of a split come in pairs, side by side, that show the same frames in another order. size: pixels of a side of drawn frames;
    0: none are drawn. on_progress: called with the numbers of clips written and of all. Returns the folder. Raises RefusedOverwrite
    if anything stands there, RecipeError for a number out of range.
    """
    counts = {"train": num_train, "val": num_val, "test": num_test}
    _check(counts, captions_per_clip, size, seed)
    folder = storage.new_folder(folder, replaced=True)
    lines, images, done = [], [], 0
    with storage.replacing_folder(folder) as part:
        with new_experts(part / "experts", WIDTHS) as store:
            for number, (split, count) in enumerate(counts.items()):
                for row in _compose(count, captions_per_clip, [seed, number], first=done):
                    store.append(row.name, row.experts)
                    lines.append(row.line())
                    images.append({"filename": row.name, "split": split, "sentences": [{"raw": text} for text in row.captions]})
                    if size:
                        drawn = np.stack([np.asarray(draw(scene, size)) for scene in row.clip.frames])
                        storage.write_array(part / "frames" / f"{row.name}.npy", drawn)
                    done += 1
                    if on_progress:
                        on_progress(done, sum(counts.values()))
        storage.write_json(part / "dataset.json", {"images": images})
        storage.write_json_lines(part / "clips.jsonl", lines)
    return folder


@dataclass(frozen=True)
class MovingScenes:
    """The truth about a folder of moving scenes, in the order of its clips.

    partner_of ``[clips]``: the clip that shows the same frames in another order. subset ``[clips]``: "order" or "direction".
    missing: of each clip, the experts that it lacks.
    """

    names: tuple[str, ...]
    clips: tuple[Clip, ...]
    partner_of: np.ndarray
    subset: np.ndarray
    missing: tuple[tuple[str, ...], ...]

    @classmethod
    def open(cls, folder: str | Path) -> MovingScenes:
        """Read ``clips.jsonl`` of a folder. Raises DataError if there is none."""
        lines: list[_Line] = storage.read_json_lines(Path(folder) / "clips.jsonl", _Line)
        place = {line.name: i for i, line in enumerate(lines)}
        if not lines or any(line.partner not in place for line in lines):
            raise DataError(f"{Path(folder) / 'clips.jsonl'} describes no clip, or one whose partner it does not describe.")
        return cls(
            tuple(place),
            tuple(line.clip for line in lines),
            np.array([place[line.partner] for line in lines]),
            np.array(["direction" if line.clip.crossing else "order" for line in lines]),
            tuple(line.missing for line in lines),
        )


@dataclass(frozen=True)
class _Line:
    """One clip as ``clips.jsonl`` describes it."""

    name: str
    partner: str
    missing: tuple[str, ...]
    clip: Clip


@dataclass(frozen=True)
class _Row:
    """One clip before it is written."""

    name: str
    partner: str
    clip: Clip
    captions: list[str]
    experts: dict[str, np.ndarray | None]

    def line(self) -> dict[str, object]:
        missing = [name for name, vectors in self.experts.items() if vectors is None]
        return {"name": self.name, "partner": self.partner, "missing": missing, "clip": self.clip.to_json()}


def _compose(count: int, per_clip: int, seed: list[int], *, first: int) -> Iterator[_Row]:
    """The clips of one split, pair by pair; every pair has a random generator of its own."""
    for pair in range(count // 2):
        rng = np.random.default_rng([*seed, pair])
        clip = draw_clip(rng, crossing=rng.random() < CROSSINGS)
        noise = draw_noise(clip, rng)
        missing = {name for name, share in MISSING.items() if rng.random() < share}
        names = [f"clip{first + 2 * pair + place:06d}" for place in range(2)]
        for clip, noise, (name, partner) in ((clip, noise, names), (clip.partner, noise_of_partner(clip, noise), names[::-1])):  # noqa: B020
            experts = {expert: None if expert in missing else vectors for expert, vectors in sense(clip, noise).items()}
            captions = clip_captions(clip, per_clip, rng, heard="sound" not in missing)
            yield _Row(name, partner, clip, captions, experts)


def _check(counts: dict[str, int], per_clip: int, size: int, seed: int) -> None:
    for name, count in counts.items():
        if count < 0 or count % 2:
            raise RecipeError(f"num_{name}={count} is no number of clips that come in pairs: give an even one, 0 or more.")
    if not 1 <= per_clip <= 10:
        raise RecipeError(f"captions_per_clip={per_clip} is out of range: give a number from 1 to 10.")
    if size and not 32 <= size <= 1024:
        raise RecipeError(f"size={size} is out of range: give the pixels of a side, from 32 to 1024, or 0 for no frames.")
    if seed < 0:
        raise RecipeError(f"seed={seed} is negative: give a whole number, 0 or more.")
