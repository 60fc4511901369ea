"""Laws of objectives. What is parametrised over the CATALOG holds for objectives that are still to be written, too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

from visavis import PairLoss, Targets
from visavis.errors import MissingSupervision, ShapeError
from visavis.objectives import CATALOG, RSP, SSP, VLC, InfoNCE, MaxMargin, NTXent, Triplet, TripletHN, Unified

every_objective = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
every_with_margins = pytest.mark.parametrize("kind", [Triplet, TripletHN, Unified, MaxMargin, SSP, RSP], ids=lambda kind: kind.__name__)

# Exceptions of the laws below, by name; an objective that is not listed keeps the law.
NOT_OF_DIFFERENCES = {"SSP", "AOQ", "Goal", "BinomialDeviance", "MultiSimilarity", "Circle"}  # a constant on a whole row changes them
OWN_POSITIVES_COMPETE = {"InfoNCE", "SmoothAP"}  # as published: soft targets, average precision
TERMS_NOT_OF_PAIRS = {"SmoothAP", "MultiSimilarity", "Circle"}
BEYOND_NEGATIVES = {"AOQ", "InfoNCE"}  # offline negatives, competing positives: a term where the batch has no negative


def cosines(height: int, width: int | None = None) -> torch.Tensor:
    rows, columns = (normalize(torch.randn(n, 5, dtype=torch.float64), dim=-1) for n in (height, width or height))
    return rows @ columns.T


def facts(height: int, width: int, **changes) -> dict[str, torch.Tensor]:
    """Everything that any objective may need."""
    made = {name: torch.rand(height, width, dtype=torch.float64) for name in ("relevance", "weight", "pair_margin")}
    made |= {name: torch.rand(n, dtype=torch.float64) for name, n in (("query_margin", height), ("candidate_margin", width))}
    made |= {f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64) for name, n in (("query", height), ("candidate", width))}
    return made | changes


def targets_of(query_ids, candidate_ids, **changes) -> Targets:
    return Targets(query_ids=query_ids, candidate_ids=candidate_ids, **facts(len(query_ids), len(candidate_ids), **changes))


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(objective(scores, targets), scores)
    return found


def close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-11} | tolerance))


# identities of the family

widths = pytest.mark.parametrize("gamma", [0.5, 10.0, 50.0, 1000.0])


@widths
def test_unified_without_margin_is_vlc_is_the_loss_of_clip(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    clip = (cross_entropy(gamma * scores, labels) + cross_entropy(gamma * scores.T, labels)) / 2
    close(VLC(gamma=gamma)(scores, pairs), 2 * 8 * clip, rtol=1e-10)
    close(gamma * Unified(margin=0, gamma=gamma)(scores, pairs), VLC(gamma=gamma)(scores, pairs))
    close(NTXent(tau=1 / gamma)(scores, pairs), VLC(gamma=gamma, reduction="half_mean")(scores, pairs))
    close(gamma * gradient(Unified(margin=0, gamma=gamma), scores, pairs), gradient(VLC(gamma=gamma), scores, pairs))


@widths
def test_info_nce_of_pairs_is_the_loss_of_clip(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    forth, back = cross_entropy(gamma * scores, labels), cross_entropy(gamma * scores.T, labels)
    close(InfoNCE(tau=1 / gamma)(scores, pairs), (forth + back) / 2, rtol=1e-10)
    close(InfoNCE(tau=1 / gamma, reduction="mean")(scores, pairs), forth + back, rtol=1e-10)  # MMT
    close(gradient(InfoNCE(tau=1 / gamma), scores, pairs), gradient(NTXent(tau=1 / gamma), scores, pairs), rtol=1e-9)


def test_info_nce_shares_its_target_among_equal_ids():
    ids = torch.tensor([4, 7, 4, 9, 7, 4])
    scores, targets = cosines(6), Targets(query_ids=ids, candidate_ids=ids)
    shared = (ids[:, None] == ids).double()
    shared /= shared.sum(1, keepdim=True)
    forth, back = cross_entropy(scores / 0.1, shared), cross_entropy(scores.T / 0.1, shared)
    close(InfoNCE(tau=0.1)(scores, targets), (forth + back) / 2)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_unified_tends_to_the_hardest_negative_from_above(size):
    scores, pairs = cosines(size), Targets.paired(size)
    hardest = TripletHN(margin=0.2)(scores, pairs)
    for gamma in (1.0, 10.0, 60.0, 1e3, 1e6):
        above = Unified(margin=0.2, gamma=gamma)(scores, pairs) - hardest
        assert -1e-12 <= above <= 2 * size / gamma * math.log(size) + 1e-12
    close(gradient(Unified(gamma=1e6), scores, pairs), gradient(TripletHN(), scores, pairs), atol=1e-6)
    collapsed = torch.full((size, size), 0.3, dtype=torch.float64)  # the bound is reached where everything ties
    above = Unified(margin=0, gamma=5.0)(collapsed, pairs) - TripletHN(margin=0)(collapsed, pairs)
    assert above.item() == pytest.approx(2 * size / 5 * math.log(size))


def test_all_negatives_weigh_at_least_as_much_as_the_hardest():
    for size in (2, 3, 9):
        scores, pairs = cosines(size), Targets.paired(size)
        assert Triplet()(scores, pairs) >= TripletHN()(scores, pairs)
    scores, one_negative = cosines(2), Targets.paired(2)
    close(Triplet()(scores, one_negative), TripletHN()(scores, one_negative))
    close(gradient(Triplet(), scores, one_negative), gradient(TripletHN(), scores, one_negative))


def test_a_weight_of_one_changes_nothing():
    scores, ids = cosines(6), {"query_ids": torch.arange(6), "candidate_ids": torch.arange(6)}
    ones = torch.ones(6, 6, dtype=torch.float64)
    close(Unified()(scores, Targets(**ids, weight=ones)), Unified()(scores, Targets(**ids)))
    close(gradient(Unified(), scores, Targets(**ids, weight=ones)), gradient(Unified(), scores, Targets(**ids)))


def test_weights_have_a_gradient_of_their_own():
    scores, weight = cosines(4), torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda weight: Unified(gamma=5)(scores, Targets.paired(4, weight=weight)), weight)


@every_with_margins
def test_given_margins_replace_the_objectives_own(kind):
    scores, margins = cosines(6), torch.full((6,), 0.3, dtype=torch.float64)
    given_margins = Targets.paired(6, query_margin=margins, candidate_margin=margins)
    close(kind(margin=0.9)(scores, given_margins), kind(margin=0.3)(scores, Targets.paired(6)))


@every_with_margins
@pytest.mark.parametrize("side", ["query_margin", "candidate_margin"])
def test_margins_of_one_side_only_are_no_reason_to_fall_back(kind, side):
    with pytest.raises(
        MissingSupervision, match=rf"^{kind.__name__} got margins for one side only: give query_margin and candidate_margin"
    ):
        kind()(cosines(3), Targets.paired(3, **{side: torch.rand(3)}))


# laws of every objective

RELATIONS = {
    "pairs": (range(6), range(6)),
    "captions": ([3, 1, 2], [1, 1, 2, 2, 3, 3, 3]),
    "duplicates": ([1, 1, 2, 3], [1, 2, 2, 3, 1]),
}
every_relation = pytest.mark.parametrize("relation", RELATIONS)


@every_objective
@every_relation
def test_turning_scores_and_targets_changes_nothing(kind, relation):
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape)
    close(kind()(scores, targets), kind()(scores.T, targets.T))
    close(gradient(kind(), scores, targets), gradient(kind(), scores.T, targets.T).T)


@every_objective
@every_relation
def test_another_order_of_items_is_another_order_of_gradients(kind, relation):
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape)
    rows, columns = torch.randperm(targets.shape[0]), torch.randperm(targets.shape[1])
    shuffled = targets[rows].T[columns].T
    close(kind()(scores[rows][:, columns], shuffled), kind()(scores, targets))
    close(gradient(kind(), scores[rows][:, columns], shuffled), gradient(kind(), scores, targets)[rows][:, columns])


@every_objective
def test_ids_say_only_who_belongs_together(kind):
    given_facts, scores = facts(4, 4), cosines(4)
    values = [kind()(scores, Targets(query_ids=i, candidate_ids=i, **given_facts)) for i in ([0, 1, 2, 3], [9, -5, 2**60, 7])]
    close(*values)
    related = Targets.from_pairs([3, 1, 2, 0], [3, 1, 2, 0], 4, 4, **given_facts)
    close(kind()(scores, related), values[0])


@every_objective
@every_relation
def test_a_constant_on_a_row_changes_nothing_for_its_query(kind, relation):
    if kind.__name__ in NOT_OF_DIFFERENCES:
        pytest.skip(f"{kind.__name__} reads scores, not only their differences")
    targets = targets_of(*RELATIONS[relation], weight=None)
    scores = cosines(*targets.shape)
    close(kind().one_way(scores + torch.rand(len(scores), 1), targets), kind().one_way(scores, targets), rtol=1e-9)


@every_objective
def test_other_positives_of_a_query_are_never_its_negatives(kind):
    if kind.__name__ in OWN_POSITIVES_COMPETE | TERMS_NOT_OF_PAIRS:
        pytest.skip(f"{kind.__name__} lets positives compete, as published, or has no term for each pair")
    targets = targets_of([1, 2], [1, 1, 2, 1, 2])
    scores = cosines(2, 5).requires_grad_()
    terms = kind().one_way(scores, targets)
    query, candidate = targets.positive.nonzero(as_tuple=True)
    assert len(terms) == len(query)
    for term, i, p in zip(terms, query, candidate, strict=True):
        (found,) = torch.autograd.grad(term, scores, retain_graph=True)
        others = targets.positive[i].clone()
        others[p] = False
        assert not found[i, others].any()
        assert not found[torch.arange(2) != i].any()


@every_objective
def test_ignored_pairs_get_no_gradient_and_have_no_say(kind):
    ignore = torch.rand(4, 4) > 0.6
    targets, scores = targets_of(range(4), range(4), ignore=ignore), cosines(4)
    assert not gradient(kind(), scores, targets)[ignore].any()
    close(kind()(scores + 100 * ignore, targets), kind()(scores, targets))


@every_objective
@pytest.mark.parametrize("reduction", ["sum", "mean", "half_mean"])
def test_reductions_by_hand(kind, reduction):
    targets = targets_of([1, 2, 2], [1, 2, 1, 1, 2])
    scores = cosines(3, 5)
    prepared = kind().prepare(scores, targets)[1]
    forth, back = kind().one_way(scores, prepared), kind().one_way(scores.T, prepared.T)
    expected = {"sum": forth.sum() + back.sum(), "mean": forth.mean() + back.mean(), "half_mean": (forth.mean() + back.mean()) / 2}
    close(kind(reduction=reduction)(scores, targets), expected[reduction])


@every_objective
def test_a_query_without_negatives_adds_nothing_and_counts(kind):
    if kind.__name__ in BEYOND_NEGATIVES:
        pytest.skip(f"{kind.__name__} has negatives beyond the batch")
    scores, targets = cosines(1, 3), targets_of([1], [1, 1, 1])
    assert not kind().one_way(scores, targets).any()
    assert not gradient(kind(), scores, targets).any()
    mixed = targets_of([1, 2], [1, 2], ignore=torch.tensor([[False, True], [False, False]]))
    terms = kind().one_way(cosines(2), mixed)
    assert len(terms) == 2
    assert terms[0] == 0


@every_objective
def test_scaling_the_loss_scales_the_gradient(kind):
    scores, targets = cosines(5).requires_grad_(), targets_of(range(5), range(5))
    (scaled,) = torch.autograd.grad(1024 * kind()(scores, targets), scores)
    close(scaled, 1024 * gradient(kind(), scores, targets))


@every_objective
@every_relation
def test_gradients_are_those_of_the_value(kind, relation):
    if not kind.integrable:
        pytest.skip(f"{kind.__name__} prescribes a gradient with no loss behind it")
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: kind()(scores, targets), scores, atol=1e-6)


@every_objective
def test_rows_need_not_lie_side_by_side(kind):
    scores, targets = cosines(12)[::2, 1::2], targets_of(range(6), range(6))
    assert not scores.is_contiguous()
    close(kind()(scores, targets), kind()(scores.contiguous(), targets))
    close(gradient(kind(), scores, targets), gradient(kind(), scores.contiguous(), targets))


@every_objective
@given(data=st.data())
def test_any_ids_give_a_finite_value_and_gradient(kind, data):
    sides = [data.draw(st.lists(st.integers(0, 3), max_size=5)) for _ in range(2)]
    targets = targets_of(*sides)
    scores = cosines(6)[: targets.shape[0], : targets.shape[1]]
    assert kind()(scores, targets).isfinite()
    assert gradient(kind(), scores, targets).isfinite().all()


# edges

EDGES = {
    "ties": torch.full((4, 4), 0.25),
    "zeros": torch.zeros(4, 4),
    "perfect": 2 * torch.eye(4) - 1,
    "antipodal": 1 - 2 * torch.eye(4),
    "ones": torch.ones(4, 4),
    "minus ones": -torch.ones(4, 4),
    "one pair": torch.ones(1, 1),
    "one query": torch.tensor([[0.5, -1.0, 1.0]]),
}


@every_objective
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_edges_are_finite_at_every_sharpness_and_precision(kind, edge, dtype):
    scores = EDGES[edge].to(dtype)
    targets = targets_of(*(range(n) for n in scores.shape), weight=None)
    sharp = {"gamma": 1e3, "tau": 1e-3}
    for fields in ({}, {name: value for name, value in sharp.items() if name in kind.__dataclass_fields__}):
        assert kind(**fields)(scores, targets).isfinite()
        assert gradient(kind(**fields), scores, targets).isfinite().all()


@every_objective
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_batch_is_zero(kind, shape):
    scores = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    value = kind()(scores, targets_of(*(range(n) for n in shape)))
    assert value == 0
    value.backward()
    assert scores.grad.shape == shape


@every_objective
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_promoted_once(kind, dtype):
    scores = cosines(8).to(dtype)
    targets = Targets(query_ids=range(8), candidate_ids=range(8), **{name: fact.float() for name, fact in facts(8, 8).items()})
    value = kind()(scores, targets)
    assert value.dtype == torch.float32
    assert torch.equal(value, kind()(scores.float(), targets))
    assert gradient(kind(), scores, targets).dtype == dtype


@every_objective
def test_what_is_no_number_is_not_hidden(kind):
    for place in ((0, 0), (0, 1)):
        scores = cosines(3)
        scores[place] = math.nan
        assert kind()(scores, targets_of(range(3), range(3))).isnan()


@every_objective
def test_scores_and_targets_that_do_not_fit_are_refused(kind):
    objective = kind()
    with pytest.raises(ShapeError, match=r"^scores have shape \[3, 4\], but the targets speak of 3 queries and 3 candidates\.$"):
        objective(torch.rand(3, 4), Targets.paired(3))
    with pytest.raises(ShapeError, match=r"^the targets are a Tensor, expected a Targets"):
        objective(torch.rand(3, 3), torch.arange(3))
    for scores in (torch.eye(3).long(), torch.eye(3).bool(), torch.eye(3).numpy()):
        with pytest.raises(ShapeError, match=r"^the scores are of type .*, expected a tensor of floating-point numbers"):
            objective(scores, Targets.paired(3))


@every_objective
def test_collapsed_embeddings_have_no_gradient_along_the_sphere(kind):
    images = torch.ones(4, 5, dtype=torch.float64).requires_grad_()
    value = PairLoss(kind())(images, images.detach(), targets=targets_of(range(4), range(4), weight=None))
    (found,) = torch.autograd.grad(value, images)
    close(found, torch.zeros_like(found), atol=1e-9)
