"""Laws of NCR: whose margin a hinge has, and what the warm-up is the mean of."""

from __future__ import annotations

import re

import pytest
import torch

from visavis import Targets
from visavis.errors import MissingSupervision
from visavis.objectives import NCR, MaxMargin, TripletHN

RELATIONS = {"pairs": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), "captions": ([7, 8, 7, 9], [8, 7, 7, 9, 8, 3]), "one": ([1], [1])}
every_relation = pytest.mark.parametrize("relation", RELATIONS)


def case(relation, **facts) -> tuple[torch.Tensor, Targets]:
    targets = Targets(query_ids=RELATIONS[relation][0], candidate_ids=RELATIONS[relation][1], **facts)
    return 2 * torch.rand(targets.shape, dtype=torch.float64) - 1, targets


def anchors(relation, value=None) -> dict[str, torch.Tensor]:
    """The margins of both sides: random, or one for all."""
    queries, candidates = (torch.rand(len(ids), dtype=torch.float64) for ids in RELATIONS[relation])
    made = {"query_margin": queries, "candidate_margin": candidates}
    return made if value is None else {name: torch.full_like(margin, value) for name, margin in made.items()}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def of_the_code(scores, margins, *, mean: bool) -> float:
    """The released loss by loops: the margin of the image, row i, in both directions; the diagonal is 0."""
    size = len(scores)
    total = 0.0
    for anchor in range(size):
        forth = [0.0 if j == anchor else max(0.0, margins[anchor] + scores[anchor][j] - scores[anchor][anchor]) for j in range(size)]
        back = [0.0 if i == anchor else max(0.0, margins[i] + scores[i][anchor] - scores[anchor][anchor]) for i in range(size)]
        total += sum(map(sum, (forth, back))) / size if mean else max(forth) + max(back)
    return total


@every_relation
def test_one_margin_for_all_is_the_triplet_loss(relation):
    scores, plain = case(relation)
    expected = TripletHN(margin=0.3)(scores, plain)
    for facts in (anchors(relation, 0.3), {"pair_margin": torch.full(plain.shape, 0.3, dtype=torch.float64)}):
        close(NCR()(scores, case(relation, **facts)[1]), expected)


@every_relation
def test_margins_of_anchors_are_the_adaptive_triplet_loss(relation):
    scores, targets = case(relation, **anchors(relation))
    close(NCR()(scores, targets), TripletHN()(scores, targets))


@every_relation
def test_margins_of_anchors_can_be_said_of_cells_one_direction_at_a_time(relation):
    facts = anchors(relation)
    scores, targets = case(relation, **facts)
    cells = facts["query_margin"][:, None].expand(targets.shape)
    for objective in (NCR(), NCR(warmup=True)):
        close(objective.one_way(scores, case(relation, pair_margin=cells)[1]), objective.one_way(scores, targets))


@pytest.mark.parametrize("size", [1, 2, 3, 24])
@pytest.mark.parametrize("warmup", [False, True])
def test_a_margin_of_rows_is_that_of_the_released_code(size, warmup):
    scores, margins = 2 * torch.rand(size, size, dtype=torch.float64) - 1, torch.rand(size, dtype=torch.float64)
    targets = Targets.paired(size, pair_margin=margins[:, None].expand(size, size))
    expected = of_the_code(scores.tolist(), margins.tolist(), mean=warmup)
    assert NCR(semantics="reference", warmup=warmup)(scores, targets).item() == pytest.approx(expected, rel=1e-12)
    turned = NCR(semantics="reference", warmup=warmup)(scores.T, targets.T).item()
    assert turned == pytest.approx(expected, rel=1e-12)


def test_paper_and_code_differ_where_margins_do():
    scores = torch.tensor([[0.5, 0.5], [0.25, 0.5]], dtype=torch.float64)
    margins = torch.tensor([0.5, 0.125], dtype=torch.float64)
    facts = {"query_margin": margins, "candidate_margin": margins, "pair_margin": margins[:, None].expand(2, 2)}
    targets = Targets.paired(2, **facts)
    assert NCR()(scores, targets) == 0.5 + 0.0 + 0.25 + 0.125
    assert NCR(semantics="reference")(scores, targets) == 0.5 + 0.0 + 0.0 + 0.5


def test_the_hardest_negative_is_chosen_with_its_margin():
    scores = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([[9.0, 0.0, 0.75]], dtype=torch.float64)
    term = NCR().one_way(scores, Targets(query_ids=[0], candidate_ids=[0, 1, 2], pair_margin=margins))
    assert term == 0.25
    assert torch.autograd.grad(term.sum(), scores)[0].tolist() == [[-1, 0, 1]]


@every_relation
def test_the_warm_up_is_a_mean_with_the_pair_itself(relation):
    scores, targets = case(relation)
    negatives = targets.negative.sum(-1)[targets.positive.nonzero()[:, 0]]
    means = MaxMargin(margin=0.3).one_way(scores, targets)
    close(NCR(margin=0.3, warmup=True).one_way(scores, targets), means * negatives / (negatives + 1))
    scores, targets = case(relation, **anchors(relation))
    close(NCR(warmup=True).one_way(scores, targets), MaxMargin().one_way(scores, targets) * negatives / (negatives + 1))


@pytest.mark.parametrize(
    ("objective", "facts", "message"),
    [
        (NCR(), {}, "NCR needs query_margin and candidate_margin, or pair_margin: give Targets(..., pair_margin=...) or train with "),
        (
            NCR(semantics="reference"),
            anchors("pairs"),
            "NCR needs pair_margin for every pair: give Targets(..., pair_margin=...) or train with ",
        ),
        (NCR(), {"query_margin": torch.rand(5)}, "NCR got margins for one side only: give query_margin and candidate_margin"),
        (NCR(warmup=True), {"candidate_margin": torch.rand(5)}, "NCR got margins for one side only: give "),
    ],
    ids=["none", "anchors for the reference", "queries only", "candidates only"],
)
def test_without_its_margins_it_says_who_supplies_them(objective, facts, message):
    scores, targets = case("pairs", **facts)
    with pytest.raises(MissingSupervision, match=f"^{re.escape(message)}"):
        objective(scores, targets)


@pytest.mark.parametrize("fields", [{}, {"warmup": True}, {"semantics": "reference"}], ids=str)
def test_gradients_are_those_of_the_value(fields):
    facts = {**anchors("captions"), "pair_margin": torch.rand(4, 6, dtype=torch.float64)}
    scores, targets = case("captions", **facts)
    assert torch.autograd.gradcheck(lambda scores: NCR(**fields)(scores, targets), scores.requires_grad_())
