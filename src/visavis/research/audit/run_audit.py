"""The audit of a data set: it chooses encoders as a training does, and caches each finished part."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import VisavisError, suggest_name
from visavis.core.fields import validate_int
from visavis.core.progress import NoProgress, Progress
from visavis.core.result import Result
from visavis.core.run_context import RunContext
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.features.store import FeatureStore
from visavis.data.parallel import cpu_cores
from visavis.models.encoders import cnn_backbones
from visavis.research.audit.audit_part import (
    CachedModel,
    Issue,
    cache_path,
    cached_value,
    caption_vectors,
    image_vectors,
)
from visavis.research.audit.caption_audit import CaptionAudit, audit_captions
from visavis.research.audit.duplicates import Duplicates, find_duplicates, read_thumbnails
from visavis.research.audit.learning_curve import (
    LearningCurve,
    curve_models,
    measure_learning_curve,
)
from visavis.research.audit.mislabeled_pairs import (
    MislabeledPairs,
    find_mislabeled_pairs,
    fold_models,
)
from visavis.research.experiments.jobs import process_pool
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.default_recipe import choose_recipe
from visavis.training.recipes.features import PRECOMP
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.open_data import open_data_module
from visavis.training.recipes.recipe import build_recipe

# Parts of an audit, and the attribute of `Audit` that holds the result.
AUDIT_PARTS = {
    "duplicates": "duplicates",
    "captions": "caption_audit",
    "mislabeled": "mislabeled_pairs",
    "learning_curve": "learning_curve",
}
# With fewer steps of all models together, starting processes takes longer than they save.
MIN_PARALLEL_STEPS = 3000
# Images of a fold or a validation split, below which ranks mean little.
MIN_IMAGES = 50


@dataclass(frozen=True)
class Audit(Result):
    """Result of an audit. A part that was not requested or not possible is None.

    Attributes:
        path: The given path of the data set.
        data: Name of the data set.
        images: Number of images.
        captions: Number of captions.
        reason: Which encoders and recipe were used, and why.
        duplicates: Near-duplicate images.
        caption_audit: Uninformative and unusual captions.
        mislabeled_pairs: Likely mislabeled pairs.
        learning_curve: Expected gain from more data.
        skipped: For each part that was not possible, a sentence with the reason.
        seconds: Duration.
    """

    path: str
    data: str
    images: int
    captions: int
    reason: str
    duplicates: Duplicates | None
    caption_audit: CaptionAudit | None
    mislabeled_pairs: MislabeledPairs | None
    learning_curve: LearningCurve | None
    skipped: tuple[str, ...]
    seconds: float

    @property
    def issues(self) -> tuple[Issue, ...]:
        """All issues, serious ones first."""
        parts = [getattr(self, name) for name in AUDIT_PARTS.values()]
        issues = [issue for part in parts if part is not None for issue in part.issues()]
        return tuple(sorted(issues, key=lambda issue: not issue.serious))

    @property
    def ok(self) -> bool:
        """Whether all issues are minor."""
        return not any(issue.serious for issue in self.issues)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        values = asdict(self) | {
            "ok": self.ok,
            "serious_issues": [issue.kind for issue in self.issues if issue.serious],
        }
        first = ("path", "data", "images", "captions", "reason", "ok", "seconds", "serious_issues")
        return {name: values[name] for name in (*first, *AUDIT_PARTS.values(), "skipped")}


@dataclass
class _Auditor:
    """The parts of an audit by name, with their shared inputs. can_train: whether the recipe's
    features make a training take seconds.
    """

    data_module: DataModule
    can_train: bool
    folds: int
    seeds: int
    progress: Progress

    @property
    def data(self) -> Dataset:
        return self.data_module.data

    @cached_property
    def identity(self) -> Any:
        """JSON data that identifies the recipe, the data and the features in the cache."""
        visual = self.data_module.visual
        recipe = self.data_module.recipe
        # Sizes of the files show changed images without reading them.
        sizes = [
            image.location.num_bytes for image in self.data.images if image.location is not None
        ]
        features: Any = (
            str(visual.folder) if isinstance(visual, FeatureStore) else recipe.visual.features
        )
        if features and features != PRECOMP and not isinstance(visual, FeatureStore):
            features = [
                [str(path), stats]
                for path, stats in storage.file_stats([resolve_path(features)]).items()
            ]
        return [recipe.to_dict(), self.data.fingerprint, sizes, features]

    @cached_property
    def caption_vectors(self) -> Any:
        return caption_vectors(self.data_module, self.data)

    @property
    def has_pixels(self) -> bool:
        return all(image.location is not None for image in self.data.images)

    @cached_property
    def duplicates(self) -> Duplicates:
        seed = self.data_module.recipe.seed

        def compute() -> Any:
            vectors = image_vectors(self.data_module, self.data)
            thumbnails = read_thumbnails(self.data, self.progress) if self.has_pixels else None
            return asdict(find_duplicates(self.data, thumbnails, vectors, seed))

        duplicates: Duplicates = cached_value(
            cache_path("duplicates", self.identity, seed), Duplicates, compute
        )
        return duplicates

    @cached_property
    def copy_groups(self) -> np.ndarray:
        return self.duplicates.copy_groups(self.data)

    @cached_property
    def captions(self) -> CaptionAudit:
        vectors, encoder = self.caption_vectors
        self.progress.message(f"comparing {len(self.data.captions):,} captions ({encoder})")
        return audit_captions(
            self.data, vectors, encoder, self.copy_groups, self.data_module.recipe.seed
        )

    @cached_property
    def mislabeled(self) -> MislabeledPairs:
        vectors, _ = self.caption_vectors
        return find_mislabeled_pairs(
            self.data_module, vectors, self.copy_groups, self.identity, self.folds, self.progress
        )

    @cached_property
    def learning_curve(self) -> LearningCurve:
        return measure_learning_curve(self.data_module, self.identity, self.seeds, self.progress)

    def models(self, parts: Collection[str]) -> list[CachedModel[Any]]:
        """List the models of some parts."""
        models = list[CachedModel[Any]]()
        if "mislabeled" in parts:
            models += fold_models(
                self.data_module,
                self.caption_vectors[0],
                self.copy_groups,
                self.identity,
                self.folds,
            )
        if "learning_curve" in parts:
            models += [
                model for *_, model in curve_models(self.data_module, self.identity, self.seeds)
            ]
        return models

    def train_models(self, parts: Collection[str]) -> None:
        """Train the models of some parts in several processes if this saves time. Their results are
        cached.
        """
        models = self.models(parts)
        recipe = self.data_module.recipe
        # Models of both axes on all data share a file, so each is trained once.
        missing = {
            model.file: number
            for number, model in enumerate(models)
            if not os.path.exists(model.file)
        }
        workers = min(len(missing), cpu_cores() // (recipe.training.threads or 1))
        if (
            workers < 2
            or sum(models[number].num_steps for number in missing.values()) < MIN_PARALLEL_STEPS
        ):
            return
        # The models with the most steps come first, so that no process waits long for the last one.
        order = sorted(missing.values(), key=lambda number: -models[number].num_steps)
        arguments = json.dumps(recipe.to_dict()), tuple(parts), self.folds, self.seeds
        with process_pool(workers) as pool:
            # Results reach this process through the cache.
            futures = [pool.submit(_train_in_worker, number, *arguments) for number in order]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                self.progress.update(f"models in {workers} processes", done, len(futures), 0.0)

    def reason_to_skip(self, part: str) -> str:
        """Return why a part is not possible, or an empty text."""
        if part == "duplicates" and not self.has_pixels:
            return f"duplicates: {self.data.name} has images without pixels. Add the image files to find copies."
        if part not in ("mislabeled", "learning_curve"):
            return ""
        if not self.can_train:
            return (
                f"{part}: no image encoder is available. Name one, such as visual.encoder=FOLDER, "
                "or a recipe that trains one "
                "(--recipe photos/pixels-words, which takes minutes for each of its models)."
            )
        if part == "mislabeled" and len(self.data.images) < self.folds * MIN_IMAGES:
            return f"mislabeled: expected at least {MIN_IMAGES} images per fold, got {len(self.data.images):,} images for {self.folds} folds."
        if part == "learning_curve":
            splits = [image.split for image in self.data.images]
            sizes = {
                name: splits.count(name)
                for name in (self.data_module.recipe.evaluation.validation, "train")
            }
            if small := [
                f"{count:,} in {name}" for name, count in sizes.items() if count < MIN_IMAGES
            ]:
                return f"learning_curve: expected at least {MIN_IMAGES} images per split, got {' and '.join(small)}."
        return ""


def _train_in_worker(number: int, *arguments: Any) -> None:
    """Train one of the models of an audit."""
    _models_in_worker(*arguments)[number].result(NoProgress())


@lru_cache(maxsize=1)
def _models_in_worker(
    recipe_values: str, parts: tuple[str, ...], folds: int, seeds: int
) -> list[CachedModel[Any]]:
    recipe = build_recipe(json.loads(recipe_values), {}, "audit")
    return _Auditor(open_data_module(recipe), True, folds, seeds, NoProgress()).models(parts)


def audit(
    path: str | Path,
    recipe: str | Path | None,
    overrides: dict[str, Any],
    parts: Sequence[str],
    folds: int,
    seeds: int,
    progress: Progress,
) -> Audit:
    """Audit a data set, in all parts if none is named. The default recipe is the one for the data."""
    started = time.perf_counter()
    for part in parts:
        if part not in AUDIT_PARTS:
            raise VisavisError(
                f"parts: unknown part {part!r} of an audit: {suggest_name(part, AUDIT_PARTS)}"
            )
    validate_int(folds, "folds", 2)
    validate_int(seeds, "seeds", 2)
    # The data set of the command wins over the one of the recipe.
    settings = {"data.path": str(path)} | overrides
    is_named = recipe is not None
    reason = f"recipe {recipe}"
    if recipe is None:
        default = choose_recipe(settings)
        recipe = default.name
        settings = default.overrides | settings
        reason = default.reason
    chosen = read_recipe(recipe, settings)
    can_train = is_named or chosen.visual.encoder != cnn_backbones.SMALL_CNN
    auditor = _Auditor(
        open_data_module(chosen, RunContext(progress)), can_train, folds, seeds, progress
    )
    requested = [part for part in AUDIT_PARTS if part in (parts or AUDIT_PARTS)]
    skipped = {part: why for part in requested if (why := auditor.reason_to_skip(part))}
    auditor.train_models([part for part in requested if part not in skipped])
    results = {
        AUDIT_PARTS[part]: getattr(auditor, part) for part in requested if part not in skipped
    }
    return Audit(
        path=str(path),
        data=auditor.data.name,
        images=len(auditor.data.images),
        captions=len(auditor.data.captions),
        reason=reason,
        **{name: results.get(name) for name in AUDIT_PARTS.values()},
        skipped=tuple(skipped.values()),
        seconds=time.perf_counter() - started,
    )
