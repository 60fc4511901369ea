"""AOQ: its weight, its offline hinges and its required annotations."""

from __future__ import annotations

import pytest
import torch

from visavis import Targets
from visavis.core.errors import MissingSupervision
from visavis.objectives import AOQ, TripletHN

from ..matching import mentions
from ..sampling import for_each, pairwise

RELATIONS = {
    "pairs": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    "captions": ([7, 8, 7, 9], [8, 7, 7, 9, 8, 3]),
    "one": ([1], [1]),
}


def case(relation, columns=2, **annotations) -> tuple[torch.Tensor, Targets]:
    sides = zip(
        ("query_offline_scores", "candidate_offline_scores"), RELATIONS[relation], strict=True
    )
    offline = {
        name: 2 * torch.rand(len(ids), columns, dtype=torch.float64) - 1 for name, ids in sides
    }
    targets = Targets(
        query_ids=RELATIONS[relation][0],
        candidate_ids=RELATIONS[relation][1],
        **(offline | annotations),
    )
    return 2 * torch.rand(targets.shape, dtype=torch.float64) - 1, targets


def by_loops(objective, scores, targets) -> float:
    total = 0.0
    for s, t in ((scores, targets), (scores.T, targets.T)):
        for i, p in t.positive.nonzero().tolist():
            negatives, offline = s[i, t.negative[i]].tolist(), t.query_offline_scores[i].tolist()
            if negatives:
                weight = objective.beta - (offline[0] - max(negatives)) / objective.alpha
                total += weight * max(0.0, objective.margin + max(negatives) - s[i, p].item())
            total += sum(max(0.0, objective.offline_margin + o - s[i, p].item()) for o in offline)
    return total


@pairwise(
    objective=[AOQ(), AOQ(margin=0.5, offline_margin=0.1, alpha=0.7, beta=0.2)],
    columns=[1, 2, 5],
    relation=RELATIONS,
)
def test_aoq_matches_loops(relation, columns, objective):
    scores, targets = case(relation, columns)
    assert objective(scores, targets).item() == pytest.approx(
        by_loops(objective, scores, targets), rel=1e-12, abs=1e-12
    )


@for_each(relation=RELATIONS)
def test_aoq_with_constant_weight_equals_weighted_triplet_hn(relation):
    scores, targets = case(relation)
    objective = AOQ(offline_margin=-9, alpha=1e12, beta=1.5)
    torch.testing.assert_close(
        objective(scores, targets), 1.5 * TripletHN()(scores, targets), rtol=1e-9, atol=1e-12
    )


def test_aoq_matches_hand_computed_value():
    scores = torch.tensor([[0.5, 0.25], [0.75, 0.5]], dtype=torch.float64)
    offline = torch.tensor([[0.5, 0.75], [0.25, 0.0]], dtype=torch.float64)
    targets = Targets.paired(2, query_offline_scores=offline, candidate_offline_scores=offline)
    value = AOQ(margin=0.5, alpha=0.5, beta=1.0)(scores, targets)
    i2t = (1 - (0.5 - 0.25) / 0.5) * 0.25 + (1 - (0.25 - 0.75) / 0.5) * 0.75
    t2i = (1 - (0.5 - 0.75) / 0.5) * 0.75 + (1 - (0.25 - 0.25) / 0.5) * 0.25
    assert value.item() == i2t + t2i + 2 * (0.0 + 0.25)


def test_aoq_weights_may_be_negative():
    scores = torch.tensor([[0.5, 0.4], [0.4, 0.5]], dtype=torch.float64)
    easy = torch.full(
        (2, 1), 0.4 + 0.3 * 1.5 + 0.3, dtype=torch.float64
    )  # hard enough for a weight of -1
    targets = Targets.paired(2, query_offline_scores=easy, candidate_offline_scores=easy)
    assert AOQ(offline_margin=-9)(scores, targets).item() == pytest.approx(-4 * 0.1)


def test_aoq_gradient_includes_weights():
    scores, targets = case("captions")
    names = ("query_offline_scores", "candidate_offline_scores")
    inputs = [scores, *(getattr(targets, name) for name in names)]

    def value(scores, *offline):
        annotations = dict(zip(names, offline, strict=True))
        return AOQ()(
            scores,
            Targets(
                query_ids=targets.query_ids, candidate_ids=targets.candidate_ids, **annotations
            ),
        )

    assert torch.autograd.gradcheck(value, [tensor.detach().requires_grad_() for tensor in inputs])


def test_aoq_of_one_pair_has_offline_hinges():
    scores = torch.tensor([[0.25]], dtype=torch.float64, requires_grad=True)
    offline = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    value = AOQ()(
        scores, Targets.paired(1, query_offline_scores=offline, candidate_offline_scores=offline)
    )
    assert value == 2 * 0.25
    assert torch.autograd.grad(value, scores)[0] == -2


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"query_offline_scores": torch.rand(5, 2)},
        {"candidate_offline_scores": torch.rand(5, 2)},
        {"query_offline_scores": torch.rand(5, 0), "candidate_offline_scores": torch.rand(5, 0)},
    ],
    ids=["none", "queries only", "candidates only", "no columns"],
)
def test_aoq_without_offline_scores_names_supervision(annotations):
    with pytest.raises(
        MissingSupervision,
        match=mentions("AOQ", "query_offline_scores", "OfflineNegativeSupervision"),
    ):
        AOQ()(torch.rand(5, 5), Targets.paired(5, **annotations))
