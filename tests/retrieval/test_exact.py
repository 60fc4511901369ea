"""The exact top k: it is what numpy finds by adding up in float64, ties and masks included, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis.errors import ShapeError, SpecError
from visavis.retrieval.exact import GROUP, Exact
from visavis.retrieval.reduced import multiplies_int8, open_reduced, write_reduced


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


@pytest.mark.skipif(not multiplies_int8(), reason="this processor has no instructions for products of 8-bit numbers")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["plain", "far from zero", "one large number", "ties", "of many lengths", "zeros"])
def test_rows_of_8_bits_lose_nothing(tmp_path, kind, masked):
    generator = np.random.default_rng(1)
    rows, queries = unit(generator, 5011, 96), unit(generator, 9, 96)
    if kind == "far from zero":
        rows += 3
    if kind == "one large number":
        rows[:, 5] = generator.choice([-30, 30], len(rows))
    if kind == "ties":
        rows = rows[generator.integers(0, 40, len(rows))]
    if kind == "of many lengths":
        rows *= np.exp(3 * generator.standard_normal((len(rows), 1))).astype(np.float32)
    if kind == "zeros":
        rows[40:] = 0
        queries[3] = 0
    write_reduced(tmp_path, rows)
    mask = generator.random(len(rows)) < 0.3 if masked else None
    for top in (1, 10, 300):
        assert_found(Exact(rows, reduced=open_reduced(tmp_path)), queries, top, mask)


@pytest.mark.skipif(not multiplies_int8(), reason="this processor has no instructions for products of 8-bit numbers")
def test_a_score_is_within_its_bound_and_the_bound_is_of_use(tmp_path):
    generator = np.random.default_rng(2)
    rows, queries = unit(generator, 2048, 96), unit(generator, 5, 96)
    write_reduced(tmp_path, rows)
    reduced = open_reduced(tmp_path)
    reduced.prepare(torch.from_numpy(queries))
    groups = slice(0, 2048 // GROUP)
    factor, offset = reduced.scale(groups)
    products = reduced.products(slice(0, 2048)).view(5, -1, GROUP).double()
    score = torch.from_numpy(queries).double() @ torch.from_numpy(rows).double().T
    off = (products * factor[..., None] + offset[..., None]).view(5, -1).sub(score).abs().view(5, -1, GROUP).amax(2)
    error = reduced.error(groups)
    assert (off <= error).all()
    assert (off > error / 20).any() and error.max() < 0.03


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
