"""Tangent norms: corrected equations of the Unified paper against differentiation."""

from __future__ import annotations

import pytest
import torch
from tests.diagnostics.closed_forms import closed_weights
from torch.nn.functional import normalize

from visavis import Targets
from visavis.losses.pair_gradients import tangent_norms, tangent_norms_of_slopes
from visavis.objectives import CATALOG, VLC, TripletHN, Unified

ANATOMIZED = [
    TripletHN(),
    TripletHN(margin=0.7),
    Unified(gamma=1),
    Unified(gamma=50),
    VLC(gamma=1),
    VLC(gamma=20),
]
anatomized = pytest.mark.parametrize("objective", ANATOMIZED, ids=repr)


def sides(size: int = 12, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    images = normalize(torch.randn(size, width, dtype=torch.float64), dim=1)
    return images, normalize(images + 0.3 * torch.randn(size, width, dtype=torch.float64), dim=1)


def by_differentiation(objective, images, texts):
    """Each anchor's own term, differentiated with respect to free embeddings, then projected off
    them.
    """

    def norms(gradient, unit):
        return (gradient - (gradient * unit).sum(-1, keepdim=True) * unit).norm(dim=-1)

    anchors, candidates = [], []
    for i, image in enumerate(images):
        v, t = image.clone().requires_grad_(), texts.clone().requires_grad_()
        term = objective.one_way(v[None] @ t.T, Targets.paired(len(images))[i : i + 1]).sum()
        on_anchor, on_texts = torch.autograd.grad(term, (v, t))
        anchors.append(norms(on_anchor, image))
        candidates.append(norms(on_texts, texts))
    return torch.stack(anchors), torch.stack(candidates)


@anatomized
@pytest.mark.parametrize("size", [1, 2, 12])
def test_tangent_norms_equal_autograd(objective, size):
    images, texts = sides(size)
    pairs = Targets.paired(size)
    anchors, candidates = by_differentiation(objective, images, texts)
    by_weights = tangent_norms(objective, images, texts, pairs)
    closed = tangent_norms_of_slopes(
        closed_weights(objective, images @ texts.T, pairs) * objective.gradient_scale, images, texts
    )
    for found in (by_weights, closed):
        torch.testing.assert_close(found.anchor, anchors, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.candidate, candidates, rtol=1e-10, atol=1e-12)
    assert size == 1 or candidates.diagonal().sum() > 0  # the positive is turned, too


def test_tangent_norms_match_equations():
    """Eqs. 14, 15 and 18 with gamma = 1. Eq. 15 with the corrected denominator. Eq. 17 is a bound,
    not the norm.
    """
    images, texts = sides()
    scores, margin = images @ texts.T, 0.2
    D = (scores - scores.diagonal()[:, None] + margin).exp().fill_diagonal_(0)
    share = D / (1 + D.sum(1, keepdim=True))
    found = tangent_norms(Unified(margin=margin, gamma=1), images, texts, Targets.paired(12))
    difference = texts[None] - texts[:, None]  # t_j - t_i
    eq14 = (share[:, :, None] * difference).sum(1)
    torch.testing.assert_close(
        found.anchor, (eq14 - (eq14 * images).sum(1, keepdim=True) * images).norm(dim=1)
    )
    sine = (1 - scores**2).sqrt()
    negatives = ~torch.eye(12, dtype=torch.bool)
    torch.testing.assert_close(found.candidate[negatives], (share * sine)[negatives])
    torch.testing.assert_close(found.candidate.diagonal(), (share.sum(1) * sine.diagonal()))

    printed_15 = D / (1 + D) * sine
    assert (printed_15[negatives] > 2 * found.candidate[negatives]).all()
    projected = (
        difference - torch.einsum("ijd,id->ij", difference, images)[:, :, None] * images[:, None]
    )
    printed_17 = (projected.norm(dim=-1) * share).sum(1)
    assert (printed_17 > found.anchor).all()


def test_tangent_norms_of_hardest_negative_match_equations():
    """Eqs. 11 and 12."""
    images, texts = sides()
    scores = images @ texts.T
    best, hardest = scores.masked_fill(torch.eye(12, dtype=torch.bool), -9.0).max(1)
    opened = (best - scores.diagonal() + 0.2 > 0).double()
    found = tangent_norms(TripletHN(), images, texts, Targets.paired(12))
    difference = texts[hardest] - texts
    cosine = (difference * images).sum(1) / difference.norm(dim=1)
    torch.testing.assert_close(
        found.anchor, opened * difference.norm(dim=1) * (1 - cosine**2).sqrt()
    )
    torch.testing.assert_close(
        found.candidate.gather(1, hardest[:, None])[:, 0], opened * (1 - best**2).sqrt()
    )
    assert (found.candidate > 0).sum() == 2 * opened.sum()
    assert 0 < opened.sum() < 12


def test_tangent_norms_of_vlc_are_gamma_times_unified():
    images, texts = sides()
    for one, other in zip(
        vars(tangent_norms(VLC(gamma=20), images, texts, Targets.paired(12))).values(),
        vars(
            tangent_norms(Unified(gamma=20, margin=0), images, texts, Targets.paired(12))
        ).values(),
        strict=True,
    ):
        torch.testing.assert_close(one, 20 * other)


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_tangent_norms_vanish_for_identical_embeddings(kind):
    """Whatever the weights are, and for every objective: the paper's claim that Unified does not
    vanish needs different texts.
    """
    unit = normalize(torch.randn(1, 7, dtype=torch.float64), dim=1).expand(5, 7)
    facts = {
        name: torch.rand(5, 5, dtype=torch.float64)
        for name in ("relevance", "weight", "pair_margin")
    }
    facts |= {
        f"{side}_offline_scores": torch.rand(5, 2, dtype=torch.float64)
        for side in ("query", "candidate")
    }
    found = tangent_norms(kind(), unit, unit, Targets.paired(5, **facts))
    assert found.anchor.max() < 1e-13
    assert found.candidate.max() < 1e-13
