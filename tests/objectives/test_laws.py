"""Laws of objectives. What is parametrised over the CATALOG holds for objectives that are still to be written, too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import Targets
from visavis.targets import FACTS

from .cases import RELATIONS, close, cosines, every_objective, every_relation, facts, gradient, targets_of

# Exceptions of the laws below, by name; an objective that is not listed keeps the law.
NOT_OF_DIFFERENCES = {"SSP", "AOQ", "Goal", "BinomialDeviance", "MultiSimilarity", "Circle", "Sigmoid"}  # a constant on a row changes them
OWN_POSITIVES_COMPETE = {"InfoNCE", "SmoothAP"}  # as published: soft targets, average precision
TERMS_NOT_OF_PAIRS = {"SmoothAP", "MultiSimilarity", "Circle", "Sigmoid"}
BEYOND_NEGATIVES = {"AOQ", "InfoNCE"}  # offline negatives, competing positives: a term where the batch has no negative


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


@every_objective
@pytest.mark.parametrize(
    "fact", [fact for fact in FACTS if fact.shape != "candidate" and fact.name != "ignore"], ids=lambda fact: fact.name
)
def test_it_reads_the_facts_that_it_says_and_no_others(kind, fact):
    scores, sides = cosines(8), dict.fromkeys((fact.name, fact.turned))  # in this order, so that the draws are the same each time
    needed = {name: value for name, value in facts(8, 8).items() if name not in {*sides, "weight", "query_margin", "candidate_margin"}}
    values = [
        kind()(scores, Targets(query_ids=range(8), candidate_ids=range(8), **needed, **{side: facts(8, 8)[side] for side in sides}))
        for _ in range(10)
    ]
    assert (len({value.item() for value in values}) > 1) == (fact.name in kind.reads)
