"""Learning curve: validation RSUM by the amount of training data, and the expected gain from twice
as much.

The extrapolation fits y(n) = a - b n^-c, and its limit for c -> 0, y(n) = a + b log n. The exponent
c comes from a grid, a and b >= 0 from least squares. The interval covers both sources of
uncertainty:

- Measurements are resampled (Student's t with the pooled standard deviation over seeds).
- For each resampled curve, the smallest and the largest prediction of all exponents that fit nearly
  as well as the best are kept, because few sizes determine the exponent badly. The interval is from
  the 2.5 % quantile of the former to the 97.5 % quantile of the latter.

Source: J. Hestness et al., "Deep Learning Scaling is Predictable, Empirically" (2017).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.models import Matcher
from visavis.research.audit.audit_part import (
    CachedModel,
    Issue,
    cache_path,
    cached_value,
    count_steps,
    fit_model,
    max_epoch_factor,
)
from visavis.training.recipes.data_module import DataModule

EXPONENTS = np.concatenate([[0.0], np.geomspace(0.05, 2.0, 200)])
NUM_SAMPLES, CONFIDENCE = 400, 0.95
FRACTIONS = (0.125, 0.25, 0.5, 1.0)
# A part of the data is trained on for as many steps as the whole, but for at most this factor of
# the epochs, and for at most `MAX_STEPS` times the square root of its fraction: more steps do not
# improve small parts. The curve shows the best of several evaluations, so that neither a too short
# nor a too long training is mistaken for too little data.
MAX_EPOCH_FACTOR, NUM_EVALUATIONS = 4.0, 4

Verdict = Literal["more", "little", "unclear"]


@dataclass(frozen=True)
class Extrapolation:
    """Expected gain from twice the largest measured size.

    Attributes:
        size: Twice the largest measured size.
        gain: Expected gain in RSUM.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        exponent: Exponent of the best fit.
        verdict: "more" if the gain is certainly positive, "little" if it is certainly below 1 % of
            the current RSUM, else "unclear".
    """

    size: int
    gain: float
    low: float
    high: float
    exponent: float
    verdict: Verdict

    def __str__(self) -> str:
        verdict = {"more": "", "little": ", almost nothing", "unclear": ", inconclusive"}[
            self.verdict
        ]
        return f"{self.size:,} would add {self.gain:+.1f} RSUM (95 %: {self.low:+.1f} to {self.high:+.1f}){verdict}"


def extrapolate(sizes: np.ndarray, values: np.ndarray, seed: int = 0) -> Extrapolation:
    """Predict the gain from twice the largest size, from several values of at least three sizes."""
    from scipy.stats import f, t

    distinct = np.unique(sizes)  # [S], ascending
    means = np.array([values[sizes == size].mean() for size in distinct])
    counts = np.array([(sizes == size).sum() for size in distinct])
    dof = int(counts.sum() - len(distinct))  # pooled over the sizes
    residuals = values - means[np.searchsorted(distinct, sizes)]
    std = float(np.sqrt((residuals**2).sum() / dof))
    random = np.random.default_rng(seed)
    noise = (
        t.rvs(dof, size=(NUM_SAMPLES, len(distinct)), random_state=random) * std / np.sqrt(counts)
    )
    # [1 + samples, E]: the measured curve first.
    errors, gains = _fit_power_laws(distinct, np.concatenate([means[None], means + noise]), counts)
    best = int(errors[0].argmin())  # exponent of the measured curve
    # Exponents that an F test does not distinguish from the best one.
    fits_well = errors[1:] <= errors[1:].min(1, keepdims=True) + std**2 * f.ppf(CONFIDENCE, 1, dof)
    lowest = np.where(fits_well, gains[1:], np.inf).min(1)
    highest = np.where(fits_well, gains[1:], -np.inf).max(1)
    gain = float(gains[0, best])
    low = min(float(np.quantile(lowest, (1 - CONFIDENCE) / 2)), gain)
    high = max(float(np.quantile(highest, (1 + CONFIDENCE) / 2)), gain)
    verdict: Verdict = (
        "little" if high < 0.01 * abs(means[-1]) else "more" if low > 0 else "unclear"
    )
    return Extrapolation(int(2 * distinct[-1]), gain, low, high, float(EXPONENTS[best]), verdict)


def _fit_power_laws(
    sizes: np.ndarray, means: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return squared errors of the best fit for each curve and exponent ``[M, E]``, and its gain at
    twice the largest size.
    """
    # Relative to the largest size, where every shape is 0.
    relative = sizes / sizes[-1]
    # [E, S]
    shapes = np.stack([np.log(relative) if c == 0 else (1 - relative**-c) / c for c in EXPONENTS])
    doubled = np.array([np.log(2) if c == 0 else (1 - 2.0**-c) / c for c in EXPONENTS])
    weights = counts / counts.sum()
    # Weighted least squares with an intercept: center both sides.
    centered = shapes - (shapes * weights).sum(1, keepdims=True)
    residuals = means - (means * weights).sum(1, keepdims=True)
    # [M, E], more data never hurts
    slopes = np.maximum((residuals * weights) @ centered.T / (centered**2 * weights).sum(1), 0.0)
    errors = ((residuals[:, None] - slopes[..., None] * centered[None]) ** 2 * counts).sum(-1)
    return errors, slopes * doubled


@dataclass(frozen=True)
class CurvePoint:
    """One trained model.

    Attributes:
        size: Number of images, or of captions per image, that it was trained on.
        seed: Seed of the training.
        rsum: Its validation RSUM.
    """

    size: int
    seed: int
    rsum: float


@dataclass(frozen=True)
class CurveAxis:
    """Measurements along one kind of data.

    Attributes:
        unit: "images" or "captions per image".
        points: The trained models.
        extrapolation: Expected gain. None if there are fewer than three sizes or two seeds.
    """

    unit: str
    points: tuple[CurvePoint, ...]
    extrapolation: Extrapolation | None

    def __str__(self) -> str:
        by_size = {
            size: [point.rsum for point in self.points if point.size == size]
            for size in sorted({p.size for p in self.points})
        }
        means = ", ".join(f"{size:,}: {np.mean(values):.1f}" for size, values in by_size.items())
        return f"{self.unit} {means}. {self.extrapolation or f'{len(by_size)} sizes are too few for an extrapolation'}"


@dataclass(frozen=True)
class LearningCurve:
    """Validation RSUM by number of images and by captions per image.

    Attributes:
        axes: Measurements along each kind of data.
        validation: Number of validation images.
    """

    axes: tuple[CurveAxis, ...]
    validation: int

    def issues(self) -> list[Issue]:
        """Report the curve as one issue that is not serious."""
        points = sum(len(axis.points) for axis in self.axes)
        description = f"validation RSUM ({self.validation:,} images) of {points} models by size of their training data."
        gains = {
            axis.unit: e.gain
            for axis in self.axes
            if (e := axis.extrapolation) is not None and e.verdict == "more"
        }
        fix = "More data of the same kind has no certain benefit. Try another encoder or recipe first, or use more seeds."
        if gains:
            best = max(gains, key=gains.__getitem__)
            fix = f"Collect more {best}: twice as many are expected to add {gains[best]:+.1f} RSUM."
        return [
            Issue(
                "learning curve",
                points,
                description,
                fix,
                tuple(map(str, self.axes)),
                serious=False,
            )
        ]


def measure_learning_curve(
    data_module: DataModule, identity: Any, seeds: int, progress: Progress
) -> LearningCurve:
    """Train models on parts of the training split and evaluate them on the validation split."""
    models = curve_models(data_module, identity, seeds)
    curves = list[CurveAxis]()
    points_of = defaultdict[str, list[CurvePoint]](list)
    # Each result is cached, so that an interrupted call resumes.
    for done, (unit, size, seed, model) in enumerate(models, 1):
        # The best of several evaluations.
        points_of[unit].append(CurvePoint(size, seed, max(model.result(progress))))
        progress.update("learning curve", done, len(models), 0.0)
    for unit, points in points_of.items():
        sizes, rsums = ([getattr(p, name) for p in points] for name in ("size", "rsum"))
        can_extrapolate = len(set(sizes)) > 2 and seeds > 1
        extrapolation = extrapolate(np.array(sizes), np.array(rsums)) if can_extrapolate else None
        curves.append(CurveAxis(unit, tuple(points), extrapolation))
    return LearningCurve(tuple(curves), len(data_module.validation.images))


def curve_models(
    data_module: DataModule, identity: Any, seeds: int
) -> list[tuple[str, int, int, CachedModel[list[float]]]]:
    """List unit, size and seed of the models of the curve, and the models. Models of both axes that
    are trained on all data are the same.
    """
    train = data_module.data.split("train")
    # For each size: the size, its fraction of the data, and the arguments of `Dataset.subsample`.
    axes = {
        "images": [
            (count := round(fraction * len(train.images)), fraction, (count, 0))
            for fraction in FRACTIONS
        ]
    }
    max_captions = min(map(len, train.captions_of))
    if max_captions > 1:
        # One, two, half of them, and all.
        caption_counts = sorted({1, 2, -(-max_captions // 2), max_captions})
        axes["captions per image"] = [
            (count, count / max_captions, (0, count)) for count in caption_counts
        ]
    return [
        (
            unit,
            size,
            seed,
            _point_model(data_module, train.subsample(*limits, seed), identity, seed, fraction),
        )
        for unit, sizes in axes.items()
        for size, fraction, limits in sizes
        for seed in range(seeds)
    ]


def _point_model(
    data_module: DataModule, part: Dataset, identity: Any, seed: int, fraction: float
) -> CachedModel[list[float]]:
    """Return the model that is trained on a part of the data. Its result is its validation RSUM at
    each of `NUM_EVALUATIONS`.
    """
    recipe = data_module.recipe
    validation = data_module.validation
    epoch_factor = min(
        1 / fraction, MAX_EPOCH_FACTOR, max_epoch_factor(recipe, part) * fraction**0.5
    )
    cache = cache_path(
        "curve",
        identity,
        part.image_rows.tolist(),
        part.caption_rows.tolist(),
        seed,
        epoch_factor,
        NUM_EVALUATIONS,
    )

    def evaluate_during_training(progress: Progress) -> list[float]:
        values = list[float]()

        def on_step(matcher: Matcher, done: int, total: int) -> None:
            progress.update(f"model of {len(part.images):,} images", done, total, 0.0)
            # After each quarter of the steps.
            if done * NUM_EVALUATIONS // total > (done - 1) * NUM_EVALUATIONS // total:
                values.append(data_module.evaluate(matcher, validation).metrics["rsum"])

        fit_model(data_module, part, validation, seed, on_step, epoch_factor=epoch_factor)
        return values

    return CachedModel(
        cache.with_suffix(".json"),
        count_steps(recipe, part, epoch_factor),
        lambda progress: cached_value(
            cache, list[float], partial(evaluate_during_training, progress)
        ),
    )
