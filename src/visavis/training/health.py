"""Is there still something to learn, and someone who learns it, and is it the right thing? The vital numbers of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch
from visavis.evaluation import Evaluation
from visavis.objectives import Objective
from visavis.targets import Targets
from visavis.training.curves import slopes
from visavis.types import Encoded

LOOKED_AT = 128
"""Items of a side whose effective rank is taken."""
HUBS = 0.01
"""The share of the candidates, those that are retrieved most, that are counted as hubs."""


def collapsed_loss(objective: Objective, scores: Tensor, targets: Targets) -> float:
    """The loss of identical embeddings, for which all pairs score the same: here, the mean of these scores."""
    return objective(torch.full_like(scores, scores.float().mean().item()), targets).item()


def effective_rank(items: Encoded) -> float:
    """How many directions unit vectors span: e to the entropy of the eigenvalues of their Gram matrix over its trace.

    1 for identical vectors, N for N orthogonal ones; N vectors of mean cosine c near 1 have about 1 + (1 - c) log N.
    Of several vectors an item, their mean. Source: the Vendi score, Friedman and Dieng (2023), eq. 2.

    >>> effective_rank(Encoded(torch.eye(3))), effective_rank(Encoded(torch.ones(5, 2)))
    (3.0, 1.0)
    """
    parts = items.vectors.values() if isinstance(items.vectors, dict) else [items.vectors]
    rows = torch.cat(
        [part[:LOOKED_AT].double().flatten(1, -2).mean(1) if part.dim() > 2 else part[:LOOKED_AT].double() for part in parts], 1
    )
    unit = normalize(rows.cpu(), dim=1)
    eigenvalues = torch.linalg.eigvalsh(unit @ unit.T / len(unit)).clamp(min=0)
    return round(torch.special.entr(eigenvalues).sum().exp().item(), 6)


def examine(objective: Objective, visual: Encoded, text: Encoded, scores: Tensor, targets: Targets, loss: Tensor) -> dict[str, float]:
    """The vital numbers of one batch as it is encoded."""
    return {
        "loss": loss.item(),
        "collapsed_loss": collapsed_loss(objective, scores, targets),
        "image_rank": effective_rank(visual),
        "text_rank": effective_rank(text),
    }


def misdirected(objective: Objective, scores: Tensor, targets: Targets, batch: Batch) -> dict[str, Any]:
    """The share of what pushes pairs of a batch apart, both directions, that falls on pairs which belong together, and by what.

    They do by their ids, where the targets go by positions; by a caption of the image in the same words; by a degree as high as that of
    the image's own caption, where the supervision gives degrees.
    """
    known, by = _same_words(batch).to(scores.device), ["the words of the captions"]
    if not torch.equal(targets.query_ids, batch.image_ids.to(scores.device)):
        known |= batch.image_ids[:, None].to(scores.device) == batch.text_ids.to(scores.device)
        by.append("the ids of the images")
    if targets.relevance is not None:
        degrees = targets.pairwise("relevance")
        known |= degrees >= degrees.masked_fill(~targets.positive, -math.inf).amax(1, keepdim=True)
        by.append("degrees")
    apart = wrong = 0.0
    for way, slope, facts in slopes(objective, scores, targets):
        push = slope.clamp(min=0) * facts.negative
        apart, wrong = apart + push.sum().item(), wrong + (push * (known if way == "i2t" else known.T)).sum().item()
    return {"misdirected": wrong / apart if apart else 0.0, "known_by": " or ".join(by)}


def _same_words(batch: Batch) -> Tensor:
    """Whether an image of a batch has, anywhere in the data, a caption of the same words: ``[V, T]``."""
    data = batch.loader.data
    same = torch.zeros(len(batch.images), len(batch.captions), dtype=torch.bool)
    columns: dict[tuple[str, ...], list[int]] = {}
    for column, caption in enumerate(batch.captions):
        if caption >= len(data.captions):  # a judged sentence that fits no picture
            continue
        columns.setdefault(tuple(tokenize(data.captions[caption])), []).append(column)
    for row, image in enumerate(batch.images):
        for caption in data.captions_of[image]:
            same[row, columns.get(tuple(tokenize(data.captions[caption])), [])] = True
    return same


def first_found(result: Evaluation, data: Dataset) -> dict[str, Any]:
    """What the queries of a validation find first, by ``<way>_<what>``.

    first: the candidate that the most queries find first; first_share: the share of these. hubs: how many candidates are 1 % of them, those
    that are found first most often; hub_share: the share of queries that find one of them.
    Source: the k-occurrence of Radovanovic, Nanopoulos and Ivanovic (2010), with k = 1.
    """
    assert result.first_texts is not None and result.first_images is not None
    return _occurrence("i2t", result.first_texts, data.captions) | _occurrence(
        "t2i", result.first_images, [image.name for image in data.images]
    )


def _occurrence(way: str, first: np.ndarray, candidates: Sequence[str]) -> dict[str, Any]:
    occurrence, hubs = np.bincount(first, minlength=len(candidates)), math.ceil(HUBS * len(candidates))
    return {
        f"{way}_first": candidates[int(occurrence.argmax())],
        f"{way}_first_share": float(occurrence.max() / len(first)),
        f"{way}_hubs": hubs,
        f"{way}_hub_share": float(np.sort(occurrence)[-hubs:].sum() / len(first)),
    }
