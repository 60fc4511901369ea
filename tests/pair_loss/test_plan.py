"""Execution plan: the choice of a path, and the memory bound that a plan promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visavis import PairLoss, Targets
from visavis.core.blocking import BlockCost, ScoreCost, measure_block_cost
from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError, VisavisError
from visavis.losses.pair_loss import choose_plan
from visavis.losses.pair_loss import plan as plan_module
from visavis.losses.pair_loss.plan import ExecutionPlan, PlanInputs
from visavis.losses.targets import Factors
from visavis.objectives import (
    AOQ,
    CATALOG,
    NCR,
    RSP,
    BinomialDeviance,
    Goal,
    InfoNCE,
    Ladder,
    MaxMargin,
    NTXent,
    Sigmoid,
    SmoothAP,
    Triplet,
    TripletHN,
    Unified,
)

from ..matching import mentions
from ..sampling import for_each, pairwise
from .cases import assert_close, required_annotations

CPU, CUDA, GIB = torch.device("cpu"), torch.device("cuda"), 2**30
CHEAP = BlockCost(100.0)


def chosen_plan(
    objective,
    number: int,
    *,
    cost=None,
    memory=8 * GIB,
    device=CPU,
    annotations=None,
    candidates=None,
    **choices,
) -> ExecutionPlan:
    """The plan that is chosen for ``number`` pairs."""
    targets = Targets.paired(number, **(annotations or {}))
    if candidates:
        targets = Targets(query_ids=range(number), candidate_ids=range(candidates))
    inputs = PlanInputs(
        objective,
        (targets, targets.T),
        4 * 64 * sum(targets.shape),
        device,
        memory,
        cost,
        **choices,
    )
    return choose_plan(inputs)


def path(objective, number: int, **choices) -> str:
    """The path that is chosen for ``number`` pairs, and which directions a block serves."""
    plan = chosen_plan(objective, number, **choices)
    if plan.path == "dense":
        return "dense"
    if plan.tile_shape is not None:
        return "tiles"
    return "shared rows" if plan.shares_blocks else "rows"


def test_plan_uses_tiles_for_summary_objectives():
    for objective in (TripletHN(), Unified(), NTXent(), Goal(pair="con"), AOQ(), RSP()):
        for number in (257, 500, 8192):
            assert path(objective, number) == path(objective, number, device=CUDA) == "tiles"
        for number in (2, 256):
            assert path(objective, number) == path(objective, number, device=CUDA) == "dense"


def test_plan_uses_one_matrix_then_rows_for_other_objectives():
    for objective in (Triplet(), Goal(), RSP(gamma=3.0), NCR(), InfoNCE()):
        for device in (CPU, CUDA):
            paths = [path(objective, number, device=device) for number in (512, 2048, 2049)]
            assert paths == ["dense", "dense", "rows"]
    assert [path(Sigmoid(), number) for number in (2048, 2049)] == ["dense", "shared rows"]


def test_plan_depends_on_annotations():
    weights = {"weight": torch.rand(600, 600)}
    assert path(Unified(), 600, annotations=weights) == "dense"
    margins = {name: torch.rand(600) for name in ("query_margin", "candidate_margin")}
    assert path(NCR(), 600, annotations=margins) == "tiles"
    learned = {"weight": torch.rand(600, 600, requires_grad=True)}
    assert path(Unified(), 600, annotations=learned) == "dense"
    margin = torch.rand(2049, requires_grad=True)
    assert path(Unified(), 2049, annotations={"query_margin": margin}) == "tiles"


def test_plan_counts_pairs_for_wide_objectives():
    targets = Targets(
        query_ids=range(250), candidate_ids=torch.arange(1250) // 5
    )  # 312,500 scores, 1,562,500 pairs of a positive and a candidate
    for objective in (Triplet(), InfoNCE()):
        assert (
            choose_plan(
                PlanInputs(objective, (targets, targets.T), 2**18, CPU, 8 * GIB, CHEAP)
            ).path
            == "dense"
        )
    large = Targets(query_ids=range(1000), candidate_ids=torch.arange(3000) // 3)
    inputs = [
        PlanInputs(objective, (large, large.T), 2**20, CPU, 8 * GIB, CHEAP)
        for objective in (SmoothAP(), InfoNCE())
    ]
    paths = [choose_plan(each).path for each in inputs]
    assert paths == ["blocks", "dense"]


def test_plan_depends_on_extra_candidates_group_and_block_rows():
    assert path(Unified(), 500, has_extra_candidates=True) == "dense"
    assert (
        path(Unified(), 3000, has_extra_candidates=True)
        == path(Triplet(), 3000, has_extra_candidates=True)
        == "rows"
    )
    assert path(Unified(), 500, world_size=2) == "tiles"
    assert path(Triplet(), 500, world_size=2) == "rows"
    assert (
        path(Unified(), 500, world_size=2, annotations={"query_margin": torch.rand(500)}) == "rows"
    )
    assert path(Unified(), 500, block_rows=7) == "tiles"
    assert path(Triplet(), 500, block_rows=7) == "rows"


@pytest.mark.parametrize("objective", [Unified(), TripletHN(), Triplet()], ids=str)
def test_plan_is_dense_for_small_score_function(objective):
    path_of_large = "rows" if objective == Triplet() else "tiles"
    assert [path(objective, number, cost=CHEAP) for number in (100, 2048, 2049)] == [
        "dense",
        "dense",
        path_of_large,
    ]
    assert path(objective, 256, cost=BlockCost(1e6)) == path_of_large  # 65 GB
    assert path(objective, 256, cost=BlockCost(1e6), memory=100 * GIB) == "dense"


@pairwise(
    kind=CATALOG,
    cost=[None, BlockCost(3e5, 1e4, 2e4, 1e5), BlockCost(100.0)],
    number=[1, 300, 3000],
    block_rows=[None, 5],
)
def test_plan_expected_memory_stays_within_budget(kind, cost, number, block_rows):
    targets = Targets.paired(number)
    item_bytes = 4 * 64 * 2 * number
    last = math.inf
    for memory in (32 * GIB, GIB, 2**26, 2**24):
        plan = choose_plan(
            PlanInputs(
                kind(), (targets, targets.T), item_bytes, CPU, memory, cost, block_rows=block_rows
            )
        )
        assert plan.expected_bytes + item_bytes <= memory
        assert min(*plan.block_rows, *plan.block_columns) >= 1
        assert block_rows is None or max(plan.block_rows) <= block_rows
        assert plan.expected_bytes <= last
        last = plan.expected_bytes
    with pytest.raises(VisavisError, match="larger memory"):
        choose_plan(
            PlanInputs(kind(), (targets, targets.T), item_bytes, CPU, 2**24, BlockCost(1e9))
        )


FORMS = (
    *(kind() for kind in CATALOG),
    *Goal.all(),
    NTXent(denominator="negatives"),
    NCR(warmup=True),
    NCR(semantics="reference"),
    RSP(gamma=5.0),
    RSP(gamma=5.0, coefficients=(0.0, 1.0, 2.0, 3.0)),
    *(Ladder(**form) for form in ({"sampling": "sum"}, {"cumulative": True, "pairs": 4})),
    *(
        Ladder(
            margins=(0.2, 0.1, 0.1, 0.1),
            thresholds=(0.7, 0.6, 0.5),
            betas=(1.0, 1.0, 1.0, 1.0),
            sampling=sampling,
        )
        for sampling in ("hard", "sum")
    ),
    Ladder(semantics="reference"),
    MaxMargin(fix_norm=False),
    BinomialDeviance(negatives="all"),
)


@for_each(objective=FORMS)
@pytest.mark.slow
def test_declared_cost_covers_memory_of_terms(objective):
    for extra in ((), ("weight",), ("ignore",)):

        def prepare(height, width, extra=extra):
            annotations = {
                name: Factors(torch.rand(height, 2), torch.rand(width, 2))
                for name in ("relevance", "pair_margin", *extra)
            }
            for name, value in required_annotations(height, width).items():
                annotations.setdefault(name, value.detach().float())
            targets = Targets(
                query_ids=torch.arange(height), candidate_ids=torch.arange(width), **annotations
            )
            scores = torch.rand(height, width).requires_grad_()
            scores, targets = objective.prepare(scores, targets)

            def run():
                terms = objective.terms(scores, targets).sum()
                return terms.requires_grad and torch.autograd.grad(terms, scores)

            return run

        measured = measure_block_cost(prepare, 4, 16)
        targets = Targets.paired(2)
        declared = PlanInputs(objective, (targets, targets.T), 0, CPU, 0).term_cost
        assert measured.total_bytes(64, 64) <= declared.total_bytes(64, 64)
        assert measured.total_bytes(64, 4096) <= declared.total_bytes(64, 4096)


def test_plan_describes_path_and_memory():
    description = str(PairLoss(Unified()).plan(8192, 8192, embedding_dim=512))
    assert all(
        part in description
        for part in (
            "tiles of 2048 x 2048",
            "both directions",
            "up to 240.0 MiB",
            "About 304.0 MiB",
        )
    )
    assert "one matrix of 100 x 500 scores" in str(PairLoss(Triplet()).plan(100, 500))
    description = str(PairLoss(Triplet()).plan(1000, 5000))
    assert "one direction after the other in blocks of 419 images" in description
    rows = PairLoss(
        Triplet(), score=AttentionScore(), score_cost=ScoreCost(1e5, 3e5), memory="500MB"
    ).plan(300, 300)
    assert f"in blocks of {rows.block_rows[0]} images, then of {rows.block_rows[1]} texts" in str(
        rows
    )
    with pytest.raises(SpecError, match=mentions("score_cost", "images=")):
        PairLoss(Triplet(), score=AttentionScore()).plan(300, 300)
    with pytest.raises(SpecError, match=mentions("memory", "lots")):
        PairLoss(Triplet(), memory="lots")


@pytest.mark.parametrize(
    ("objective", "number", "choices", "reason"),
    [
        (Unified(), 256, {}, "blocks are not faster up to 65,536 scores"),
        (Triplet(), 256, {}, "blocks are not faster up to 4,194,304 scores"),
        (
            Unified(),
            257,
            {},
            "66,049 scores exceed 65,536, and the objective needs one number per query",
        ),
        (
            BinomialDeviance(),
            2049,
            {},
            "4,198,401 scores exceed 4,194,304, and the objective needs all negatives of a query",
        ),
        (
            Triplet(),
            2049,
            {},
            "4,198,401 scores of the pair matrix exceed 4,194,304, and the objective needs all negatives of a query",
        ),
        (
            Sigmoid(),
            2049,
            {},
            "4,198,401 scores exceed 4,194,304, and the loss of a pair is the same in both directions",
        ),
        (
            Unified(),
            3000,
            {"has_extra_candidates": True},
            "9,000,000 scores exceed 4,194,304, and extra candidates are never queries",
        ),
        (
            TripletHN(),
            500,
            {"world_size": 2},
            "the batch is on 2 ranks, and the objective needs one number per query",
        ),
        (
            Unified(),
            500,
            {"world_size": 2, "annotations": {"query_margin": torch.rand(500)}},
            "the batch is on 2 ranks, and each rank has only its own annotations",
        ),
        (
            TripletHN(),
            500,
            {"block_rows": 7},
            "block_rows is set, and the objective needs one number per query",
        ),
        (
            Triplet(),
            256,
            {"cost": BlockCost(1e6)},
            "one matrix needs 61.0 GiB, but 8.0 GiB are left, and the objective needs all negatives of a query",
        ),
    ],
)
def test_plan_gives_the_reason_of_its_path(objective, number, choices, reason):
    plan = chosen_plan(objective, number, **choices)
    assert plan.reason == reason
    assert str(plan).endswith(f"next to items and gradients. Reason: {reason}.")


class AttentionScore(nn.Module):
    """Attention of every word over the regions of every image. Records the largest number of pairs
    scored at once.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.map, self.dropout, self.peak = nn.Linear(6, 6).double(), nn.Dropout(dropout), 0

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        self.peak = max(self.peak, len(images) * len(texts))
        affinity = torch.einsum("vrd,twd->vtwr", self.map(images.vectors), texts.vectors)
        attended = torch.einsum(
            "vtwr,vrd->vtwd", self.dropout(affinity).softmax(-1), images.vectors
        )
        return torch.cosine_similarity(attended, texts.vectors[None], dim=-1).mean(-1)


def random_items(number: int, length: int) -> Encoded:
    return Encoded(torch.randn(number, length, 6, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [(kind, 0.0) for kind in CATALOG]
    + [
        pytest.param(kind, 0.3, marks=() if kind in (Triplet, Unified) else pytest.mark.long)
        for kind in CATALOG
    ],
)
def test_plan_for_little_memory_matches_full_gradient(kind, dropout):
    score, images, texts = AttentionScore(dropout), random_items(40, 9), random_items(40, 7)
    targets = Targets.paired(40, **required_annotations(40, 40))
    inputs = [images.vectors, texts.vectors, score.map.weight]
    answers, peak = [], []
    for memory in (None, "1.5MB"):
        score.peak = 0
        loss = PairLoss(kind(), score=score, memory=memory)
        torch.manual_seed(3)
        value = loss(images, texts, targets=targets)
        answers.append([value, *torch.autograd.grad(value, inputs)])
        peak.append(score.peak)
    assert peak[0] == 1600
    assert peak[1] <= 400
    if not dropout:  # other block sizes draw other dropout masks
        for ours, right in zip(*answers, strict=True):
            assert_close(ours, right, rtol=1e-9, atol=1e-9)
    else:
        assert all(answer.isfinite().all() for answer in answers[1])


@pytest.mark.parametrize("objective", [Triplet(), Unified(gamma=3.0), InfoNCE()], ids=str)
def test_plan_with_column_blocks_repeats_dropout(objective):
    score, images, texts = AttentionScore(0.5), random_items(20, 9), random_items(20, 7)
    loss = PairLoss(objective, score=score, memory="700KB")
    assert loss.plan(20, 20, images=images, texts=texts).block_columns[0] < 20
    torch.manual_seed(1)
    value = loss(images, texts)
    (gradient,) = torch.autograd.grad(value, images.vectors)
    step = 1e-6 * torch.randn_like(gradient)
    torch.manual_seed(1)
    moved = loss(Encoded(images.vectors.detach() + step), texts)
    torch.testing.assert_close(
        (moved - value).detach(), (gradient * step).sum(), rtol=1e-3, atol=1e-12
    )


def test_plan_is_chosen_once_per_shape_and_kind_of_targets(monkeypatch):
    chosen = []
    choose = plan_module.choose_plan
    monkeypatch.setattr(
        plan_module, "choose_plan", lambda inputs: chosen.append(choose(inputs)) or chosen[-1]
    )
    loss = PairLoss(Unified())
    for number, weight in ((300, False), (300, False), (301, False), (300, True), (300, True)):
        annotations = {"weight": torch.rand(number, number)} if weight else {}
        loss(*torch.randn(2, number, 8), targets=Targets.paired(number, **annotations))
    assert [(plan.path, plan.num_queries[0]) for plan in chosen] == [
        ("blocks", 300),
        ("blocks", 301),
        ("dense", 300),
    ]


def test_loss_follows_ids_that_change_in_place():
    images, texts = torch.randn(2, 200, 8).unbind()
    ids = torch.arange(200)
    targets = Targets(query_ids=ids, candidate_ids=ids)
    first = [TripletHN()(images @ texts.T, targets), targets.positive.sum()]
    ids.fill_(7)
    assert TripletHN()(images @ texts.T, targets) == 0 < first[0]
    assert targets.positive.sum() == 200**2 > first[1]


def test_plan_computes_score_cost_once_per_shape():
    calls = []

    class Declared(AttentionScore):
        def score_cost(self, images, texts):
            calls.append(images.vectors.shape[1:])
            return ScoreCost(2e3, 5e3)

    loss = PairLoss(Unified(), score=Declared())
    for length in (3, 3, 5, 3):
        loss(random_items(6, length), random_items(6, 4))
    assert calls == [(3, 6), (5, 6)]


def test_plan_names_the_memory_that_gradients_need():
    with pytest.raises(
        VisavisError,
        match=r"^memory: expected more than 2\.0 GiB for the gradients of the items, got 896\.0 MiB after",
    ):
        PairLoss(Unified(), memory="1GiB").plan(16384, 2**20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_plan_for_the_gpu_of_another_machine_needs_its_memory():
    with pytest.raises(
        SpecError,
        match=r'^device: expected a device of this machine, got cuda\. Set a memory such as "40GiB"',
    ):
        PairLoss(Unified()).plan(16384, 16384, device="cuda")
    assert "8192 x 8192" in str(
        PairLoss(Unified(), memory="40GiB").plan(16384, 16384, device="cuda")
    )
