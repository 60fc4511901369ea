"""Exact top-k search: a coarse pass with a bounded error, then exact scores of all rows that the
bound does not exclude.

A score is the inner product of two float32 vectors, summed in float64 and rounded to float32. Equal
scores are in the order of rows. The coarse pass multiplies blocks of rows, in float32 or int8, and
bounds the error of its products for each group of ``GROUP_ROWS`` rows. The highest product of a
group minus the error is a lower bound of a score, so the k-th best of these bounds is a lower bound
of the k-th best score. Only rows whose upper bound is below it are excluded.

Int8 codes take a quarter of the bytes. Rows are shifted by their mean m and rounded with one step s per group,
$x = m + s c + e$. A query is rounded with its own step, $q = t d + f$. Then $<x, q> = <m, q> + s t <c, d> + <e, q> +
s <c, f>$. The product of the codes is exact. By Cauchy-Schwarz the rest is at most $|e| |q| + |s c| |f|$, of which the
maximum of each group is stored.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from visavis.core import storage
from visavis.core.memory_budget import MemoryLimit, budget_bytes, chunk_slices
from visavis.retrieval.stores.base import validate_queries

GROUP_ROWS = 32
"""Rows that share an error bound."""
# A few float32 operations change a product by less than this share of the product of the two norms.
ROUNDING_ERROR = 2.0**-20
# Largest relative error of one float32 operation.
UNIT_ROUNDOFF = 2.0**-24
# Norms are computed in float32. This factor turns them into upper bounds.
NORM_MARGIN = 1 + 1e-4
# With more candidates per query than 8 k + rows / 64, a second pass in float32 is faster than
# scoring them exactly.
MAX_CANDIDATES_PER_RESULT = 8
MAX_QUERIES, MAX_SCORES, MAX_CANDIDATES = 256, 2**21, 2**20
"""Queries scored together, scores of a block, and candidates held at once, whatever the memory
limit.
"""

CODES = "codes.npy"
SCALES = "scales.npy"
MEAN = "mean.npy"
MAX_CODE = 127
INT8_INSTRUCTIONS = ("icelake", "alder", "sierra", "neonsdot", "svesdot")
"""Names in numkong of processors whose instructions sum products of int8."""
# Of 100,000 rows of 512 dimensions, 16, 64 and 256 queries take 22, 70 and 290 ms by int8 codes, and 48, 105 and 310 ms in float32 on a
# Xeon with VNNI. Without its instructions, the products alone take 34, 116 and 530 ms, and 60, 130 and 420 ms in float32.
MAX_INT8_QUERIES, MAX_SERIAL_QUERIES = 64, 32
"""Queries up to which int8 codes are faster than float32, with such instructions and without."""
MIN_ROWS, MIN_DIM = 2**12, 64
"""Smaller collections and shorter vectors are not faster with int8 codes."""
CHUNK_ROWS = 2**10
MIN_ROWS_PER_THREAD = 2**15
# Of 1,000,000 rows of 512 dimensions, reading the codes of a tenth row by row takes as long as reading all of them (benchmarks/search.py
# --filtered). Of 100,000 rows, it takes half as long.
MAX_SELECTED_SHARE = 1 / 8
"""Share of rows that a filtered search reads one by one. Above it, all rows are read."""
MIN_EXTRA_RESULTS = 32
"""Results beyond the expected number, in a search of all rows that is filtered afterwards."""
SMALL_SEARCH_BYTES = 2**20
"""Memory that a search always uses. Reading the free memory takes as long as such a search."""


class _Float32Pass:
    """Coarse pass over the rows themselves. The error is that of summing D products (Higham,
    section 3.1).

    Its methods are documented in ``Int8Pass``.

    Args:
        rows: Vectors, float32, shape ``[N, D]``.
        max_norm: Upper bound of their norms, see ``max_row_norm``.
    """

    def __init__(self, rows: np.ndarray | _SelectedRows, max_norm: float):
        self.rows = rows
        self.max_norm = max_norm

    def prepare(self, queries: np.ndarray) -> None:
        """Set the queries."""
        dim = queries.shape[1]
        relative_error = dim * UNIT_ROUNDOFF / (1 - dim * UNIT_ROUNDOFF) + ROUNDING_ERROR
        self.queries = queries
        # Shape [queries, 1], which broadcasts to all groups.
        self.bound = np.float32(relative_error * self.max_norm) * _norms(queries)

    def products(self, rows: slice) -> np.ndarray:
        """Multiply some rows with the queries."""
        products = np.empty((_padded(rows.stop - rows.start), len(self.queries)), np.float32)
        # The transposed queries are a view. This order of factors is the faster one in OpenBLAS.
        np.matmul(self.rows[rows], self.queries.T, out=products[: rows.stop - rows.start])
        return products

    def bounds(self, groups: slice) -> _Bounds:
        """Return factor 1, offset 0, and the bound of the error of the products."""
        shape = len(self.queries), groups.stop - groups.start
        return (
            np.broadcast_to(np.float32(1), shape),
            np.zeros((1, 1), np.float32),
            np.broadcast_to(self.bound, shape),
        )


class _SelectedRows:
    """Some rows of an array, read when they are indexed."""

    def __init__(self, rows: np.ndarray, selected: np.ndarray):
        self.rows = rows
        self.selected = selected
        self.shape = len(selected), rows.shape[1]

    def __len__(self) -> int:
        return len(self.selected)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        selected: np.ndarray = self.rows[self.selected[rows]]
        return selected


class Int8Pass:
    """Coarse pass over int8 codes: products of blocks of rows with queries, and bounds of their
    error.

    Args:
        codes: Codes, int8, shape ``[N, D]`` with N a multiple of ``GROUP_ROWS``.
        scales: For each group: the step, and the maxima of |e|, |s c| and |x|, float32, shape ``[4,
            G]``.
        mean: Mean of the rows, float32, shape ``[D]``.
    """

    codes: np.ndarray | _SelectedRows

    def __init__(self, codes: np.ndarray, scales: np.ndarray, mean: np.ndarray):
        self.codes = codes
        self.mean = mean.astype(np.float64)
        self.scales = scales
        self.step, self.error_norm, self.code_norm, self.row_norm = scales[:, None]

    @classmethod
    def from_vectors(cls, vectors: np.ndarray) -> Int8Pass:
        """Quantize vectors in memory."""
        codes = np.empty(_codes_shape(vectors), np.int8)
        return cls(codes, *_quantize(vectors, codes))

    def prepare(self, queries: np.ndarray) -> None:
        """Set and quantize the queries, ``[Q, D]``."""
        step = np.abs(queries).max(1, keepdims=True) / np.float32(MAX_CODE)
        # A query of zeros has step 0. Dividing by it would give NaN codes.
        step[step == 0] = 1.0
        codes = np.rint(queries / step)
        self.query_norm = _norms(queries)
        self.query_error = _norms(queries - codes * step)
        self.query_step = step
        self.query_codes = codes.astype(np.int8)
        self.offset = (queries @ self.mean).astype(np.float32)[:, None]

    def products(self, rows: slice) -> np.ndarray:
        """Multiply the codes of some rows with the codes of the queries, ``[N, Q]``, with N a
        multiple of ``GROUP_ROWS``.
        """
        codes = self.codes[rows.start : rows.start + _padded(rows.stop - rows.start)]
        num_parts = min(max_threads(), len(codes) // MIN_ROWS_PER_THREAD) or 1
        if num_parts == 1:
            return _int8_products(codes, self.query_codes)
        parts = chunk_slices(len(codes), -(-len(codes) // num_parts))
        with ThreadPoolExecutor(num_parts) as pool:
            work = pool.map(lambda part: _int8_products(codes[part], self.query_codes), parts)
            return np.concatenate(list(work))

    @property
    def max_queries(self) -> int:
        """Number of queries up to which codes are faster than float32."""
        return MAX_INT8_QUERIES if has_int8_instructions() else MAX_SERIAL_QUERIES

    def bounds(self, groups: slice) -> _Bounds:
        """Read the conversion of products to scores, ``factor * product + offset``, and bound its
        error.
        """
        row_error = self.error_norm[:, groups] + ROUNDING_ERROR * self.row_norm[:, groups]
        error = self.query_norm * row_error + self.query_error * self.code_norm[:, groups]
        return self.query_step * self.step[:, groups], self.offset, error


class _SelectedInt8Pass(Int8Pass):
    """Coarse pass over some rows of another pass. Rows of a group have steps of their own."""

    def __init__(self, whole: Int8Pass, selected: np.ndarray):
        assert isinstance(whole.codes, np.ndarray)
        self.mean = whole.mean
        # The last row fills its group.
        padded = np.pad(selected, (0, -len(selected) % GROUP_ROWS), "edge")
        self.codes = _SelectedRows(whole.codes, padded)
        scales = whole.scales[:, padded // GROUP_ROWS]
        norms = scales[1:].reshape(3, -1, GROUP_ROWS).max(2)
        self.row_step = scales[0, :, None]
        self.step = np.ones((1, norms.shape[1]), np.float32)
        self.error_norm, self.code_norm, self.row_norm = norms[:, None]

    def products(self, rows: slice) -> np.ndarray:
        """Multiply the codes of the queries with some rows, times the step of each row."""
        products = super().products(rows)
        return products * self.row_step[rows.start : rows.start + len(products)]


_Bounds: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Factor, ``[Q, G]``, offset, ``[Q, 1]``, and error, ``[Q, G]``, of products."""


def _padded(num_rows: int) -> int:
    """Number of rows in whole groups."""
    return -(-num_rows // GROUP_ROWS) * GROUP_ROWS


def _norms(rows: np.ndarray) -> np.ndarray:
    """Upper bounds of the norms of float32 rows, shape ``[N, 1]``."""
    return np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None] * np.float32(NORM_MARGIN)


def _int8_products(codes: np.ndarray, query_codes: np.ndarray) -> np.ndarray:
    """Inner products of codes by numkong, ``[N, Q]``: int32, or float32 for one query."""
    kernels = dot_kernels()
    # Packed queries are multiplied in blocks, which takes 1.3 times as long for a single query
    # without AVX-512.
    products = (
        kernels.cdist(codes, query_codes, "dot", out_dtype="float32")
        if len(query_codes) == 1
        else kernels.dots_packed(codes, kernels.dots_pack(query_codes))
    )
    return np.asarray(products)


class ExactSearch:
    """Exact search in float32 rows in memory or mapped from a file. One thread searches at a time,
    because the coarse pass keeps the state of a query.

    Args:
        rows: Vectors, float32, shape ``[N, D]``.
        coarse: A faster, less precise first pass. Queries for which it leaves too many candidates
            are repeated in float32.
        memory: Memory limit of blocks of scores and of rows that are scored exactly.
        max_norm: Upper bound of the norms of the rows, see ``max_row_norm``. None: it is computed
            before the first float32 pass.
    """

    def __init__(
        self,
        rows: np.ndarray | _SelectedRows,
        *,
        coarse: Int8Pass | None = None,
        memory: MemoryLimit = None,
        max_norm: float | None = None,
    ):
        # A plain array, because each slice of a np.memmap runs Python code.
        self.rows = rows if isinstance(rows, _SelectedRows) else np.asarray(rows)
        self.coarse = coarse
        self.memory = memory
        self._max_norm = max_norm

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _float32_pass(self) -> _Float32Pass:
        return _Float32Pass(
            self.rows, max_row_norm(self.rows) if self._max_norm is None else self._max_norm
        )

    def search(
        self, queries: np.ndarray, top: int, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the scores and rows of the highest inner products, ``[Q, K]``, best first, equal
        scores in the order of rows. K is at most ``top``, and the mask ``[N]`` allows rows.
        """
        validate_queries(queries, top, self.rows.shape[1])
        queries = np.ascontiguousarray(queries, np.float32)
        num_allowed = len(self.rows) if mask is None else int(np.count_nonzero(mask))
        top = min(top, num_allowed)
        if mask is None or num_allowed == len(self.rows):
            return self._search(queries, top)
        if num_allowed <= MAX_SELECTED_SHARE * len(self.rows):
            return self._search_selected(queries, top, np.flatnonzero(mask))
        # With 1.5 times the expected number of results, few searches of all rows find too few that
        # are allowed.
        extended = 3 * top * len(self.rows) // (2 * num_allowed) + MIN_EXTRA_RESULTS
        if extended > len(self.rows) // MIN_EXTRA_RESULTS:
            return self._search(queries, top, mask)
        all_scores, all_rows = self._search(queries, extended)
        allowed = mask[all_rows]
        # Allowed results first, each part in its order.
        order = np.argsort(~allowed, axis=1, kind="stable")[:, :top]
        scores, rows = (np.take_along_axis(all_, order, 1) for all_ in (all_scores, all_rows))
        if len(missed := np.flatnonzero(allowed.sum(1) < top)):
            scores[missed], rows[missed] = self._search(queries[missed], top, mask)
        return scores, rows

    def _search_selected(
        self, queries: np.ndarray, top: int, selected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search some rows, in ascending order, without reading others."""
        assert isinstance(self.rows, np.ndarray)
        coarse = None
        max_norm = self._max_norm
        if self.coarse is not None and len(selected) >= MIN_ROWS:
            coarse = _SelectedInt8Pass(self.coarse, selected)
        else:
            max_norm = self._float32_pass.max_norm
        rows = _SelectedRows(self.rows, selected)
        search = ExactSearch(rows, coarse=coarse, memory=self.memory, max_norm=max_norm)
        scores, found = search._search(queries, top)
        return scores, selected[found]

    def _search(
        self, queries: np.ndarray, top: int, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search with valid queries and at most as many results as rows."""
        scores = np.empty((len(queries), top), np.float32)
        rows = np.empty((len(queries), top), np.int64)
        # A second pass would read all selected rows one by one.
        share = 4 if isinstance(self.rows, _SelectedRows) else 64
        max_candidates = max(MAX_CANDIDATES_PER_RESULT * top, len(self.rows) // share)
        for chunk in chunk_slices(len(queries) if top else 0, MAX_QUERIES):
            unresolved = np.arange(chunk.start, chunk.stop)
            if self.coarse is not None and len(unresolved) <= self.coarse.max_queries:
                best, given_up = self._run_pass(
                    self.coarse, queries[chunk], top, mask, max_candidates
                )
                scores[chunk], rows[chunk] = best.to_arrays()
                unresolved = unresolved[given_up]
            if len(unresolved):
                best, _ = self._run_pass(self._float32_pass, queries[unresolved], top, mask, None)
                scores[unresolved], rows[unresolved] = best.to_arrays()
        return scores, rows

    def _run_pass(
        self,
        coarse: _Float32Pass | Int8Pass,
        queries: np.ndarray,
        top: int,
        mask: np.ndarray | None,
        max_candidates: int | None,
    ) -> tuple[_BestRows, np.ndarray]:
        """The best rows, and which queries were given up because they had more than
        ``max_candidates``.
        """
        score_bytes = 16 * len(queries) * len(self.rows)
        budget = (
            SMALL_SEARCH_BYTES
            if score_bytes <= SMALL_SEARCH_BYTES
            else budget_bytes(self.memory, "cpu")
        )
        best = _BestRows(self.rows, queries, top, budget)
        candidates = list[_Candidates]()
        coarse.prepare(queries)
        # bound[q] holds the k best lower bounds of scores, the lowest one first. Infinity gives a
        # query up.
        bound = np.full((len(queries), top), -np.inf, np.float32)
        unresolved = np.zeros(len(queries), bool)
        # A multiple of GROUP_ROWS, as far as memory allows.
        block_groups = min(MAX_SCORES, budget // 16) // len(queries) // GROUP_ROWS
        blocks = chunk_slices(len(self.rows), max(block_groups, 1) * GROUP_ROWS)
        for block in blocks:
            allowed = None if mask is None else mask[block]
            if allowed is None or allowed.any():
                bound, block_candidates = _find_candidates(coarse, block, allowed, bound)
                candidates.append(block_candidates)
            if candidates and (
                block is blocks[-1]
                or sum(len(query) for query, _, _ in candidates) > MAX_CANDIDATES
            ):
                # The candidates of the only block have the final bound already.
                one_block = len(blocks) == 1
                remaining = candidates[0] if one_block else _prune(candidates, bound[:, 0])
                if max_candidates is not None and len(remaining[0]) > max_candidates:
                    counts = np.bincount(remaining[0], minlength=len(queries))
                    unresolved |= counts > max_candidates
                    bound[unresolved] = np.inf
                    remaining = _prune([remaining], bound[:, 0])
                candidates = [remaining]
                if block is blocks[-1] or len(remaining[0]) > MAX_CANDIDATES // 2:
                    best.add(remaining[0], remaining[1])
                    candidates = []
        return best, np.flatnonzero(unresolved)


_Candidates: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pairs of a query and a row, and an upper bound of the score of each."""


def _find_candidates(
    coarse: _Float32Pass | Int8Pass, block: slice, allowed: np.ndarray | None, bound: np.ndarray
) -> tuple[np.ndarray, _Candidates]:
    """The updated lower bounds, shape ``[Q, K]``, the lowest one first, and the candidates of a
    block.
    """
    products = coarse.products(block)
    num_rows = block.stop - block.start
    lowest = -np.inf if products.dtype.kind == "f" else np.iinfo(products.dtype).min
    # In place, because the products are not used elsewhere.
    products[num_rows:] = lowest
    if allowed is not None:
        products[:num_rows][~allowed] = lowest
    products = products.reshape(-1, GROUP_ROWS, products.shape[1])
    first = block.start // GROUP_ROWS
    factor, offset, error = coarse.bounds(slice(first, first + len(products)))
    # Shape [queries, groups].
    shift = offset + error
    highest = products.max(1).T * factor + shift
    lower_bounds = np.concatenate([bound, highest - 2 * error], 1)
    top = bound.shape[1]
    bound = np.partition(lower_bounds, -top, axis=1)[:, -top:]
    # Groups that may hold one of the k best rows of a query.
    query, group = np.nonzero(highest >= bound[:, :1])
    # Shape [pairs, GROUP_ROWS].
    upper_bound = products[group, :, query] * factor[query, group, None] + shift[query, group, None]
    pair, column = np.nonzero(upper_bound >= bound[query, :1])
    row = group[pair] * GROUP_ROWS + column
    # The last group may be padded.
    is_valid = row < num_rows
    if allowed is not None:
        is_valid &= allowed[np.minimum(row, num_rows - 1)]
    pair = pair[is_valid]
    column = column[is_valid]
    row = row[is_valid]
    return bound, (query[pair], row + block.start, upper_bound[pair, column])


def _prune(candidates: Sequence[_Candidates], bound: np.ndarray) -> _Candidates:
    """The candidates that can reach the bound of their query, shape ``[Q]``."""
    query, row, upper_bound = (np.concatenate(parts) for parts in zip(*candidates, strict=True))
    is_candidate = upper_bound >= bound[query]
    return query[is_candidate], row[is_candidate], upper_bound[is_candidate]


def exact_scores(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the exact scores of some rows for one query: summed in float64, float32, ``[N]``."""
    # einsum sums every row in the same order, so that equal rows have equal scores.
    scores: np.ndarray = np.einsum(
        "nd,d->n", rows.astype(np.float64), query.astype(np.float64)
    ).astype(np.float32)
    return scores


class _BestRows:
    """The best rows of each query so far, by exact score."""

    def __init__(
        self, rows: np.ndarray | _SelectedRows, queries: np.ndarray, top: int, budget: int
    ):
        self.rows = rows
        self.queries = queries.astype(np.float64)
        self.top = top
        self.chunk_rows = max(min(budget // (16 * rows.shape[1]), 2**14), 1)
        # One entry per kept pair of a query and a row, ordered by query, then best first.
        self.query = np.empty(0, np.int64)
        self.row = np.empty(0, np.int64)
        self.score = np.empty(0, np.float32)

    def add(self, query: np.ndarray, row: np.ndarray) -> None:
        """Score candidates and keep the best of all so far."""
        # Rows of a query are in order, because blocks are.
        order = np.argsort(query, kind="stable")
        query = query[order]
        row = row[order]
        # Candidates of query q are starts[q] to starts[q + 1].
        starts = np.searchsorted(query, np.arange(len(self.queries) + 1))
        scores = [
            exact_scores(
                self.rows[row[starts[number] + chunk.start : starts[number] + chunk.stop]],
                self.queries[number],
            )
            for number in range(len(self.queries))
            for chunk in chunk_slices(starts[number + 1] - starts[number], self.chunk_rows)
        ]
        query = np.concatenate([self.query, query])
        row = np.concatenate([self.row, row])
        score = np.concatenate([self.score, *scores])
        order = np.lexsort((row, -score, query))
        query = query[order]
        row = row[order]
        score = score[order]
        # Position within the entries of a query, which are sorted by query.
        rank = np.arange(len(query)) - np.searchsorted(query, query)
        is_best = rank < self.top
        self.query = query[is_best]
        self.row = row[is_best]
        self.score = score[is_best]

    def to_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows, both ``[Q, K]``. Queries that were given up have zeros."""
        scores = np.zeros((len(self.queries), self.top), np.float32)
        rows = np.zeros((len(self.queries), self.top), np.int64)
        rank = np.arange(len(self.query)) - np.searchsorted(self.query, self.query)
        scores[self.query, rank] = self.score
        rows[self.query, rank] = self.row
        return scores, rows


def max_row_norm(rows: np.ndarray | _SelectedRows) -> float:
    """Compute an upper bound of the norms of rows, on which the error of a float32 pass depends."""
    chunks = chunk_slices(len(rows), 2**12)
    return max((float(_norms(rows[chunk]).max()) for chunk in chunks), default=0.0)


@cache
def dot_kernels() -> Any:
    """Return numkong, which multiplies int8 codes exactly on any processor. None: it is not
    installed.
    """
    try:
        import numkong
    except ImportError:
        return None
    return numkong


@cache
def has_int8_instructions() -> bool:
    """Check whether the processor has instructions that sum products of int8."""
    capabilities = dot_kernels().get_capabilities()
    return any(capabilities.get(name, False) for name in INT8_INSTRUCTIONS)


@cache
def max_threads() -> int:
    """Maximum number of threads of a product: the cores of the process, or OMP_NUM_THREADS, which
    also limits the products of numpy.
    """
    from visavis.data.parallel import cpu_cores

    setting = os.environ.get("OMP_NUM_THREADS", "")
    return min(cpu_cores(), max(int(setting), 1)) if setting.isdecimal() else cpu_cores()


def is_int8_faster(rows: int, embedding_dim: int) -> bool:
    """Check whether int8 codes make a search faster on this machine."""
    return rows >= MIN_ROWS and embedding_dim >= MIN_DIM and has_int8_products()


def has_int8_products() -> bool:
    """Check for fast products of int8 codes."""
    return dot_kernels() is not None


def write_int8_codes(folder: Path, vectors: np.ndarray) -> None:
    """Write the int8 codes of vectors into a folder that readers do not see yet."""
    storage.create_array(folder / CODES, shape=_codes_shape(vectors), dtype="int8")
    codes = storage.current_disk().map_array(folder / CODES)
    scales, mean = _quantize(vectors, codes)
    codes.flush()  # type: ignore[attr-defined]
    storage.write_array(folder / SCALES, scales)
    storage.write_array(folder / MEAN, mean)


def open_int8_codes(folder: Path) -> Int8Pass:
    """Map the files of ``write_int8_codes``."""
    codes = storage.read_array(folder / CODES, dimensions=2, kinds="i", memory_map=True)
    return Int8Pass(
        codes,
        storage.read_array(folder / SCALES, dimensions=2),
        storage.read_array(folder / MEAN, dimensions=1),
    )


def _codes_shape(vectors: np.ndarray) -> tuple[int, int]:
    """Shape of the codes of vectors, padded to whole groups."""
    return _padded(len(vectors)), vectors.shape[1]


def _quantize(vectors: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill the codes of vectors. Return the scales and the mean of ``Int8Pass``."""
    chunks = chunk_slices(len(vectors), CHUNK_ROWS)
    total = sum(
        (np.sum(vectors[chunk], 0, np.float64) for chunk in chunks), np.zeros(vectors.shape[1])
    )
    mean = np.asarray(total / max(len(vectors), 1), np.float32)
    scales = np.empty((4, len(codes) // GROUP_ROWS), np.float32)
    dim = vectors.shape[1]
    for chunk in chunks:
        num_rows = chunk.stop - chunk.start
        # Padded with zeros to whole groups, shape [groups, GROUP_ROWS, D].
        shifted = np.zeros((_padded(num_rows) // GROUP_ROWS, GROUP_ROWS, dim), np.float32)
        np.subtract(vectors[chunk], mean, out=shifted.reshape(-1, dim)[:num_rows])
        step = np.abs(shifted).max((1, 2), keepdims=True) / np.float32(MAX_CODE)
        # A group whose rows all equal the mean has step 0. Dividing by it would give NaN codes.
        step[step == 0] = 1.0
        chunk_codes = np.rint(shifted / step)
        rounded = chunk_codes * step
        # Maxima of |e|, of |s c|, and of a bound of |x| + |m|, because products with both are
        # rounded.
        norms = [
            _norms(rows.reshape(-1, dim)).reshape(-1, GROUP_ROWS).max(1)
            for rows in (shifted - rounded, rounded, shifted)
        ]
        norms[2] += 2 * _norms(mean[None])[0]
        first = chunk.start // GROUP_ROWS
        codes[chunk.start :][: _padded(num_rows)] = chunk_codes.reshape(-1, dim)
        scales[:, first : first + len(shifted)] = np.stack([step[:, 0, 0], *norms])
    return scales, mean
