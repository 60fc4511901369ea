"""Encodings of items with several vectors: pooled vectors, int8 and one bit per dimension, compared with exact MaxSim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from visavis.blocking import chunk_slices
from visavis.memory_budget import MemoryLimit
from visavis.retrieval.compression import (
    CHUNK_ROWS,
    MEASURED_TOP,
    TARGET_RECALL,
    CompressionReport,
    EncodingBenchmark,
    NearestFunction,
    VectorEncoding,
    noisy_queries,
)
from visavis.retrieval.stores.maxsim_search import MIN_CANDIDATES, MIN_ITEMS, POOLED_VECTORS, MaxSimSearch, pool_vectors
from visavis.retrieval.stores.vector_sets import MaxSimQuery, VectorSets
from visavis.types import MaxSimDirection

MEASURED_SETS = 50
"""Number of queries."""
NOISY_VECTORS = 12
"""Vectors of a query that is made from an item."""
POOLED_COUNTS = (POOLED_VECTORS, 9, 16)
"""Measured numbers of pooled vectors per item."""
MAX_CODE = 127


class Int8Rows:
    """Vectors in int8 with one scale per vector. Indexing decodes them.

    Args:
        rows: Vectors, float32, shape ``[T, D]``.
    """

    def __init__(self, rows: np.ndarray):
        self.shape, self.codes, self.scales = rows.shape, np.empty(rows.shape, np.int8), np.empty((len(rows), 1), np.float32)
        for chunk in chunk_slices(len(rows), CHUNK_ROWS):
            largest = np.abs(rows[chunk]).max(1, keepdims=True)
            self.scales[chunk] = np.where(largest == 0, 1, largest) / MAX_CODE
            self.codes[chunk] = np.rint(rows[chunk] / self.scales[chunk])

    def __getitem__(self, index: Any) -> np.ndarray:
        decoded: np.ndarray = self.codes[index] * self.scales[index]
        return decoded


class BitRows:
    """Vectors as the sign of each dimension about its mean, decoded to the mean plus or minus the mean absolute deviation.

    Args:
        rows: Vectors, float32, shape ``[T, D]``.
    """

    def __init__(self, rows: np.ndarray):
        chunks = chunk_slices(len(rows), CHUNK_ROWS)
        self.shape, zero = rows.shape, np.zeros(rows.shape[1])
        mean = sum((rows[chunk].sum(0, dtype=np.float64) for chunk in chunks), zero) / len(rows)
        deviation = sum((np.abs(rows[chunk] - mean).sum(0) for chunk in chunks), zero) / len(rows)
        self.low, self.step = (mean - deviation).astype(np.float32), (2 * deviation).astype(np.float32)
        self.bits = np.concatenate([np.packbits(rows[chunk] > mean, axis=1) for chunk in chunks])

    def __getitem__(self, index: Any) -> np.ndarray:
        decoded: np.ndarray = np.unpackbits(self.bits[index], axis=1, count=self.shape[1]) * self.step + self.low
        return decoded


def noisy_set_queries(sets: VectorSets) -> list[MaxSimQuery]:
    """Make a query from each item: some of its vectors with noise, with a fixed seed.

    Args:
        sets: The items.

    Returns:
        One query per item.
    """
    generator = np.random.default_rng(0)
    chosen = [rows[generator.permutation(len(rows))[:NOISY_VECTORS]] for rows in sets]
    return [MaxSimQuery.from_vectors((1.0, noisy_queries(rows))) for rows in chosen]


def compare_set_encodings(
    sets: VectorSets,
    queries: Sequence[MaxSimQuery],
    direction: MaxSimDirection,
    *,
    positives: Sequence[int] | None = None,
    query_source: str = "queries",
    memory: MemoryLimit = None,
) -> CompressionReport:
    """Measure encodings of items with several vectors.

    Args:
        sets: Unit vectors of the items, at least one item.
        queries: The queries, at least one.
        direction: Which means the score contains.
        positives: Item of each query, if queries are captions.
        query_source: Description of the queries.
        memory: Memory limit of a search.

    Returns:
        Measured encodings and a recommendation.
    """
    exact, dim = MaxSimSearch(sets, direction, memory=memory), sets.rows.shape[1]
    mean_count = len(sets.rows) / len(sets)
    full_bytes = 4 * dim * mean_count
    min_scores = exact.search(queries, MEASURED_TOP)[0][:, -1]
    benchmark = EncodingBenchmark(queries, len(sets), min_scores, exact.exact_scores, positives)

    def nearest(encoded: VectorSets) -> NearestFunction:
        search = MaxSimSearch(encoded, direction, memory=memory)
        return lambda query, count: search.search([query], count)[1][0]

    encodings = [benchmark.measure("float32", nearest(sets), dim, full_bytes, full_bytes)]
    for count in POOLED_COUNTS:
        if count >= sets.counts.max():
            continue
        pooled = pool_vectors(sets, count)
        pooled_bytes, first_pass = 4 * dim * len(pooled.rows) / len(sets), nearest(pooled)
        if count == POOLED_VECTORS and len(sets) >= MIN_ITEMS:
            search = MaxSimSearch(sets, direction, pooled=pooled, memory=memory)
            default = benchmark.measure(
                "search",
                lambda query, top, search=search: search.search([query], top)[1][0],  # type: ignore[misc]
                dim,
                pooled_bytes,
                pooled_bytes + full_bytes,
                MIN_CANDIDATES,
            )
            encodings.append(default)
        encodings.append(benchmark.measure_rescored(f"{count} pooled", first_pass, dim, pooled_bytes, full_bytes))
        encodings.append(benchmark.measure(f"{count} pooled only", first_pass, dim, pooled_bytes, pooled_bytes))
    int8, bits = (dim + 4) * mean_count, -(-dim // 8) * mean_count
    encodings.append(benchmark.measure("int8 only", nearest(VectorSets(Int8Rows(sets.rows), sets.offsets)), dim, int8, int8))  # type: ignore[arg-type]
    by_sign = nearest(VectorSets(BitRows(sets.rows), sets.offsets))  # type: ignore[arg-type]
    encodings.append(benchmark.measure_rescored("1 bit", by_sign, dim, bits, full_bytes))
    return CompressionReport(len(sets), len(queries), query_source, tuple(encodings), describe_search(encodings))


def describe_search(encodings: Sequence[VectorEncoding]) -> str:
    """Describe the search of an index, and the smallest encoding with the target recall.

    Args:
        encodings: Measured encodings, float32 first.

    Returns:
        A few sentences.
    """
    plain = encodings[0]
    text = f"Search: exact, {plain.milliseconds:.2g} ms per query."
    if (used := next((encoding for encoding in encodings if encoding.name == "search"), None)) is not None:
        text = (
            f"Search: {POOLED_VECTORS} pooled vectors per item, then exact scores of {used.rescored:,} candidates. It finds "
            f"{used.recall_at_10:.1f} % of the true top {MEASURED_TOP} in {used.milliseconds:.2g} ms. Exact search takes {plain.milliseconds:.2g} ms."
        )
    good = [encoding for encoding in encodings[1:] if encoding.recall_at_10 >= 100 * TARGET_RECALL]
    if not good:
        return f"{text} No encoding finds {100 * TARGET_RECALL:.0f} %."
    smallest = min(good, key=lambda encoding: encoding.stored_bytes)
    return f"{text} Smallest with {100 * TARGET_RECALL:.0f} %: {smallest.name}, {smallest.stored_bytes:,.0f} bytes per item."
