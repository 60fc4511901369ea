"""The exact top k: it is what numpy finds by adding up in float64, ties and masks included, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visavis.errors import ShapeError, SpecError
from visavis.retrieval.exact import Exact


def oracle(rows: np.ndarray, queries: np.ndarray, top: int, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows by sorting all."""
    scores = (queries.astype(np.float64) @ rows.astype(np.float64).T).astype(np.float32)
    found = np.arange(len(rows)) if mask is None else np.flatnonzero(mask)
    order = np.argsort(-scores[:, found], axis=1, kind="stable")[:, :top]
    return np.take_along_axis(scores[:, found], order, 1), found[order]


def assert_found(exact: Exact, queries: np.ndarray, top: int, mask: np.ndarray | None = None) -> None:
    for one, other in zip(exact.search(queries, top, mask), oracle(exact.rows, queries, top, mask), strict=True):
        np.testing.assert_array_equal(one, other)


def unit(generator: np.random.Generator, *shape: int) -> np.ndarray:
    rows = generator.standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 150),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 200),
    st.sampled_from([None, 0.0, 0.1, 0.7]),
)
def test_it_finds_what_numpy_finds_among_many_ties(seed, rows, width, queries, top, share):
    generator = np.random.default_rng(seed)
    mask = None if share is None else generator.random(rows) < share
    small = generator.integers(-2, 3, (rows, width)).astype(np.float32)
    assert_found(Exact(small), generator.integers(-2, 3, (queries, width)).astype(np.float32), top, mask)


@pytest.mark.parametrize("top", [1, 10, 700])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_change_nothing(monkeypatch, top, masked):
    generator = np.random.default_rng(0)
    rows, queries = unit(generator, 3001, 48), unit(generator, 7, 48)
    rows[2000:] = rows[:1001]  # every one of these is a tie
    mask = generator.random(len(rows)) < 0.3 if masked else None
    for scores, candidates in ((2**21, 2**20), (7 * 64, 2**20), (7 * 320, 50)):
        monkeypatch.setattr("visavis.retrieval.exact.MOST_SCORES", scores)
        monkeypatch.setattr("visavis.retrieval.exact.MOST_CANDIDATES", candidates)
        assert_found(Exact(rows), queries, top, mask)


def test_memory_makes_the_blocks_smaller():
    rows = unit(np.random.default_rng(0), 5000, 16)
    exact = Exact(rows, memory="1MB")
    assert exact._height(64) < Exact(rows, memory="1GB")._height(64)
    assert_found(exact, rows[:64], 5)


def test_what_does_not_fit_is_said():
    exact = Exact(np.zeros((3, 2), np.float32))
    with pytest.raises(ShapeError, match=r"queries are of shape \[1, 3\], expected \[Q, 2\]"):
        exact.search(np.zeros((1, 3)), 1)
    with pytest.raises(SpecError, match="top is 0"):
        exact.search(np.zeros((1, 2)), 0)
    with pytest.raises(ShapeError, match="not finite"):
        exact.search(np.full((1, 2), np.nan), 1)
    with pytest.raises(ShapeError, match=r"mask is of shape \[2\], expected \[3\]"):
        exact.search(np.zeros((1, 2)), 1, np.ones(2, bool))
    with pytest.raises(ShapeError, match="float64"):
        Exact(np.zeros((3, 2)))
