"""What a score costs, and the blocks that follow: measured beside the allocator's own count, and laws of the shapes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

from visavis.errors import SpecError, VisavisError
from visavis.measured_cost import cost_of, leaves_behind, measure_cost
from visavis.memory import BlockCost, ScoreCost, block_shape, blocks, budget, declared_cost, parse_memory, score_in_blocks
from visavis.types import Encoded


def cosine(visual: Tensor, text: Tensor) -> Tensor:
    return normalize(visual, dim=-1) @ normalize(text, dim=-1).T


class CrossAttention(nn.Module):
    """Every word attends over the regions of every image."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, visual: Encoded, text: Encoded) -> Tensor:
        regions = self.norm(self.map(visual.vectors).flatten(0, 1)).view_as(visual.vectors)
        affinity = torch.einsum("vrd,twd->vtwr", regions, text.vectors).masked_fill(~visual.mask[:, None, None], -1e9)
        attended = torch.einsum("vtwr,vrd->vtwd", self.dropout(affinity.softmax(-1)), regions)
        return (torch.cosine_similarity(attended, text.vectors[None], dim=-1) * text.mask).sum(-1) / text.mask.sum(-1)


class PairNetwork(nn.Module):
    """A multilayer perceptron over both vectors of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, visual: Tensor, text: Tensor) -> Tensor:
        both = torch.cat([visual[:, None].expand(-1, len(text), -1), text.expand(len(visual), -1, -1)], -1)
        return self.layers(both)[..., 0]


def items(number: int, length: int) -> Encoded:
    return Encoded(torch.randn(number, length, 16), torch.ones(number, length, dtype=torch.bool))


SCORES = {
    "cosine": lambda: (cosine, torch.randn(150, 16), torch.randn(250, 16)),
    "cross-attention": lambda: (CrossAttention(), items(30, 36), items(40, 20)),
    "pair network": lambda: (PairNetwork(), torch.randn(50, 16), torch.randn(60, 16)),
    "named parts": lambda: (
        lambda visual, text: cosine(visual.vectors["face"], text.vectors["face"]) + cosine(visual.vectors["scene"], text.vectors["scene"]),
        *(Encoded({name: torch.randn(number, 8) for name in ("face", "scene")}) for number in (120, 130)),
    ),
}


def allocated_at_most(score, visual, text, *, training: bool) -> int:
    """The peak of the allocator while a whole matrix is scored, by torch's profiler."""

    def leaf(part: Tensor) -> Tensor:
        return part.detach().requires_grad_(training and part.is_floating_point())

    visual, text = (leaf(each) if isinstance(each, Tensor) else each.map(leaf) for each in (visual, text))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.set_grad_enabled(training):
        scores = score(visual, text)
        if training:
            torch.autograd.grad(scores, leaves_behind(scores), torch.ones_like(scores), retain_graph=True)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("training", [False, True])
def test_a_few_items_tell_what_a_whole_matrix_holds(name, training):
    score, visual, text = SCORES[name]()
    expected = measure_cost(score, visual, text, training=training).of(len(visual), len(text))
    assert 0.98 <= expected / allocated_at_most(score, visual, text, training=training) <= 1.3


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_probe_leaves_no_trace(training, number):
    score, visual, text = CrossAttention(), items(number, 3), items(number, 2)
    visual.vectors.requires_grad_()
    before = [torch.get_rng_state(), *(part.clone() for part in score.state_dict().values())]
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_cost(score, visual, text, training=training).pair > 0
    for old, new in zip(before, [torch.get_rng_state(), *score.state_dict().values()], strict=True):
        assert torch.equal(old, new)
    assert all(part.grad is None for part in (visual.vectors, *score.parameters()))
    assert measure_cost(score, visual[:0], text, training=training).of(0, number) == 0


def test_a_score_whose_steps_depend_on_the_items_is_not_underrated():
    def by_rows(visual: Tensor, text: Tensor) -> Tensor:
        return torch.stack([(row - text).pow(2).sum(-1) for row in visual])

    visual, text = torch.randn(40, 16), torch.randn(50, 16)
    assert measure_cost(by_rows, visual, text, training=True).of(40, 50) >= allocated_at_most(by_rows, visual, text, training=True)


class Declared(nn.Module):
    def score_cost(self, visual: Tensor, text: Tensor) -> ScoreCost:
        return ScoreCost(scored=visual.shape[1] * 10.0, trained=1000.0)

    def score(self, visual: Tensor, text: Tensor) -> Tensor:
        return visual @ text.T

    def forward(self, visual: Tensor, text: Tensor) -> Tensor:
        return visual @ text.T


class OfAnotherScore(Declared):
    def score(self, visual: Tensor, text: Tensor) -> Tensor:
        return (visual[:, None] - text).abs().sum(-1)


def test_who_scores_says_what_it_costs():
    visual, text = torch.randn(5, 8), torch.randn(6, 8)
    for score in (Declared().score, Declared(), OfAnotherScore().forward):
        assert cost_of(score, visual, text, training=False) == BlockCost(80.0)
        assert cost_of(score, visual, text, training=True) == BlockCost(1000.0)
    assert declared_cost(OfAnotherScore().score, visual, text) is None  # its parent spoke of another score
    assert cost_of(OfAnotherScore().score, visual, text, training=False).pair == 2 * 8 * 4
    assert declared_cost(cosine, visual, text) is None
    assert cost_of(cosine, visual, text, training=False, declared=ScoreCost(7, 8)) == BlockCost(7.0)


sizes = st.integers(1, 3000)
costs = st.builds(BlockCost, st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e6))


@given(sizes, sizes, costs, st.integers(10**6, 10**9))
def test_blocks_fit_and_are_as_large_as_they_may(rows, columns, cost, memory):
    if cost.of(1, 1) > memory:
        with pytest.raises(VisavisError, match=r"^scoring one pair takes .*, but blocks may take .*: give a larger memory\.$"):
            block_shape(rows, columns, cost, memory)
        return
    height, width = block_shape(rows, columns, cost, memory)
    assert 1 <= height <= min(rows, 1024)
    assert 1 <= width <= min(columns, 5120)
    assert cost.of(height, width) <= memory
    assert width == min(columns, 5120) or cost.of(height, width + 1) > memory
    assert width < min(columns, 5120) or height == min(rows, 1024) or cost.of(height + 1, width) > memory
    more = block_shape(rows, columns, cost, 2 * memory)
    assert more[0] * more[1] >= height * width


@given(st.integers(0, 20), st.integers(0, 20), st.tuples(st.integers(1, 25), st.integers(1, 25)))
def test_blocks_cover_every_pair_once(rows, columns, shape):
    seen = torch.zeros(rows, columns)
    for own, other in blocks(rows, columns, shape):
        seen[own, other] += 1
        assert (own.stop - own.start) <= shape[0]
        assert (other.stop - other.start) <= shape[1]
    assert torch.equal(seen, torch.ones(rows, columns))
    visual, text = torch.randn(rows, 4), torch.randn(columns, 4)
    torch.testing.assert_close(score_in_blocks(lambda v, t: v @ t.T, visual, text, shape), visual @ text.T)


def test_today_s_tiles_stay_where_memory_allows():
    assert block_shape(10_000, 50_000, BlockCost(4.0), 2**30) == (1024, 5120)
    assert block_shape(10_000, 50_000, BlockCost(4.0), 2**30, largest=(256, None)) == (256, 50_000)
    assert block_shape(0, 5, BlockCost(4.0), 2**20) == (1, 5)


SETTINGS = {1: 1, "1": 1, "2GiB": 2**31, " 500 mb": 500_000_000, "1.5KiB": 1536, "3 TB": 3 * 10**12, "7B": 7}


@pytest.mark.parametrize("setting", SETTINGS)
def test_sizes_are_read(setting):
    assert parse_memory(setting) == SETTINGS[setting]


def test_a_part_of_a_setting_is_left_to_libraries():
    assert [budget(setting, "cpu") for setting in (1000, "32MiB", "288MiB", "4GiB")] == [1000, 2**25, 224 * 2**20, 2**32 - 2**27]


@pytest.mark.parametrize("setting", [0, -1, "", "much", "2 GiBs", "0MB", True, 1.5, "-3GB", "1e9"])
def test_what_is_no_size_is_refused(setting):
    with pytest.raises(SpecError, match=f"^memory is {re.escape(repr(setting))}, expected bytes such as 2000000000, a text such as '2GiB'"):
        parse_memory(setting)


def test_without_a_setting_it_is_a_share_of_what_is_free():
    share = budget(None, "cpu")
    assert share == 1 << (share.bit_length() - 1)
    assert parse_memory(None) is None
    assert 2**20 <= share < 2**50


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "4"])
def test_a_cost_is_a_number_of_bytes(wrong):
    with pytest.raises(SpecError, match=r"^ScoreCost got scored=.*, expected the bytes of a pair, a number above 0\.$"):
        ScoreCost(scored=wrong, trained=4)
