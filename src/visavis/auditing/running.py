"""The whole audit: what it needs of encoders is chosen as a training would choose it, and every part is kept once it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visavis.auditing.concern import Concern
from visavis.auditing.copies import Duplicates, find_duplicates
from visavis.auditing.curve import LearningCurve, learning_curve
from visavis.auditing.folds import held_out_facts
from visavis.auditing.pairs import WrongPairs, wrong_pairs
from visavis.auditing.pictures import small_pictures
from visavis.auditing.remembered import place, remembered_value
from visavis.auditing.texts import Captions, audit_captions
from visavis.auditing.vectors import PictureVectors, caption_vectors, picture_vectors
from visavis.data.dataset import Dataset
from visavis.data.features import FeatureStore
from visavis.data.finite import file_marks
from visavis.data.reading import find_file
from visavis.errors import VisavisError, nearest
from visavis.models import small_cnn
from visavis.progress import Progress
from visavis.training.data_module import DataModule, open_data_module
from visavis.training.default_recipe import choose_recipe
from visavis.training.inputs import PRECOMP
from visavis.training.recipe_files import read_recipe

PARTS = ("duplicates", "captions", "pairs", "curve")
FEWEST = 50
"""Pictures of a fold, or of a validation split, that are needed to rank anything."""


@dataclass(frozen=True)
class Audit:
    """What pictures and captions are worth; a part that was not asked for, or that could not be done, is None.

    why: by which encoders and recipe. left_out: sentences that say which part could not be done, and how it can.
    """

    path: str
    data: str
    images: int
    captions: int
    why: str
    duplicates: Duplicates | None
    texts: Captions | None
    pairs: WrongPairs | None
    curve: LearningCurve | None
    left_out: tuple[str, ...]
    seconds: float

    @property
    def concerns(self) -> tuple[Concern, ...]:
        """All that was found, alarms first."""
        parts = (self.duplicates, self.texts, self.pairs, self.curve)
        concerns = [concern for part in parts if part is not None for concern in part.concerns()]
        return tuple(sorted(concerns, key=lambda concern: not concern.alarm))

    @property
    def ok(self) -> bool:
        """Whether nothing was found that changes what a training gives or what an evaluation says."""
        return not any(concern.alarm for concern in self.concerns)

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("path", "data", "images", "captions", "why", "ok", "seconds")}
        parts = {"duplicates": self.duplicates, "texts": self.texts, "pairs": self.pairs, "curve": self.curve}
        alarms = [concern.kind for concern in self.concerns if concern.alarm]
        return {
            **facts,
            "alarms": alarms,
            **{name: part and part.to_json() for name, part in parts.items()},
            "left_out": list(self.left_out),
        }


@dataclass
class _Auditor:
    """The parts of an audit, which share what they need. trains: whether heads on the recipe's features are trained in seconds."""

    data_module: DataModule
    trains: bool
    seed: int
    progress: Progress

    @cached_property
    def data(self) -> Dataset:
        return self.data_module.data

    @cached_property
    def identity(self) -> Any:
        """All that the results follow from."""
        visual, recipe = self.data_module.visual, self.data_module.recipe
        sizes = [image.bytes.num_bytes for image in self.data.images if image.bytes is not None]
        features: Any = str(visual.folder) if isinstance(visual, FeatureStore) else recipe.visual.features
        if features and features != PRECOMP and not isinstance(visual, FeatureStore):
            features = [[str(path), mark] for path, mark in file_marks([find_file(features)]).items()]
        return [recipe.to_dict(), self.data.fingerprint, sizes, features]

    @cached_property
    def pictures(self) -> PictureVectors | None:
        return picture_vectors(self.data_module, self.data)

    @cached_property
    def texts(self) -> Any:
        return caption_vectors(self.data_module, self.data)

    @cached_property
    def duplicates(self) -> Duplicates:
        def compute() -> Any:
            pixels = all(image.bytes is not None for image in self.data.images)
            vectors = self.pictures
            found = find_duplicates(
                self.data,
                small_pictures(self.data, self.progress) if pixels else None,
                None if vectors is None else vectors.features,
                None if vectors is None else vectors.encode,
                self.seed,
            )
            return found.to_json()

        found: Duplicates = remembered_value(place("duplicates", self.identity, self.seed), Duplicates, compute)
        return found

    @cached_property
    def groups(self) -> np.ndarray:
        return self.duplicates.groups_in(self.data)

    def captions(self) -> Captions:
        vectors, by = self.texts
        self.progress.say(f"comparing {len(self.data.captions):,} captions by {by}")
        return audit_captions(self.data, vectors, by, self.groups, self.seed)

    def pairs(self, folds: int) -> WrongPairs:
        vectors, _ = self.texts
        held = held_out_facts(self.data_module, self.data, vectors, self.groups, self.identity, folds, self.seed, self.progress)
        return wrong_pairs(self.data, held, self.data_module.recipe.phases[-1].objective, folds)

    def curve(self, seeds: int) -> LearningCurve:
        return learning_curve(self.data_module, self.data, self.identity, seeds, self.progress)

    def why_not(self, part: str, folds: int) -> str:
        """Why a part cannot be done; nothing where it can."""
        if part == "duplicates" and any(image.bytes is None for image in self.data.images):
            return f"duplicates: {self.data.name} has images without pixels, by which copies are told."
        if part not in ("pairs", "curve"):
            return ""
        if not self.trains:
            return (
                f"{part}: no image encoder is at hand: name one, such as visual.tower=FOLDER, or a recipe that trains one "
                "(--recipe photos/pixels-words, which takes minutes for each of its models)."
            )
        if part == "pairs" and len(self.data.images) < folds * FEWEST:
            return f"pairs: {len(self.data.images):,} images are too few for {folds} folds of {FEWEST}."
        if part == "curve":
            sizes = {
                name: sum(image.split == name for image in self.data.images)
                for name in (self.data_module.recipe.evaluation.validation, "train")
            }
            if short := [f"{name} has {count:,} images" for name, count in sizes.items() if count < FEWEST]:
                return f"curve: {' and '.join(short)}, expected at least {FEWEST}."
        return ""


def audit(
    path: str | Path,
    recipe: str | Path | None,
    overrides: dict[str, Any],
    parts: Sequence[str],
    folds: int,
    seeds: int,
    progress: Progress,
) -> Audit:
    """The audit of a data set. recipe: whose encoders, model and objective are asked; None: the default for the data.

    Raises VisavisError for an unknown part or a number out of range, and as training does for the data and the recipe.
    """
    started = time.perf_counter()
    for part in parts:
        if part not in PARTS:
            raise VisavisError(f"{part} is no part of an audit: {nearest(part, PARTS)}")
    if folds < 2 or seeds < 2:
        raise VisavisError(f"folds is {folds} and seeds is {seeds}, expected at least 2 of each.")
    settings = {"data.path": str(path)} | overrides
    why, named = f"recipe {recipe}", recipe is not None
    if recipe is None:
        default = choose_recipe(settings)
        recipe, settings = default.name, default.overrides | settings
        why = default.why.removeprefix("no recipe named, so ")
    chosen = read_recipe(recipe, settings)
    trains = named or chosen.visual.tower != small_cnn.NAME
    auditor = _Auditor(open_data_module(chosen, progress), trains, chosen.seed, progress)
    wanted = parts or PARTS
    left_out = {part: reason for part in wanted if (reason := auditor.why_not(part, folds))}
    todo = [part for part in PARTS if part in wanted and part not in left_out]

    def done(part: str, compute: Callable[[], Any]) -> Any:
        return compute() if part in todo else None

    return Audit(
        path=str(path),
        data=auditor.data.name,
        images=len(auditor.data.images),
        captions=len(auditor.data.captions),
        why=why,
        duplicates=done("duplicates", lambda: auditor.duplicates),
        texts=done("captions", auditor.captions),
        pairs=done("pairs", lambda: auditor.pairs(folds)),
        curve=done("curve", lambda: auditor.curve(seeds)),
        left_out=tuple(left_out.values()),
        seconds=time.perf_counter() - started,
    )
