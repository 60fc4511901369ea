"""Top-k search by late interaction (MaxSim) in items with several vectors.

With cosines s of the query vectors w with the vectors r of an item, the score is $mean_w max_r s$
("t2i"), $mean_r max_w s$ ("i2t"), or the mean of both ("both"). Search has up to three passes:

1. Candidates: scores of a few pooled vectors per item, if the collection is large. This pass may
   miss a result.
2. Scores of the candidates in float32, with an error bound that excludes all items that cannot be
   among the best.
3. Scores of the remaining items, summed in float64 and rounded to float32. Equal scores are in the
   order of items.

Without pooled vectors, the second pass reads all items, and the result is exact. Compressed vectors
are decoded by each pass, and the result is exact for the decoded vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from visavis.core.errors import ShapeError
from visavis.core.memory_budget import MemoryLimit, budget_bytes, chunk_slices
from visavis.core.ragged import MaxSimDirection, offsets_from_counts
from visavis.retrieval.stores.base import MAX_NORM, MaxSimQuery, VectorSets, validate_queries
from visavis.retrieval.stores.exact_search import UNIT_ROUNDOFF
from visavis.retrieval.stores.set_codec import SetCodec

# Of 100,000 noisy copies of photos with 49 regions, and 60 captions, the best 2,048 items by 1, 2, 4 and 9 pooled vectors contained 96.2,
# 98.0, 99.0 and 99.8 % of the true top 10 of "t2i", and all of "both" (benchmarks/late_interaction.py --recall).
POOLED_VECTORS = 4
"""Pooled vectors of an item for the first pass."""
MIN_ITEMS = 2**14
"""Smaller collections are searched exactly."""
MIN_CANDIDATES, CANDIDATES_PER_RESULT = 2048, 16
"""Candidates of the first pass: at least this number, or this multiple of the number of results."""
CHUNK_ROWS = 2**16
"""Vectors that are scored at once."""
# OpenBLAS copies both matrices of a large product, which takes most of the time for a few words. With AVX-512, 4, 8 and 16 words with
# 32,000 rows of 128 dimensions take 3.0, 3.3 and 4.4 ms, and 0.7, 1.2 and 2.1 ms in products with 64 rows each. 32 words take 5 and 6 ms.
MAX_SMALL_PRODUCT, ROWS_OF_SMALL_PRODUCT = 16, 64
"""Words of a query up to which small products are faster, and rows of each."""
POOLING_STEPS = 2
"""Steps of k-means."""


class MaxSimSearch:
    """Search in items with several vectors, in memory or mapped from a file.

    Args:
        sets: Unit vectors of the items, or their codes.
        direction: Which means the score contains.
        pooled: Pooled vectors of the items for the first pass, see ``pool_vectors``. None: exact
            search. Compressed items have their means instead.
        memory: Memory limit of blocks of scores.
    """

    def __init__(
        self,
        sets: VectorSets,
        direction: MaxSimDirection,
        *,
        pooled: VectorSets | None = None,
        memory: MemoryLimit = None,
    ):
        self.sets = sets
        self.direction = direction
        self.memory = memory
        self._pooled = pooled

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def codec(self) -> SetCodec | None:
        """Codec of compressed vectors."""
        codec = self.sets.codec
        assert codec is None or isinstance(codec, SetCodec)
        return codec

    @cached_property
    def pooled(self) -> VectorSets | None:
        """Vectors of the first pass. None: there is none."""
        codec = self.codec
        if self._pooled is not None or codec is None or len(self.sets) <= MIN_CANDIDATES:
            return self._pooled
        # Of 100,000 means of 128 dimensions, bytes are converted in 5 ms, and float16 in 40 ms.
        chunks = chunk_slices(len(self.sets), CHUNK_ROWS)
        means = np.concatenate([codec.mean_codes(self.sets[chunk]) for chunk in chunks])
        return VectorSets(means, np.arange(len(means) + 1))

    def search(
        self, queries: Sequence[MaxSimQuery], top: int, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the highest scores and their items, ``[Q, K]``, best first, equal scores in the
        order of items. K is at most ``top``, and the mask ``[N]`` allows items.
        """
        for query in queries:
            for part in query.parts:
                validate_queries(part, top, self.sets.dim)
                # The mean of no words is NaN, which would rank all items arbitrarily.
                if not len(part):
                    raise ShapeError(
                        "queries: expected at least one vector per part, got none. Remove the "
                        "empty part."
                    )
        rows = np.arange(len(self.sets)) if mask is None else np.flatnonzero(mask)
        top = min(top, len(rows))
        scores = np.empty((len(queries), top), np.float32)
        items = np.empty((len(queries), top), np.int64)
        if top:
            for number, query in enumerate(queries):
                scores[number], items[number] = self._search_one(query, top, rows)
        return scores, items

    def _search_one(
        self, query: MaxSimQuery, top: int, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.pooled is not None:
            items = self.candidates(query, max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * top), items)
        scores = self.scores(query, items)
        # A product of two unit vectors sums D terms, and a mean sums at most one term per vector.
        num_terms = self.sets.dim + max(*map(len, query.parts), int(self.sets.counts.max()))
        # Decoded vectors may be longer than 1, but by less than 1.
        max_norm = MAX_NORM if self.sets.codec is None else 2.0
        error = 2 * num_terms * UNIT_ROUNDOFF * max_norm**2
        # Both the k-th best score and that of another item may be wrong by the error.
        items = items[scores >= np.partition(scores, -top)[-top] - 2 * error]
        exact = self.exact_scores(items, query)
        order = np.lexsort((items, -exact))[:top]
        return exact[order], items[order]

    def candidates(self, query: MaxSimQuery, count: int, items: np.ndarray) -> np.ndarray:
        """Select at most ``count`` items by the scores of their pooled vectors, ascending."""
        if len(items) <= count or self.pooled is None:
            return items
        if self.codec is not None:
            query = self.codec.rotate_to_codes(query)
        scores = MaxSimSearch(self.pooled, self.direction, memory=self.memory).scores(query, items)
        return items[np.sort(np.argpartition(-scores, count)[:count])]

    def exact_scores(self, items: np.ndarray, query: MaxSimQuery) -> np.ndarray:
        """Score items exactly: summed in float64, then float32, ``[n]``."""
        return self.scores(query, items, np.float64).astype(np.float32)

    def scores(
        self, query: MaxSimQuery, items: np.ndarray, dtype: type[np.floating[Any]] = np.float32
    ) -> np.ndarray:
        """Score items, ``[n]``."""
        if not len(items):
            return np.empty(0, dtype)
        codec = self.codec
        if codec is not None:
            query = codec.rotate(query)
        vectors = np.concatenate(query.parts).astype(dtype)
        # Copying most items costs more than scoring all of them.
        is_dense = 2 * len(items) > len(self.sets)
        selected = np.arange(len(self.sets)) if is_dense else items
        dim = self.sets.dim
        max_rows = max(
            min(CHUNK_ROWS, budget_bytes(self.memory, "cpu") // (8 * (dim + 2 * len(vectors)))), 1
        )
        chunk_items = max(max_rows // max(int(self.sets.counts.max()), 1), 1)
        # Words after which a part of the query ends.
        ends = np.cumsum([len(part) for part in query.parts])[:-1]
        blocks = list[np.ndarray]()
        factor = 0.5 if self.direction == "both" else 1.0
        for chunk in chunk_slices(len(selected), chunk_items):
            sets = self.sets[chunk] if is_dense else self.sets[selected[chunk]]
            # Shape [words, rows]. The vectors of an item are adjacent in a row of this product, so
            # that their maximum is fast.
            if codec is None:
                products = _products(vectors, np.asarray(sets.rows, dtype))
            else:
                of_means = vectors @ np.asarray(codec.means(sets), dtype).T
                sets = codec.differences(sets)
                coordinates = np.asarray(sets.rows, dtype)
                products = vectors[:, : sets.dim] @ coordinates.T
                products += np.repeat(of_means, sets.counts, axis=1)
            total = np.zeros(len(sets), dtype)
            if self.direction != "i2t":
                best = np.split(_reduce_items(products, sets, np.maximum), ends)
                for weight, part in zip(query.weights, best, strict=True):
                    total += factor * weight * part.mean(0)
            if self.direction != "t2i":
                for weight, part in zip(query.weights, np.split(products, ends), strict=True):
                    sums = _reduce_items(part.max(0, keepdims=True), sets, np.add)[0]
                    total += factor * weight * sums / sets.counts
            blocks.append(total)
        scores = np.concatenate(blocks)
        return scores[items] if is_dense else scores


def _products(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Inner products, ``[W, R]``."""
    if len(vectors) > MAX_SMALL_PRODUCT:
        return vectors @ rows.T
    products = np.empty((len(vectors), len(rows)), rows.dtype)
    whole = len(rows) // ROWS_OF_SMALL_PRODUCT * ROWS_OF_SMALL_PRODUCT
    blocks = rows[:whole].reshape(-1, ROWS_OF_SMALL_PRODUCT, rows.shape[1])
    out = products[:, :whole].reshape(len(vectors), -1, ROWS_OF_SMALL_PRODUCT)
    np.matmul(vectors, blocks.swapaxes(1, 2), out=out.swapaxes(0, 1))
    np.matmul(vectors, rows[whole:].T, out=products[:, whole:])
    return products


def _reduce_items(values: np.ndarray, sets: VectorSets, operation: np.ufunc) -> np.ndarray:
    """The maximum or the sum over the vectors of each item, shape ``[W, N]``."""
    reduced: np.ndarray = operation.reduceat(values, sets.offsets[:-1], axis=1)
    return reduced


def pool_vectors(sets: VectorSets, count: int) -> VectorSets:
    """Replace the vectors of each item by at most ``count`` means of similar ones, by spherical
    k-means within the item.
    """
    counts = np.minimum(sets.counts, count)
    offsets = offsets_from_counts(counts)
    rows = np.empty((offsets[-1], sets.rows.shape[1]), np.float32)
    # Items with equally many vectors form one tensor, [items, vectors, D].
    for size in np.unique(sets.counts):
        group = np.flatnonzero(sets.counts == size)
        for chunk in chunk_slices(len(group), max(CHUNK_ROWS // int(size), 1)):
            items = group[chunk]
            vectors = sets[items].rows.reshape(len(items), size, -1)
            pooled = vectors if size <= count else _cluster_means(vectors, count)
            positions = offsets[items][:, None] + np.arange(pooled.shape[1])
            rows[positions.ravel()] = pooled.reshape(-1, rows.shape[1])
    return VectorSets(rows, offsets)


def _cluster_means(vectors: np.ndarray, count: int) -> np.ndarray:
    """Unit means ``[N, count, D]`` of clusters of the vectors ``[N, n, D]`` of each item. The first
    centers are far from each other.
    """
    batch = np.arange(len(vectors))
    centers = [_unit(vectors.mean(1))]
    # Cosine with the nearest center so far. The next center is the vector that is farthest from
    # all.
    nearest = np.full(vectors.shape[:2], -np.inf, np.float32)
    for _ in range(count):
        nearest = np.maximum(nearest, (vectors @ centers[-1][:, :, None])[..., 0])
        centers.append(vectors[batch, nearest.argmin(1)])
    means = np.stack(centers[1:], 1)
    for _ in range(POOLING_STEPS):
        nearest_mean = (vectors @ means.swapaxes(1, 2)).argmax(-1)
        # Shape [items, clusters, vectors].
        members = (nearest_mean[:, None] == np.arange(count)[:, None]).astype(np.float32)
        # A cluster without members keeps its center.
        has_members = members.any(2, keepdims=True)
        means = np.where(has_members, _unit(members @ vectors), means)
    return means


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows divided by their norms. Zeros stay zeros."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)
