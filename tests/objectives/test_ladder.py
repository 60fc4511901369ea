"""Ladder loss: comparison with loops over all hinges, limits and empty levels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from visavis import Targets, parse
from visavis.core.errors import MissingSupervision
from visavis.losses.objectives.graded_losses import _hinge_sums as hinge_sums
from visavis.losses.targets import Factors
from visavis.objectives import Ladder, Triplet, TripletHN

from ..matching import mentions
from ..sampling import pairwise

LEVELS = {
    1: {"margins": (0.2,), "thresholds": (), "betas": (1.0,)},
    2: {},
    3: {"margins": (0.2, 0.01, 0.03), "thresholds": (0.63, 0.4), "betas": (1.0, 0.25, 0.125)},
    4: {
        "margins": (0.3, 0.1, 0.2, 0.05),
        "thresholds": (0.8, 0.5, 0.2),
        "betas": (0.5, 2.0, 0.25, 1.0),
    },
    5: {
        "margins": (0.3, 0.1, 0.2, 0.05, 0.4),
        "thresholds": (0.9, 0.6, 0.5, 0.2),
        "betas": (1.5, 2.0, 0.25, 1.0, 0.5),
    },
}
RELATIONS = {
    "pairs": (range(6), range(6)),
    "captions": ([7, 8, 7, 9], [8, 7, 7, 9, 8, 3]),
    "without a partner": ([1, 2, 3], [2, 4, 4, 2]),
    "one": ([1], [1]),
}
every_level = pytest.mark.parametrize("levels", LEVELS)


def case(relation, relevance=None, **annotations) -> tuple[torch.Tensor, Targets]:
    queries, candidates = (list(ids) for ids in RELATIONS[relation])
    shape = len(queries), len(candidates)
    row_relevance = (
        (10 * torch.rand(shape, dtype=torch.float64)).floor() / 10
        if relevance is None
        else torch.full(shape, relevance).double()
    )
    targets = Targets(
        query_ids=queries, candidate_ids=candidates, relevance=row_relevance, **annotations
    )
    return 2 * torch.rand(shape, dtype=torch.float64) - 1, targets


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def gradient(objective, scores, targets):
    scores = scores.clone().requires_grad_()
    return torch.autograd.grad(objective(scores, targets), scores)[0]


def hinges(margin, above, below) -> list[float]:
    """The hinges of all pairs of a level, largest first."""
    return sorted((max(0.0, margin - u + d) for u in above for d in below), reverse=True)


def by_loops(ladder, scores, targets) -> float:
    """The sum over both directions, hinge by hinge."""
    max_hinges = ladder.pairs if ladder.sampling == "hard" else None
    total = 0.0
    for s, t in ((scores, targets), (scores.T, targets.T)):
        for row, row_relevance, positive, negative in zip(
            s.tolist(), t.relevance.tolist(), t.positive.tolist(), t.negative.tolist(), strict=True
        ):
            positives = [x for x, selected in zip(row, positive, strict=True) if selected]
            others = [
                (x, r)
                for x, r, selected in zip(row, row_relevance, negative, strict=True)
                if selected
            ]
            for p in positives:
                total += ladder.betas[0] * sum(
                    hinges(ladder.margins[0], [p], [x for x, _ in others])[:max_hinges]
                )
            for level, threshold in enumerate(ladder.thresholds, start=1):
                end = ladder.thresholds[level - 2] if level > 1 else math.inf
                level_scores = [x for x, r in others if threshold <= r < end]
                below = [x for x, r in others if r < threshold]
                if ladder.cumulative:
                    each = [
                        hinges(sum(ladder.margins[: level + 1]), [p], below)[:max_hinges]
                        for p in positives
                    ]
                    total += ladder.betas[level] * sum(map(sum, each))
                else:
                    total += ladder.betas[level] * sum(
                        hinges(ladder.margins[level], level_scores, below)[:max_hinges]
                    )
    return total


def reference_by_loops(ladder, scores, targets) -> float:
    """The rule of the released code for pairs in order, which fills empty sets with 1 and 0."""
    total = 0.0
    for s, relevance in (
        (scores.tolist(), targets.relevance.tolist()),
        (scores.T.tolist(), targets.relevance.T.tolist()),
    ):
        for q, (row, row_relevance) in enumerate(zip(s, relevance, strict=True)):
            total += max(
                [0.0, *(ladder.margins[0] - row[q] + x for j, x in enumerate(row) if j != q)]
            )
            for level, threshold in enumerate(ladder.thresholds, start=1):
                lowest_above = min(
                    x if r >= threshold else 1.0 for x, r in zip(row, row_relevance, strict=True)
                )
                highest_below = max(
                    x if r < threshold else 0.0 for x, r in zip(row, row_relevance, strict=True)
                )
                hinge = (
                    sum(ladder.margins[: level + 1]) - row[q]
                    if ladder.cumulative
                    else ladder.margins[level] - lowest_above
                )
                total += ladder.betas[level] * max(0.0, hinge + highest_below)
    return total


@pairwise(
    levels=LEVELS,
    fields=[
        {},
        {"pairs": 2},
        {"pairs": 5},
        {"pairs": 1000},
        {"sampling": "sum"},
        {"cumulative": True},
        {"cumulative": True, "sampling": "sum"},
    ],
)
def test_ladder_matches_loop_over_hinges(levels, fields):
    ladder = Ladder(**LEVELS[levels], **fields)
    for relation in RELATIONS:
        scores, targets = case(relation)
        assert ladder(scores, targets).item() == pytest.approx(
            by_loops(ladder, scores, targets), rel=1e-12, abs=1e-12
        ), relation


@pairwise(levels=LEVELS, fields=[{}, {"pairs": 3}, {"sampling": "sum"}])
def test_ladder_excludes_ignored_pairs_from_levels(levels, fields):
    ladder = Ladder(**LEVELS[levels], **fields)
    scores, targets = case("captions", ignore=torch.rand(4, 6) > 0.6)
    assert ladder(scores, targets).item() == pytest.approx(
        by_loops(ladder, scores, targets), rel=1e-12, abs=1e-12
    )


@pairwise(levels=LEVELS, size=[1, 2, 3, 24], cumulative=[False, True])
def test_ladder_reference_matches_released_rule(levels, cumulative, size):
    ladder = Ladder(**LEVELS[levels], cumulative=cumulative, semantics="reference")
    constants = [torch.full((size, size), value).double() for value in (0.0, 1.0)]
    for relevance in (torch.rand(size, size).double(), torch.eye(size).double(), *constants):
        scores, targets = (
            2 * torch.rand(size, size, dtype=torch.float64) - 1,
            Targets.paired(size, relevance=relevance),
        )
        assert ladder(scores, targets).item() == pytest.approx(
            reference_by_loops(ladder, scores, targets), rel=1e-12, abs=1e-12
        )


@pairwise(
    relation=RELATIONS, reduction=["sum", "mean", "half_mean"], semantics=["paper", "reference"]
)
def test_ladder_with_one_level_equals_triplet(relation, reduction, semantics):
    scores, targets = case(relation)
    ids = Targets(
        query_ids=targets.query_ids, candidate_ids=targets.candidate_ids
    )  # needs no relevance
    hard = Ladder(**LEVELS[1], semantics=semantics, reduction=reduction)
    assert_close(hard(scores, ids), TripletHN(reduction=reduction)(scores, ids))
    assert_close(gradient(hard, scores, ids), gradient(TripletHN(reduction=reduction), scores, ids))
    if semantics == "paper":
        every = Ladder(**LEVELS[1], sampling="sum", reduction=reduction)
        assert_close(every(scores, ids), Triplet(reduction=reduction)(scores, ids))
        assert_close(
            gradient(every, scores, ids), gradient(Triplet(reduction=reduction), scores, ids)
        )


@pairwise(relation=RELATIONS, fields=[{}, {"cumulative": True}, {"semantics": "reference"}])
def test_ladder_ignores_levels_of_weight_zero(relation, fields):
    scores, targets = case(relation)
    ladder = Ladder(margins=(0.2, 0.1, 0.1), thresholds=(0.6, 0.3), betas=(1, 0, 0), **fields)
    assert_close(ladder(scores, targets), TripletHN()(scores, targets))
    assert_close(gradient(ladder, scores, targets), gradient(TripletHN(), scores, targets))


@pytest.mark.parametrize("relevance", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["hard", "sum"])
def test_ladder_equals_triplet_if_one_level_holds_all(relevance, sampling):
    scores, targets = case("pairs", relevance)
    expected = Triplet() if sampling == "sum" else TripletHN()
    assert_close(Ladder(sampling=sampling)(scores, targets), expected(scores, targets))
    assert gradient(Ladder(sampling=sampling), scores, targets).isfinite().all()


def test_ladder_threshold_belongs_to_level_above():
    scores = torch.tensor([[0.9, 0.25, 0.5]], dtype=torch.float64)
    relevance = torch.tensor([[1.0, 0.63, 0.5]], dtype=torch.float64)
    targets = Targets(query_ids=[0], candidate_ids=[0, 1, 2], relevance=relevance)
    ladder = Ladder(margins=(0.0, 0.125), betas=(1.0, 0.5))
    assert ladder.one_way(scores, targets).item() == 0.5 * (0.125 - 0.25 + 0.5)
    higher = Ladder(margins=(0.0, 0.125), thresholds=(math.nextafter(0.63, 1),), betas=(1.0, 0.5))
    assert higher.one_way(scores, targets).item() == 0


def test_ladder_paper_and_reference_differ_on_three_levels():
    scores = torch.tensor([[0.5, 0.75, 0.25, 0.0]], dtype=torch.float64)
    relevance = torch.tensor([[1.0, 0.9, 0.5, 0.1]], dtype=torch.float64)
    targets = Targets(query_ids=[0], candidate_ids=[0, 1, 2, 3], relevance=relevance)
    fields = {"margins": (0.0, 0.0, 0.5), "thresholds": (0.8, 0.4), "betas": (1.0, 1.0, 1.0)}
    assert Ladder(**fields).one_way(scores, targets) == (0.75 - 0.5) + 0 + (0.5 - 0.25 + 0.0)
    scores[0, 2] = 0.625
    assert Ladder(**fields).one_way(scores, targets) == 0.25 + 0 + 0
    reference = Ladder(**fields, semantics="reference").one_way(scores, targets)
    assert reference == 0.25 + (0.625 - 0.5) + (
        0.5 - 0.5 + 0.0
    )  # the pair itself has the lowest score of both levels


def test_ladder_reference_has_hinge_for_empty_level():
    scores, targets = (
        torch.tensor([[-0.5]], dtype=torch.float64),
        Targets.paired(1, relevance=torch.ones(1, 1)),
    )
    assert Ladder(margins=(0.25, 0.25))(scores, targets) == 0
    assert Ladder(margins=(0.25, 0.25), semantics="reference")(scores, targets) == 2 * 0.25 * (
        0.25 + 0.5
    )


def test_ladder_reference_uses_first_beta_of_one():
    scores, targets = case("pairs")
    fields = {"semantics": "reference"}
    assert_close(
        Ladder(betas=(9.0, 0.25), **fields)(scores, targets), Ladder(**fields)(scores, targets)
    )


def test_ladder_counts_each_query_once():
    scores, targets = case("captions")
    upper_levels = Ladder(
        margins=(-9.0, 0.5), betas=(1.0, 1.0)
    )  # the first level has no active hinge
    for query in range(4):
        row, targets_of_row = scores[query : query + 1], targets[query : query + 1]
        unmatched = replace(
            targets_of_row, query_ids=torch.tensor([99]), ignore=targets_of_row.positive
        )
        assert_close(
            upper_levels.one_way(row, targets_of_row).sum(),
            upper_levels.one_way(row, unmatched).sum(),
        )


def test_ladder_gradient_pushes_below_and_pulls_above():
    scores = torch.tensor([[0.9, 0.25, 0.3, 0.5, 0.4]], dtype=torch.float64, requires_grad=True)
    relevance = torch.tensor([[1.0, 0.7, 0.7, 0.1, 0.1]], dtype=torch.float64)
    targets = Targets(query_ids=[0], candidate_ids=range(5), relevance=relevance)
    fields = {"margins": (0.1, 0.01), "betas": (1.0, 0.25)}
    expected = {
        Ladder(**fields): [0, -0.25, 0, 0.25, 0],
        Ladder(**fields, pairs=2): [0, -0.25, -0.25, 0.5, 0],
        Ladder(**fields, pairs=3): [0, -0.5, -0.25, 0.5, 0.25],
        Ladder(**fields, sampling="sum"): [0, -0.5, -0.5, 0.5, 0.5],
    }
    for ladder, right in expected.items():
        (actual,) = torch.autograd.grad(ladder.one_way(scores, targets).sum(), scores)
        assert_close(actual, torch.tensor([right], dtype=torch.float64))


@pairwise(
    levels=LEVELS,
    fields=[{"sampling": "sum"}, {"pairs": 3}, {"semantics": "reference"}, {"cumulative": True}],
)
def test_ladder_gradient_matches_finite_differences(levels, fields):
    scores, targets = case("captions")
    ladder = Ladder(**LEVELS[levels], **fields)
    assert torch.autograd.gradcheck(
        lambda scores: ladder(scores, targets), scores.requires_grad_(), atol=1e-6
    )


@pytest.mark.parametrize(
    "fields",
    [{"sampling": "sum"}, {"pairs": 3}, {"semantics": "reference"}, {"cumulative": True}],
    ids=str,
)
def test_ladder_is_finite_for_ties_and_propagates_nan(fields):
    for scores in (
        torch.ones(4, 4),
        -torch.ones(4, 4),
        torch.zeros(4, 4),
        2 * torch.eye(4) - 1,
        1 - 2 * torch.eye(4),
    ):
        targets = Targets.paired(4, relevance=torch.rand(4, 4))
        assert Ladder(**fields)(scores, targets).isfinite()
        assert gradient(Ladder(**fields), scores, targets).isfinite().all()
    for index in ((0, 0), (0, 1)):
        scores = torch.rand(4, 4)
        scores[index] = math.nan
        assert Ladder(**fields)(scores, Targets.paired(4, relevance=torch.rand(4, 4))).isnan()


@pytest.mark.parametrize("fields", [{}, {"sampling": "sum"}, {"semantics": "reference"}], ids=str)
def test_ladder_accepts_factors_and_functions(fields):
    left, right = torch.rand(4, 2, dtype=torch.float64), torch.rand(6, 2, dtype=torch.float64)
    scores = torch.rand(4, 6, dtype=torch.float64)
    relevance = left @ right.T
    values = []
    for annotation in (
        relevance,
        Factors(left, right),
        lambda rows, columns: relevance[rows][:, columns],
    ):
        targets = Targets(
            query_ids=RELATIONS["captions"][0],
            candidate_ids=RELATIONS["captions"][1],
            relevance=annotation,
        )
        values.append(Ladder(**fields)(scores, targets))
        assert_close(values[-1], values[0])
        parts = [
            Ladder(**fields).one_way(scores[rows], targets[rows]).sum()
            for rows in (slice(0, 1), slice(1, 4))
        ]
        assert_close(sum(parts), Ladder(**fields).one_way(scores, targets).sum())


def test_ladder_transposes_relevance_for_text_to_image():
    scores, relevance = (
        torch.zeros(2, 3, dtype=torch.float64),
        torch.tensor([[0.0, 0.9, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64),
    )
    targets = Targets(query_ids=[0, 1], candidate_ids=[8, 8, 8], relevance=relevance)
    assert (
        Ladder(margins=(0, 0.25), betas=(1, 1))(scores, targets) == 0.25 + 0.25
    )  # image 0: text 1 over the others, text 1: image 0 over image 1


def test_hinge_sums_match_loops():
    below, above = torch.rand(5, 7, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64)
    below[torch.rand(5, 7) > 0.6] = -math.inf
    below[0] = -math.inf
    expected = (below[:, None, :] - above[:, :, None]).relu().sum(-1)
    assert_close(hinge_sums(below, above), expected)


def test_ladder_sum_sampling_needs_memory_of_score_matrix():
    queries, candidates = 40, 20_000  # a table of all triples would take 64 GB
    scores, relevance = torch.rand(2, queries, candidates)
    targets = Targets(
        query_ids=range(queries), candidate_ids=range(candidates), relevance=relevance
    )
    assert Ladder(sampling="sum").one_way(scores, targets).isfinite().all()


def test_ladder_without_relevance_names_supervision():
    with pytest.raises(
        MissingSupervision, match=mentions("Ladder", "relevance", "GradedSupervision")
    ):
        Ladder()(torch.rand(3, 3), Targets.paired(3))


@every_level
def test_ladder_repr_round_trips(levels):
    ladder = Ladder(**LEVELS[levels])
    assert parse(repr(ladder)) == ladder
