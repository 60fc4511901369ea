"""Exact search equals a float64 search in numpy, with ties and masks, for all block sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visavis.core.errors import ShapeError, SpecError
from visavis.retrieval.stores import exact_search
from visavis.retrieval.stores.exact_search import (
    GROUP_ROWS,
    MAX_CODE,
    ExactSearch,
    Int8Pass,
    dot_kernels,
    open_int8_codes,
    write_int8_codes,
)


def reference_search(
    rows: np.ndarray, queries: np.ndarray, top: int, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows by sorting all scores."""
    scores = (queries.astype(np.float64) @ rows.astype(np.float64).T).astype(np.float32)
    found = np.arange(len(rows)) if mask is None else np.flatnonzero(mask)
    order = np.argsort(-scores[:, found], axis=1, kind="stable")[:, :top]
    return np.take_along_axis(scores[:, found], order, 1), found[order]


def assert_equals_reference(
    exact: ExactSearch, queries: np.ndarray, top: int, mask: np.ndarray | None = None
) -> None:
    for one, other in zip(
        exact.search(queries, top, mask),
        reference_search(exact.rows, queries, top, mask),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def unit(generator: np.random.Generator, *shape: int) -> np.ndarray:
    rows = generator.standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


AVX512 = ("skylake", "icelake", "genoa", "sapphire", "turin")
AVX_VNNI = ("alder", "sierra")


@pytest.fixture(params=[(), AVX512, AVX512 + AVX_VNNI], ids=["all", "avx-vnni", "avx2"])
def processors(request):
    """Compute products as this processor does, and as older ones do."""
    kernels = dot_kernels()
    disabled = [name for name in request.param if kernels.get_capabilities().get(name)]
    for name in disabled:
        kernels.disable_capability(name)
    exact_search.has_int8_instructions.cache_clear()
    yield
    for name in disabled:
        kernels.enable_capability(name)
    exact_search.has_int8_instructions.cache_clear()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 150),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 200),
    st.sampled_from([None, 0.0, 0.1, 0.7]),
)
def test_search_equals_numpy_with_ties(seed, rows, width, queries, top, share):
    generator = np.random.default_rng(seed)
    mask = None if share is None else generator.random(rows) < share
    small = generator.integers(-2, 3, (rows, width)).astype(np.float32)
    assert_equals_reference(
        ExactSearch(small),
        generator.integers(-2, 3, (queries, width)).astype(np.float32),
        top,
        mask,
    )


@pytest.mark.parametrize("top", [1, 10, 700])
@pytest.mark.parametrize("share", [None, 0.05, 0.3])
def test_search_does_not_depend_on_blocks(monkeypatch, top, share):
    generator = np.random.default_rng(0)
    rows, queries = unit(generator, 3001, 48), unit(generator, 7, 48)
    rows[2000:] = rows[:1001]  # all of these are ties
    mask = None if share is None else generator.random(len(rows)) < share
    for scores, candidates in ((2**21, 2**20), (7 * 64, 2**20), (7 * 320, 50)):
        monkeypatch.setattr("visavis.retrieval.stores.exact_search.MAX_SCORES", scores)
        monkeypatch.setattr("visavis.retrieval.stores.exact_search.MAX_CANDIDATES", candidates)
        assert_equals_reference(ExactSearch(rows), queries, top, mask)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("share", [None, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(
    "kind", ["plain", "large mean", "large dimension", "ties", "varying norms", "zeros"]
)
def test_search_with_int8_codes_is_exact(tmp_path, monkeypatch, kind, share):
    # Also few selected rows are read as codes.
    monkeypatch.setattr(exact_search, "MIN_ROWS", 64)
    generator = np.random.default_rng(1)
    rows, queries = unit(generator, 2011, 96), unit(generator, 9, 96)
    if kind == "large mean":
        rows += 3
    if kind == "large dimension":
        rows[:, 5] = generator.choice([-30, 30], len(rows))
    if kind == "ties":
        rows = rows[generator.integers(0, 40, len(rows))]
    if kind == "varying norms":
        rows *= np.exp(3 * generator.standard_normal((len(rows), 1))).astype(np.float32)
    if kind == "zeros":
        rows[40:] = 0
        queries[3] = 0
    write_int8_codes(tmp_path, rows)
    mask = None if share is None else generator.random(len(rows)) < share
    for top in (1, 10, 300):
        # One query and several take different products.
        for chosen in (queries, queries[:1]):
            exact = ExactSearch(rows, coarse=open_int8_codes(tmp_path))
            assert_equals_reference(exact, chosen, top, mask)


@pytest.mark.parametrize("queries", [1, 5])
def test_threads_change_no_result(monkeypatch, queries):
    monkeypatch.setattr(exact_search, "max_threads", lambda: 3)
    monkeypatch.setattr(exact_search, "MIN_ROWS_PER_THREAD", 100)
    generator = np.random.default_rng(3)
    rows = unit(generator, 3001, 96) * np.exp(3 * generator.standard_normal((3001, 1)))
    rows[2000:] = rows[:1001]
    rows = rows.astype(np.float32)
    for coarse in (None, Int8Pass.from_vectors(rows)):
        search = ExactSearch(rows, coarse=coarse)
        assert_equals_reference(search, unit(generator, queries, 96), 20)


@pytest.mark.parametrize(("setting", "expected"), [("1", 1), ("64", 3), ("", 3), ("many", 3)])
def test_threads_follow_the_environment(monkeypatch, setting, expected):
    monkeypatch.setattr("visavis.data.parallel.cpu_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert exact_search.max_threads.__wrapped__() == expected


@pytest.mark.parametrize("selectivity", [0.001, 0.01, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("chosen", ["random", "best", "worst"])
def test_filtered_search_equals_brute_force(selectivity, chosen):
    generator = np.random.default_rng(4)
    rows, queries = unit(generator, 9000, 64), unit(generator, 3, 64)
    # Filters that agree or disagree with the first query find all or none of its best rows.
    order = {
        "random": generator.random(9000),
        "best": -rows @ queries[0],
        "worst": rows @ queries[0],
    }
    mask = np.zeros(9000, bool)
    mask[np.argsort(order[chosen])[: round(selectivity * 9000)]] = True
    for search in (ExactSearch(rows), ExactSearch(rows, coarse=Int8Pass.from_vectors(rows))):
        for top in (1, 10, 2000):
            assert_equals_reference(search, queries, top, mask)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("dim", [64, 100, 512, 2048])
def test_products_of_the_largest_codes_are_exact(dim):
    signs = np.random.default_rng(4).choice([-1, 1], (GROUP_ROWS, dim)).astype(np.int8)
    codes = MAX_CODE * signs
    codes[0], codes[1] = MAX_CODE, -MAX_CODE
    coarse = exact_search.Int8Pass(codes, np.ones((4, 1), np.float32), np.zeros(dim, np.float32))
    for number in (1, 3):
        coarse.prepare(np.ones((number, dim), np.float32))
        expected = MAX_CODE * codes.astype(np.int64).sum(1, keepdims=True)
        # float32 holds integers up to 2**24. The bound allows for its rounding above.
        products = coarse.products(slice(0, GROUP_ROWS))
        assert products.shape == (GROUP_ROWS, number)
        assert np.allclose(products, expected, rtol=2**-24, atol=0)


@pytest.mark.usefixtures("processors")
def test_int8_error_is_within_a_tight_bound(tmp_path):
    generator = np.random.default_rng(2)
    rows, queries = unit(generator, 2048, 96), unit(generator, 5, 96)
    write_int8_codes(tmp_path, rows)
    coarse = open_int8_codes(tmp_path)
    coarse.prepare(queries)
    factor, offset, error = coarse.bounds(slice(0, 2048 // GROUP_ROWS))
    products = coarse.products(slice(0, 2048)).T.reshape(5, -1, GROUP_ROWS)
    score = queries.astype(np.float64) @ rows.astype(np.float64).T
    approximation = products * factor[..., None] + offset[..., None]
    deviation = np.abs(approximation - score.reshape(approximation.shape)).max(2)
    assert (deviation <= error).all()
    assert (deviation > error / 20).any() and error.max() < 0.03


def test_search_reads_rows_that_are_not_contiguous():
    rows = unit(np.random.default_rng(5), 3000, 128)
    for view in (rows[:, ::2], rows[:, :64], np.asfortranarray(rows)):
        assert_equals_reference(ExactSearch(view), view[:1].copy(), 5)
        assert_equals_reference(ExactSearch(view), view[:9].copy(), 5)


def test_search_blocks_follow_memory_limit(monkeypatch):
    rows = unit(np.random.default_rng(0), 5000, 16)
    blocks = list[slice]()
    find_candidates = exact_search._find_candidates
    monkeypatch.setattr(
        exact_search,
        "_find_candidates",
        lambda coarse, block, *rest: blocks.append(block) or find_candidates(coarse, block, *rest),
    )
    assert_equals_reference(ExactSearch(rows, memory="1GB"), rows[:64], 5)
    large = len(blocks)
    assert_equals_reference(ExactSearch(rows, memory="1MB"), rows[:64], 5)
    assert len(blocks) - large > large


def test_search_rejects_invalid_arguments():
    exact = ExactSearch(np.zeros((3, 2), np.float32))
    with pytest.raises(ShapeError, match=r"queries: expected shape \[Q, 2\], got \[1, 3\]"):
        exact.search(np.zeros((1, 3)), 1)
    with pytest.raises(SpecError, match="got 0"):
        exact.search(np.zeros((1, 2)), 0)
    with pytest.raises(ShapeError, match="got NaN or infinity"):
        exact.search(np.full((1, 2), np.nan), 1)
