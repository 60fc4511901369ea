"""The exact top k of many rows: a coarse pass whose error is bounded, then the true scores of all that the bound does not exclude.

A score is the inner product of two float32 vectors, added up in float64 and rounded to float32; equal scores stand in the order of rows.
The coarse pass multiplies blocks of rows, in float32 or as whole numbers of 8 bits (``reduced``), and knows for every group of
``GROUP`` rows how far its products may be from the scores. Of each group the highest product less that error is a lower bound of a
score, so the k-th best of those bounds is one of the k-th best score; what cannot reach it is no candidate, and nothing else is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.errors import ShapeError
from visavis.memory import Memory, budget, spans
from visavis.retrieval.store import Near, check_queries

GROUP = 32
"""Rows that share a bound."""
ROUNDING = 2.0**-20
"""Of the product of two norms: more than a few operations in float32 are off by."""
UNIT = 2.0**-24
"""Of a product: what one operation in float32 is off by at most."""
PATIENCE = 8
"""Candidates for each of the top k, beside a 64th of the rows, up to which scoring them is faster than another pass."""
MOST_QUERIES, MOST_SCORES, MOST_CANDIDATES = 256, 2**21, 2**20
"""Queries that are scored together, scores of a block, candidates that are kept at once, whatever the memory."""


class Coarse(Protocol):
    """Products of blocks of rows with prepared queries, and how far they may be off."""

    def prepare(self, queries: Tensor) -> None:
        """Take queries ``[Q, D]`` in float32."""

    def products(self, rows: slice) -> Tensor:
        """Numbers ``[Q, N]`` of some rows, from which scores follow by ``scale``."""

    def scale(self, groups: slice) -> tuple[Tensor | float, Tensor | float]:
        """``(factor, offset)`` for some groups, ``[Q, G]`` or what broadcasts to it: a score is near ``factor * product + offset``."""

    def error(self, groups: slice) -> Tensor:
        """How far that may be from the score, for each query and group ``[Q, G]`` or what broadcasts to it."""


class InFloat32:
    """Products of the rows as they are; the error is that of adding up D products (Higham, section 3.1)."""

    def __init__(self, rows: np.ndarray):
        self.rows = as_tensor(rows)
        self.norm = max((float(self.rows[some].norm(dim=1).max()) for some in spans(len(rows), 2**12)), default=0.0) * (1 + 1e-4)

    def prepare(self, queries: Tensor) -> None:
        width = queries.shape[1]
        share = width * UNIT / (1 - width * UNIT) + ROUNDING
        self.queries, self.bound = queries, (share * self.norm * queries.norm(dim=1) * (1 + 1e-4))[:, None]

    def products(self, rows: slice) -> Tensor:
        return self.queries @ self.rows[rows].T

    def scale(self, groups: slice) -> tuple[Tensor | float, Tensor | float]:
        return 1.0, 0.0

    def error(self, groups: slice) -> Tensor:
        return self.bound


@dataclass
class Found:
    """The candidates of a search: which query, which row, and at most which score."""

    query: list[Tensor] = field(default_factory=list)
    row: list[Tensor] = field(default_factory=list)
    upper: list[Tensor] = field(default_factory=list)

    def add(self, query: Tensor, row: Tensor, upper: Tensor) -> None:
        self.query.append(query)
        self.row.append(row)
        self.upper.append(upper)

    def __len__(self) -> int:
        return sum(map(len, self.query))

    def keep(self, bound: Tensor) -> None:
        """Those that may reach the bound of their query ``[Q]``."""
        query, row, upper = (torch.cat(parts) for parts in (self.query, self.row, self.upper))
        kept = upper >= bound[query]
        self.query, self.row, self.upper = [query[kept]], [row[kept]], [upper[kept]]

    def counts(self, queries: int) -> Tensor:
        """How many candidates each query has ``[Q]``."""
        return sum((torch.bincount(query, minlength=queries) for query in self.query), torch.zeros(queries, dtype=torch.long))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and rows of all, which are then gone."""
        taken = torch.cat(self.query).numpy(), torch.cat(self.row).numpy()
        self.query, self.row, self.upper = [], [], []
        return taken


class Exact:
    """Rows ``[N, D]`` in float32, in memory or mapped from a file, to be searched.

    reduced: a first pass that is faster than in float32 and less sharp; queries for which it leaves too many candidates take the one in
    float32. memory: of blocks of scores and of rows that are scored again.
    """

    def __init__(self, rows: np.ndarray, *, reduced: Coarse | None = None, memory: Memory = None):
        if rows.ndim != 2 or rows.dtype != np.float32:
            raise ShapeError(f"rows are {rows.dtype} of shape {list(rows.shape)}, expected float32 of shape [N, D].")
        self.rows, self.reduced, self.memory = rows, reduced, memory

    @cached_property
    def in_float32(self) -> Coarse:
        """The pass that needs nothing but the rows."""
        return InFloat32(self.rows)

    def search(self, queries: np.ndarray, top: int, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the highest inner products with each query ``[Q, D]``, best first, equal ones in their order: ``(scores [Q, K], rows
        [Q, K])`` with K the smaller of ``top`` and the number of rows.

        mask: the rows that may be found ``[N]``. Raises ShapeError, SpecError.
        """
        check_queries(queries, top, self.rows.shape[1])
        if mask is not None and mask.shape != (len(self.rows),):
            raise ShapeError(f"the mask is of shape {list(mask.shape)}, expected [{len(self.rows)}].")
        queries = np.ascontiguousarray(queries, np.float32)
        top = min(top, len(self.rows) if mask is None else int(mask.sum()))
        if not len(queries) or not top:
            return np.empty((len(queries), top), np.float32), np.empty((len(queries), top), np.int64)
        parts = [self._search(queries[some], top, mask) for some in spans(len(queries), MOST_QUERIES)]
        scores, rows = zip(*parts, strict=True)
        return np.concatenate(scores), np.concatenate(rows)

    def _search(self, queries: np.ndarray, top: int, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if self.reduced is None:
            return self._walk(self.in_float32, queries, top, mask, None)[0].ordered()
        best, loose = self._walk(self.reduced, queries, top, mask, max(PATIENCE * top, len(self.rows) // 64))
        scores, rows = best.ordered()
        if loose.any():
            scores[loose], rows[loose] = self._walk(self.in_float32, queries[loose], top, mask, None)[0].ordered()
        return scores, rows

    def _walk(
        self, coarse: Coarse, queries: np.ndarray, top: int, mask: np.ndarray | None, patience: int | None
    ) -> tuple[_Best, np.ndarray]:
        """One pass over the rows: the best of them, and which queries had more candidates than ``patience`` and were given up."""
        best, found = _Best(self.rows, queries, top, self.memory), Found()
        coarse.prepare(torch.from_numpy(queries))
        bound, loose = torch.full((len(queries), top), -torch.inf), torch.zeros(len(queries), dtype=torch.bool)
        blocks = spans(len(self.rows), self._height(len(queries)))
        for block in blocks:
            allowed = None if mask is None else torch.from_numpy(mask[block])
            if allowed is None or allowed.any():
                bound = self._candidates(coarse.products(block), coarse, block, allowed, bound, found)
            if found.query and (block is blocks[-1] or len(found) > MOST_CANDIDATES):
                if patience is not None:
                    found.keep(bound[:, -1])
                    loose |= found.counts(len(queries)) > patience
                    bound[loose] = torch.inf
                found.keep(bound[:, -1])
                if block is blocks[-1] or len(found) > MOST_CANDIDATES // 2:
                    best.add(*found.take())
        return best, loose.numpy()

    def _height(self, queries: int) -> int:
        """Rows of a block: a multiple of ``GROUP``, as many as memory lets."""
        most = min(MOST_SCORES, budget(self.memory, "cpu") // 16)
        return max(most // queries // GROUP, 1) * GROUP

    def _candidates(self, products: Tensor, coarse: Coarse, block: slice, allowed: Tensor | None, bound: Tensor, found: Found) -> Tensor:
        """Add the candidates of a block; the best lower bounds so far, ``[Q, top]`` with the highest first, and now."""
        if allowed is not None:
            products.masked_fill_(~allowed, _lowest(products.dtype))
        queries, height = products.shape
        if height % GROUP:
            products = torch.nn.functional.pad(products, (0, -height % GROUP), value=_lowest(products.dtype))
        products = products.view(queries, -1, GROUP)
        first = block.start // GROUP
        groups = slice(first, first + products.shape[1])
        (factor, offset), error = coarse.scale(groups), coarse.error(groups)
        highest = products.amax(2) * factor + offset
        bound = torch.cat([bound, highest - error], 1).topk(bound.shape[1], dim=1).values
        query, group = (highest + error >= bound[:, -1:]).nonzero(as_tuple=True)
        upper = products[query, group] * _at(factor, query, group) + _at(offset, query, group) + _at(error, query, group)
        pair, place = (upper >= bound[query, -1:]).nonzero(as_tuple=True)
        within = group[pair] * GROUP + place
        kept = within < height if allowed is None else (within < height).logical_and_(allowed[within.clamp(max=height - 1)])
        pair, place, within = pair[kept], place[kept], within[kept]
        found.add(query[pair], within + block.start, upper[pair, place])
        return bound


def ranked(query: np.ndarray, keys: Sequence[str], vectors: np.ndarray, memory: Memory = None) -> list[Near]:
    """Some items by their true scores, equal ones in the order of keys; vectors: ``[N, D]``."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if not order:
        return []
    scores, rows = Exact(np.ascontiguousarray(vectors[order], np.float32), memory=memory).search(query[None], len(keys))
    return [Near(keys[order[row]], score) for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True)]


class _Best:
    """The best rows of each query so far, by their true scores."""

    def __init__(self, rows: np.ndarray, queries: np.ndarray, top: int, memory: Memory):
        self.rows, self.queries, self.top = rows, queries.astype(np.float64), top
        self.at_once = max(min(budget(memory, "cpu") // (16 * rows.shape[1]), 2**14), 1)
        self.query, self.row, self.score = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)

    def add(self, query: np.ndarray, row: np.ndarray) -> None:
        """Score candidates, and keep the best of all so far."""
        order = np.lexsort((row, query))
        query, row = query[order], row[order]
        starts = np.searchsorted(query, np.arange(len(self.queries) + 1))
        scores = [
            self._scores(self.queries[one], row[starts[one] + some.start : starts[one] + some.stop])
            for one in range(len(self.queries))
            for some in spans(starts[one + 1] - starts[one], self.at_once)
        ]
        query, row = np.concatenate([self.query, query]), np.concatenate([self.row, row])
        score = np.concatenate([self.score, *scores])
        order = np.lexsort((row, -score, query))
        query, row, score = query[order], row[order], score[order]
        rank = np.arange(len(query)) - np.searchsorted(query, query)
        self.query, self.row, self.score = query[rank < self.top], row[rank < self.top], score[rank < self.top]

    def _scores(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # einsum adds up every row in the same order, so that equal rows have equal scores
        return np.einsum("nd,d->n", self.rows[rows].astype(np.float64), query).astype(np.float32)

    def ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """``(scores [Q, top], rows [Q, top])``; zeros for queries that were given up."""
        scores, rows = np.zeros((len(self.queries), self.top), np.float32), np.zeros((len(self.queries), self.top), np.int64)
        place = np.arange(len(self.query)) - np.searchsorted(self.query, self.query)
        scores[self.query, place], rows[self.query, place] = self.score, self.row
        return scores, rows


def as_tensor(rows: np.ndarray) -> Tensor:
    """An array as a tensor that shares its memory, which nobody writes to: also one that is mapped from a file to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        return torch.from_numpy(np.ascontiguousarray(rows))


def _at(value: Tensor | float, query: Tensor, group: Tensor) -> Tensor | float:
    """The values of pairs of a query and a group, as a column, of what broadcasts to ``[Q, G]``."""
    if not isinstance(value, Tensor):
        return value
    rows, columns = value.shape
    return value[query if rows > 1 else 0 * query, group if columns > 1 else 0 * group][:, None]


def _lowest(dtype: torch.dtype) -> float | int:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
