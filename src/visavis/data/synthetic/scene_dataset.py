"""A data set of synthetic scenes with ground truth.

Files of the folder:

- ``images/000000.png``: the images.
- ``captions.jsonl``: for each image its file name, split and captions.
- ``scenes.jsonl``: for each image its scene, the facts of each caption, which captions were swapped
  and with which image, and of which image it is a near-duplicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RecipeError, suggest_name
from visavis.data.synthetic.captions import (
    CaptionFacts,
    SceneCaption,
    fact_relevance,
    write_captions,
)
from visavis.data.synthetic.lexicon import STYLES, Style
from visavis.data.synthetic.rendering import render_scene
from visavis.data.synthetic.scene import Scene, resample_layout, sample_scene


def write_synthetic_scenes(
    folder: str | Path,
    *,
    num_train: int = 2000,
    num_val: int = 200,
    num_test: int = 500,
    captions_per_image: int = 5,
    size: int = 96,
    seed: int = 0,
    noise_ratio: float = 0.0,
    near_duplicates: float = 0.0,
    style: str = "paper",
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a data set of synthetic scenes into a new folder. The same arguments give the same
    bytes.

    Args:
        folder: The new folder.
        num_train: Number of training images.
        num_val: Number of validation images.
        num_test: Number of test images.
        captions_per_image: Number of captions per image, 1 to 20.
        size: Width and height of the images in pixels, 32 to 1024.
        seed: Random seed.
        noise_ratio: Share of the training captions that are moved to a wrong image.
        near_duplicates: Share of the images of each split that are near-duplicates of an earlier
            one.
        style: Colors and words: "paper", or "glass" with other colors and with other names of
            colors and shapes.
        on_progress: Called with the number of rendered images and of all images.

    Returns:
        The folder.

    Raises:
        RecipeError: If a number is out of range or the style is unknown.
    """
    counts = {"train": num_train, "val": num_val, "test": num_test}
    check_ranges(
        **{f"num_{split}": (count, 0, 10**7) for split, count in counts.items()},
        captions_per_image=(captions_per_image, 1, 20),
        size=(size, 32, 1024),
        seed=(seed, 0, math.inf),
        noise_ratio=(noise_ratio, 0, 1),
        near_duplicates=(near_duplicates, 0, 1),
    )
    if noise_ratio and (num_train < 3 or round(noise_ratio * num_train * captions_per_image) < 2):
        raise RecipeError(
            f"noise_ratio: expected at least two wrong captions, got {noise_ratio} with "
            f"{num_train} training images. Increase num_train."
        )
    if style not in STYLES:
        raise RecipeError(f"style: unknown style {style!r}: {suggest_name(style, STYLES)}")
    folder = storage.prepare_empty_folder(folder, will_be_replaced=True)
    # All scenes exist before an image is rendered, because swapped captions need all of them.
    rows: list[_SceneRow] = []
    for number, (split, count) in enumerate(counts.items()):
        rows += _sample_split(
            split,
            count,
            captions_per_image,
            [seed, number],
            near_duplicates,
            STYLES[style],
            first=len(rows),
        )
    _swap_captions(
        [row for row in rows if row.split == "train"],
        noise_ratio,
        np.random.default_rng([seed, len(counts)]),
    )
    with storage.atomic_folder(folder) as part:
        # The folder appears as a whole, or not at all.
        storage.current_disk().mkdir(part / "images")
        for number, row in enumerate(rows):
            # A low compression, because rendering should not wait for it.
            render_scene(row.scene, size, STYLES[style].palette).save(
                part / row.filename, compress_level=1
            )
            if on_progress:
                on_progress(number + 1, len(rows))
        storage.write_json_lines(
            part / "captions.jsonl",
            (
                {
                    "filename": row.filename,
                    "split": row.split,
                    "captions": [caption.text for caption in row.captions],
                }
                for row in rows
            ),
        )
        storage.write_json_lines(
            part / "scenes.jsonl",
            (
                {
                    "filename": row.filename,
                    "split": row.split,
                    "scene": asdict(row.scene),
                    "facts": [asdict(caption.facts) for caption in row.captions],
                    "swapped_from": row.swapped_from,
                    "duplicate_of": row.duplicate_of,
                }
                for row in rows
            ),
        )
    return folder


@dataclass(frozen=True)
class SceneGraphs:
    """Ground truth of a folder of scenes, in the order of its images and captions.

    Attributes:
        scenes: The scene of each image.
        facts: The facts of each caption.
        image_of: Index of the image of each caption, shape ``[captions]``.
        swapped: Whether this is a wrong image, shape ``[captions]``.
        duplicate_of: Index of the original of a near-duplicate, else -1, shape ``[images]``.
    """

    scenes: tuple[Scene, ...]
    facts: tuple[CaptionFacts, ...]
    image_of: np.ndarray
    swapped: np.ndarray
    duplicate_of: np.ndarray

    @classmethod
    def open(cls, folder: str | Path) -> SceneGraphs:
        """Read ``scenes.jsonl`` of a folder.

        Args:
            folder: The folder.

        Returns:
            The ground truth.

        Raises:
            DataError: If it has no scene.
        """
        lines: list[_SceneLine] = storage.read_json_lines(Path(folder) / "scenes.jsonl", _SceneLine)
        if not lines:
            raise DataError(f"{Path(folder) / 'scenes.jsonl'} has no scene.")
        index_of = {line.filename: i for i, line in enumerate(lines)}
        return cls(
            tuple(line.scene for line in lines),
            tuple(facts for line in lines for facts in line.facts),
            np.repeat(np.arange(len(lines)), [len(line.facts) for line in lines]),
            np.array([name is not None for line in lines for name in line.swapped_from]),
            np.array([index_of.get(line.duplicate_of or "", -1) for line in lines]),
        )

    def relevance(
        self, images: np.ndarray | None = None, captions: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the true graded relevance of images and captions.

        Args:
            images: Indices of images. None: all.
            captions: Indices of captions. None: all.

        Returns:
            Relevance in [0, 1], shape ``[images, captions]``.
        """
        scenes = self.scenes if images is None else [self.scenes[i] for i in images]
        facts = self.facts if captions is None else [self.facts[i] for i in captions]
        return fact_relevance(scenes, facts)


@dataclass(frozen=True)
class _SceneLine:
    """A line of ``scenes.jsonl``."""

    filename: str
    scene: Scene
    facts: tuple[CaptionFacts, ...]
    swapped_from: tuple[str | None, ...]
    duplicate_of: str | None

    def __post_init__(self) -> None:
        has_facts = [
            any(facts.mentions) or facts.background is not None or facts.total is not None
            for facts in self.facts
        ]
        if not all(has_facts) or not has_facts or len(has_facts) != len(self.swapped_from):
            raise DataError(
                f"{self.filename}: expected captions with facts and one origin each, got "
                f"{len(has_facts)} captions, {sum(has_facts)} with "
                f"facts, and {len(self.swapped_from)} origins."
            )


@dataclass
class _SceneRow:
    """An image before it is written."""

    filename: str
    split: str
    scene: Scene
    captions: list[SceneCaption]
    swapped_from: list[str | None]
    duplicate_of: str | None


def _sample_split(
    split: str,
    count: int,
    per_image: int,
    seed: list[int],
    near_duplicates: float,
    style: Style,
    *,
    first: int,
) -> list[_SceneRow]:
    """Return the scenes and captions of one split. Each image has its own random generator."""
    # A stream of its own, so that near-duplicates change no other image.
    plan = np.random.default_rng([*seed, 0])
    copies = set(
        (1 + plan.permutation(max(count - 1, 0))[: round(near_duplicates * count)]).tolist()
    )
    origins = list(range(count))
    rows: list[_SceneRow] = []
    for i in range(count):
        # So an image does not depend on the number of images before it.
        rng = np.random.default_rng([*seed, i + 1])
        if i in copies:
            # The original of a copy of a copy is the first image.
            origins[i] = origins[int(plan.integers(i))]
        origin = rows[origins[i]] if i in copies else None
        scene = (
            resample_layout(origin.scene, rng)
            if origin
            else sample_scene(rng, training=split == "train")
        )
        captions = write_captions(scene, per_image, rng, style)
        rows.append(
            _SceneRow(
                f"images/{first + i:06d}.png",
                split,
                scene,
                captions,
                [None] * per_image,
                origin.filename if origin else None,
            )
        )
    return rows


def _swap_captions(rows: list[_SceneRow], noise: float, rng: np.random.Generator) -> None:
    """Shift a share of the captions cyclically, so far that each gets another image."""
    # Image and number of each caption.
    captions = [(i, k) for i, row in enumerate(rows) for k in range(len(row.captions))]
    count = step = round(noise * len(captions))
    while 2 * step > count:
        order = rng.permutation(len(rows))
        swapped = [
            captions[position] for position in rng.choice(len(captions), count, replace=False)
        ]
        swapped.sort(key=lambda caption: (order[caption[0]], caption[1]))
        # Captions of one image are neighbors. A shift by the largest number of them leaves none at
        # its image.
        step = int(np.bincount([i for i, _ in swapped]).max())
    if count:
        moved = [(rows[i].captions[k], rows[i].filename) for i, k in swapped]
        for (i, k), (caption, source) in zip(swapped, [*moved[step:], *moved[:step]], strict=True):
            rows[i].captions[k] = caption
            rows[i].swapped_from[k] = source


def check_ranges(**ranges: tuple[float, float, float]) -> None:
    """Check numbers: value, smallest and largest value of each argument. Infinity: no limit."""
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            expected = f">= {low}" if high == math.inf else f"from {low} to {high}"
            raise RecipeError(f"{name}: expected a number {expected}, got {value}.")
