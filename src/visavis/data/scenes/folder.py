"""A folder of drawn scenes, in the format of anybody's own data set, with the truth beside it.

images/000000.png ...   the pictures
captions.jsonl          a line for each image: filename, split, captions
scenes.jsonl            a line for each image: its scene, the facts that each caption states, which captions
                        were swapped and with which image, and which image it is a re-drawing of
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visavis import storage
from visavis.data.scenes.captions import Caption, Facts, captions
from visavis.data.scenes.draw import draw
from visavis.data.scenes.relevance import relevance
from visavis.data.scenes.style import STYLES, Style
from visavis.data.scenes.world import Scene, draw_scene, redraw
from visavis.errors import DataError, RecipeError, nearest


def write_scenes(
    folder: str | Path,
    *,
    num_train: int = 2000,
    num_val: int = 200,
    num_test: int = 500,
    captions_per_image: int = 5,
    size: int = 96,
    seed: int = 0,
    noise: float = 0.0,
    near_duplicates: float = 0.0,
    style: str = "paper",
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw a captioned world into a new folder; the same arguments give the same bytes.

    size: pixels of a side. noise: share of the training captions that are moved to a wrong image. near_duplicates:
    share of the images of each split that are slight re-drawings of an earlier one. style: its paint and words, "paper", or "glass",
    where every color looks otherwise and every color and shape has another name. on_progress: called with the
    numbers of images drawn and of all images. Returns the folder. Raises RefusedOverwrite if anything stands
    there, RecipeError for a number out of range or an unknown style.
    """
    counts = {"train": num_train, "val": num_val, "test": num_test}
    _check(counts, captions_per_image, size, seed, noise, near_duplicates)
    if style not in STYLES:
        raise RecipeError(f"style={style!r} is no style of drawn worlds: {nearest(style, STYLES)}")
    folder = storage.new_folder(folder, replaced=True)
    rows = [
        row
        for number, split in enumerate(counts)
        for row in _compose(split, counts[split], captions_per_image, [seed, number], near_duplicates, STYLES[style])
    ]
    for number, row in enumerate(rows):
        row.filename = f"images/{number:06d}.png"
    _swap([row for row in rows if row.split == "train"], noise, np.random.default_rng([seed, len(counts)]))
    with storage.replacing_folder(folder) as part:
        (part / "images").mkdir()
        for number, row in enumerate(rows):
            draw(row.scene, size, STYLES[style].paint).save(part / row.filename, compress_level=1)
            if on_progress:
                on_progress(number + 1, len(rows))
        storage.write_json_lines(part / "captions.jsonl", [row.captions_line() for row in rows])
        storage.write_json_lines(part / "scenes.jsonl", [row.scene_line() for row in rows])
    return folder


@dataclass(frozen=True)
class SceneGraphs:
    """The truth about a folder of scenes, in the order of its images and captions.

    image_of ``[captions]``: the image that each caption stands beside. swapped ``[captions]``: true where that is
    the wrong one. duplicate_of ``[images]``: the index of the image that it is a re-drawing of, else -1.
    """

    scenes: tuple[Scene, ...]
    facts: tuple[Facts, ...]
    image_of: np.ndarray
    swapped: np.ndarray
    duplicate_of: np.ndarray

    @classmethod
    def open(cls, folder: str | Path) -> SceneGraphs:
        """Read ``scenes.jsonl`` of a folder. Raises DataError if there is none."""
        lines: list[_Line] = storage.read_json_lines(Path(folder) / "scenes.jsonl", _Line)
        if not lines:
            raise DataError(f"{Path(folder) / 'scenes.jsonl'} describes no scene.")
        place = {line.filename: i for i, line in enumerate(lines)}
        return cls(
            tuple(line.scene for line in lines),
            tuple(facts for line in lines for facts in line.facts),
            np.repeat(np.arange(len(lines)), [len(line.facts) for line in lines]),
            np.array([name is not None for line in lines for name in line.swapped_from]),
            np.array([place.get(line.duplicate_of or "", -1) for line in lines]),
        )

    def relevance(self, images: np.ndarray | None = None, captions: np.ndarray | None = None) -> np.ndarray:
        """True degrees ``[images, captions]`` in [0, 1] of some images and captions, by index (None: all)."""
        scenes = self.scenes if images is None else [self.scenes[i] for i in images]
        facts = self.facts if captions is None else [self.facts[i] for i in captions]
        return relevance(scenes, facts)


@dataclass(frozen=True)
class _Line:
    """One image as ``scenes.jsonl`` describes it."""

    filename: str
    scene: Scene
    facts: tuple[Facts, ...]
    swapped_from: tuple[str | None, ...]
    duplicate_of: str | None

    def __post_init__(self) -> None:
        stated = [any(facts.mentions) or facts.background is not None or facts.total is not None for facts in self.facts]
        if not all(stated) or not stated or len(stated) != len(self.swapped_from):
            raise DataError(
                f"{len(stated)} captions of {self.filename} with {len(self.swapped_from)} origins, {sum(stated)} of them state facts."
            )


@dataclass
class _Row:
    """One image before it is written."""

    split: str
    scene: Scene
    captions: list[Caption]
    swapped_from: list[str | None]
    duplicate_of: _Row | None = None
    filename: str = ""

    def captions_line(self) -> dict[str, object]:
        return {"filename": self.filename, "split": self.split, "captions": [caption.text for caption in self.captions]}

    def scene_line(self) -> dict[str, object]:
        return {
            "filename": self.filename,
            "split": self.split,
            "scene": self.scene.to_json(),
            "facts": [caption.facts.to_json() for caption in self.captions],
            "swapped_from": self.swapped_from,
            "duplicate_of": self.duplicate_of.filename if self.duplicate_of else None,
        }


def _compose(split: str, count: int, per_image: int, seed: list[int], near_duplicates: float, style: Style) -> list[_Row]:
    """The scenes and captions of one split; every image has a random generator of its own."""
    plan = np.random.default_rng([*seed, 0])
    copies = set((1 + plan.permutation(max(count - 1, 0))[: round(near_duplicates * count)]).tolist())
    rows: list[_Row] = []
    for i in range(count):
        rng = np.random.default_rng([*seed, i + 1])
        origin = None
        if i in copies:
            origin = rows[int(plan.integers(i))]
            origin = origin.duplicate_of or origin
        scene = redraw(origin.scene, rng) if origin else draw_scene(rng, training=split == "train")
        rows.append(_Row(split, scene, captions(scene, per_image, rng, style), [None] * per_image, origin))
    return rows


def _swap(rows: list[_Row], noise: float, rng: np.random.Generator) -> None:
    """Shift a share of the captions cyclically, so far that each is paired with another image."""
    places = [(i, k) for i, row in enumerate(rows) for k in range(len(row.captions))]
    count = step = round(noise * len(places))
    while 2 * step > count:
        order = rng.permutation(len(rows))
        chosen = [places[p] for p in rng.choice(len(places), count, replace=False)]
        chosen.sort(key=lambda place: (order[place[0]], place[1]))
        step = int(np.bincount([i for i, _ in chosen]).max())
    if count:
        moved = [(rows[i].captions[k], rows[i].filename) for i, k in chosen]
        for (i, k), (caption, source) in zip(chosen, [*moved[step:], *moved[:step]], strict=True):
            rows[i].captions[k], rows[i].swapped_from[k] = caption, source


def _check(counts: dict[str, int], per_image: int, size: int, seed: int, noise: float, near_duplicates: float) -> None:
    for name, count in counts.items():
        if count < 0:
            raise RecipeError(f"num_{name}={count} is negative: give the number of images to draw, 0 or more.")
    if not 1 <= per_image <= 20:
        raise RecipeError(f"captions_per_image={per_image} is out of range: give a number from 1 to 20.")
    if not 32 <= size <= 1024:
        raise RecipeError(f"size={size} is out of range: give the pixels of a side, from 32 to 1024.")
    if seed < 0:
        raise RecipeError(f"seed={seed} is negative: give a whole number, 0 or more.")
    for knob, share in (("noise", noise), ("near_duplicates", near_duplicates)):
        if not 0 <= share <= 1:
            raise RecipeError(f"{knob}={share} is not a share: give a number from 0 to 1.")
    if noise and (counts["train"] < 3 or round(noise * counts["train"] * per_image) < 2):
        raise RecipeError(f"noise={noise} moves fewer than two of the captions of {counts['train']} training images: draw more images.")
