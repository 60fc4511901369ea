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

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import chunk_slices
from visavis.core.encoded import MaxSimDirection, unit_rows
from visavis.core.errors import ShapeError
from visavis.core.memory_budget import MemoryLimit, budget_bytes
from visavis.retrieval.stores.base import MAX_NORM, MaxSimQuery, VectorSets, validate_queries
from visavis.retrieval.stores.exact_search import UNIT_ROUNDOFF, shared_tensor
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
        """Find the items with the highest scores.

        Args:
            queries: The queries.
            top: Maximum number of results per query.
            mask: Items that may be returned, bool, shape ``[N]``. None: all.

        Returns:
            Scores and items, both of shape ``[Q, K]``, best first, equal scores in the order of
            items. K is the smaller of ``top`` and the number of items.

        Raises:
            ShapeError: If the vectors of a query have another dimension, or are not finite.
            SpecError: If ``top`` is below 1.
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
        """Select items by the scores of their pooled vectors.

        Args:
            query: The query.
            count: Maximum number of candidates.
            items: Items to select from, in ascending order.

        Returns:
            The candidates in ascending order.
        """
        if len(items) <= count or self.pooled is None:
            return items
        if self.codec is not None:
            query = self.codec.rotate_to_codes(query)
        scores = MaxSimSearch(self.pooled, self.direction, memory=self.memory).scores(query, items)
        return items[np.sort(np.argpartition(-scores, count)[:count])]

    def exact_scores(self, items: np.ndarray, query: MaxSimQuery) -> np.ndarray:
        """Score items exactly.

        Args:
            items: Items to score.
            query: The query.

        Returns:
            Scores, summed in float64, float32, shape ``[n]``.
        """
        return self.scores(query, items, dtype=torch.float64).astype(np.float32)

    def scores(
        self, query: MaxSimQuery, items: np.ndarray, *, dtype: torch.dtype = torch.float32
    ) -> np.ndarray:
        """Score items.

        Args:
            query: The query.
            items: Items to score.
            dtype: Precision.

        Returns:
            Scores, shape ``[n]``.
        """
        if not len(items):
            return np.empty(0, np.float32)
        codec = self.codec
        if codec is not None:
            query = codec.rotate(query)
        vectors = torch.from_numpy(np.concatenate(query.parts)).to(dtype)
        # Copying most items costs more than scoring all of them.
        is_dense = 2 * len(items) > len(self.sets)
        selected = np.arange(len(self.sets)) if is_dense else items
        dim = self.sets.dim
        max_rows = max(
            min(CHUNK_ROWS, budget_bytes(self.memory, "cpu") // (8 * (dim + 2 * len(vectors)))), 1
        )
        chunk_items = max(max_rows // max(int(self.sets.counts.max()), 1), 1)
        lengths = [len(part) for part in query.parts]
        blocks = list[Tensor]()
        factor = 0.5 if self.direction == "both" else 1.0
        for chunk in chunk_slices(len(selected), chunk_items):
            sets = self.sets[chunk] if is_dense else self.sets[selected[chunk]]
            # Shape [words, rows]. The vectors of an item are adjacent in a row of this product, so
            # that their maximum is fast.
            if codec is None:
                products = vectors @ shared_tensor(sets.rows).to(vectors.dtype).T
            else:
                means = torch.from_numpy(codec.means(sets))
                sets = codec.differences(sets)
                coordinates = torch.from_numpy(sets.rows).to(vectors.dtype)
                products = vectors[:, : sets.dim] @ coordinates.T
                of_means = vectors @ means.to(vectors.dtype).T
                products += of_means.repeat_interleave(torch.from_numpy(sets.counts), dim=1)
            total = products.new_zeros(len(sets))
            if self.direction != "i2t":
                best = _reduce_items(products, sets, "max").split(lengths)
                for weight, part in zip(query.weights, best, strict=True):
                    total += factor * weight * part.mean(0)
            if self.direction != "t2i":
                counts = torch.from_numpy(sets.counts)
                for weight, part in zip(query.weights, products.split(lengths), strict=True):
                    sums = _reduce_items(part.amax(0, keepdim=True), sets, "sum")[0]
                    total += factor * weight * sums / counts
            blocks.append(total)
        scores: np.ndarray = torch.cat(blocks).numpy()
        return scores[items] if is_dense else scores


def _reduce_items(values: Tensor, sets: VectorSets, operation: str) -> Tensor:
    """The maximum or the sum over the vectors of each item, shape ``[W, N]``."""
    count = len(sets.rows) // len(sets)
    if bool((sets.counts == count).all()):
        grid = values.view(len(values), len(sets), count)
        return grid.amax(2) if operation == "max" else grid.sum(2)
    reduce = np.maximum if operation == "max" else np.add
    # Items of different sizes, of which reduceat reduces each segment.
    return torch.from_numpy(reduce.reduceat(values.numpy(), sets.offsets[:-1], axis=1))


def pool_vectors(sets: VectorSets, count: int) -> VectorSets:
    """Replace the vectors of each item by means of similar ones, by spherical k-means within the
    item.

    Args:
        sets: Unit vectors of the items.
        count: Number of pooled vectors. Items with at most this number keep their vectors.

    Returns:
        Unit vectors, at most ``count`` per item.
    """
    counts = np.minimum(sets.counts, count)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.empty((offsets[-1], sets.rows.shape[1]), np.float32)
    for size in np.unique(sets.counts):
        group = np.flatnonzero(sets.counts == size)
        for chunk in chunk_slices(len(group), max(CHUNK_ROWS // int(size), 1)):
            items = group[chunk]
            vectors = torch.from_numpy(np.array(sets[items].rows)).view(len(items), size, -1)
            pooled = vectors if size <= count else _cluster_means(vectors, count)
            rows[(offsets[items][:, None] + np.arange(pooled.shape[1])).ravel()] = pooled.flatten(
                0, 1
            ).numpy()
    return VectorSets(rows, offsets)


def _cluster_means(vectors: Tensor, count: int) -> Tensor:
    """Unit means ``[N, count, D]`` of clusters of the vectors ``[N, n, D]`` of each item. The first
    centers are far from each other.
    """
    batch = torch.arange(len(vectors))
    centers = [unit_rows(vectors.mean(1))]
    # Cosine with the nearest center so far. The next center is the vector that is farthest from
    # all.
    nearest = torch.full(vectors.shape[:2], -torch.inf)
    for _ in range(count):
        nearest = torch.maximum(nearest, (vectors @ centers[-1][:, :, None])[..., 0])
        centers.append(vectors[batch, nearest.argmin(1)])
    means = torch.stack(centers[1:], 1)
    for _ in range(POOLING_STEPS):
        # Shape [items, vectors, clusters].
        members = torch.nn.functional.one_hot((vectors @ means.mT).argmax(-1), count).to(
            vectors.dtype
        )
        sums = members.mT @ vectors
        # A cluster without members keeps its center.
        means = torch.where(members.sum(1)[..., None] > 0, unit_rows(sums), means)
    return means
