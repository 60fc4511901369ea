"""Laws of GOAL: every combination against gradients written out by hand, and what each is and is not the gradient of."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from visavis import Targets, parse
from visavis.errors import SpecError
from visavis.objectives import VLC, BinomialDeviance, Goal, TripletHN
from visavis.objectives.goal import prescribe

ALL = [goal for semantics in ("paper", "reference") for goal in Goal.all(semantics=semantics)]
every_goal = pytest.mark.parametrize("goal", ALL, ids=lambda goal: f"{goal.semantics}-{goal.triplet}-{goal.pair}")
every_pair_of_weights = pytest.mark.parametrize("goal", Goal.all(), ids=lambda goal: f"{goal.triplet}-{goal.pair}")

RELATIONS = {
    "pairs": Targets.paired(6),
    "two pairs": Targets.paired(2),
    "captions": Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3]),
    "duplicates": Targets(query_ids=[1, 1, 2, 3], candidate_ids=[1, 2, 2, 3, 1]),
    "overlapping": Targets.from_pairs([0, 0, 1, 1, 2], [0, 1, 1, 2, 0], 4, 5),
    "ignored": Targets.paired(5, ignore=torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) > 0.7),
}
every_relation = pytest.mark.parametrize("relation", RELATIONS)


def sides(height: int, width: int | None = None) -> list[torch.Tensor]:
    return [normalize(torch.randn(n, 4, dtype=torch.float64), dim=-1) for n in (height, width or height)]


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    return torch.autograd.grad(objective(scores, targets), scores)[0]


def close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-12} | tolerance))


# written out by hand


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def weights_by_hand(goal: Goal, s_p: float, s_n: float, positives: list[float], negatives: list[float], least: float) -> list[float]:
    """T, P+ and P- of a positive and its hardest negative, from the other positives of the batch and the other negatives of the query."""
    released = goal.semantics == "reference"
    triplet = {
        "con": 1.0 if released or goal.margin + s_n - s_p > 0 else 0.0,
        "nca": sigmoid(goal.tau * (s_n - s_p)),
        "cir": sigmoid(goal.tau * (s_n**2 - s_p * (2 - s_p) + (0.5 if released else 0.0))),
    }[goal.triplet]
    positives = [r for r in positives if r <= s_n + goal.epsilon]
    negatives = [r for r in negatives if r >= least - goal.epsilon]
    leads = [s_p - r for r in positives if not (released and r == s_p)]
    distances = [s_n - r for r in negatives if not (released and r == s_n)]
    m_p = average([math.exp(goal.alpha * (s_p - r)) for r in positives])
    m_n = average([math.exp(-goal.beta * (s_n - r)) for r in negatives])
    e_p, e_n = math.exp(goal.alpha * (s_p - goal.lam)), math.exp(-goal.beta * (s_n - goal.lam))
    pull, push = {
        "con": (1.0, 1.0),
        "lin": (1 - s_p, s_n),
        "sig": (1 / (1 + e_p), 1 / (1 + e_n)),
        "lin_ms": ((1 - average(leads)) * (1 - s_p), (1 + average(distances)) * s_n),
        "sig_ms": (1 / (m_p + e_p), 1 / (m_n + e_n)),
    }[goal.pair]
    return [triplet, pull, push]


def one_way_by_hand(goal: Goal, scores: list[list[float]], positive, negative) -> tuple[float, list[tuple[int, int, float]]]:
    """The monitor, and what is added to the gradient of which score."""
    pairs = [(i, j) for i, row in enumerate(scores) for j in range(len(row)) if positive[i][j]]
    monitor, changes = 0.0, []
    for i, j in pairs:
        rivals = [k for k in range(len(scores[i])) if negative[i][k]]
        if not rivals:
            continue
        hardest = max(rivals, key=lambda k: scores[i][k])
        triplet, pull, push = weights_by_hand(
            goal,
            scores[i][j],
            scores[i][hardest],
            [scores[a][b] for a, b in pairs if (a, b) != (i, j)],
            [scores[i][k] for k in rivals if k != hardest],
            min(scores[a][b] for a, b in pairs),
        )
        monitor += scores[i][hardest] - scores[i][j]
        changes += [(i, hardest, triplet * push), (i, j, -triplet * pull)]
    return monitor, changes


def by_hand(goal: Goal, images: torch.Tensor, texts: torch.Tensor, scores: torch.Tensor, targets: Targets):
    """The monitor and the gradients of both towers: each weighted score pulls its two embeddings along each other."""
    image_gradient, text_gradient = torch.zeros_like(images), torch.zeros_like(texts)
    facts = (scores, targets.positive, targets.negative)
    forth, changes = one_way_by_hand(goal, *(fact.tolist() for fact in facts))
    back, changed_back = one_way_by_hand(goal, *(fact.T.tolist() for fact in facts))
    for i, j, weight in changes + [(i, j, weight) for j, i, weight in changed_back]:
        image_gradient[i] += weight * texts[j]
        text_gradient[j] += weight * images[i]
    return forth + back, image_gradient, text_gradient


@every_goal
@every_relation
def test_gradients_of_both_towers_are_those_written_out_by_hand(goal, relation):
    targets = RELATIONS[relation]
    images, texts = (side.requires_grad_() for side in sides(*targets.shape))
    scores = images @ texts.T
    value = goal(scores, targets)
    found = torch.autograd.grad(value, (images, texts))
    monitor, *expected = by_hand(goal, images.detach(), texts.detach(), scores.detach(), targets)
    assert value.item() == pytest.approx(monitor, rel=1e-12, abs=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    assert any(theirs.any() for theirs in expected)


@every_goal
def test_other_parameters_by_hand(goal):
    targets = RELATIONS["captions"]
    images, texts = sides(*targets.shape)
    scores = images @ texts.T
    for fields in ({"alpha": 20, "beta": 40}, {"epsilon": 0}, {"epsilon": -0.3}, {"epsilon": 2}, {"lam": -0.2, "tau": 1, "margin": 0.4}):
        other = replace(goal, **fields)
        _, expected, _ = by_hand(other, images, texts, scores, targets)
        close(gradient(other, scores, targets) @ texts, expected, rtol=1e-9)


@every_goal
def test_equal_scores_by_hand(goal):
    """Other positives that score as the own one does are read, or not counted, as others are: the own one alone is left out."""
    scores = torch.tensor([[0.5, 0.25, 0.125], [0.375, 0.5, 0.25], [0.25, 0.125, 0.75]], dtype=torch.float64)
    scores = torch.cat([scores, scores[:, 1:2]], 1)
    targets = Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 3])
    for each, turned in ((scores, targets), (scores.T, targets.T)):
        monitor, changes = one_way_by_hand(goal, *(fact.tolist() for fact in (each, turned.positive, turned.negative)))
        expected = torch.zeros_like(each)
        for i, j, weight in changes:
            expected[i, j] += weight
        leaf = each.clone().requires_grad_()
        terms = goal.one_way(leaf, turned)
        assert terms.sum().item() == pytest.approx(monitor)
        found = torch.autograd.grad(terms.sum(), leaf)[0]
        close(found.sum(-1), expected.sum(-1))  # ties among the hardest: whichever of them
        close(found[turned.positive], expected[turned.positive])


# what it is the gradient of


def hard_nt_xent(scores: torch.Tensor, targets: Targets, tau: float) -> torch.Tensor:
    def one_way(scores, targets):
        positive = scores[targets.positive]
        hardest = scores.masked_fill(~targets.negative, -math.inf).amax(-1)[targets.positive.nonzero()[:, 0]]
        return -(tau * torch.stack([positive, hardest], -1)).log_softmax(-1)[:, 0].sum()

    return one_way(scores, targets) + one_way(scores.T, targets.T)


@every_relation
def test_con_con_is_the_gradient_of_the_hardest_triplet(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    for margin in (0.0, 0.2, 0.5):
        goal = Goal(triplet="con", pair="con", margin=margin)
        close(gradient(goal, left @ right.T, targets), gradient(TripletHN(margin=margin), left @ right.T, targets))


def test_con_con_as_released_pulls_where_the_triplet_rests():
    scores, targets = 2 * torch.eye(4, dtype=torch.float64) - 1, Targets.paired(4)
    assert not gradient(TripletHN(), scores, targets).any()
    assert not gradient(Goal(triplet="con", pair="con"), scores, targets).any()
    assert (gradient(Goal(triplet="con", pair="con", semantics="reference"), scores, targets).diagonal() == -2).all()


@pytest.mark.parametrize("relation", ["pairs", "captions", "duplicates"])
def test_nca_con_times_tau_is_the_gradient_of_nt_xent_with_the_hardest_negative(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    scores = left @ right.T
    for tau in (1.0, 10.0, 50.0):
        expected = gradient(partial(hard_nt_xent, tau=tau), scores, targets)
        close(tau * gradient(Goal(triplet="nca", pair="con", tau=tau), scores, targets), expected)
    two = scores[:2, :2]
    close(7 * gradient(Goal(triplet="nca", pair="con", tau=7.0), two, Targets.paired(2)), gradient(VLC(gamma=7.0), two, Targets.paired(2)))


@every_relation
def test_con_sig_is_the_gradient_of_binomial_deviance_where_every_hinge_is_open(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    scores = left @ right.T
    expected = gradient(BinomialDeviance(), scores, targets)
    close(gradient(Goal(triplet="con", pair="sig", semantics="reference"), scores, targets), expected)
    close(gradient(Goal(triplet="con", pair="sig", margin=3.0), scores, targets), expected)


def test_con_sig_rests_where_the_hinge_is_closed_and_binomial_deviance_does_not():
    scores, targets = 2 * torch.eye(3, dtype=torch.float64) - 1, Targets.paired(3)
    assert not gradient(Goal(triplet="con", pair="sig"), scores, targets).any()
    assert gradient(BinomialDeviance(), scores, targets).any()


@pytest.mark.parametrize(("semantics", "shift"), [("paper", 0.0), ("reference", 0.5)])
@pytest.mark.parametrize("tau", [1.0, 10.0])
def test_cir_lin_has_a_potential(semantics, shift, tau):
    scores = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    leaf = scores.clone().requires_grad_()
    s_p, s_n = leaf.T
    potential = torch.logaddexp(tau * (s_n**2 - s_p * (2 - s_p) + shift), torch.zeros(100, dtype=torch.float64)).sum() / (2 * tau)
    close(field(Goal(triplet="cir", pair="lin", tau=tau, semantics=semantics), scores), torch.autograd.grad(potential, leaf)[0])


def test_con_lin_has_a_potential_without_its_hinge():
    scores = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    close(field(Goal(triplet="con", pair="lin", semantics="reference"), scores), torch.stack([scores[:, 0] - 1, scores[:, 1]], -1))


def field(goal: Goal, points: torch.Tensor) -> torch.Tensor:
    """The prescribed gradient at many points (s_p, s_n), each a query of its own: ``[N, 2]``."""
    leaf = points.clone().requires_grad_()
    targets = Targets(query_ids=[0] * len(points), candidate_ids=[0, 1])
    return torch.autograd.grad(goal.one_way(leaf, targets).sum(), leaf)[0]


def curl(goal: Goal, points: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    across, along = torch.tensor([[0.0, step], [step, 0.0]], dtype=torch.float64)
    pulled = (field(goal, points + across) - field(goal, points - across))[:, 0]
    pushed = (field(goal, points + along) - field(goal, points - along))[:, 1]
    return (pulled - pushed) / (2 * step)


INTEGRABLE = {("con", "con"), ("con", "lin"), ("con", "sig"), ("nca", "con"), ("cir", "lin")}


@pytest.mark.parametrize("goal", [goal for goal in ALL if not goal.pair.endswith("_ms")], ids=str)
def test_four_combinations_belong_to_no_loss_at_all(goal):
    goal = replace(goal, margin=3.0, tau=3.0)  # every hinge is open
    largest = curl(goal, torch.rand(50, 2, dtype=torch.float64) * 1.8 - 0.9).abs().max()
    if (goal.triplet, goal.pair) in INTEGRABLE:
        assert largest < 1e-8
    else:
        assert largest > 0.05


@pytest.mark.parametrize("pair", ["con", "lin", "sig"])
def test_around_the_corner_of_its_hinge_only_con_con_comes_back(pair):
    corners = torch.tensor([[0.1, -0.5], [0.9, -0.5], [0.9, 0.5], [0.1, 0.5], [0.1, -0.5]], dtype=torch.float64)
    fraction = (torch.arange(20000, dtype=torch.float64)[:, None] + 0.5) / 20000
    circulation = sum(
        ((end - start) * field(Goal(triplet="con", pair=pair), start + fraction * (end - start)).mean(0)).sum()
        for start, end in pairwise(corners)
    )
    assert abs(circulation) < 1e-3 if pair == "con" else abs(circulation) > 0.05


# laws of all fifteen


@every_goal
def test_the_value_is_the_monitor_and_the_scale_of_a_loss_is_kept(goal):
    left, right = sides(6)
    scores = left @ right.T
    hardest = scores - 9 * torch.eye(6)
    expected = hardest.amax(0).sum() + hardest.amax(1).sum() - 2 * scores.trace()
    close(goal(scores, Targets.paired(6)), expected)
    leaf = scores.clone().requires_grad_()
    (scaled,) = torch.autograd.grad(1024 * goal(leaf, Targets.paired(6)), leaf)
    assert torch.equal(scaled, 1024 * gradient(goal, scores, Targets.paired(6)))


@every_goal
def test_turned_and_shuffled_batches(goal):
    targets = RELATIONS["duplicates"]
    left, right = sides(*targets.shape)
    scores, rows, columns = left @ right.T, torch.randperm(4), torch.randperm(5)
    expected = gradient(goal, scores, targets)
    close(gradient(goal, scores.T, targets.T).T, expected)
    close(gradient(goal, scores[rows][:, columns], targets[rows].T[columns].T), expected[rows][:, columns])


@every_goal
def test_the_positives_of_the_batch_have_no_order(goal):
    left, right = sides(6)
    scores, targets = left @ right.T, Targets.paired(6)
    shuffled = replace(targets, positive_scores=scores.diagonal()[torch.randperm(6)])
    close(gradient(goal, scores, shuffled), gradient(goal, scores, targets))
    rounded = replace(shuffled, positive_scores=shuffled.positive_scores * (1 + 2**-51))  # as another order of additions leaves them
    close(gradient(goal, scores, rounded), gradient(goal, scores, targets))


@pytest.mark.parametrize("goal", [goal for goal in ALL if goal.pair.endswith("_ms")], ids=str)
def test_rows_may_come_in_blocks_once_the_positives_are_known(goal):
    left, right = sides(6)
    scores, targets = goal.prepare(left @ right.T, Targets.paired(6))
    leaf = scores.clone().requires_grad_()
    whole = torch.autograd.grad(goal.one_way(leaf, targets).sum(), leaf)[0]
    for rows in (slice(0, 2), slice(2, 6)):
        leaf = scores[rows].clone().requires_grad_()
        close(torch.autograd.grad(goal.one_way(leaf, targets[rows]).sum(), leaf)[0], whole[rows])


EDGES = {
    "ties": torch.full((4, 4), 0.25),
    "perfect": 2 * torch.eye(4) - 1,
    "antipodal": 1 - 2 * torch.eye(4),
    "ones": torch.ones(4, 4),
    "minus ones": -torch.ones(4, 4),
    "one pair": torch.ones(1, 1),
    "one query": torch.tensor([[0.5, -1.0, 1.0]]),
    "nothing": torch.zeros(0, 3),
}


@every_goal
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_edges_are_finite(goal, dtype):
    for edge in EDGES.values():
        scores = edge.to(dtype)
        by_ids = Targets(query_ids=range(len(scores)), candidate_ids=range(scores.shape[1]))
        for targets in (by_ids, Targets.from_pairs([], [], *scores.shape)):
            assert goal(scores, targets).isfinite()
            assert gradient(goal, scores, targets).isfinite().all()


@every_goal
def test_no_table_of_pairs_by_positives_is_made(goal, largest):
    targets = Targets(query_ids=range(8), candidate_ids=torch.arange(8).repeat_interleave(5))
    left, right = sides(8, 40)
    with largest:
        gradient(goal, left @ right.T, targets)
    assert largest.numel == 8 * 40


@every_goal
def test_a_pair_without_a_negative_counts_and_rests(goal):
    targets = Targets.paired(3, ignore=torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]]))
    leaf = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    terms = goal.one_way(leaf, targets)
    assert len(terms) == 3
    assert terms[0] == 0
    assert terms[1] != 0
    assert not torch.autograd.grad(terms.sum(), leaf)[0][0].any()


# weights


def pair_weights(pair: str, scores: list[list[float]], semantics: str = "reference", **fields) -> list[tuple[float, float]]:
    """P+ and P- of each query, read from the prescribed gradient where T is 1."""
    leaf = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    goal = Goal(triplet="con", pair=pair, margin=3.0, semantics=semantics, **fields)
    (found,) = torch.autograd.grad(goal.one_way(leaf, Targets.paired(len(scores))).sum(), leaf)
    return [(-row[i].item(), (row.sum() - row[i]).item()) for i, row in enumerate(found)]


def test_the_hinge_is_strict_and_its_corner_closed():
    scores = torch.tensor([[0.75, 0.5], [0.5, 0.75]])
    for margin, count in ((0.25, 0), (0.250001, 2)):
        assert gradient(Goal(triplet="con", pair="con", margin=margin), scores, Targets.paired(2)).diagonal().abs().sum() == 2 * count


def test_what_stands_at_the_edge_of_a_set_is_in_it():
    scores = [[0.5, 0.25, -0.25], [0.0, 0.75, 0.0], [0.0, 0.0, 0.25]]
    near = {"epsilon": 0.5, "semantics": "paper"}  # 0.75 <= 0.25 + 0.5 and -0.25 >= 0.25 - 0.5
    lead = ((0.5 - 0.75) + (0.5 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - lead) * 0.5, (1 + 0.5) * 0.25))
    scores[1][1], scores[0][2] = 0.75 + 2**-20, -0.25 - 2**-20
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - 0.25) * 0.5, 0.25))
    scores[0][0], scores[1][1] = 0.75, 0.5  # the pair itself stands at the edge, and is left out
    lead = ((0.75 - 0.5) + (0.75 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - lead) * 0.25, 0.25))


def test_the_released_code_does_not_count_differences_of_zero():
    scores = [[0.5, 0.5, 0.5, 0.25], [0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.5]]
    assert pair_weights("lin_ms", scores, semantics="paper")[0] == pytest.approx(((1 - 0.25 / 3) * 0.5, (1 + 0.25 / 2) * 0.5))
    assert pair_weights("lin_ms", scores)[0] == pytest.approx(((1 - 0.25) * 0.5, (1 + 0.25) * 0.5))


def test_sig_ms_by_hand():
    scores = [[0.5, 0.25, 0.125], [0.0, 0.25, 0.0], [0.0, 0.0, 0.75]]
    m_p, m_n = math.exp(2 * (0.5 - 0.25)), math.exp(-10 * (0.25 - 0.125))  # 0.75 is above 0.25 + 0.1, 0.125 not below 0.25 - 0.15
    expected = (1 / (m_p + math.exp(2 * (0.5 - 0.5))), 1 / (m_n + math.exp(-10 * (0.25 - 0.5))))
    assert pair_weights("sig_ms", scores, epsilon=0.15)[0] == pytest.approx(expected)


def test_under_hard_mining_the_relative_term_of_negatives_is_at_most_one():
    left, right = sides(40)
    scores = left @ right.T
    hardest = (scores - 9 * torch.eye(40)).amax(-1)
    pushed = torch.tensor([push for _, push in pair_weights("sig_ms", scores.tolist())], dtype=torch.float64)
    m_n = 1 / pushed - (-10 * (hardest - 0.5)).exp()
    assert (m_n <= 1 + 1e-9).all()
    assert (m_n > 0.01).sum() > 10


def test_a_negative_below_zero_is_pulled_by_lin():
    assert pair_weights("lin", [[0.5, -0.25], [-0.5, 0.5]]) == [(0.5, -0.25), (0.5, -0.5)]


# as values


def test_all_combinations_are_listed_once():
    assert len(set(Goal.all())) == 15
    assert Goal() in Goal.all()
    assert {goal.tau for goal in Goal.all(tau=3)} == {3.0}
    assert all(parse(repr(goal)) == goal for goal in ALL)


def test_only_relative_weights_need_the_positives_of_the_batch():
    assert {goal.pair for goal in ALL if goal.needs_positive_scores} == {"lin_ms", "sig_ms"}
    left, right = sides(3)
    for goal in ALL:
        prepared = goal.prepare(left @ right.T, Targets.paired(3))[1]
        assert (prepared.positive_scores is not None) == goal.needs_positive_scores


@pytest.mark.parametrize("field", ["tau", "alpha", "beta"])
def test_slopes_are_above_zero(field):
    with pytest.raises(SpecError, match=rf"^Goal: {field} is 0\.0, expected a number above 0\.$"):
        Goal(**{field: 0})


def test_a_prescribed_gradient_leaves_the_value_alone():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    value = prescribe(x / 3, 1e9 * x)
    assert torch.equal(value, x.detach() / 3)
    assert torch.autograd.grad(value.sum(), x)[0].tolist() == [1e9] * 3
