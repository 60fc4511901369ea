"""What tests of the engine share: relations, facts, items, a score that is no product, and what equal means."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from visavis.engine import planner
from visavis.engine.plan import KEPT_BYTES, Plan
from visavis.errors import ShapeError, VisavisError
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified
from visavis.types import Encoded

every_objective = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
FAMILY = (Triplet(), TripletHN(), NTXent(), NTXent(denominator="negatives", reduction="mean"), VLC(), Unified())
every_of_family = pytest.mark.parametrize("objective", FAMILY, ids=str)
REDUCTIONS = ("sum", "mean", "half_mean")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

# rows of ids: one to one; captions; ids that occur on both sides several times, or on one side only
IDS = {
    "pairs": (range(9), range(9)),
    "captions": ([3, 1, 2, 7], [1, 1, 2, 2, 3, 3, 3, 7, 7]),
    "duplicates": ([1, 1, 2, 3, 5, 3, 2], [1, 2, 2, 3, 1, 8]),
    "strangers": ([1, 2, 3], [4, 5]),
    "one": ([1], [1, 1, 1]),
}


NEED_FACTS_OF_PAIRS = ("NCR", "Ladder", "GradedVLC")
"""Objectives that cannot do without facts of pairs, which say nothing about extra candidates."""


def close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-12, "atol": 1e-13} | tolerance))


def vectors(*numbers: int, width: int = 6) -> list[torch.Tensor]:
    return [torch.randn(number, width, dtype=torch.float64, requires_grad=True) for number in numbers]


def needed(height: int, width: int) -> dict[str, torch.Tensor]:
    """Facts that some objective cannot do without; none of those that change another."""
    made = {name: torch.rand(height, width, dtype=torch.float64) for name in ("relevance", "pair_margin")}
    return made | {
        f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64, requires_grad=True)
        for name, n in (("query", height), ("candidate", width))
    }


def same(loss: nn.Module, expected, inputs, *items, **arguments) -> None:
    """The loss and its gradients by ``inputs`` are those of ``expected``; what comes from above multiplies them."""
    inputs = [each for each in inputs if each.requires_grad]
    value = loss(*items, **arguments)
    close(value, expected)
    ours = torch.autograd.grad(3 * value, inputs, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True, retain_graph=True)
    for own, right in zip(ours, theirs, strict=True):
        close(own, 3 * right, atol=1e-12)


def planned(monkeypatch, path: str, rows: int = 2**20, tile: int = 1024) -> None:
    """Every PairLoss takes this path from now on, in blocks of so many rows."""

    def plan(objective, cost, targets, sizes, *_, **__):
        return Plan(path, sizes.queries, (rows, rows), sizes.candidates, (min(rows, tile), tile), kept_bytes=KEPT_BYTES)

    monkeypatch.setattr(planner, "choose", plan)


def refused(sentence: str, kind: type[VisavisError] = ShapeError):
    return pytest.raises(kind, match=f"^{re.escape(sentence)}")


class WordScore(nn.Module):
    """The best region for each word, averaged, through one learned map, with dropout: a score that is no product of vectors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6, bias=False).double()
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Encoded, texts: Encoded) -> torch.Tensor:
        affinity = torch.einsum("vrd,twd->vtrw", self.map(images.vectors), texts.vectors)
        best = affinity.masked_fill(~images.mask[:, None, :, None], float("-inf")).amax(2)
        return self.dropout((best * texts.mask).sum(-1) / texts.mask.sum(-1))


def items(number: int, longest: int) -> Encoded:
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (number, 1))
    mask[0] = True
    return Encoded(torch.randn(number, longest, 6, dtype=torch.float64, requires_grad=True), mask)
