"""Ranking coherence: whether the order of all candidates follows their graded relevance, as CS@K
and nDCG@K.

Queries are processed in blocks, so neither the full score matrix nor the full relevance matrix
exists. Each metric is compared with that of random scores, sampled independently for every pair:
their expected CS@K is 0, their nDCG@K is not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import Score
from visavis.core.encoded import DIRECTIONS, Direction, Encoded
from visavis.core.errors import SpecError, format_value
from visavis.core.fields import validate_int
from visavis.core.memory_budget import MemoryLimit
from visavis.core.table import Column, Table
from visavis.data.dataset import Dataset
from visavis.evaluation.metrics import GRADED
from visavis.evaluation.metrics.catalog import DIRECTION_ROLES
from visavis.evaluation.metrics.graded_metrics import INVALID_GAINS
from visavis.evaluation.metrics.ranking import raise_on_invalid_row
from visavis.evaluation.results import SectionResult
from visavis.losses.scoring import score_query_rows, select_items
from visavis.papers.relevance.base import RelevanceEstimator
from visavis.papers.relevance.catalog import parse_estimator
from visavis.training.evaluation.result_sections import ResultSection

KS_FOR_1K_IMAGES = (100, 200, 1000)
"""Values of K of the Ladder paper for 1,000 test images."""
KS_FOR_5K_IMAGES = (500, 5000)
"""Values of K of the Ladder paper for 5,000 test images."""
SEED = 0
"""Seed of the random scores."""
COHERENCE_BYTES_PER_PAIR = 96.0
"""Bytes per pair of a block: scores, random scores and relevance in float64, sorted, with their
order and sums.
"""

_DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")


@dataclass(frozen=True, eq=False)
class RankingCoherence(SectionResult):
    """How well the order of candidates follows graded relevance.

    Attributes:
        relevance: Spec of the relevance estimator.
        semantics: "reference" or "paper". See `ranking_coherence`.
        ks: Values of K, at most the number of images.
        candidates: Number of candidates of an image query and of a text query.
        per_query: Value of each query by metric key such as ``i2t_cs_at_100``, NaN where undefined.
        random_baseline: Means for random scores, by the same keys.
    """

    relevance: str
    semantics: str
    ks: tuple[int, ...]
    candidates: tuple[int, int]
    per_query: dict[str, np.ndarray]
    random_baseline: dict[str, float | None]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Mean of each metric over the queries for which it is defined. None if there are none."""
        return {name: _mean(values) for name, values in self.per_query.items()}

    @property
    def undefined(self) -> dict[str, int]:
        """Number of queries for which each metric is undefined."""
        return {name: int(np.isnan(values).sum()) for name, values in self.per_query.items()}

    def to_json(self) -> dict[str, Any]:
        """Return a flat JSON object. The suffix ``_undefined`` marks numbers of queries,
        ``_random`` the random baseline.
        """
        return (
            {"relevance": self.relevance, "coherence_semantics": self.semantics}
            | self.metrics
            | {f"{name}_undefined": count for name, count in self.undefined.items()}
            | {f"{name}_random": mean for name, mean in self.random_baseline.items()}
        )

    def table(self) -> Table:
        """Return the means by direction, and the means of random scores below them."""
        measures = [(metric, k) for metric in GRADED[self.semantics] for k in self.ks]
        rows = []
        for direction, title in DIRECTIONS.items():
            for name, means in (
                (title, self.metrics),
                ("  random scores", self.random_baseline),
            ):
                rows.append((name, *(means[metric.key(direction, k)] for metric, k in measures)))
        if self.semantics == "reference":
            tau, captions = "tau-b", "the first caption of each image"
        else:
            tau, captions = "tau-a", "all captions"
        undefined = [f"{name} {count:,}" for name, count in self.undefined.items() if count]
        rules = (
            f"Relevance by {self.relevance}. CS is {tau} over the top K of {captions}: "
            f"{self.candidates[0]:,} texts, {self.candidates[1]:,} images, the upper limit of K. "
            f"Queries left out as undefined (constant in the top K): {', '.join(undefined) or 'none'}."
        )
        notes = [rules]
        if None in self.metrics.values():
            notes.append(
                "undefined: expected a query with different relevance in its top K, got none. Use "
                "another relevance or more images."
            )
        columns = (
            Column(metric.label.replace("K", str(k)), ".3f", missing="undefined")
            for metric, k in measures
        )
        return Table((Column(is_text=True), *columns), tuple(rows), tuple(notes))


@dataclass(frozen=True, kw_only=True)
class Coherence(ResultSection):
    """Coherence of the ranking with graded relevance, as CS@K and nDCG@K. See `ranking_coherence`.

    Attributes:
        relevance: Spec of the relevance estimator.
        semantics: "reference" or "paper".
    """

    relevance: str = "CBoW()"
    semantics: Literal["reference", "paper"] = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Raises SpecError before the training, not after it.
        parse_estimator(self.relevance)

    def measure(
        self,
        visual: Encoded,
        text: Encoded,
        score: Score,
        data: Dataset,
        *,
        folds: int,
        memory: MemoryLimit,
    ) -> RankingCoherence:
        """Measure the coherence. See `ResultSection.measure`."""
        return ranking_coherence(
            visual,
            text,
            score,
            data,
            self.relevance,
            semantics=self.semantics,
            folds=folds,
            memory=memory,
        )


def ranking_coherence(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    relevance: RelevanceEstimator | str,
    *,
    semantics: str = "reference",
    ks: tuple[int, ...] = (),
    folds: int = 1,
    memory: MemoryLimit = None,
) -> RankingCoherence:
    """Compute CS@K and nDCG@K in both directions. "reference": the first caption of each image and
    tau-b, as in the released code of the Ladder loss. "paper": all captions and tau-a, as in its
    text.
    """
    estimator = parse_estimator(relevance) if isinstance(relevance, str) else relevance
    if semantics not in GRADED:
        raise SpecError(
            f"semantics: expected {' or '.join(map(repr, GRADED))}, got {format_value(semantics)}."
        )
    ks = tuple(validate_int(k, "ks", minimum=1) for k in ks)
    num_folds = validate_int(folds, "folds", minimum=1)
    data.check_lengths(len(visual), len(text))
    # The relevance to an image is the one to its first caption, or the ground truth if the
    # estimator reads it.
    image_relevance = estimator.for_dataset(data)
    image_of = torch.from_numpy(data.image_of)
    # Positions of the captions that are candidates.
    ranked = (
        torch.tensor([captions[0] for captions in data.captions_of])
        if semantics == "reference"
        else torch.arange(len(text))
    )
    parts = [
        (images, ranked[torch.isin(image_of[ranked], images)])
        for images in torch.arange(len(visual)).chunk(num_folds)
    ]
    # Folds have equal sizes. The largest K is the whole list.
    size = len(parts[0][0])
    ks = tuple(
        sorted(
            {
                min(k, size)
                for k in ks
                or (KS_FOR_1K_IMAGES if size < max(KS_FOR_5K_IMAGES) else KS_FOR_5K_IMAGES)
            }
        )
    )
    # Blocks of the value of each query, by metric key.
    per_query: dict[str, list[Tensor]] = defaultdict(list)
    random: dict[str, list[Tensor]] = defaultdict(list)
    for images, texts in parts:
        fold = select_items(visual, images), select_items(text, texts)
        for direction in _DIRECTIONS:
            for rows, scores in score_query_rows(
                score,
                *fold,
                direction,
                caller_bytes_per_pair=COHERENCE_BYTES_PER_PAIR,
                memory=memory,
            ):
                queries = (images if direction == "i2t" else texts)[rows]
                gains = (
                    image_relevance(queries, texts)
                    if direction == "i2t"
                    else image_relevance(images, queries).T
                )
                _check_values(scores, gains, direction, queries)
                # Scores [R, C] that depend only on the index of the query, so that block sizes do
                # not change the result.
                seeds = [(SEED, direction == "t2i", query) for query in queries.tolist()]
                random_rows = [
                    np.random.default_rng(seed).random(scores.shape[1]) for seed in seeds
                ]
                random_scores = torch.from_numpy(np.stack(random_rows))
                for means, ranked_by in ((per_query, scores.cpu()), (random, random_scores)):
                    # Each metric: [R, len(ks)].
                    values = [metric.function(ranked_by, gains, ks) for metric in GRADED[semantics]]
                    for column, k in enumerate(ks):
                        for metric, by_k in zip(GRADED[semantics], values, strict=True):
                            means[metric.key(direction, k)].append(by_k[:, column])
    return RankingCoherence(
        relevance=repr(estimator),
        semantics=semantics,
        ks=ks,
        candidates=(len(parts[0][1]), size),
        per_query={name: torch.cat(values).numpy() for name, values in per_query.items()},
        random_baseline={name: _mean(torch.cat(values).numpy()) for name, values in random.items()},
    )


def _check_values(scores: Tensor, gains: Tensor, direction: Direction, queries: Tensor) -> None:
    """Raise DataError with the first query whose scores or relevance values ``[R, C]`` are invalid."""
    item = f"{DIRECTION_ROLES[direction]['query']} {{}}"
    for kind, block, fix in (
        ("scores", scores, "Check the model and its features"),
        ("relevance", gains, "Fix the relevance estimator"),
    ):
        message = f"{kind} of {item}: expected finite numbers, got NaN. {fix}."
        raise_on_invalid_row(block.isnan(), message, queries)
    raise_on_invalid_row((gains < 0) | gains.isinf(), INVALID_GAINS.format(item), queries)


def _mean(values: np.ndarray) -> float | None:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else None
