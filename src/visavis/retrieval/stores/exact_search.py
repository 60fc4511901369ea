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

import warnings
from collections import deque
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.blocking import chunk_slices
from visavis.core.memory_budget import MemoryLimit, budget_bytes
from visavis.data.parallel import map_in_order
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
MAX_KERNEL_QUERIES, MAX_INT8_KERNEL_QUERIES = 4, 16
"""Queries up to which numkong is faster than the matrix product of torch: with VNNI or in float32,
and int8 codes compared with float32 without VNNI.
"""
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

    def prepare(self, queries: Tensor) -> None:
        """Set the queries."""
        dim = queries.shape[1]
        relative_error = dim * UNIT_ROUNDOFF / (1 - dim * UNIT_ROUNDOFF) + ROUNDING_ERROR
        self.queries = queries
        # Shape [queries, 1], which broadcasts to all groups.
        self.bound = (relative_error * self.max_norm * queries.norm(dim=1) * NORM_MARGIN)[:, None]

    def products(self, rows: slice) -> Tensor:
        """Multiply the queries with some rows."""
        if len(self.queries) <= MAX_KERNEL_QUERIES and dot_kernels() is not None:
            return _kernel_products(self.queries, self.rows[rows])
        return self.queries @ shared_tensor(self.rows[rows]).T

    def bounds(self, groups: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return factor 1, offset 0, and the bound of the error of the products."""
        return torch.ones(1, 1), torch.zeros(1, 1), self.bound


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
        self.step, self.error_norm, self.code_norm, self.row_norm = shared_tensor(scales)[:, None]

    @classmethod
    def from_vectors(cls, vectors: np.ndarray) -> Int8Pass:
        """Quantize vectors in memory.

        Args:
            vectors: Vectors, float32, shape ``[N, D]``.

        Returns:
            The coarse pass.
        """
        codes = np.empty(_codes_shape(vectors), np.int8)
        return cls(codes, *_quantize(vectors, codes))

    def prepare(self, queries: Tensor) -> None:
        """Set and quantize the queries.

        Args:
            queries: Query vectors, float32, shape ``[Q, D]``.
        """
        # numpy, because torch takes three times as long for a single query.
        array = queries.numpy()
        step = np.abs(array).max(1, keepdims=True) / np.float32(MAX_CODE)
        # A query of zeros has step 0. Dividing by it would give NaN codes.
        step[step == 0] = 1.0
        codes = np.rint(array / step)
        norms = _norms(array), _norms(array - codes * step), step
        self.query_norm, self.query_error, self.query_step = map(torch.from_numpy, norms)
        self.query_codes = torch.from_numpy(codes.astype(np.int8))
        self.offset = torch.from_numpy((array @ self.mean).astype(np.float32)[:, None])

    def products(self, rows: slice) -> Tensor:
        """Multiply the codes of the queries with those of some rows.

        Args:
            rows: Rows to multiply.

        Returns:
            Products, shape ``[Q, N]``.
        """
        if dot_kernels() is not None and (
            len(self.query_codes) <= MAX_KERNEL_QUERIES or not supports_int8_matmul()
        ):
            return _kernel_products(self.query_codes, self.codes[rows])
        # The codes are padded to whole groups.
        stop = -(-rows.stop // GROUP_ROWS) * GROUP_ROWS
        codes = shared_tensor(self.codes[rows.start : stop])
        return torch._int_mm(self.query_codes, codes.T)[:, : rows.stop - rows.start]

    @property
    def max_queries(self) -> int:
        """Number of queries up to which codes are faster than float32."""
        return MAX_QUERIES if supports_int8_matmul() else MAX_INT8_KERNEL_QUERIES

    def bounds(self, groups: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Read the conversion of products to scores, ``factor * product + offset``, and bound its
        error.

        Args:
            groups: Groups of rows.

        Returns:
            Factor, offset, and largest distance from the exact scores, of shapes that broadcast to
            ``[Q, G]``.
        """
        row_error = self.error_norm[:, groups] + ROUNDING_ERROR * self.row_norm[:, groups]
        error = self.query_norm * row_error + self.query_error * self.code_norm[:, groups]
        return self.query_step * self.step[:, groups], self.offset, error


class _SelectedInt8Pass(Int8Pass):
    """Coarse pass over some rows of another pass. Rows of a group have steps of their own."""

    def __init__(self, whole: Int8Pass, selected: np.ndarray):
        assert isinstance(whole.codes, np.ndarray)
        self.codes = _SelectedRows(whole.codes, selected)
        self.mean = whole.mean
        # The last row fills its group.
        padded = np.pad(selected, (0, -len(selected) % GROUP_ROWS), "edge")
        # numpy, because torch takes several times as long.
        scales = whole.scales[:, padded // GROUP_ROWS]
        norms = scales[1:].reshape(3, -1, GROUP_ROWS).max(2)
        self.row_step = torch.from_numpy(scales[0])[: len(selected)]
        self.step = torch.ones(1, norms.shape[1])
        self.error_norm, self.code_norm, self.row_norm = torch.from_numpy(norms)[:, None]

    def products(self, rows: slice) -> Tensor:
        """Multiply the codes of the queries with some rows, times the step of each row."""
        return super().products(rows).float() * self.row_step[rows]


def _norms(rows: np.ndarray) -> np.ndarray:
    """Upper bounds of the norms of float32 rows, shape ``[N, 1]``."""
    return np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None] * np.float32(NORM_MARGIN)


def _kernel_products(queries: Tensor, rows: np.ndarray) -> Tensor:
    """Inner products of a few queries with rows by numkong, float32, shape ``[Q, N]``. Each thread
    multiplies a part of the rows.
    """
    products = torch.empty(len(queries), len(rows))
    rows_per_thread = -(-len(rows) // torch.get_num_threads())
    parts = chunk_slices(len(rows), max(rows_per_thread, MIN_ROWS_PER_THREAD))

    def multiply(part: slice) -> None:
        block = np.ascontiguousarray(rows[part])
        result = dot_kernels().cdist(queries.numpy(), block, "dot", out_dtype="float32")
        products[:, part] = torch.from_numpy(np.asarray(result))

    if len(parts) == 1:
        multiply(parts[0])
    else:
        deque(map_in_order(multiply, parts, threads=len(parts)), maxlen=0)
    return products


class ExactSearch:
    """Exact search in float32 rows in memory or mapped from a file.

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
        self.rows = rows
        self.coarse = coarse
        self.memory = memory
        self._max_norm = max_norm

    @cached_property
    def _float32_pass(self) -> _Float32Pass:
        return _Float32Pass(
            self.rows, max_row_norm(self.rows) if self._max_norm is None else self._max_norm
        )

    def search(
        self, queries: np.ndarray, top: int, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the rows with the highest inner products.

        Args:
            queries: Query vectors, shape ``[Q, D]``.
            top: Maximum number of results per query.
            mask: Rows that may be returned, bool, shape ``[N]``. None: all rows.

        Returns:
            Scores and rows, both of shape ``[Q, K]``, best first, equal scores in the order of
            rows. K is the smaller of ``top`` and the number of rows.

        Raises:
            ShapeError: If the shape of the queries is wrong, or a query is not finite.
            SpecError: If ``top`` is below 1.
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
        coarse.prepare(torch.from_numpy(queries))
        # bound[q] holds the k best lower bounds of scores, highest first. Infinity gives a query
        # up.
        bound = torch.full((len(queries), top), -torch.inf)
        unresolved = torch.zeros(len(queries), dtype=torch.bool)
        # A multiple of GROUP_ROWS, as far as memory allows.
        block_groups = min(MAX_SCORES, budget // 16) // len(queries) // GROUP_ROWS
        blocks = chunk_slices(len(self.rows), max(block_groups, 1) * GROUP_ROWS)
        for block in blocks:
            allowed = None if mask is None else torch.from_numpy(mask[block])
            if allowed is None or allowed.any():
                bound, block_candidates = _find_candidates(coarse, block, allowed, bound)
                candidates.append(block_candidates)
            if candidates and (
                block is blocks[-1]
                or sum(len(query) for query, _, _ in candidates) > MAX_CANDIDATES
            ):
                # The candidates of the only block have the final bound already.
                one_block = len(blocks) == 1
                remaining = candidates[0] if one_block else _prune(candidates, bound[:, -1])
                if max_candidates is not None and len(remaining[0]) > max_candidates:
                    counts = torch.bincount(remaining[0], minlength=len(queries))
                    unresolved |= counts > max_candidates
                    bound[unresolved] = torch.inf
                    remaining = _prune([remaining], bound[:, -1])
                candidates = [remaining]
                if block is blocks[-1] or len(remaining[0]) > MAX_CANDIDATES // 2:
                    best.add(remaining[0].numpy(), remaining[1].numpy())
                    candidates = []
        return best, unresolved.numpy()


_Candidates: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Pairs of a query and a row, and an upper bound of the score of each."""


def _find_candidates(
    coarse: _Float32Pass | Int8Pass, block: slice, allowed: Tensor | None, bound: Tensor
) -> tuple[Tensor, _Candidates]:
    """The updated lower bounds, shape ``[Q, K]``, highest first, and the candidates of a block."""
    products = coarse.products(block)
    lowest = -torch.inf if products.is_floating_point() else torch.iinfo(products.dtype).min
    if allowed is not None:
        # In place, because the products are not used elsewhere.
        products.masked_fill_(~allowed, lowest)
    num_queries, num_rows = products.shape
    if num_rows % GROUP_ROWS:
        products = torch.nn.functional.pad(products, (0, -num_rows % GROUP_ROWS), value=lowest)
    products = products.view(num_queries, -1, GROUP_ROWS)
    first = block.start // GROUP_ROWS
    num_groups = products.shape[1]
    factor, offset, error = coarse.bounds(slice(first, first + num_groups))
    # Shape [queries, groups].
    shift = offset + error
    highest = products.amax(2) * factor + shift
    bound = torch.cat([bound, highest - 2 * error], 1).topk(bound.shape[1], dim=1).values
    # Groups that may hold one of the k best rows of a query.
    query, group = (highest >= bound[:, -1:]).nonzero(as_tuple=True)
    pair_factor, pair_shift = (
        value.expand(num_queries, num_groups)[query, group][:, None] for value in (factor, shift)
    )
    # Shape [pairs, GROUP_ROWS].
    upper_bound = products[query, group] * pair_factor + pair_shift
    pair, column = (upper_bound >= bound[query, -1:]).nonzero(as_tuple=True)
    row = group[pair] * GROUP_ROWS + column
    # The last group may be padded.
    is_valid = row < num_rows
    if allowed is not None:
        is_valid &= allowed[row.clamp(max=num_rows - 1)]
    pair = pair[is_valid]
    column = column[is_valid]
    row = row[is_valid]
    return bound, (query[pair], row + block.start, upper_bound[pair, column])


def _prune(candidates: Sequence[_Candidates], bound: Tensor) -> _Candidates:
    """The candidates that can reach the bound of their query, shape ``[Q]``."""
    query, row, upper_bound = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    is_candidate = upper_bound >= bound[query]
    return query[is_candidate], row[is_candidate], upper_bound[is_candidate]


def exact_scores(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the exact scores of some rows for one query.

    Args:
        rows: Vectors, float32, shape ``[N, D]``.
        query: Query vector, float32 or float64, shape ``[D]``.

    Returns:
        Scores, float32, shape ``[N]``.
    """
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
    """Compute an upper bound of the norms of rows, on which the error of a float32 pass depends.

    Args:
        rows: Vectors, float32, shape ``[N, D]``.

    Returns:
        The bound, 0 without rows.
    """
    chunks = (shared_tensor(rows[chunk]) for chunk in chunk_slices(len(rows), 2**12))
    return max((float(chunk.norm(dim=1).max()) for chunk in chunks), default=0.0) * NORM_MARGIN


def shared_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor that shares its memory.

    Args:
        array: An array, which may be a read-only map of a file.

    Returns:
        The tensor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a read-only array must not be written
        return torch.from_numpy(np.ascontiguousarray(array))


@cache
def dot_kernels() -> Any:
    """Return numkong, whose inner products of one query with many rows are limited by memory on any
    processor.

    Returns:
        The module. None if it is not installed.
    """
    try:
        import numkong
    except ImportError:
        return None
    return numkong


@cache
def supports_int8_matmul() -> bool:
    """Check whether the processor has int8 instructions (VNNI, AMX) that make torch faster, with
    exact results.

    Returns:
        Whether int8 codes can be used.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    if not any(
        capabilities.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8")
    ) or not hasattr(torch, "_int_mm"):
        return False
    largest_codes = torch.full((GROUP_ROWS, MIN_DIM), MAX_CODE, dtype=torch.int8)
    # Without VNNI, the kernels of some processors saturate sums of two products in int16.
    return all(
        bool(
            (
                torch._int_mm(sign * largest_codes, largest_codes.T) == sign * MIN_DIM * MAX_CODE**2
            ).all()
        )
        for sign in (1, -1)
    )


def is_int8_faster(rows: int, embedding_dim: int) -> bool:
    """Check whether int8 codes make a search faster on this machine.

    Args:
        rows: Number of vectors.
        embedding_dim: Dimension of the vectors.

    Returns:
        Whether codes are worth storing.
    """
    return rows >= MIN_ROWS and embedding_dim >= MIN_DIM and has_int8_products()


def has_int8_products() -> bool:
    """Check for fast products of int8 codes, by numkong or by instructions of the processor.

    Returns:
        Whether int8 codes can be used.
    """
    return dot_kernels() is not None or supports_int8_matmul()


def write_int8_codes(folder: Path, vectors: np.ndarray) -> None:
    """Write the int8 codes of vectors into a folder.

    Args:
        folder: Folder to write to, not yet visible to readers.
        vectors: Vectors, float32, shape ``[N, D]``.

    Raises:
        StorageError: If the folder cannot be written.
    """
    storage.create_array(folder / CODES, shape=_codes_shape(vectors), dtype="int8")
    codes = np.lib.format.open_memmap(folder / CODES, mode="r+")
    scales, mean = _quantize(vectors, codes)
    codes.flush()
    storage.write_array(folder / SCALES, scales)
    storage.write_array(folder / MEAN, mean)


def open_int8_codes(folder: Path) -> Int8Pass:
    """Map the files of ``write_int8_codes``.

    Args:
        folder: Folder of the codes.

    Returns:
        The coarse pass.

    Raises:
        DataError: If a file is missing or damaged.
    """
    codes = storage.read_array(folder / CODES, dimensions=2, kinds="i", memory_map=True)
    return Int8Pass(
        codes,
        storage.read_array(folder / SCALES, dimensions=2),
        storage.read_array(folder / MEAN, dimensions=1),
    )


def _codes_shape(vectors: np.ndarray) -> tuple[int, int]:
    """Shape of the codes of vectors, padded to whole groups."""
    return -(-len(vectors) // GROUP_ROWS) * GROUP_ROWS, vectors.shape[1]


def _quantize(vectors: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill the codes of vectors. Return the scales and the mean of ``Int8Pass``."""
    chunks = chunk_slices(len(vectors), CHUNK_ROWS)
    total = sum(
        (np.sum(vectors[chunk], 0, np.float64) for chunk in chunks), np.zeros(vectors.shape[1])
    )
    mean = np.asarray(total / max(len(vectors), 1), np.float32)
    scales = np.empty((4, len(codes) // GROUP_ROWS), np.float32)
    center = torch.from_numpy(mean)
    for chunk in chunks:
        shifted = torch.from_numpy(np.array(vectors[chunk])) - center
        # Padded to whole groups, shape [groups, GROUP_ROWS, D].
        shifted = torch.nn.functional.pad(shifted, (0, 0, 0, -len(shifted) % GROUP_ROWS)).view(
            -1, GROUP_ROWS, vectors.shape[1]
        )
        step = shifted.abs().amax((1, 2), keepdim=True) / MAX_CODE
        # A group whose rows all equal the mean has step 0. Dividing by it would give NaN codes.
        step[step == 0] = 1.0
        chunk_codes = (shifted / step).round()
        rounded = chunk_codes * step
        norms = torch.stack(
            [
                (shifted - rounded).norm(dim=2),
                rounded.norm(dim=2),
                shifted.norm(dim=2) + 2 * center.norm(),
            ]
        ).amax(2)
        first = chunk.start // GROUP_ROWS
        codes[chunk.start :][: len(shifted) * GROUP_ROWS] = (
            chunk_codes.to(torch.int8).flatten(0, 1).numpy()
        )
        scales[:, first : first + len(shifted)] = torch.cat(
            [step[None, :, 0, 0], norms * NORM_MARGIN]
        ).numpy()
    return scales, mean
