"""The choice of a path: asked, line by line of its table; and the memory that a plan promises, kept for costly scores too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visavis import PairLoss, Targets
from visavis.engine import choose
from visavis.engine.plan import Sizes
from visavis.errors import SpecError, VisavisError
from visavis.memory import BlockCost, ScoreCost
from visavis.objectives import AOQ, CATALOG, NCR, RSP, Goal, InfoNCE, NTXent, SmoothAP, Triplet, TripletHN, Unified
from visavis.types import Encoded

from ..sampling import pairwise
from .cases import close, every_objective, needed

CPU, CUDA, GIB = torch.device("cpu"), torch.device("cuda"), 2**30
CHEAP = BlockCost(100.0)


def path(objective, number: int, *, cost=None, memory=8 * GIB, device=CPU, facts=None, candidates=None, **choices) -> str:
    """What is chosen for so many pairs."""
    targets = Targets.paired(number, **(facts or {}))
    if candidates:
        targets = Targets(query_ids=range(number), candidate_ids=range(candidates))
    sizes = {name: choices.pop(name) for name in ("extra", "processes") if name in choices}
    rows, columns = targets.shape
    given = Sizes((rows, columns), (columns, rows), 4 * 64 * (rows + columns), **sizes)
    return choose(objective, cost, (targets, targets.T), given, device, memory, **choices).path


def test_a_summary_of_cosines_shares_its_blocks_at_any_size():
    for number in (2, 500, 8192):
        for objective in (TripletHN(), Unified(), NTXent(), Goal(pair="con"), AOQ(), RSP()):
            assert path(objective, number) == path(objective, number, device=CUDA) == "tiles"


def test_who_needs_more_than_one_number_walks_over_rows():
    for objective in (Triplet(), Goal(), RSP(gamma=3.0), NCR(), InfoNCE()):
        assert [path(objective, number) for number in (512, 513, 4096, 4097)] == ["dense", "kept", "kept", "rows"]
        assert [path(objective, number, device=CUDA) for number in (512, 2048, 2049, 4097)] == ["dense", "dense", "kept", "rows"]


def test_facts_decide():
    assert path(Unified(), 600, facts={"weight": torch.rand(600, 600)}) == "kept"
    margins = {name: torch.rand(600) for name in ("query_margin", "candidate_margin")}
    assert path(NCR(), 600, facts=margins) == "tiles"
    learned = {"weight": torch.rand(600, 600, requires_grad=True)}
    assert path(Unified(), 600, facts=learned) == "dense"
    assert path(Unified(), 2049, facts={"query_margin": torch.rand(2049, requires_grad=True)}) == "tiles"


def test_wide_objectives_count_pairs_against_candidates():
    targets = Targets(query_ids=range(250), candidate_ids=torch.arange(1250) // 5)  # 312,500 scores, 1,562,500 of pairs
    sizes = Sizes((250, 1250), (1250, 250), 2**18)
    wide, narrow = (choose(objective, CHEAP, (targets, targets.T), sizes, CPU, 8 * GIB) for objective in (Triplet(), InfoNCE()))
    assert wide.path == narrow.path == "dense"
    many = Targets(query_ids=range(1000), candidate_ids=torch.arange(3000) // 3)
    sizes = Sizes((1000, 3000), (3000, 1000), 2**20)
    paths = [choose(objective, CHEAP, (many, many.T), sizes, CPU, 8 * GIB).path for objective in (SmoothAP(), InfoNCE())]
    assert paths == ["rows", "dense"]


def test_extra_candidates_processes_and_rows_that_are_asked_for():
    assert path(Unified(), 500, extra=True) == "dense"
    assert path(Unified(), 3000, extra=True) == path(Triplet(), 3000, extra=True) == "rows"
    assert path(Unified(), 500, processes=2) == "tiles"
    assert path(Triplet(), 500, processes=2) == "rows"
    assert path(Unified(), 500, processes=2, facts={"query_margin": torch.rand(500)}) == "rows"
    assert path(Unified(), 500, block_rows=7) == "tiles"
    assert path(Triplet(), 500, block_rows=7) == "rows"


@pytest.mark.parametrize("objective", [Unified(), TripletHN(), Triplet()], ids=str)
def test_a_score_function_is_dense_while_it_is_small_and_fits(objective):
    beyond = "rows" if objective == Triplet() else "tiles"
    assert [path(objective, number, cost=CHEAP) for number in (100, 2048, 2049)] == ["dense", "dense", beyond]
    assert path(objective, 256, cost=BlockCost(1e6)) == beyond  # 65 GB
    assert path(objective, 256, cost=BlockCost(1e6), memory=100 * GIB) == "dense"


@pairwise(kind=CATALOG, cost=[None, BlockCost(3e5, 1e4, 2e4, 1e5), BlockCost(100.0)], number=[1, 300, 3000], block_rows=[None, 5])
def test_what_a_plan_expects_stays_within_the_memory(kind, cost, number, block_rows):
    targets = Targets.paired(number)
    item_bytes = 4 * 64 * 2 * number
    sizes = Sizes((number, number), (number, number), item_bytes)
    last = math.inf
    for memory in (32 * GIB, GIB, 2**26, 2**24):
        plan = choose(kind(), cost, (targets, targets.T), sizes, CPU, memory, block_rows=block_rows)
        assert plan.expected_bytes + item_bytes <= memory
        assert min(*plan.rows, *plan.columns) >= 1
        assert block_rows is None or max(plan.rows) <= block_rows
        assert plan.expected_bytes <= last
        last = plan.expected_bytes
    with pytest.raises(VisavisError, match=r"give a larger memory\.$"):
        choose(kind(), BlockCost(1e9), (targets, targets.T), sizes, CPU, 2**24)


def test_it_says_the_way_and_the_memory():
    said = str(PairLoss(Unified()).plan(8192, 8192, width=512))
    assert said == (
        "tiles of 1024 x 1024 scores for both directions at once, up to 80.0 MiB of them kept in between; about 120.0 MiB beside items and gradients"
    )
    assert str(PairLoss(Triplet()).plan(100, 500)).startswith("the graph of one matrix of 100 x 500 scores; about ")
    assert str(PairLoss(Triplet()).plan(1000, 5000)).startswith(
        "1000 x 5000 cosines kept, one direction after the other in blocks of 64 images, "
    )
    rows = PairLoss(Triplet(), score=Attention(), score_cost=ScoreCost(1e5, 3e5), memory="500MB").plan(300, 300)
    assert str(rows).startswith(f"one direction after the other in blocks of {rows.rows[0]} images, then of {rows.rows[1]} texts, at most ")
    with pytest.raises(
        SpecError, match=r"^plan\(\) does not know what this score costs: give PairLoss\(score_cost=\.\.\.\), or a few images="
    ):
        PairLoss(Triplet(), score=Attention()).plan(300, 300)
    with pytest.raises(SpecError, match=r"^memory is 'lots', expected bytes"):
        PairLoss(Triplet(), memory="lots")


class Attention(nn.Module):
    """Every word over the regions of every image; counts how many pairs are scored at once."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.map, self.dropout, self.most = nn.Linear(6, 6).double(), nn.Dropout(dropout), 0

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        self.most = max(self.most, len(images) * len(texts))
        affinity = torch.einsum("vrd,twd->vtwr", self.map(images.vectors), texts.vectors)
        attended = torch.einsum("vtwr,vrd->vtwd", self.dropout(affinity).softmax(-1), images.vectors)
        return torch.cosine_similarity(attended, texts.vectors[None], dim=-1).mean(-1)


def items(number: int, length: int) -> Encoded:
    return Encoded(torch.randn(number, length, 6, dtype=torch.float64, requires_grad=True))


@every_objective
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_costly_score_in_little_memory_gives_the_same_value_and_gradients(kind, dropout):
    score, images, texts = Attention(dropout), items(40, 9), items(40, 7)
    targets = Targets.paired(40, **needed(40, 40))
    inputs = [images.vectors, texts.vectors, score.map.weight]
    answers, most = [], []
    for memory in (None, "1.5MB"):
        score.most = 0
        loss = PairLoss(kind(), score=score, memory=memory)
        torch.manual_seed(3)
        value = loss(images, texts, targets=targets)
        answers.append([value, *torch.autograd.grad(value, inputs)])
        most.append(score.most)
    assert most[0] == 1600
    assert most[1] <= 400
    if not dropout:  # other blocks draw other numbers
        for ours, right in zip(*answers, strict=True):
            close(ours, right, rtol=1e-9, atol=1e-9)
    else:
        assert all(answer.isfinite().all() for answer in answers[1])


@pytest.mark.parametrize("objective", [Triplet(), Unified(gamma=3.0), InfoNCE()], ids=str)
def test_pieces_of_a_block_that_are_scored_twice_drop_the_same(objective):
    score, images, texts = Attention(0.5), items(20, 9), items(20, 7)
    loss = PairLoss(objective, score=score, memory="700KB")
    assert loss.plan(20, 20, images=images, texts=texts).columns[0] < 20
    torch.manual_seed(1)
    value = loss(images, texts)
    (gradient,) = torch.autograd.grad(value, images.vectors)
    step = 1e-6 * torch.randn_like(gradient)
    torch.manual_seed(1)
    moved = loss(Encoded(images.vectors.detach() + step), texts)
    torch.testing.assert_close((moved - value).detach(), (gradient * step).sum(), rtol=1e-3, atol=1e-12)


def test_the_cost_of_a_score_is_asked_once_for_each_form():
    calls = []

    class Declared(Attention):
        def score_cost(self, images, texts):
            calls.append(images.vectors.shape[1:])
            return ScoreCost(2e3, 5e3)

    loss = PairLoss(Unified(), score=Declared())
    for length in (3, 3, 5, 3):
        loss(items(6, length), items(6, 4))
    assert calls == [(3, 6), (5, 6)]
