"""How far estimators of degrees agree with human ratings, and what they cost."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr

from visavis import storage
from visavis.degrees.base import Degrees
from visavis.degrees.catalog import CATALOG
from visavis.degrees.ratings import RatedPairs, read_crisscrossed, read_stsb
from visavis.progress import Progress
from visavis.spec import parse

ESTIMATORS = (
    "CBoW()",
    "CBoW(weighting='idf')",
    "CBoW(common=1)",
    "SentenceModel()",
    "CoarseToFine()",
    "CoarseToFine(semantics='reference')",
)
"""The estimators that are judged by default."""

PAPER = {
    "coarse to fine: CBoW, fine-tuned BERT above 0.8": "0.79 on STS-B, split not stated",
    "BERT fine-tuned on STS-B": "0.88 on STS-B dev",
}
"""Pearson's correlations that the ladder paper reports."""

THETA = 0.63
"""The first threshold of the ladder paper."""

RANDOM_PAIRS = 5_000
MEASURED_S = 1.0
"""How long each estimator's speed is measured."""


@dataclass(frozen=True)
class Judged:
    """One estimator compared with human ratings. pearson, spearman: by collection, None where all degrees are equal.

    mean, above: the mean degree of random pairs of different captions of Crisscrossed Captions, and the share of them above 0.63.
    captions_per_s: captions encoded per second, loading the model included. million_pairs_s: seconds for a million pairs of encoded
    captions.
    """

    degrees: str
    pearson: dict[str, float | None]
    spearman: dict[str, float | None]
    mean: float
    above: float
    captions_per_s: float
    million_pairs_s: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def judge(specs: Sequence[str], progress: Progress) -> list[Judged]:
    """Every estimator against the ratings of STS-B dev and test and of Crisscrossed Captions. Raises DataError if they are missing."""
    estimators = [parse(spec, CATALOG) for spec in specs]
    collections = [read_stsb("dev"), read_stsb("test"), read_crisscrossed()]
    rows = []
    for number, (spec, estimator) in enumerate(zip(specs, estimators, strict=True)):
        progress.work("estimators", number, len(specs), 0.0)
        rows.append(_judge(spec, estimator, collections))
    return rows


def _judge(spec: str, estimator: Degrees, collections: Sequence[RatedPairs]) -> Judged:
    pearson, spearman, notes = {}, {}, []
    for rated in collections:
        pearson[rated.name], spearman[rated.name], special = agreement(estimator, rated)
        notes += [f"{rated.name}: {note}" for note in special]
    captions = sorted({*collections[-1].first, *collections[-1].second})
    random = estimator.of(captions).pairs(*random_pairs(len(captions), RANDOM_PAIRS))
    with _empty_cache():
        captions_per_s, million_pairs_s = speed(estimator, captions[:: max(1, len(captions) // 2000)][:2000])
    return Judged(
        spec, pearson, spearman, float(random.mean()), float((random > THETA).float().mean()), captions_per_s, million_pairs_s, tuple(notes)
    )


def agreement(estimator: Degrees, rated: RatedPairs) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Pearson's and Spearman's correlation of degrees with ratings, and notes on the captions."""
    number = len(rated.ratings)
    ready = estimator.of([*rated.first, *rated.second])
    degrees = ready.pairs(torch.arange(number), number + torch.arange(number)).numpy().astype(np.float64)
    if np.ptp(degrees) == 0:
        return None, None, (*ready.notes, f"every pair has the degree {degrees[0]:g}: no correlation.")
    return float(pearsonr(degrees, rated.ratings).statistic), float(spearmanr(degrees, rated.ratings).statistic), ready.notes


def random_pairs(number: int, pairs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pairs of different items, uniformly distributed."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(number, (pairs,), generator=generator)
    return first, (first + torch.randint(1, number, (pairs,), generator=generator)) % number


def speed(estimator: Degrees, captions: Sequence[str]) -> tuple[float, float]:
    """Captions encoded per second, and seconds for a million pairs: the best of blocks of growing size, within ``MEASURED_S``."""
    begun = time.perf_counter()
    ready = estimator.of(captions)
    captions_per_s = len(captions) / (time.perf_counter() - begun)
    half = len(captions) // 2
    ready(torch.arange(1), half + torch.arange(2))  # a first call may load a model
    start, size, spent, best = 0, min(32, half), 0.0, math.inf
    while spent < MEASURED_S:
        rows = torch.arange(start, start + size)
        begun = time.perf_counter()
        ready(rows, half + rows)
        seconds = time.perf_counter() - begun
        spent, best = spent + seconds, min(best, seconds / size**2)
        if start + 3 * size <= half:  # pairs that were not computed before
            start, size = start + size, 2 * size
    return captions_per_s, 1e6 * best


@contextmanager
def _empty_cache() -> Iterator[None]:
    """An empty cache, so that everything is computed anew; only the models in the cache are still found."""
    before, backbones = os.environ.get("VISAVIS_CACHE"), storage.cache_folder() / "backbones"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VISAVIS_CACHE"] = folder
        try:
            if backbones.exists():
                (Path(folder) / "backbones").symlink_to(backbones.resolve())
            yield
        finally:
            os.environ.pop("VISAVIS_CACHE")
            os.environ |= {} if before is None else {"VISAVIS_CACHE": before}
