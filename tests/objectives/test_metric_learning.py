"""BinomialDeviance, MultiSimilarity and Circle: gradients by formula, and relation to GOAL."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from visavis import Targets
from visavis.core.errors import SpecError
from visavis.objectives import BinomialDeviance, Circle, Goal, MultiSimilarity

from ..matching import mentions

CAPTIONS = Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3])


def cosines(num_queries: int, num_candidates: int) -> torch.Tensor:
    rows, columns = (
        normalize(torch.randn(n, 4, dtype=torch.float64), dim=-1)
        for n in (num_queries, num_candidates)
    )
    return rows @ columns.T


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Gradient of one direction."""
    scores = scores.detach().clone().requires_grad_()
    return torch.autograd.grad(objective.one_way(scores, targets).sum(), scores)[0]


def assert_close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-12} | tolerance))


def points(number: int = 200) -> tuple[torch.Tensor, Targets]:
    """Queries with one positive (column 0) and one negative (column 1) each."""
    return torch.rand(number, 2, dtype=torch.float64) * 2 - 1, Targets(
        query_ids=[0] * number, candidate_ids=[0, 1]
    )


# BinomialDeviance


def test_binomial_deviance_weights_scores_independently():
    scores, targets = points()
    actual = gradient(BinomialDeviance(alpha=3, beta=7, lam=0.2), scores, targets)
    assert_close(actual[:, 0], -1 / (1 + (3 * (scores[:, 0] - 0.2)).exp()))
    assert_close(actual[:, 1], 1 / (1 + (-7 * (scores[:, 1] - 0.2)).exp()))


def test_binomial_deviance_sums_all_negatives():
    scores = cosines(3, 7)
    hardest, every = (BinomialDeviance(negatives=negatives) for negatives in ("hardest", "all"))
    assert (every.one_way(scores, CAPTIONS) > hardest.one_way(scores, CAPTIONS)).all()
    scores, targets = points()
    assert_close(every.one_way(scores, targets), hardest.one_way(scores, targets))
    pushed = gradient(every, cosines(1, 5), Targets(query_ids=[0], candidate_ids=range(5)))
    assert (pushed[0, 1:] > 0).all()


# MultiSimilarity


def test_multi_similarity_of_one_pair_equals_con_sig():
    scores, targets = points()
    read = scores[:, 1] > scores[:, 0] - 0.1
    actual = gradient(MultiSimilarity(beta=10), scores, targets)
    assert_close(
        actual[read],
        gradient(Goal(triplet="con", pair="sig", semantics="reference"), scores, targets)[read],
    )
    assert_close(actual[read], gradient(BinomialDeviance(), scores, targets)[read])
    assert not actual[~read].any()
    assert 20 < read.sum() < 180


def test_con_sig_ms_differs_from_multi_similarity():
    scores, targets = cosines(8, 8), Targets.paired(8)
    ours = gradient(Goal(triplet="con", pair="sig_ms", semantics="reference"), scores, targets)
    published = gradient(MultiSimilarity(beta=10), scores, targets)
    assert (ours - published).norm() > 0.3 * published.norm()


def test_multi_similarity_selects_informative_pairs():
    scores = torch.tensor([[0.75, 0.25, 0.5, 0.125]], dtype=torch.float64)
    targets = Targets(query_ids=[0], candidate_ids=[0, 0, 1, 1])
    # positives below 0.5 + epsilon, negatives above 0.25 - epsilon, strictly
    for epsilon, expected in (
        (0.0, [0, 1, 1, 0]),
        (0.125, [0, 1, 1, 0]),
        (0.126, [0, 1, 1, 1]),
        (0.25, [0, 1, 1, 1]),
        (0.251, [1, 1, 1, 1]),
    ):
        assert gradient(MultiSimilarity(epsilon=epsilon), scores, targets).ne(0).int().tolist() == [
            expected
        ]


def test_multi_similarity_is_zero_for_separated_query():
    scores = 2 * torch.eye(4, dtype=torch.float64) - 1
    assert not MultiSimilarity().one_way(scores, Targets.paired(4)).any()
    assert not gradient(MultiSimilarity(), scores, Targets.paired(4)).any()


# Circle


@pytest.mark.parametrize("targets", [Targets.paired(6), CAPTIONS], ids=["pairs", "captions"])
def test_circle_gradient_matches_formula(targets):
    scores, m, gamma = cosines(*targets.shape), 0.3, 5.0
    a_n, a_p = (scores + m).relu(), (1 + m - scores).relu()
    e_n = torch.where(targets.negative, (gamma * a_n * (scores - m)).exp(), 0.0)
    e_p = torch.where(targets.positive, (-gamma * a_p * (scores - 1 + m)).exp(), 0.0)
    product = e_n.sum(1, keepdim=True) * e_p.sum(1, keepdim=True)
    assert_close(Circle(margin=m, gamma=gamma).one_way(scores, targets), product[:, 0].log1p())
    share = e_n / e_n.sum(1, keepdim=True) * a_n - e_p / e_p.sum(1, keepdim=True) * a_p
    assert_close(
        gradient(Circle(margin=m, gamma=gamma), scores, targets),
        gamma * product / (1 + product) * share,
    )


@pytest.mark.parametrize(("margin", "semantics"), [(math.sqrt(0.5), "paper"), (0.5, "reference")])
def test_circle_shares_triplet_weight_with_goal_cir(margin, semantics):
    scores, targets = points()
    scores = scores.clamp(min=-margin + 0.01)  # Circle gives negatives below -margin no weight
    actual = gradient(Circle(margin=margin, gamma=10), scores, targets) / 10
    triplet = gradient(
        Goal(triplet="cir", pair="con", tau=10, semantics=semantics), scores, targets
    )[:, 1]
    assert_close(actual[:, 0], -triplet * (1 + margin - scores[:, 0]))
    assert_close(actual[:, 1], triplet * (scores[:, 1] + margin))
    assert (
        actual
        - gradient(Goal(triplet="cir", pair="lin", tau=10, semantics=semantics), scores, targets)
    ).abs().max() > 0.1


def test_circle_has_no_gradient_beyond_optima():
    scores, targets = torch.tensor([[1.5, -0.5]]), Targets(query_ids=[0], candidate_ids=[0, 1])
    assert not gradient(Circle(), scores, targets).any()


# One term per query


@pytest.mark.parametrize("kind", [MultiSimilarity, Circle])
def test_query_objectives_have_one_term_per_query_with_positive(kind):
    targets = Targets(query_ids=[1, 2, 3], candidate_ids=[2, 4, 4, 2])
    assert kind().one_way(cosines(3, 4), targets).shape == (1,)
    assert kind().one_way(cosines(4, 3), targets.T).shape == (2,)
    assert kind()(cosines(3, 4), Targets.from_pairs([], [], 3, 4)) == 0


def test_metric_learning_objectives_reject_negative_slopes():
    for kind, field in (
        (BinomialDeviance, "alpha"),
        (BinomialDeviance, "beta"),
        (MultiSimilarity, "alpha"),
        (Circle, "gamma"),
    ):
        with pytest.raises(SpecError, match=mentions(kind.__name__, field, "-1")):
            kind(**{field: -1})
