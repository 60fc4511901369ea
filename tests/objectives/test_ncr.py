"""NCR: the margin of each hinge, and the mean of the warm-up."""

from __future__ import annotations

import pytest
import torch

from visavis import Targets
from visavis.core.errors import MissingSupervision
from visavis.objectives import NCR, MaxMargin, TripletHN

from ..matching import mentions
from ..sampling import for_each

RELATIONS = {
    "pairs": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    "captions": ([7, 8, 7, 9], [8, 7, 7, 9, 8, 3]),
    "one": ([1], [1]),
}


def case(relation, **annotations) -> tuple[torch.Tensor, Targets]:
    targets = Targets(
        query_ids=RELATIONS[relation][0], candidate_ids=RELATIONS[relation][1], **annotations
    )
    return 2 * torch.rand(targets.shape, dtype=torch.float64) - 1, targets


def anchor_margins(relation, value=None) -> dict[str, torch.Tensor]:
    """The margins of both sides: random, or one constant."""
    queries, candidates = (torch.rand(len(ids), dtype=torch.float64) for ids in RELATIONS[relation])
    made = {"query_margin": queries, "candidate_margin": candidates}
    return (
        made
        if value is None
        else {name: torch.full_like(margin, value) for name, margin in made.items()}
    )


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def reference_by_loops(scores, margins, *, mean: bool) -> float:
    """The released loss by loops. Both directions use the margin of image i, and the diagonal is 0."""
    size = len(scores)
    total = 0.0
    for anchor in range(size):
        i2t = [
            0.0
            if j == anchor
            else max(0.0, margins[anchor] + scores[anchor][j] - scores[anchor][anchor])
            for j in range(size)
        ]
        t2i = [
            0.0
            if i == anchor
            else max(0.0, margins[i] + scores[i][anchor] - scores[anchor][anchor])
            for i in range(size)
        ]
        total += sum(map(sum, (i2t, t2i))) / size if mean else max(i2t) + max(t2i)
    return total


@for_each(relation=RELATIONS)
def test_ncr_with_constant_margin_equals_triplet_hn(relation):
    scores, plain = case(relation)
    expected = TripletHN(margin=0.3)(scores, plain)
    for margins in (
        anchor_margins(relation, 0.3),
        {"pair_margin": torch.full(plain.shape, 0.3, dtype=torch.float64)},
    ):
        assert_close(NCR()(scores, case(relation, **margins)[1]), expected)


@for_each(relation=RELATIONS)
def test_ncr_with_anchor_margins_equals_adaptive_triplet_hn(relation):
    scores, targets = case(relation, **anchor_margins(relation))
    assert_close(NCR()(scores, targets), TripletHN()(scores, targets))


@for_each(relation=RELATIONS)
def test_ncr_pair_margins_match_anchor_margins_per_direction(relation):
    annotations = anchor_margins(relation)
    scores, targets = case(relation, **annotations)
    pair_margins = annotations["query_margin"][:, None].expand(targets.shape)
    for objective in (NCR(), NCR(warmup=True)):
        assert_close(
            objective.one_way(scores, case(relation, pair_margin=pair_margins)[1]),
            objective.one_way(scores, targets),
        )


@pytest.mark.parametrize("size", [1, 2, 3, 24])
@pytest.mark.parametrize("warmup", [False, True])
def test_ncr_reference_matches_released_code(size, warmup):
    scores, margins = (
        2 * torch.rand(size, size, dtype=torch.float64) - 1,
        torch.rand(size, dtype=torch.float64),
    )
    targets = Targets.paired(size, pair_margin=margins[:, None].expand(size, size))
    expected = reference_by_loops(scores.tolist(), margins.tolist(), mean=warmup)
    assert NCR(semantics="reference", warmup=warmup)(scores, targets).item() == pytest.approx(
        expected, rel=1e-12
    )
    transposed = NCR(semantics="reference", warmup=warmup)(scores.T, targets.T).item()
    assert transposed == pytest.approx(expected, rel=1e-12)


def test_ncr_paper_and_reference_differ_for_unequal_margins():
    scores = torch.tensor([[0.5, 0.5], [0.25, 0.5]], dtype=torch.float64)
    margins = torch.tensor([0.5, 0.125], dtype=torch.float64)
    annotations = {
        "query_margin": margins,
        "candidate_margin": margins,
        "pair_margin": margins[:, None].expand(2, 2),
    }
    targets = Targets.paired(2, **annotations)
    assert NCR()(scores, targets) == 0.5 + 0.0 + 0.25 + 0.125
    assert NCR(semantics="reference")(scores, targets) == 0.5 + 0.0 + 0.0 + 0.5


def test_ncr_selects_hardest_negative_with_its_margin():
    scores = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([[9.0, 0.0, 0.75]], dtype=torch.float64)
    term = NCR().one_way(
        scores, Targets(query_ids=[0], candidate_ids=[0, 1, 2], pair_margin=margins)
    )
    assert term == 0.25
    assert torch.autograd.grad(term.sum(), scores)[0].tolist() == [[-1, 0, 1]]


@for_each(relation=RELATIONS)
def test_ncr_warmup_averages_negatives_and_pair(relation):
    scores, targets = case(relation)
    negatives = targets.negative.sum(-1)[targets.positive.nonzero()[:, 0]]
    means = MaxMargin(margin=0.3).one_way(scores, targets)
    assert_close(
        NCR(margin=0.3, warmup=True).one_way(scores, targets), means * negatives / (negatives + 1)
    )
    scores, targets = case(relation, **anchor_margins(relation))
    assert_close(
        NCR(warmup=True).one_way(scores, targets),
        MaxMargin().one_way(scores, targets) * negatives / (negatives + 1),
    )


@pytest.mark.parametrize(
    ("objective", "annotations", "parts"),
    [
        (NCR(), {}, ("NCR", "query_margin", "candidate_margin", "pair_margin", "NoisySupervision")),
        (
            NCR(semantics="reference"),
            anchor_margins("pairs"),
            ("NCR", "pair_margin", "NoisySupervision"),
        ),
        (NCR(), {"query_margin": torch.rand(5)}, ("NCR", "one side only")),
        (NCR(warmup=True), {"candidate_margin": torch.rand(5)}, ("NCR", "one side only")),
    ],
    ids=["none", "anchors for the reference", "queries only", "candidates only"],
)
def test_ncr_without_margins_names_supervision(objective, annotations, parts):
    scores, targets = case("pairs", **annotations)
    with pytest.raises(MissingSupervision, match=mentions(*parts)):
        objective(scores, targets)


@pytest.mark.parametrize("fields", [{}, {"warmup": True}, {"semantics": "reference"}], ids=str)
def test_ncr_gradient_matches_finite_differences(fields):
    annotations = {
        **anchor_margins("captions"),
        "pair_margin": torch.rand(4, 6, dtype=torch.float64),
    }
    scores, targets = case("captions", **annotations)
    assert torch.autograd.gradcheck(
        lambda scores: NCR(**fields)(scores, targets), scores.requires_grad_()
    )
