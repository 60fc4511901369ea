"""Thresholds of Ladder's levels from the distribution of degrees, since 0.63 means something else for every estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import torch

from visavis.data.dataset import Dataset
from visavis.degrees.base import ImageBy, ImageDegrees
from visavis.degrees.catalog import CATALOG
from visavis.degrees.judging import THETA
from visavis.errors import DataError, SpecError
from visavis.progress import Progress
from visavis.spec import parse

SHARES = (0.01, 0.03, 0.1, 0.3)
"""The share of a batch's other captions above the first threshold, the second, ...; each about three times the one before."""

MOST_PAIRS = 100_000_000
BATCH = 128


@dataclass(frozen=True)
class Distribution:
    """The degrees of random images and captions of other images, in batches of 128.

    mean, above: of all pairs, and the share above 0.63. quantiles: the degree above which each share of SHARES lies.
    ladders: specs of Ladder for 2 to 5 levels, as many as have thresholds that differ. histogram: counts in 100 equal bins of [0, 1].
    notes: on captions that needed special treatment.
    """

    degrees: str
    data: str
    pairs: int
    mean: float
    above: float
    quantiles: tuple[float, ...]
    ladders: tuple[str, ...]
    histogram: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def distributions(specs: Sequence[str], data: Dataset, image: ImageBy, pairs: int, progress: Progress) -> list[Distribution]:
    """How each estimator's degrees lie over the training pairs of a data set. Raises DataError if all degrees are equal."""
    if image not in get_args(ImageBy) or not 1 <= pairs <= MOST_PAIRS:
        raise SpecError(f"image is {image!r} and pairs is {pairs}, expected 'own', 'best' or 'mean', and 1 to {MOST_PAIRS:,}.")
    estimators = [parse(spec, CATALOG) for spec in specs]
    train = data.split("train")
    rows = []
    for number, (spec, estimator) in enumerate(zip(specs, estimators, strict=True)):
        progress.work("estimators", number, len(specs), 0.0)
        degrees = estimator.between(train, image)
        rows.append(replace(distribution(spec, sample(degrees, train, pairs), data.name), notes=degrees.notes))
    return rows


def sample(degrees: ImageDegrees, data: Dataset, pairs: int, seed: int = 0) -> np.ndarray:
    """At least ``pairs`` degrees of images with captions of other images, from random batches as in training."""
    if len(data.images) < 2:
        raise DataError(
            f"{data.name} has {len(data.images)} training image, expected several: degrees are of images with others' captions."
        )
    random = np.random.default_rng(seed)
    samples: list[np.ndarray] = []
    while sum(map(len, samples)) < pairs:
        images = random.choice(len(data.images), min(BATCH, len(data.images)), replace=False)
        captions = np.array([random.choice(data.captions_of[i]) for i in images])
        block = degrees(*map(torch.from_numpy, (images, captions, captions)))
        samples.append(block[~torch.eye(len(images), dtype=torch.bool)].numpy())
    return np.concatenate(samples)


def distribution(spec: str, degrees: np.ndarray, data: str) -> Distribution:
    if np.ptp(degrees) == 0:
        raise DataError(f"{spec} gives all pairs of {data} that were looked at the degree {degrees[0]:g}: no threshold tells them apart.")
    quantiles = np.quantile(degrees, [1 - share for share in SHARES]).round(3).tolist()
    usable = [quantiles[:number] for number in range(1, len(SHARES) + 1) if all(a > b for a, b in pairwise((*quantiles[:number], 0.0)))]
    return Distribution(
        spec,
        data,
        len(degrees),
        float(degrees.mean()),
        float((degrees > THETA).mean()),
        tuple(quantiles),
        tuple(map(ladder, usable)),
        tuple(np.histogram(degrees, 100, (0, 1))[0].tolist()),
    )


def ladder(thresholds: Sequence[float]) -> str:
    """The spec of Ladder with these thresholds; margins and betas continue the paper's values."""
    margins = (0.2, *[0.01] * len(thresholds))
    betas = (1.0, *(0.25 / 2**rung for rung in range(len(thresholds))))
    return f"Ladder(margins={margins}, thresholds={tuple(thresholds)}, betas={betas})"
