"""Scores in blocks: independent of memory, within memory, and with the cost of items."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from visavis.core.blocking import ScoreCost
from visavis.core.encoded import Encoded
from visavis.core.errors import VisavisError
from visavis.losses.scoring import (
    DeviceScore,
    inference_block_cost,
    max_query_rows,
    score_matrix,
    score_query_rows,
    select_items,
)
from visavis.models.inference import score_indexed_pairs

PAIR = 1000.0
CPU = torch.device("cpu")


class DeclaredScore(nn.Module):
    """A score with a declared cost that records the shapes of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shapes: list[tuple[int, int]] = []

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost:
        return ScoreCost(inference_bytes=PAIR, training_bytes=2 * PAIR)

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
def test_scores_are_independent_of_memory(rows, columns, memory, direction):
    matcher, visual, text = DeclaredScore(), items(rows), items(columns)
    whole = matcher.score(visual, text).detach()
    matcher.shapes.clear()
    assert torch.equal(score_matrix(matcher.score, visual, text, memory), whole)
    assert all(PAIR * height * width <= memory for height, width in matcher.shapes)
    matcher.shapes.clear()
    parts = list(
        score_query_rows(
            DeviceScore(matcher.score, CPU),
            visual,
            text,
            direction,
            caller_bytes_per_pair=4.0,
            memory=2 * memory,
        )
    )
    assert all(PAIR * height * width <= memory for height, width in matcher.shapes)
    expected_rows = whole if direction == "i2t" else whole.T
    assert [rows for rows, _ in parts] == [rows for rows, _ in parts if rows.stop > rows.start]
    assert torch.equal(
        torch.cat([expected_rows[:0], *(block for _, block in parts)]), expected_rows
    )
    assert all(torch.equal(block, expected_rows[rows]) for rows, block in parts)


def test_scores_that_fit_take_one_call_without_graph():
    matcher, visual, text = DeclaredScore(), items(300), items(7)
    assert not score_matrix(matcher.score, visual, text).requires_grad
    assert matcher.shapes == [(300, 7)]
    matcher.shapes.clear()
    assert [
        rows
        for rows, _ in score_query_rows(
            matcher.score, visual, text, "i2t", caller_bytes_per_pair=4.0
        )
    ] == [
        slice(0, 256),
        slice(256, 300),
    ]
    assert matcher.shapes == [(256, 7), (44, 7)]


def test_max_query_rows_is_at_least_one():
    assert max_query_rows(1000, 10.0, 200_000) == 10
    assert max_query_rows(1000, 10.0, 1) == 1


def test_score_matrix_rejects_memory_below_one_pair():
    with pytest.raises(
        VisavisError,
        match=r"^memory: expected at least 1016 B to score one pair, got 900 B for blocks",
    ):
        score_matrix(DeclaredScore().score, items(3), items(4), 900)


@pytest.mark.parametrize("memory", [1100, 5000, None])
def test_score_indexed_pairs_stays_within_memory(memory):
    matcher, visual, text = DeclaredScore(), items(9), items(8)
    rows, columns = torch.randint(9, (30,)), torch.randint(8, (30,))
    found = score_indexed_pairs(matcher, visual, text, rows, columns, memory)
    torch.testing.assert_close(found, matcher.score(visual, text)[rows, columns].detach())
    assert max(pairs for pairs, _ in matcher.shapes[:-1]) == {1100: 1, 5000: 4, None: 30}[memory]
    assert score_indexed_pairs(matcher, visual, text, rows[:0], columns[:0]).shape == (0,)


def test_inference_block_cost_includes_items():
    visual, text = (
        Encoded(torch.randn(5, 4, 3), torch.ones(5, 4, dtype=torch.bool)),
        Encoded(torch.randn(6, 3, dtype=torch.float64)),
    )
    declared = DeclaredScore().score
    measured = lambda visual, text: visual.vectors.double().sum(1) @ text.vectors.T  # noqa: E731 - a score without a declared cost
    for score, pair in ((declared, PAIR), (measured, 8.0)):
        cost = inference_block_cost(score, visual, text)
        assert cost == inference_block_cost(DeviceScore(score, CPU), visual, text)
        assert cost.pair_bytes == pair
        assert cost.text_bytes == 24
        assert cost.visual_bytes == 52 + (0 if score is declared else 4 * 3 * 8 + 3 * 8)


def test_select_items_does_not_copy_consecutive_items():
    some = items(6)
    for rows, shared in (
        (torch.arange(2, 5), True),
        (slice(1, 4), True),
        (torch.tensor([2, 4]), False),
        (torch.tensor([], dtype=torch.long), True),
    ):
        picked = select_items(some, rows)
        assert torch.equal(picked.vectors, some.vectors[rows])
        assert (
            picked.vectors.untyped_storage().data_ptr() == some.vectors.untyped_storage().data_ptr()
        ) == shared
