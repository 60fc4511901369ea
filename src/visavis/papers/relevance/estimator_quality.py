"""Quality of relevance estimators: agreement with human ratings, speed, and the distribution of
their values.

Estimators differ in scale, so a threshold such as 0.63 means something else for each of them. The
thresholds of Ladder's levels are therefore taken from the distribution of an estimator's values.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.fields import validate_int
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Row, Table
from visavis.data.dataset import Dataset
from visavis.papers.relevance.base import (
    CaptionAggregation,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.papers.relevance.catalog import named_estimator
from visavis.papers.relevance.human_agreement import (
    RatedCaptionPairs,
    read_crisscrossed_captions,
    read_stsb,
)

DEFAULT_ESTIMATORS = (
    "CBoW()",
    "CBoW(weighting='idf')",
    "CBoW(removed_components=1)",
    "SentenceModel()",
    "CoarseToFine()",
    "CoarseToFine(semantics='reference')",
)
"""Estimators that are evaluated by default."""

PUBLISHED_CORRELATIONS = {
    "coarse to fine: CBoW, fine-tuned BERT above 0.8": "0.79 on STS-B, split not stated",
    "BERT fine-tuned on STS-B": "0.88 on STS-B dev",
}
"""Pearson correlations that the Ladder paper reports."""

FIRST_LADDER_THRESHOLD = 0.63
"""First threshold of the Ladder paper."""

RANDOM_PAIRS = 5_000
"""Number of random caption pairs whose mean relevance is measured."""

SPEED_TEST_SECONDS = 1.0
"""Duration of the speed test of each estimator."""

TAIL_SHARES = (0.01, 0.03, 0.1, 0.3)
"""Share of a batch's other captions above the first threshold, the second, and so on. Each is about
three times the previous one.
"""

MAX_PAIRS = 100_000_000
"""Maximum number of sampled pairs of a distribution."""
SAMPLE_BATCH_SIZE = 128
"""Number of images per sampled batch."""


@dataclass(frozen=True)
class EstimatorQuality(Result):
    """Agreement of one estimator with human ratings, and its speed.

    Attributes:
        estimator: Spec of the estimator.
        pearson: Pearson correlation by collection. None if all values are equal.
        spearman: Spearman correlation by collection. None if all values are equal.
        mean: Mean relevance of random pairs of different captions of Crisscrossed Captions.
        share_above_threshold: Share of these pairs above 0.63.
        captions_per_s: Encoded captions per second, including loading the model.
        million_pairs_s: Seconds for a million pairs of encoded captions.
        notes: Sentences about captions that needed special treatment.
    """

    estimator: str
    pearson: dict[str, float | None]
    spearman: dict[str, float | None]
    mean: float
    share_above_threshold: float
    captions_per_s: float
    million_pairs_s: float
    notes: tuple[str, ...]

    def tables(self) -> list[Table]:
        """Return the correlations and speeds."""
        return [estimator_table([self])]

    def to_json(self) -> dict[str, object]:
        """Return a JSON object."""
        return asdict(self)


def estimator_table(qualities: Sequence[EstimatorQuality]) -> Table:
    """Make a table of the correlation with human ratings and the speed of estimators."""
    rows: list[Row] = []
    for each in qualities:
        correlations = (
            None if r is None else f"{r:.3f} / {each.spearman[name]:.3f}"
            for name, r in each.pearson.items()
        )
        speeds = (each.captions_per_s, each.million_pairs_s)
        rows.append((each.estimator, *correlations, each.mean, each.share_above_threshold, *speeds))
    columns = (
        Column(is_text=True),
        *(Column(name, missing="-") for name in qualities[0].pearson),
        Column("mean", ".2f"),
        Column("> 0.63", ".1%"),
        Column("captions/s", ",.0f"),
        Column("s/million pairs", ".3g"),
    )
    published = "; ".join(f"{name} {value}" for name, value in PUBLISHED_CORRELATIONS.items())
    note = (
        "Pearson / Spearman with human ratings. Mean and share above 0.63 of random pairs of COCO "
        "captions."
    )
    notes = (
        note,
        f"Pearson in the paper: {published}.",
        *dict.fromkeys(f"{each.estimator}: {note}" for each in qualities for note in each.notes),
    )
    return Table(columns, tuple(rows), notes)


def evaluate_estimators(specs: Sequence[str], progress: Progress) -> list[EstimatorQuality]:
    """Compare estimators with the human ratings of STS-B (dev and test) and of Crisscrossed
    Captions.
    """
    estimators = [named_estimator(spec) for spec in specs]
    collections = [read_stsb("dev"), read_stsb("test"), read_crisscrossed_captions()]
    captions = sorted({*collections[-1].first, *collections[-1].second})
    qualities = []
    for number, (spec, estimator) in enumerate(zip(specs, estimators, strict=True)):
        progress.update("estimators", number, len(specs), 0.0)
        correlations = {rated.name: rating_correlations(estimator, rated) for rated in collections}
        random = estimator.for_captions(captions).pairs(*random_pairs(len(captions), RANDOM_PAIRS))
        # At most 2,000 captions, at equal distances, and none of them in the cache.
        with _empty_cache():
            captions_per_s, million_pairs_s = measure_speed(
                estimator, captions[:: max(1, len(captions) // 2000)][:2000]
            )
        notes = [f"{name}: {note}" for name, (*_, notes) in correlations.items() for note in notes]
        qualities.append(
            EstimatorQuality(
                estimator=spec,
                pearson={name: pearson for name, (pearson, _, _) in correlations.items()},
                spearman={name: spearman for name, (_, spearman, _) in correlations.items()},
                mean=float(random.mean()),
                share_above_threshold=float((random > FIRST_LADDER_THRESHOLD).float().mean()),
                captions_per_s=captions_per_s,
                million_pairs_s=million_pairs_s,
                notes=tuple(notes),
            )
        )
    return qualities


def rating_correlations(
    estimator: RelevanceEstimator, rated: RatedCaptionPairs
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Pearson and Spearman correlation of an estimator with human ratings, and notes about
    captions. None if all values are equal.
    """
    number = len(rated.ratings)
    prepared = estimator.for_captions([*rated.first, *rated.second])
    relevance = (
        prepared.pairs(torch.arange(number), number + torch.arange(number))
        .numpy()
        .astype(np.float64)
    )
    if np.ptp(relevance) == 0:
        note = f"no correlation, because every pair has relevance {relevance[0]:g}."
        return None, None, (*prepared.notes, note)
    pearson = float(pearsonr(relevance, rated.ratings).statistic)
    return pearson, float(spearmanr(relevance, rated.ratings).statistic), prepared.notes


def random_pairs(number: int, pairs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample pairs of different items from the uniform distribution."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(number, (pairs,), generator=generator)
    # A shift of at least 1 never returns to the first item.
    return first, (first + torch.randint(1, number, (pairs,), generator=generator)) % number


def measure_speed(estimator: RelevanceEstimator, captions: Sequence[str]) -> tuple[float, float]:
    """Measure the speed of an estimator in blocks of growing size, for `SPEED_TEST_SECONDS`:
    captions per second, and seconds for a million pairs in the fastest block.
    """
    start_time = time.perf_counter()
    prepared = estimator.for_captions(captions)
    captions_per_s = len(captions) / (time.perf_counter() - start_time)
    # Rows come from the first half and columns from the second, so no pair occurs twice.
    half = len(captions) // 2
    # The first call may load a model, so it is not measured.
    prepared(torch.arange(1), half + torch.arange(2))
    start = 0
    size = min(32, half)
    elapsed = 0.0
    best = math.inf
    while elapsed < SPEED_TEST_SECONDS:
        rows = torch.arange(start, start + size)
        start_time = time.perf_counter()
        prepared(rows, half + rows)
        seconds = time.perf_counter() - start_time
        elapsed += seconds
        best = min(best, seconds / size**2)
        # Continue with pairs that are not in the cache yet, as long as there are enough.
        if start + 3 * size <= half:
            start += size
            size = 2 * size
    return captions_per_s, 1e6 * best


@contextmanager
def _empty_cache() -> Iterator[None]:
    """An empty cache, so that everything is computed again. Only downloaded models remain
    available.
    """
    before = os.environ.get("VISAVIS_CACHE")
    backbones = storage.cache_folder() / "backbones"
    # Windows does not remove files that results still map.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if os.path.exists(backbones):
            link = Path(folder) / "backbones"
            target = os.path.realpath(backbones)
            # A copy where the user may not make links, as on Windows by default.
            try:
                link.symlink_to(target, target_is_directory=True)
            except OSError:
                shutil.copytree(target, link)
        os.environ["VISAVIS_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("VISAVIS_CACHE")
            os.environ |= {} if before is None else {"VISAVIS_CACHE": before}


@dataclass(frozen=True)
class RelevanceDistribution(Result):
    """Distribution of the relevance of random images and captions of other images, in batches of
    128.

    Attributes:
        estimator: Spec of the estimator.
        data: Name of the data set.
        pairs: Number of sampled pairs.
        mean: Mean relevance.
        share_above_threshold: Share of pairs above 0.63.
        quantiles: Value above which each share of `TAIL_SHARES` lies.
        ladder_specs: Specs of Ladder for 2 to 5 levels, as far as their thresholds differ.
        histogram: Counts in 100 equal bins of [0, 1].
        notes: Sentences about captions that needed special treatment.
    """

    estimator: str
    data: str
    pairs: int
    mean: float
    share_above_threshold: float
    quantiles: tuple[float, ...]
    ladder_specs: tuple[str, ...]
    histogram: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """Return the distribution and the suggested thresholds in sentences."""
        shares = ", ".join(
            f"{share:.0%} above {value:.3f}"
            for share, value in zip(TAIL_SHARES, self.quantiles, strict=True)
        )
        notes = [
            f"mean {self.mean:.3f}, {self.share_above_threshold:.1%} above the paper's 0.63, {shares}"
        ]
        notes += [f"L = {level}: {ladder}" for level, ladder in enumerate(self.ladder_specs, 2)]
        notes += self.notes
        if len(self.ladder_specs) < len(TAIL_SHARES):
            notes.append(
                f"no thresholds for L >= {len(self.ladder_specs) + 2}: too many pairs have the "
                "same relevance."
            )
        title = f"{self.estimator}: {self.pairs:,} random training pairs of {self.data}"
        return [Table(title=title, notes=tuple(f"  {note}" for note in notes))]

    def to_json(self) -> dict[str, object]:
        """Return a JSON object."""
        return asdict(self)


def relevance_distributions(
    specs: Sequence[str],
    data: Dataset,
    caption_aggregation: CaptionAggregation,
    pairs: int,
    progress: Progress,
) -> list[RelevanceDistribution]:
    """Sample the relevance values of estimators over the training pairs of a data set."""
    validate_int(pairs, "num_pairs", 1, MAX_PAIRS)
    estimators = [named_estimator(spec) for spec in specs]
    train = data.split("train")
    distributions = []
    for number, (spec, estimator) in enumerate(zip(specs, estimators, strict=True)):
        progress.update("estimators", number, len(specs), 0.0)
        relevance = estimator.for_dataset(train, caption_aggregation)
        distributions.append(
            summarize_relevance(
                spec, sample_relevance(relevance, train, pairs), data.name, relevance.notes
            )
        )
    return distributions


def sample_relevance(
    relevance: ImageRelevance, data: Dataset, pairs: int, seed: int = 0
) -> np.ndarray:
    """Sample the relevance of images to captions of other images for at least a number of pairs, in
    random batches as in training.
    """
    if len(data.images) < 2:
        raise DataError(
            f"{data.name}: expected at least 2 training images, got {len(data.images)}. Use a data "
            "set with more images."
        )
    random = np.random.default_rng(seed)
    samples: list[np.ndarray] = []
    while sum(map(len, samples)) < pairs:
        images = random.choice(
            len(data.images), min(SAMPLE_BATCH_SIZE, len(data.images)), replace=False
        )
        # One caption of each image.
        captions = np.array([random.choice(data.captions_of[i]) for i in images])
        block = relevance(*map(torch.from_numpy, (images, captions, captions)))
        # Pairs of an image and its own caption are left out.
        samples.append(block[~torch.eye(len(images), dtype=torch.bool)].numpy())
    return np.concatenate(samples)


def summarize_relevance(
    spec: str, relevance: np.ndarray, data: str, notes: tuple[str, ...] = ()
) -> RelevanceDistribution:
    """Summarize sampled relevance values, with thresholds for Ladder."""
    if np.ptp(relevance) == 0:
        raise DataError(
            f"{spec}: expected different relevance values, got {relevance[0]:g} for all sampled "
            f"pairs of {data}."
        )
    quantiles = np.quantile(relevance, [1 - share for share in TAIL_SHARES]).round(3).tolist()
    ladder_specs = []
    for levels in range(1, len(TAIL_SHARES) + 1):
        thresholds = tuple(quantiles[:levels])
        # Ladder needs decreasing thresholds. Equal quantiles have no such levels.
        if all(a > b for a, b in pairwise((*thresholds, 0.0))):
            # Margins and betas continue the values of the paper.
            margins = (0.2, *[0.01] * levels)
            betas = (1.0, *(0.25 / 2**level for level in range(levels)))
            ladder_specs.append(f"Ladder({margins=}, {thresholds=}, {betas=})")
    return RelevanceDistribution(
        spec,
        data,
        len(relevance),
        float(relevance.mean()),
        float((relevance > FIRST_LADDER_THRESHOLD).mean()),
        tuple(quantiles),
        tuple(ladder_specs),
        tuple(np.histogram(relevance, 100, (0, 1))[0].tolist()),
        notes,
    )
