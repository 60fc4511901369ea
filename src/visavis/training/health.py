"""Is there still something to learn, and someone who learns it? Signs of collapse and of dead gradients, with their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.objectives import Objective
from visavis.targets import Targets
from visavis.types import Encoded

LOOKED_AT = 128
"""Items of a side whose effective rank is taken."""
COLLAPSED_RANK = 1.5
NO_BETTER = 0.02
"""A loss within this share of the loss of identical embeddings, or above, is no better than theirs."""
DEAD = 0.01
"""A share of queries with a gradient below this, in both directions, is dead."""


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
    """The vital numbers of one batch."""
    return {
        "loss": loss.item(),
        "collapsed_loss": collapsed_loss(objective, scores, targets),
        "image_rank": effective_rank(visual),
        "text_rank": effective_rank(text),
    }


def alarms(row: dict[str, Any]) -> dict[str, str]:
    """What is wrong by a row of the log, a sentence for each; nothing is wrong with a model that has not been trained yet."""
    sentences: dict[str, str] = {}
    vital, objective, step = row["health"], row["objective"], row["step"]
    if not step:
        return sentences
    bound = vital["collapsed_loss"] - NO_BETTER * abs(vital["collapsed_loss"])
    if min(vital["image_rank"], vital["text_rank"]) < COLLAPSED_RANK and vital["loss"] >= bound:
        sentences["collapse"] = (
            f"collapse at step {step}: the images of a batch span {vital['image_rank']:.2f} dimensions and its texts {vital['text_rank']:.2f} "
            f"(effective rank), and their loss {vital['loss']:.4g} is no better than the {vital['collapsed_loss']:.4g} that {objective} "
            f"gives identical embeddings: lower the learning rate, warm it up, or begin with more than the hardest negatives."
        )
    shares = [row["train"][f"gradient_{way}"] for way in ("i2t", "t2i")]
    if max(shares) < DEAD:
        sentences["dead gradients"] = (
            f"dead gradients at step {step}: {shares[0]:.1%} of the images and {shares[1]:.1%} of the texts of training batches get a gradient "
            f"from {objective}: there is nothing left to learn from them; take larger batches or a wider margin."
        )
    return sentences


def news(sentences: dict[str, str], log: Iterable[dict[str, Any]]) -> list[str]:
    """The sentences of alarms that no earlier row of the log has."""
    known = {name for row in log for name in row.get("health", {}).get("alarms", ())}
    return [sentence for name, sentence in sentences.items() if name not in known]
