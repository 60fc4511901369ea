"""Shared parts of the PairLoss tests: relations, annotations, items, a score function and
assertions.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError, VisavisError
from visavis.losses.pair_loss import plan as planner
from visavis.losses.pair_loss.plan import MAX_CACHED_TILE_BYTES, ExecutionPlan
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified

from ..matching import mentions
from ..sampling import for_each

every_objective = for_each(kind=CATALOG)
FAMILY = (
    Triplet(),
    TripletHN(),
    NTXent(),
    NTXent(denominator="negatives", reduction="mean"),
    VLC(),
    Unified(),
)
every_of_family = for_each(objective=FAMILY)
REDUCTIONS = ("sum", "mean", "half_mean")

# Ids of images and texts: one to one, captions, ids repeated on both sides, ids on one side only.
IDS = {
    "pairs": (range(9), range(9)),
    "captions": ([3, 1, 2, 7], [1, 1, 2, 2, 3, 3, 3, 7, 7]),
    "duplicates": ([1, 1, 2, 3, 5, 3, 2], [1, 2, 2, 3, 1, 8]),
    "unmatched": ([1, 2, 3], [4, 5]),
    "one": ([1], [1, 1, 1]),
}


NEED_PAIRWISE_ANNOTATIONS = ("NCR", "Ladder", "GradedVLC", "Distillation")
"""Objectives that require pairwise annotations, which are undefined for extra candidates."""


def assert_close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-12, "atol": 1e-13} | tolerance))


def random_embeddings(*counts: int, dim: int = 6) -> list[torch.Tensor]:
    return [torch.randn(count, dim, dtype=torch.float64, requires_grad=True) for count in counts]


def required_annotations(num_queries: int, num_candidates: int) -> dict[str, torch.Tensor]:
    """Annotations that some objective requires. Optional ones, which would change other objectives,
    are left out.
    """
    annotations = {
        name: torch.rand(num_queries, num_candidates, dtype=torch.float64)
        for name in ("relevance", "pair_margin")
    }
    return annotations | {
        f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64, requires_grad=True)
        for name, n in (("query", num_queries), ("candidate", num_candidates))
    }


def assert_matches(loss: nn.Module, expected, inputs, *random_items, **arguments) -> None:
    """The loss and its gradients with respect to ``inputs`` equal ``expected``, and scale with the
    incoming gradient.
    """
    inputs = [each for each in inputs if each.requires_grad]
    value = loss(*random_items, **arguments)
    assert_close(value, expected)
    ours = torch.autograd.grad(3 * value, inputs, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(
        expected, inputs, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    for actual, right in zip(ours, theirs, strict=True):
        assert_close(actual, 3 * right, atol=1e-12)


def force_plan(monkeypatch, path: str, rows: int = 2**20, tile: int = 1024) -> None:
    """Every PairLoss uses this path: "dense", "rows" for blocks of ``rows`` queries, or "tiles"."""

    def plan(inputs):
        return ExecutionPlan(
            "dense" if path == "dense" else "blocks",
            inputs.queries,
            (rows, rows),
            inputs.candidates,
            tile_shape=(min(rows, tile), tile) if path == "tiles" else None,
            cached_bytes=MAX_CACHED_TILE_BYTES,
        )

    monkeypatch.setattr(planner, "choose_plan", plan)


def raises_error(*parts: object, kind: type[VisavisError] = ShapeError):
    """The block raises an error of this kind whose message contains all parts."""
    return pytest.raises(kind, match=mentions(*parts))


class WordScore(nn.Module):
    """The best region for each word, averaged, through one learned map, with dropout: a score that
    is not a product of vectors.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6, bias=False).double()
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Encoded, texts: Encoded) -> torch.Tensor:
        affinity = torch.einsum("vrd,twd->vtrw", self.map(images.vectors), texts.vectors)
        best = affinity.masked_fill(~images.mask[:, None, :, None], float("-inf")).amax(2)
        return self.dropout((best * texts.mask).sum(-1) / texts.mask.sum(-1))


def random_items(number: int, longest: int) -> Encoded:
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (number, 1))
    mask[0] = True
    return Encoded(torch.randn(number, longest, 6, dtype=torch.float64, requires_grad=True), mask)
