"""Does the order of all candidates follow the degrees of relevance? CS@K and nDCG@K of encoded items, by blocks of queries.

Neither the scores nor the degrees are ever held as a whole: a block has the scores of some queries with all candidates.
Beside each number stands that of random scores, drawn independently for every pair: CS@K is 0 for them in expectation,
nDCG@K is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.degrees import Degrees
from visavis.evaluation.arguments import checked, fit
from visavis.evaluation.protocols import Protocol, named
from visavis.memory import Memory
from visavis.metrics import GRADED, Metric
from visavis.metrics.arguments import NO_GAINS, refuse_rows
from visavis.scoring import Score, pick, score_by_rows
from visavis.types import Direction, Encoded

FEW, MANY = (100, 200, 1000), (500, 5000)
"""The K of the Ladder paper for 1,000 test images and for 5,000."""
SEED = 0
"""Of the random scores."""
HELD = 96.0
"""Bytes of a pair while a block is measured: scores, random scores and degrees in float64, sorted, with their order and sums."""


@dataclass(frozen=True, eq=False)
class Coherence:
    """How well the order of candidates follows degrees.

    degrees: who tells them. semantics: see ``coherence_of``. ks: the K, at most the number of images. candidates: of an image and
    of a text. per_query: by the keys of ``metrics.CATALOG`` (``i2t_cs_at_100``), a value a query, NaN where it is undefined.
    random: the means of random scores, by the same keys.
    """

    degrees: str
    semantics: str
    ks: tuple[int, ...]
    candidates: tuple[int, int]
    per_query: dict[str, np.ndarray]
    random: dict[str, float | None]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Means over the queries for which a metric is defined; None where it is for none."""
        return {name: _mean(values) for name, values in self.per_query.items()}

    @property
    def undefined(self) -> dict[str, int]:
        """How many queries are left out of each mean."""
        return {name: int(np.isnan(values).sum()) for name, values in self.per_query.items()}

    def to_json(self) -> dict[str, Any]:
        """One flat object: each mean, with ``_undefined`` how many queries it leaves out, with ``_random`` that of random scores."""
        return (
            {"degrees": self.degrees, "coherence": self.semantics}
            | self.metrics
            | {f"{name}_undefined": count for name, count in self.undefined.items()}
            | {f"{name}_random": mean for name, mean in self.random.items()}
        )


@checked
def coherence_of(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    degrees: Degrees | str,
    *,
    semantics: str = "reference",
    ks: tuple[int, ...] = (),
    protocol: str | Protocol = "plain",
    memory: Memory = None,
) -> Coherence:
    """CS@K and nDCG@K both ways of encoded images and captions, those of ``data`` in its order.

    semantics: what CS@K ranks and counts. "reference", as the released code of the Ladder loss: the first caption of each image
    only, tau-b. "paper", as its text: all captions, tau-a; its keys end in ``_paper``. An image's degrees are those of its first
    caption, or the truth about it where ``degrees`` knows that.
    ks: default those of the paper for so many images. protocol: its folds; queries of all folds are one mean.
    memory: what a block of queries may take, as in ``evaluate``; it never sets the result.
    Raises SpecError for unknown degrees or semantics, DataError for scores or degrees that are not numbers.
    """
    assert isinstance(degrees, Degrees)  # the door has made these of a text and a name
    protocol = named(protocol)
    fit(visual, text, data)
    relevance = degrees.between(data)
    image_of = torch.from_numpy(data.image_of)
    ranked = torch.tensor([own[0] for own in data.captions_of]) if semantics == "reference" else torch.arange(len(text))
    folds = [(images, ranked[torch.isin(image_of[ranked], images)]) for images in torch.arange(len(visual)).chunk(protocol.folds)]
    size = len(folds[0][0])
    ks = tuple(sorted({min(k, size) for k in ks or (FEW if size < max(MANY) else MANY)}))
    ways: tuple[Direction, ...] = ("i2t", "t2i")
    own: dict[str, list[Tensor]] = defaultdict(list)
    random: dict[str, list[Tensor]] = defaultdict(list)
    for images, texts in folds:
        fold = pick(visual, images), pick(text, texts)
        for way in ways:
            for rows, scores in score_by_rows(score, *fold, way, held=HELD, memory=memory):
                queries = (images if way == "i2t" else texts)[rows]
                truth = relevance(queries, texts) if way == "i2t" else relevance(images, queries).T
                _refuse_wrong(scores, truth, "image" if way == "i2t" else "text", queries)
                for into, values in ((own, scores.cpu()), (random, _random(queries, scores.shape[1], way))):
                    for key, per_query in _measures(GRADED[semantics], way, values, truth, ks):
                        into[key].append(per_query)
    return Coherence(
        degrees=repr(degrees),
        semantics=semantics,
        ks=ks,
        candidates=(len(folds[0][1]), size),
        per_query={name: torch.cat(values).numpy() for name, values in own.items()},
        random={name: _mean(torch.cat(values).numpy()) for name, values in random.items()},
    )


def _measures(metrics: Sequence[Metric], way: str, scores: Tensor, truth: Tensor, ks: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Each metric of a block ``[R, C]`` under its key, with its values ``[R]``."""
    values = [metric.function(scores, truth, ks) for metric in metrics]
    for place, k in enumerate(ks):
        for metric, by_k in zip(metrics, values, strict=True):
            yield metric.key(way, k), by_k[:, place]


def _random(queries: Tensor, candidates: int, way: str) -> Tensor:
    """Scores ``[R, C]`` that depend on the query's position alone, so that blocks change nothing."""
    return torch.from_numpy(np.stack([np.random.default_rng((SEED, way == "t2i", query)).random(candidates) for query in queries.tolist()]))


def _refuse_wrong(scores: Tensor, degrees: Tensor, kind: str, queries: Tensor) -> None:
    """Raise DataError naming the first item whose scores or degrees ``[R, C]`` are none."""
    item = f"{kind} {{}}"
    refuse_rows(scores.isnan(), f"the scores of {item} hold NaN: the model or its features are broken.", queries)
    refuse_rows(degrees.isnan(), f"the degrees of {item} hold NaN: correct the estimator of degrees.", queries)
    refuse_rows((degrees < 0) | degrees.isinf(), NO_GAINS.format(item), queries)


def _mean(values: np.ndarray) -> float | None:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else None
