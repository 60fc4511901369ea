"""Properties of all objectives. Tests over the CATALOG also apply to objectives that are added
later.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visavis import Targets
from visavis.losses.targets import ANNOTATIONS
from visavis.objectives import CATALOG

from ..sampling import pairwise
from .cases import (
    RELATIONS,
    annotations,
    assert_close,
    cosines,
    every_objective,
    gradient,
    targets_of,
)

# Objectives without a property, by name. All others have it.
NOT_OF_DIFFERENCES = {
    "SSP",
    "AOQ",
    "Goal",
    "BinomialDeviance",
    "MultiSimilarity",
    "Circle",
    "Sigmoid",
    "RINCE",
}  # changed by a constant on a row
OWN_POSITIVES_COMPETE = {"InfoNCE", "SmoothAP"}  # as published: soft targets, average precision
TERMS_NOT_OF_PAIRS = {"SmoothAP", "MultiSimilarity", "Circle", "Sigmoid", "Distillation"}
BEYOND_NEGATIVES = {
    "AOQ",
    "InfoNCE",
    "Distillation",
}  # offline negatives, competing positives, a teacher: a term where the batch has no negative


INDEPENDENT_ANNOTATIONS = [
    annotation
    for annotation in ANNOTATIONS
    if annotation.shape != "candidate" and annotation.name != "ignore"
]


@pairwise(kind=CATALOG, relation=RELATIONS)
def test_objectives_are_invariant_to_transposition(kind, relation):
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape)
    assert_close(kind()(scores, targets), kind()(scores.T, targets.T))
    assert_close(gradient(kind(), scores, targets), gradient(kind(), scores.T, targets.T).T)


@pairwise(kind=CATALOG, relation=RELATIONS)
def test_objectives_are_equivariant_to_item_order(kind, relation):
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape)
    rows, columns = torch.randperm(targets.shape[0]), torch.randperm(targets.shape[1])
    shuffled = targets[rows].T[columns].T
    assert_close(kind()(scores[rows][:, columns], shuffled), kind()(scores, targets))
    assert_close(
        gradient(kind(), scores[rows][:, columns], shuffled),
        gradient(kind(), scores, targets)[rows][:, columns],
    )


@every_objective
def test_objectives_depend_on_id_equality_only(kind):
    given_annotations, scores = annotations(4, 4), cosines(4)
    values = [
        kind()(scores, Targets(query_ids=i, candidate_ids=i, **given_annotations))
        for i in ([0, 1, 2, 3], [9, -5, 2**60, 7])
    ]
    assert_close(*values)
    related = Targets.from_pairs([3, 1, 2, 0], [3, 1, 2, 0], 4, 4, **given_annotations)
    assert_close(kind()(scores, related), values[0])


@pairwise(kind=CATALOG, relation=RELATIONS)
def test_objectives_are_invariant_to_row_constant(kind, relation):
    if kind.__name__ in NOT_OF_DIFFERENCES:
        return
    targets = targets_of(*RELATIONS[relation], weight=None)
    scores = cosines(*targets.shape)
    assert_close(
        kind().one_way(scores + torch.rand(len(scores), 1), targets),
        kind().one_way(scores, targets),
        rtol=1e-9,
    )


@every_objective
def test_objectives_do_not_use_other_positives_as_negatives(kind):
    if kind.__name__ in OWN_POSITIVES_COMPETE | TERMS_NOT_OF_PAIRS:
        return
    targets = targets_of([1, 2], [1, 1, 2, 1, 2])
    scores = cosines(2, 5).requires_grad_()
    terms = kind().one_way(scores, targets)
    query, candidate = targets.positive.nonzero(as_tuple=True)
    assert len(terms) == len(query)
    for term, i, p in zip(terms, query, candidate, strict=True):
        (actual,) = torch.autograd.grad(term, scores, retain_graph=True)
        others = targets.positive[i].clone()
        others[p] = False
        assert not actual[i, others].any()
        assert not actual[torch.arange(2) != i].any()


@every_objective
def test_objectives_ignore_ignored_pairs(kind):
    ignore = torch.rand(4, 4) > 0.6
    targets, scores = targets_of(range(4), range(4), ignore=ignore), cosines(4)
    assert not gradient(kind(), scores, targets)[ignore].any()
    assert_close(kind()(scores + 100 * ignore, targets), kind()(scores, targets))


@pairwise(kind=CATALOG, reduction=["sum", "mean", "half_mean"])
def test_objectives_reduce_as_documented(kind, reduction):
    targets = targets_of([1, 2, 2], [1, 2, 1, 1, 2])
    scores = cosines(3, 5)
    prepared = kind().prepare(scores, targets)[1]
    i2t, t2i = kind().one_way(scores, prepared), kind().one_way(scores.T, prepared.T)
    expected = {
        "sum": i2t.sum() + t2i.sum(),
        "mean": i2t.mean() + t2i.mean(),
        "half_mean": (i2t.mean() + t2i.mean()) / 2,
    }
    assert_close(kind(reduction=reduction)(scores, targets), expected[reduction])


@every_objective
def test_objectives_count_query_without_negatives_as_zero(kind):
    if kind.__name__ in BEYOND_NEGATIVES:
        return
    scores, targets = cosines(1, 3), targets_of([1], [1, 1, 1])
    assert not kind().one_way(scores, targets).any()
    assert not gradient(kind(), scores, targets).any()
    mixed = targets_of([1, 2], [1, 2], ignore=torch.tensor([[False, True], [False, False]]))
    terms = kind().one_way(cosines(2), mixed)
    assert len(terms) == 2
    assert terms[0] == 0


@every_objective
def test_objectives_scale_gradient_with_loss(kind):
    scores, targets = cosines(5).requires_grad_(), targets_of(range(5), range(5))
    (scaled,) = torch.autograd.grad(1024 * kind()(scores, targets), scores)
    assert_close(scaled, 1024 * gradient(kind(), scores, targets))


@pairwise(kind=CATALOG, relation=RELATIONS)
def test_objectives_gradient_matches_finite_differences(kind, relation):
    if not kind.integrable:
        return
    targets = targets_of(*RELATIONS[relation])
    scores = cosines(*targets.shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: kind()(scores, targets), scores, atol=1e-6)


@every_objective
def test_objectives_accept_noncontiguous_scores(kind):
    scores, targets = cosines(12)[::2, 1::2], targets_of(range(6), range(6))
    assert not scores.is_contiguous()
    assert_close(kind()(scores, targets), kind()(scores.contiguous(), targets))
    assert_close(gradient(kind(), scores, targets), gradient(kind(), scores.contiguous(), targets))


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_objectives_are_finite_for_any_ids(kind, data):
    sides = [data.draw(st.lists(st.integers(0, 3), max_size=5)) for _ in range(2)]
    targets = targets_of(*sides)
    scores = cosines(6)[: targets.shape[0], : targets.shape[1]]
    assert kind()(scores, targets).isfinite()
    assert gradient(kind(), scores, targets).isfinite().all()


@every_objective
def test_objectives_read_declared_annotations_only(kind):
    """Random values of an annotation change the loss if and only if the objective declares the
    annotation.
    """
    scores = cosines(8)
    for annotation in INDEPENDENT_ANNOTATIONS:
        # A dict, not a set: its fixed order keeps the random values the same in every run.
        sides = dict.fromkeys((annotation.name, annotation.transposed_field or annotation.name))
        excluded = {*sides, "weight", "query_margin", "candidate_margin"}
        fixed = {name: value for name, value in annotations(8, 8).items() if name not in excluded}
        losses = set()
        for _ in range(10):
            varied = {side: annotations(8, 8)[side] for side in sides}
            losses.add(
                kind()(
                    scores, Targets(query_ids=range(8), candidate_ids=range(8), **fixed, **varied)
                ).item()
            )
        assert (len(losses) > 1) == (annotation.name in kind.used_annotations), annotation.name
