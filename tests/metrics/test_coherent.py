"""Coherent score: 1 for the perfect order, -1 for the reversed one, undefined for constant relevance."""

from __future__ import annotations

import pytest
import torch

from visavis.errors import ShapeError
from visavis.metrics import coherent_scores


def test_perfect_reversed_and_constant_orders() -> None:
    scores = torch.rand(6, 9, dtype=torch.float64)
    assert coherent_scores(scores, scores**3, k=5).tolist() == pytest.approx([1.0] * 6)
    assert coherent_scores(scores, -scores, k=100).tolist() == pytest.approx([-1.0] * 6)
    assert coherent_scores(scores, torch.ones(6, 9), k=4).isnan().all()


def test_one_swap_among_three_by_hand() -> None:
    scores, relevance = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0.9, 0.2, 0.5, 1.0]])
    assert coherent_scores(scores, relevance, k=3).tolist() == pytest.approx([(2 - 1) / 3])


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"^relevance has shape \[2, 3\], expected that of the scores, \[3, 3\]"):
        coherent_scores(torch.eye(3), torch.ones(2, 3), k=1)
