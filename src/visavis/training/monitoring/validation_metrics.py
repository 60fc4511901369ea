"""Validation metrics besides recall: losses, similarities, gradients, and health metrics such as
hubness and collapse.

Losses and similarities are curves of figures 3 (a) and 4 of the Unified paper. Shares of queries with
a gradient are not in the paper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Direction, Encoded, to_float64, unit_rows
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.data.words import tokenize
from visavis.evaluation import Evaluation
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import PairLoss
from visavis.losses.pair_loss.batch_items import smaller_dims
from visavis.losses.scoring import score_matrix
from visavis.losses.targets import Targets
from visavis.models import Matcher
from visavis.models.batch_encoding import device_of, evaluation_mode
from visavis.training.recipes.recipe import Recipe
from visavis.training.supervision import Supervision

MIN_GRADIENT = 1e-6  # of |dL/ds|: a query with no larger derivative has no gradient
MAX_RANK_ITEMS = 128  # items of a batch whose effective rank is computed
HUB_FRACTION = 0.01  # of the candidates, the most retrieved ones, that count as hubs


def similarities(scores: Tensor, targets: Targets) -> dict[str, Tensor]:
    """Collect the scores [V, T] of positives and of the hardest negatives of a batch, as flat tensors."""
    scores = scores.float()
    masked = scores.masked_fill(~targets.negative, float("-inf"))
    curves = {
        "positive": scores[targets.positive],
        "hardest_i2t": masked.amax(1),
        "hardest_t2i": masked.amax(0),
    }
    return {name: values[values > float("-inf")] for name, values in curves.items()}


def score_gradients(
    objective: Objective, scores: Tensor, targets: Targets
) -> Iterator[tuple[Direction, Tensor, Targets]]:
    """Yield each direction with the derivatives of its summed terms with respect to the scores,
    [Q, C], and its targets.
    """
    blocks: dict[Direction, tuple[Tensor, Targets]] = {
        "i2t": (scores, targets),
        "t2i": (scores.T, targets.T),
    }
    for direction, (block, block_targets) in blocks.items():
        with torch.enable_grad():
            leaf = block.detach().float().requires_grad_()
            (gradient,) = torch.autograd.grad(
                objective.terms(*objective.prepare(leaf, block_targets)).sum(), leaf
            )
        yield direction, gradient, block_targets


def queries_with_gradient(
    objective: Objective, scores: Tensor, targets: Targets
) -> dict[str, Tensor]:
    """Determine which queries with a negative receive a gradient: 1 or 0 for each."""
    return {
        f"gradient_{direction}": (gradient.abs().amax(1) > MIN_GRADIENT)[
            block_targets.negative.any(1)
        ].float()
        for direction, gradient, block_targets in score_gradients(objective, scores, targets)
    }


def summarize(batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Summarize values over batches by mean and standard deviation."""
    columns: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, values in batch.items():
            columns.setdefault(name, []).append(values.cpu().double().reshape(-1))
    summary: dict[str, float] = {}
    for name, parts in columns.items():
        values = torch.cat(parts)
        mean, std = (
            (values.mean().item(), values.std(unbiased=False).item()) if len(values) else (0.0, 0.0)
        )
        summary |= (
            {name: mean}
            if name == "loss" or name.startswith("gradient")
            else {f"{name}_mean": mean, f"{name}_std": std}
        )
    return summary


def collapsed_loss(objective: Objective, scores: Tensor, targets: Targets) -> float:
    """Compute the loss of identical embeddings, for which all pairs have the same score."""
    return objective(torch.full_like(scores, scores.float().mean().item()), targets).item()


def effective_rank(items: Encoded) -> float:
    """Compute the effective rank of unit vectors: the exponential of the entropy of their Gram
    eigenvalues.

    It is 1 for identical vectors and N for N orthogonal ones. N vectors of mean cosine c near 1
    have about 1 + (1 - c) log N. An item with several vectors counts by their mean.

    Args:
        items: Encoded items, of which the first 128 are used.

    Returns:
        The effective rank.

    Source:
        Vendi score, Friedman and Dieng (2023), eq. 2.

    Example:
        >>> effective_rank(Encoded(torch.eye(3))), effective_rank(Encoded(torch.ones(5, 2)))
        (3.0, 1.0)
    """
    parts = items.vectors.values() if isinstance(items.vectors, dict) else [items.vectors]
    first = [to_float64(part[:MAX_RANK_ITEMS]) for part in parts]
    unit = unit_rows(
        torch.cat(
            [part.flatten(1, -2).mean(1) if part.dim() > 2 else part for part in first], 1
        ).cpu()
    )
    eigenvalues = torch.linalg.eigvalsh(unit @ unit.T / len(unit)).clamp(min=0)
    return round(torch.special.entr(eigenvalues).sum().exp().item(), 6)


def batch_health(
    objective: Objective,
    visual: Encoded,
    text: Encoded,
    scores: Tensor,
    targets: Targets,
    loss: Tensor,
) -> dict[str, float]:
    """Compute the health metrics of one encoded batch."""
    return {
        "loss": loss.item(),
        "collapsed_loss": collapsed_loss(objective, scores, targets),
        "image_effective_rank": effective_rank(visual),
        "text_effective_rank": effective_rank(text),
    }


def false_negative_share(
    objective: Objective, scores: Tensor, targets: Targets, batch: Batch
) -> dict[str, Any]:
    """Compute the share of the separating gradient that falls on matching pairs."""
    # A pair matches if the image has a caption with the same words.
    matches = _same_words(batch).to(scores.device)
    evidence = ["the words of the captions"]
    # Or if the ids are equal, where targets go by position.
    if not torch.equal(targets.query_ids, batch.image_ids.to(scores.device)):
        matches |= batch.image_ids[:, None].to(scores.device) == batch.text_ids.to(scores.device)
        evidence.append("the ids of the images")
    # Or if its relevance is as high as the relevance of the positive.
    if targets.relevance is not None:
        relevance = targets.pairwise("relevance")
        matches |= relevance >= relevance.masked_fill(~targets.positive, -math.inf).amax(
            1, keepdim=True
        )
        evidence.append("relevance")
    total = wrong = 0.0
    for direction, gradient, block_targets in score_gradients(objective, scores, targets):
        push = gradient.clamp(min=0) * block_targets.negative
        total += push.sum().item()
        wrong += (push * (matches if direction == "i2t" else matches.T)).sum().item()
    return {
        "false_negative_share": wrong / total if total else 0.0,
        "false_negative_evidence": " or ".join(evidence),
    }


def hubness(result: Evaluation, data: Dataset) -> dict[str, Any]:
    """Measure how concentrated the top results of a validation are, for each direction."""
    assert result.top_texts is not None and result.top_images is not None
    images = [image.name for image in data.images]
    return _occurrence("i2t", result.top_texts, data.captions) | _occurrence(
        "t2i", result.top_images, images
    )


@torch.no_grad()
def validation_metrics(
    matcher: Matcher,
    loss: PairLoss,
    supervision: Supervision,
    loader: Loader,
    recipe: Recipe,
    encoded: tuple[Encoded, Encoded] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure a model on the first batches of a fixed schedule: means over the batches, and health
    metrics of the first one. The model is left in evaluation mode.
    """
    matcher.eval()
    device = device_of(matcher)
    batches = list[dict[str, Any]]()
    health = dict[str, Any]()
    for batch in loader.epoch(
        0, stop=recipe.training.metric_batches, training=False, device=device
    ):
        if encoded is None:
            visual = matcher.encode_visual(batch.visual)
            text = matcher.encode_text(batch.text)
        else:
            visual, text = (
                items[torch.from_numpy(index)].to(device)
                for items, index in zip(encoded, (batch.images, batch.captions), strict=True)
            )
        targets = supervision.targets(visual, text, batch).to(device)
        visual = matcher.first_stage_items(visual)
        text = matcher.first_stage_items(text)
        scores = score_matrix(matcher.score, visual, text, recipe.memory or None)
        with evaluation_mode(loss):  # a loss in training mode gathers over processes
            value = loss(visual, text, targets=targets)
        logits = loss.logits(scores)
        # The loss sums over Matryoshka dimensions, and identical embeddings have the same loss at
        # each.
        loss_per_dim = value / (1 + len(smaller_dims(loss.matryoshka_dims, visual)))
        health = health or {
            **batch_health(loss.objective, visual, text, logits, targets, loss_per_dim),
            **false_negative_share(loss.objective, logits, targets, batch),
            **(
                {}
                if matcher.scale is None
                else {"scale": matcher.scale().item(), "scale_bounds": matcher.scale.bounds}
            ),
            **({} if matcher.logit_bias is None else {"bias": matcher.logit_bias.item()}),
        }
        batches.append(
            {
                "loss": value,
                **similarities(scores, targets),
                **queries_with_gradient(loss.objective, logits, targets),
            }
        )
    return summarize(batches), health


def _same_words(batch: Batch) -> Tensor:
    """Whether an image of a batch has, anywhere in the data, a caption of the same words, shape
    ``[V, T]``.
    """
    data = batch.loader.data
    columns = defaultdict[str, list[int]](list)
    for column, caption in enumerate(batch.captions):
        if caption < len(data.captions):  # not a text query of the feedback
            columns[_words(data.captions[caption])].append(column)
    same = torch.zeros(len(batch.images), len(batch.captions), dtype=torch.bool)
    for row, image in enumerate(batch.images):
        for caption in data.captions_of[image]:
            if equal := columns.get(_words(data.captions[caption])):
                same[row, equal] = True
    return same


def _words(caption: str) -> str:
    return " ".join(tokenize(caption))


def _occurrence(direction: str, top: np.ndarray, candidates: Sequence[str]) -> dict[str, Any]:
    """The candidate that most queries rank first, and the share of queries that rank one of the 1 %
    most retrieved candidates first.
    """
    # Source: k-occurrence, Radovanovic, Nanopoulos and Ivanovic (2010), with k = 1.
    counts = np.bincount(top, minlength=len(candidates))
    num_hubs = math.ceil(HUB_FRACTION * len(candidates))
    return {
        f"{direction}_top_item": candidates[int(counts.argmax())],
        f"{direction}_top_item_share": float(counts.max() / len(top)),
        f"{direction}_num_hubs": num_hubs,
        f"{direction}_hub_share": float(np.sort(counts)[-num_hubs:].sum() / len(top)),
    }
