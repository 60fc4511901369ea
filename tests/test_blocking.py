"""Cost of scores and sizes of blocks, compared with the allocator, and laws of block shapes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

from visavis.core.blocking import (
    BlockCost,
    ScoreCost,
    block_cost_of,
    block_shape,
    declared_cost,
    graph_leaves,
    measure_score_cost,
    score_in_blocks,
)
from visavis.core.encoded import Encoded, Vectors, as_encoded
from visavis.core.errors import SpecError, VisavisError
from visavis.core.memory_budget import budget_bytes, parse_memory


def cosine(visual: Tensor, text: Tensor) -> Tensor:
    return normalize(visual, dim=-1) @ normalize(text, dim=-1).T


class CrossAttention(nn.Module):
    """Attention of every word over the regions of every image."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, visual: Encoded, text: Encoded) -> Tensor:
        regions = self.norm(self.map(visual.vectors).flatten(0, 1)).view_as(visual.vectors)
        affinity = torch.einsum("vrd,twd->vtwr", regions, text.vectors).masked_fill(
            ~visual.mask[:, None, None], -1e9
        )
        attended = torch.einsum("vtwr,vrd->vtwd", self.dropout(affinity.softmax(-1)), regions)
        return (torch.cosine_similarity(attended, text.vectors[None], dim=-1) * text.mask).sum(
            -1
        ) / text.mask.sum(-1)


class PairNetwork(nn.Module):
    """A multilayer perceptron over both vectors of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, visual: Tensor, text: Tensor) -> Tensor:
        both = torch.cat(
            [visual[:, None].expand(-1, len(text), -1), text.expand(len(visual), -1, -1)], -1
        )
        return self.layers(both)[..., 0]


def items(number: int, length: int) -> Encoded:
    return Encoded(torch.randn(number, length, 16), torch.ones(number, length, dtype=torch.bool))


SCORES = {
    "cosine": lambda: (cosine, torch.randn(150, 16), torch.randn(250, 16)),
    "cross-attention": lambda: (CrossAttention(), items(30, 36), items(40, 20)),
    "pair network": lambda: (PairNetwork(), torch.randn(50, 16), torch.randn(60, 16)),
    "named parts": lambda: (
        lambda visual, text: (
            cosine(visual.vectors["face"], text.vectors["face"])
            + cosine(visual.vectors["scene"], text.vectors["scene"])
        ),
        *(
            Encoded({name: torch.randn(number, 8) for name in ("face", "scene")})
            for number in (120, 130)
        ),
    ),
}


def allocated_at_most(score, visual, text, *, training: bool) -> int:
    """Measure the peak of the allocator with torch's profiler while a whole matrix is scored."""

    def leaf(part: Tensor) -> Tensor:
        return part.detach().requires_grad_(training and part.is_floating_point())

    visual, text = (
        leaf(each) if isinstance(each, Tensor) else each.map(leaf) for each in (visual, text)
    )
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        torch.set_grad_enabled(training),
    ):
        scores = score(visual, text)
        if training:
            torch.autograd.grad(
                scores, graph_leaves(scores), torch.ones_like(scores), retain_graph=True
            )
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("training", [False, True])
def test_measured_cost_predicts_peak_of_whole_matrix(name, training):
    score, visual, text = SCORES[name]()
    sides = as_encoded(visual), as_encoded(text)
    expected = measure_score_cost(score, *sides, training=training).total_bytes(
        len(visual), len(text)
    )
    assert 0.98 <= expected / allocated_at_most(score, visual, text, training=training) <= 1.3


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("number", [1, 3, 9])
def test_measure_score_cost_has_no_side_effects(training, number):
    score, visual, text = CrossAttention(), items(number, 3), items(number, 2)
    visual.vectors.requires_grad_()
    before = [torch.get_rng_state(), *(part.clone() for part in score.state_dict().values())]
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_score_cost(score, visual, text, training=training).pair_bytes > 0
    for old, new in zip(before, [torch.get_rng_state(), *score.state_dict().values()], strict=True):
        assert torch.equal(old, new)
    assert all(part.grad is None for part in (visual.vectors, *score.parameters()))
    assert (
        measure_score_cost(score, visual[:0], text, training=training).total_bytes(0, number) == 0
    )


def test_measured_cost_of_item_dependent_score_is_upper_bound():
    def by_rows(visual: Tensor, text: Tensor) -> Tensor:
        return torch.stack([(row - text).pow(2).sum(-1) for row in visual])

    visual, text = torch.randn(40, 16), torch.randn(50, 16)
    assert measure_score_cost(by_rows, Vectors(visual), Vectors(text), training=True).total_bytes(
        40, 50
    ) >= allocated_at_most(by_rows, visual, text, training=True)


class Declared(nn.Module):
    def score_cost(self, visual: Tensor, text: Tensor) -> ScoreCost:
        return ScoreCost(inference_bytes=visual.shape[1] * 10.0, training_bytes=1000.0)

    def score(self, visual: Tensor, text: Tensor) -> Tensor:
        return visual @ text.T

    def forward(self, visual: Tensor, text: Tensor) -> Tensor:
        return visual @ text.T


class OfAnotherScore(Declared):
    def score(self, visual: Tensor, text: Tensor) -> Tensor:
        return (visual[:, None] - text).abs().sum(-1)


def test_declared_cost_comes_from_class_of_score():
    visual, text = Vectors(torch.randn(5, 8)), Vectors(torch.randn(6, 8))
    for score in (Declared().score, Declared(), OfAnotherScore().forward):
        assert block_cost_of(score, visual, text, training=False) == BlockCost(80.0)
        assert block_cost_of(score, visual, text, training=True) == BlockCost(1000.0)
    assert (
        declared_cost(OfAnotherScore().score, visual, text) is None
    )  # its parent spoke of another score
    assert (
        block_cost_of(OfAnotherScore().score, visual, text, training=False).pair_bytes == 2 * 8 * 4
    )
    assert declared_cost(cosine, visual, text) is None
    assert block_cost_of(
        cosine, visual, text, training=False, declared=ScoreCost(7, 8)
    ) == BlockCost(7.0)


sizes = st.integers(1, 3000)
costs = st.builds(
    BlockCost, st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e6)
)


@given(sizes, sizes, costs, st.integers(10**6, 10**9))
def test_block_shape_is_largest_that_fits(rows, columns, cost, memory):
    if cost.total_bytes(1, 1) > memory:
        with pytest.raises(
            VisavisError,
            match=r"^memory: expected at least .* to score one pair, got .* for blocks",
        ):
            block_shape(rows, columns, cost, memory)
        return
    height, width = block_shape(rows, columns, cost, memory)
    assert 1 <= height <= min(rows, 1024)
    assert 1 <= width <= min(columns, 5120)
    assert cost.total_bytes(height, width) <= memory
    assert width == min(columns, 5120) or cost.total_bytes(height, width + 1) > memory
    assert (
        width < min(columns, 5120)
        or height == min(rows, 1024)
        or cost.total_bytes(height + 1, width) > memory
    )
    more = block_shape(rows, columns, cost, 2 * memory)
    assert more[0] * more[1] >= height * width


@given(st.integers(0, 20), st.integers(0, 20), st.tuples(st.integers(1, 25), st.integers(1, 25)))
def test_score_in_blocks_scores_every_pair_once(rows, columns, shape):
    sizes = []

    def score(visual, text):
        sizes.append((len(visual), len(text)))
        return visual @ text.T

    visual, text = torch.randn(rows, 4), torch.randn(columns, 4)
    torch.testing.assert_close(
        score_in_blocks(score, Vectors(visual), Vectors(text), shape), visual @ text.T
    )
    assert sum(height * width for height, width in sizes) == rows * columns
    if rows and columns:
        assert all(height <= shape[0] and width <= shape[1] for height, width in sizes)


def test_block_shape_is_limited_to_max_shape():
    assert block_shape(10_000, 50_000, BlockCost(4.0), 2**30) == (1024, 5120)
    assert block_shape(10_000, 50_000, BlockCost(4.0), 2**30, max_shape=(256, None)) == (
        256,
        50_000,
    )
    assert block_shape(0, 5, BlockCost(4.0), 2**20) == (1, 5)


SETTINGS = {
    1: 1,
    "1": 1,
    "2GiB": 2**31,
    " 500 mb": 500_000_000,
    "1.5KiB": 1536,
    "3 TB": 3 * 10**12,
    "7B": 7,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_parse_memory_reads_units(setting):
    assert parse_memory(setting) == SETTINGS[setting]


def test_budget_bytes_reserves_memory_for_libraries():
    assert [budget_bytes(setting, "cpu") for setting in (1000, "32MiB", "288MiB", "4GiB")] == [
        1000,
        2**25,
        224 * 2**20,
        2**32 - 2**27,
    ]


@pytest.mark.parametrize("setting", [0, -1, "", "much", "2 GiBs", "0MB", True, 1.5, "-3GB", "1e9"])
def test_parse_memory_rejects_invalid_sizes(setting):
    with pytest.raises(
        SpecError, match=f"^memory: expected bytes .*, got {re.escape(repr(setting))}"
    ):
        parse_memory(setting)


def test_budget_bytes_without_setting_is_share_of_free_memory():
    share = budget_bytes(None, "cpu")
    assert share == 1 << (share.bit_length() - 1)
    assert parse_memory(None) is None
    assert 2**20 <= share < 2**50


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "4"])
def test_score_cost_rejects_invalid_bytes(wrong):
    with pytest.raises(
        SpecError, match=r"^ScoreCost\.inference_bytes: expected a (finite )?number.*, got "
    ):
        ScoreCost(inference_bytes=wrong, training_bytes=4)
