"""Values of the objectives compared with loops over floats, for relations, margins, weights and
ignored pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from visavis import Targets
from visavis.losses.targets import Factors
from visavis.objectives import (
    CRCL,
    RCL,
    RINCE,
    RSP,
    SSP,
    VLC,
    BinomialDeviance,
    Circle,
    Goal,
    InfoNCE,
    MaxMargin,
    MultiSimilarity,
    NTXent,
    Sigmoid,
    SmoothAP,
    Triplet,
    TripletHN,
    TripletTopK,
    Unified,
)

from ..sampling import for_each, pairwise

# Formula of one term, given the positive, at least one negative, and the margin of the anchor.
TERMS = {
    Triplet(): lambda p, negatives, m: sum(max(0.0, m + s - p) for s in negatives),
    TripletHN(): lambda p, negatives, m: max(0.0, m + max(negatives) - p),
    TripletTopK(k=2): lambda p, negatives, m: sum(
        max(0.0, m + s - p) for s in sorted(negatives)[-2:]
    ),
    VLC(gamma=7.0): lambda p, negatives, m: math.log(
        1 + sum(math.exp(7 * (s - p)) for s in negatives)
    ),
    NTXent(tau=0.2): lambda p, negatives, m: (
        -math.log(
            math.exp(p / 0.2) / (math.exp(p / 0.2) + sum(math.exp(s / 0.2) for s in negatives))
        )
    ),
    NTXent(tau=0.2, denominator="negatives"): lambda p, negatives, m: (
        math.log(sum(math.exp(s / 0.2) for s in negatives)) - p / 0.2
    ),
    MaxMargin(margin=0.3): lambda p, negatives, m: (
        sum(max(0.0, m + s - p) for s in negatives) / len(negatives)
    ),
    SSP(reduction="sum"): lambda p, negatives, m: (
        max(0.0, 0.5 - 0.7 * p + 0.2 * p**2)
        + max(0.0, 0.03 - 0.4 * max(negatives) + 0.9 * max(negatives) ** 2)
        if max(negatives) + m > p
        else 0.0
    ),
    RSP(coefficients=(0.1, -0.5, 2.0)): lambda p, negatives, m: max(
        0.0, m + 0.1 - 0.5 * (max(negatives) - p) + 2 * (max(negatives) - p) ** 2
    ),
    RSP(coefficients=(0.1, -0.5, 2.0), gamma=7.0): lambda p, negatives, m: (
        math.log(
            1 + sum(math.exp(7 * (0.1 - 0.5 * (s - p) + 2 * (s - p) ** 2 + m)) for s in negatives)
        )
        / 7
    ),
    Unified(gamma=7.0): lambda p, negatives, m: (
        math.log(1 + sum(math.exp(7 * (s - p + m)) for s in negatives)) / 7
    ),
    BinomialDeviance(): lambda p, negatives, m: (
        softplus(-2 * (p - 0.5)) / 2 + softplus(10 * (max(negatives) - 0.5)) / 10
    ),
    BinomialDeviance(negatives="all"): lambda p, negatives, m: (
        softplus(-2 * (p - 0.5)) / 2 + sum(softplus(10 * (s - 0.5)) for s in negatives) / 10
    ),
    RCL(tau=0.2): lambda p, negatives, m: sum(
        -math.log(1 - x) for x in softmax(p, negatives, 0.2)[1]
    ),
    RCL(tau=0.2, form="tan"): lambda p, negatives, m: sum(
        math.tan(x) for x in softmax(p, negatives, 0.2)[1]
    ),
    RCL(tau=0.2, form="abs"): lambda p, negatives, m: sum(softmax(p, negatives, 0.2)[1]),
    RCL(tau=0.2, form="exp"): lambda p, negatives, m: sum(
        math.exp(x - 1) - math.exp(-1) for x in softmax(p, negatives, 0.2)[1]
    ),
    RCL(tau=0.2, form="gce", q=0.7): lambda p, negatives, m: sum(
        (1 - (1 - x) ** 0.7) / 0.7 for x in softmax(p, negatives, 0.2)[1]
    ),
    CRCL(tau=0.2): lambda p, negatives, m: active_complementary(1.0, *softmax(p, negatives, 0.2)),
    CRCL(tau=0.2, lam=2.0, estimate=True): lambda p, negatives, m: active_complementary(
        softmax(p, negatives, 0.2)[0], *softmax(p, negatives, 0.2), lam=2.0
    ),
    RINCE(tau=0.2, q=0.3, lam=0.05): lambda p, negatives, m: (
        (
            (0.05 * (math.exp(p / 0.2) + sum(math.exp(s / 0.2) for s in negatives))) ** 0.3
            - math.exp(0.3 * p / 0.2)
        )
        / 0.3
    ),
    Goal(): lambda p, negatives, m: max(negatives) - p,  # the monitor
}


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def softmax(p: float, negatives: list[float], tau: float) -> tuple[float, list[float]]:
    """Probability of a positive and of each negative of its query."""
    total = math.exp(p / tau) + sum(math.exp(s / tau) for s in negatives)
    return math.exp(p / tau) / total, [math.exp(s / tau) / total for s in negatives]


def active_complementary(label: float, positive: float, negatives: list[float], lam=5.0) -> float:
    complement = sum(math.tan(x) for x in negatives)
    total = complement + math.tan(positive)
    return -label * math.log(positive) + lam * complement / total ** (1 - label)


def multi_similarity(positives: list[float], negatives: list[float]) -> float:
    pulled = [s for s in positives if s < max(negatives) + 0.1]
    pushed = [s for s in negatives if s > min(positives) - 0.1]
    pull = math.log(1 + sum(math.exp(-2 * (s - 0.5)) for s in pulled)) / 2
    return pull + math.log(1 + sum(math.exp(50 * (s - 0.5)) for s in pushed)) / 50


def circle(positives: list[float], negatives: list[float]) -> float:
    push = sum(math.exp(8 * max(0, s + 0.25) * (s - 0.25)) for s in negatives)
    return math.log(1 + push * sum(math.exp(-8 * max(0, 1.25 - s) * (s - 0.75)) for s in positives))


def smooth_ap(positives: list[float], negatives: list[float]) -> float:
    precisions = []
    for i, p in enumerate(positives):
        rank = 1 + sum(1 / (1 + math.exp((p - s) / 0.1)) for j, s in enumerate(positives) if j != i)
        precisions.append(rank / (rank + sum(1 / (1 + math.exp((p - s) / 0.1)) for s in negatives)))
    return 1 - sum(precisions) / len(precisions)


def sigmoid(positives: list[float], negatives: list[float]) -> float:
    return sum(softplus(-(6 * s - 2)) for s in positives) + sum(
        softplus(6 * s - 2) for s in negatives
    )


# Formula of one term per query, given at least one positive and one negative.
QUERY_TERMS = {
    MultiSimilarity(): multi_similarity,
    Circle(gamma=8.0): circle,
    SmoothAP(tau=0.1): smooth_ap,
    Sigmoid(scale=6.0, bias=-2.0): sigmoid,
}
every_objective = for_each(objective=[*TERMS, *QUERY_TERMS])


def terms_by_loops(objective, scores, positive, ignored, margins):
    """The terms of one direction for all positive pairs, or for all queries with a positive, in row
    order.
    """
    terms = []
    for i, row in enumerate(scores):
        negatives = [s for j, s in enumerate(row) if not positive[i][j] and not ignored[i][j]]
        positives = [s for j, s in enumerate(row) if positive[i][j] and not ignored[i][j]]
        if objective in TERMS:
            terms += [
                TERMS[objective](s, negatives, margins[i]) if negatives else 0.0 for s in positives
            ]
        elif positives:
            terms.append(QUERY_TERMS[objective](positives, negatives) if negatives else 0.0)
    return terms


def by_loops(objective, scores, positive, ignored=None, margins=None):
    ignored = torch.zeros_like(positive) if ignored is None else ignored
    margins = margins or (
        [getattr(objective, "margin", None)] * len(scores),
        [getattr(objective, "margin", None)] * scores.shape[1],
    )
    i2t, t2i = (
        terms_by_loops(objective, *(part.tolist() for part in parts), margin)
        for parts, margin in zip(
            ((scores, positive, ignored), (scores.T, positive.T, ignored.T)), margins, strict=True
        )
    )
    if objective.reduction == "sum":
        return sum(i2t) + sum(t2i)
    mean = sum(i2t) / max(len(i2t), 1) + sum(t2i) / max(len(t2i), 1)
    return mean if objective.reduction == "mean" else mean / 2


RELATIONS = {
    "pairs in order": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "pairs in another order": ([5, 3, 9, 1], [9, 1, 3, 5]),
    "captions of an image": ([7, -8, 9], [7, 7, 7, -8, -8, 9]),
    "an image twice, with captions": ([7, 7, 8], [7, 8, 7, 8, 8]),
    "one caption of everything": ([1, 1, 1], [1]),
    "all match": ([1, 1], [1, 1, 1]),
    "nothing matches": ([1, 2], [3, 4, 5]),
    "items without a match": ([1, 2, 3], [2, 4, 4, 2]),
}


def scores_for(targets):
    return torch.rand(targets.shape, dtype=torch.float64) * 2 - 1


@pairwise(
    objective=[*TERMS, *QUERY_TERMS], relation=RELATIONS, reduction=["sum", "mean", "half_mean"]
)
def test_values_match_loops_for_ids(objective, relation, reduction):
    targets = Targets(query_ids=RELATIONS[relation][0], candidate_ids=RELATIONS[relation][1])
    scores = scores_for(targets)
    reduced = replace(objective, reduction=reduction)
    table = TERMS if objective in TERMS else QUERY_TERMS
    table[reduced] = table[objective]
    assert reduced(scores, targets).item() == pytest.approx(
        by_loops(reduced, scores, targets.positive), rel=1e-12, abs=1e-12
    )


@every_objective
def test_values_match_loops_for_overlapping_relations(objective):
    targets = Targets.from_pairs([0, 0, 1, 1, 2], [0, 1, 1, 2, 0], 4, 3)
    scores = scores_for(targets)
    assert objective(scores, targets).item() == pytest.approx(
        by_loops(objective, scores, targets.positive), rel=1e-12
    )


@every_objective
def test_values_match_loops_for_ignored_pairs(objective):
    ignored = torch.tensor(
        [[False, True, False, False], [True, True, False, False], [False, False, True, True]]
    )
    ids = {"query_ids": [1, 2, 3], "candidate_ids": [1, 2, 3, 1]}
    together = Targets(**ids).positive
    scores = scores_for(Targets(**ids))
    expected = by_loops(objective, scores, together, ignored)
    for annotation in (ignored, ignored.float(), lambda rows, columns: ignored[rows][:, columns]):
        assert objective(scores, Targets(**ids, ignore=annotation)).item() == pytest.approx(
            expected, rel=1e-12
        )


@for_each(
    objective=[
        objective
        for objective in TERMS
        if hasattr(objective, "margin") and not isinstance(objective, Goal)
    ]
)
def test_values_use_margin_of_anchor(objective):
    i2t, t2i = torch.rand(3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    targets = Targets(
        query_ids=[7, 7, 8], candidate_ids=[7, 8, 7, 8, 8], query_margin=i2t, candidate_margin=t2i
    )
    scores = scores_for(targets)
    expected = by_loops(objective, scores, targets.positive, margins=(i2t.tolist(), t2i.tolist()))
    assert objective(scores, targets).item() == pytest.approx(expected, rel=1e-12)


def test_values_multiply_scores_by_weights():
    left, right = torch.rand(3, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    ids = {"query_ids": [7, 7, 8], "candidate_ids": [7, 8, 7, 8, 8]}
    weight = left @ right.T
    scores, objective = scores_for(Targets(**ids)), Unified(gamma=7.0)
    expected = by_loops(objective, weight * scores, Targets(**ids).positive)
    for annotation in (
        weight,
        Factors(left, right),
        lambda rows, columns: weight[rows][:, columns],
    ):
        assert objective(scores, Targets(**ids, weight=annotation)).item() == pytest.approx(
            expected, rel=1e-12
        )
        transposed = objective(scores.T, Targets(**ids, weight=annotation).T).item()
        assert transposed == pytest.approx(expected, rel=1e-12)
        sliced = objective.one_way(scores[1:], Targets(**ids, weight=annotation)[1:])
        torch.testing.assert_close(
            sliced, objective.one_way(scores, Targets(**ids, weight=weight))[2:], rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("relation", RELATIONS)
def test_info_nce_has_one_term_per_query_with_positive(relation):
    targets = Targets(query_ids=RELATIONS[relation][0], candidate_ids=RELATIONS[relation][1])
    scores = scores_for(targets)

    def term(row, together):
        total = math.log(sum(math.exp(s / 0.2) for s in row))
        return sum(
            total - s / 0.2 for s, is_positive in zip(row, together, strict=True) if is_positive
        ) / sum(together)

    expected = 0.0
    for rows, positive in ((scores, targets.positive), (scores.T, targets.positive.T)):
        terms = [
            term(row, together)
            for row, together in zip(rows.tolist(), positive.tolist(), strict=True)
            if any(together)
        ]
        expected += sum(terms) / max(len(terms), 1)
    assert InfoNCE(tau=0.2, reduction="mean")(scores, targets).item() == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )
    assert InfoNCE(tau=0.2)(scores, targets).item() == pytest.approx(
        expected / 2, rel=1e-12, abs=1e-12
    )


def test_values_match_hand_computed_numbers():
    scores = torch.tensor([[0.5, 0.25], [0.75, 0.5]], dtype=torch.float64)
    pairs = Targets.paired(2)
    assert Triplet(margin=0.5)(scores, pairs).item() == pytest.approx(0.25 + 0.75 + 0.75 + 0.25)
    assert TripletHN(margin=0.25)(scores, pairs).item() == pytest.approx(0.0 + 0.5 + 0.5 + 0.0)
    assert VLC(gamma=4.0)(scores, pairs).item() == pytest.approx(
        2 * math.log(1 + math.e**-1) + 2 * math.log(1 + math.e)
    )
    assert NTXent(tau=0.25)(scores, pairs).item() == pytest.approx(
        (math.log(1 + math.e**-1) + math.log(1 + math.e)) / 2
    )
    assert InfoNCE(tau=0.25)(scores, pairs).item() == pytest.approx(
        (math.log(1 + math.e**-1) + math.log(1 + math.e)) / 2
    )
    assert MaxMargin(margin=0.5)(scores, pairs).item() == pytest.approx(
        (0.25 + 0.75 + 0.75 + 0.25) / 4
    )
    assert MaxMargin(margin=0.5, fix_norm=False)(scores, pairs).item() == pytest.approx(
        (0.25 + 0.75 + 0.75 + 0.25 + 4 * 0.5) / 8
    )
    first, second = (
        0.5 - 0.35 + 0.05,
        0.03 - 0.3 + 0.9 * 0.5625,
    )  # positives at 0.5, negatives at 0.75, none for 0.25
    assert SSP(margin=0.25)(scores, pairs).item() == pytest.approx((2 * first + 2 * second) / 2)
    assert RSP(coefficients=(0, 1, 2), margin=0.25)(scores, pairs).item() == pytest.approx(
        2 * (0.25 - 0.25 + 0.125) + 2 * (0.25 + 0.25 + 0.125)
    )
    assert Unified(margin=0.25, gamma=4.0)(scores, pairs).item() == pytest.approx(
        (math.log(2) + math.log(1 + math.e**2)) / 2
    )
    assert Goal()(scores, pairs).item() == -0.25 + 0.25 + 0.25 - 0.25
    deviance = 2 * math.log(2) + (math.log(1 + math.e**-1) + math.log(1 + math.e)) / 2
    assert BinomialDeviance(beta=4.0)(scores, pairs).item() == pytest.approx(deviance)
    assert MultiSimilarity(beta=4.0)(scores, pairs).item() == pytest.approx(
        math.log(2) + math.log(1 + math.e) / 2
    )
    assert Circle(gamma=4.0)(scores, pairs).item() == pytest.approx(
        2 * math.log(1 + math.e**0.75) + 2 * math.log(1 + math.e**2.75)
    )
    first, second = 1 + 1 / (1 + math.e), 1 + 1 / (1 + math.e**-1)
    assert SmoothAP(tau=0.25)(scores, pairs).item() == pytest.approx(
        1 - (1 / first + 1 / second) / 2
    )
