"""Scores by blocks: the whole matrix whatever the memory, blocks within it, and what wrappers of a score say of its cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from visavis.errors import VisavisError
from visavis.memory import ScoreCost
from visavis.models.scoring import score_listed_pairs
from visavis.scoring import DeviceScore, block_cost, pick, rows_at_once, score_by_blocks, score_by_rows
from visavis.types import Encoded

PAIR = 1000.0
CPU = torch.device("cpu")


class Told(nn.Module):
    """A score that says what it costs, and remembers the blocks that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shapes: list[tuple[int, int]] = []

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost:
        return ScoreCost(scored=PAIR, trained=2 * PAIR)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        self.shapes.append((len(visual), len(text)))
        return self.scale * (visual.vectors[:, None] - text.vectors).square().sum(-1)

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        self.shapes.append((len(visual), len(text)))
        return self.scale * (visual.vectors - text.vectors).square().sum(-1)


def items(number: int) -> Encoded:
    return Encoded(torch.randn(number, 2))


sizes = st.integers(0, 40)


@given(sizes, sizes, st.integers(2000, 10**6), st.sampled_from(["i2t", "t2i"]))
def test_any_memory_gives_the_whole_matrix_and_keeps_to_it(rows, columns, memory, way):
    matcher, visual, text = Told(), items(rows), items(columns)
    whole = matcher.score(visual, text).detach()
    matcher.shapes.clear()
    assert torch.equal(score_by_blocks(matcher.score, visual, text, memory), whole)
    assert all(PAIR * height * width <= memory for height, width in matcher.shapes)
    matcher.shapes.clear()
    parts = list(score_by_rows(DeviceScore(matcher.score, CPU), visual, text, way, held=4.0, memory=2 * memory))
    assert all(PAIR * height * width <= memory for height, width in matcher.shapes)
    across = whole if way == "i2t" else whole.T
    assert [rows for rows, _ in parts] == [rows for rows, _ in parts if rows.stop > rows.start]
    assert torch.equal(torch.cat([across[:0], *(block for _, block in parts)]), across)
    assert all(torch.equal(block, across[rows]) for rows, block in parts)


def test_what_fits_is_scored_in_one_call_and_leaves_no_graph():
    matcher, visual, text = Told(), items(300), items(7)
    assert not score_by_blocks(matcher.score, visual, text).requires_grad
    assert matcher.shapes == [(300, 7)]
    matcher.shapes.clear()
    assert [rows for rows, _ in score_by_rows(matcher.score, visual, text, "i2t", held=4.0)] == [slice(0, 256), slice(256, 300)]
    assert matcher.shapes == [(256, 7), (44, 7)]


def test_a_row_that_is_too_long_for_the_memory_is_still_worked_on():
    assert rows_at_once(1000, 10.0, 200_000) == 10
    assert rows_at_once(1000, 10.0, 1) == 1


def test_not_even_one_pair():
    with pytest.raises(VisavisError, match=r"^scoring one pair takes 1016 B, but blocks may take 900 B: give a larger memory\.$"):
        score_by_blocks(Told().score, items(3), items(4), 900)


@pytest.mark.parametrize("memory", [1100, 5000, None])
def test_single_pairs(memory):
    matcher, visual, text = Told(), items(9), items(8)
    rows, columns = torch.randint(9, (30,)), torch.randint(8, (30,))
    found = score_listed_pairs(matcher, visual, text, rows, columns, memory)
    torch.testing.assert_close(found, matcher.score(visual, text)[rows, columns].detach())
    assert max(pairs for pairs, _ in matcher.shapes[:-1]) == {1100: 1, 5000: 4, None: 30}[memory]
    assert score_listed_pairs(matcher, visual, text, rows[:0], columns[:0]).shape == (0,)


def test_items_count_beside_the_score_declared_or_measured_wherever_it_is_computed():
    visual, text = Encoded(torch.randn(5, 4, 3), torch.ones(5, 4, dtype=torch.bool)), Encoded(torch.randn(6, 3, dtype=torch.float64))
    told = Told().score
    measured = lambda visual, text: visual.vectors.double().sum(1) @ text.vectors.T  # noqa: E731 - a score that says nothing
    for score, pair in ((told, PAIR), (measured, 8.0)):
        cost = block_cost(score, visual, text)
        assert cost == block_cost(DeviceScore(score, CPU), visual, text)
        assert cost.pair == pair
        assert cost.text == 24
        assert cost.visual == 52 + (0 if score is told else 4 * 3 * 8 + 3 * 8)


def test_consecutive_items_are_picked_without_a_copy():
    some = items(6)
    for rows, shared in (
        (torch.arange(2, 5), True),
        (slice(1, 4), True),
        (torch.tensor([2, 4]), False),
        (torch.tensor([], dtype=torch.long), True),
    ):
        picked = pick(some, rows)
        assert torch.equal(picked.vectors, some.vectors[rows])
        assert (picked.vectors.untyped_storage().data_ptr() == some.vectors.untyped_storage().data_ptr()) == shared
