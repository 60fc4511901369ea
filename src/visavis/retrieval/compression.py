"""Vector encodings: size, search time and recall of compressed vectors.

An encoding is searched first: float32 or int8 (exact), one bit per dimension, or the first dimensions of Matryoshka
vectors. Except in exact search, the candidates of this first pass are then scored again with the full float32 vectors. Their
number is the smallest that reaches the target recall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np

from visavis.blocking import chunk_slices
from visavis.memory_budget import MemoryLimit
from visavis.retrieval.stores.exact_search import MIN_DIM, ExactSearch, Int8Pass, exact_scores, supports_int8_matmul

CHUNK_ROWS = 2**14
MEASURED_TOP, TARGET_RECALL, MEASURED_QUERIES = 10, 0.98, 200
NOISE_NORM = 0.3
"""Length of the noise that is added to a stored unit vector to make a query."""
TIMED_QUERIES, WARMUP_QUERIES = 50, 3
"""Queries whose median time is measured, and queries before them that are not counted."""
MAX_RESCORED = 1024
"""Maximum number of candidates that are scored again."""
MAX_TIME_RATIO = 0.9
"""Largest ratio of two times for which the first is reported as faster."""
_BIT_COUNTS = np.array([number.bit_count() for number in range(2**16)], np.uint8)

NearestFunction = Callable[[Any, int], np.ndarray]
"""Returns the rows nearest to a query (``[D]``, or of late interaction), best first: ``(query, count) -> rows``."""


class BinaryCodes:
    """One bit per dimension: whether a value is above the mean of all rows.

    With the mean m, ``<x, q> = <m, q> + <x - m, q>``. The first term is the same for all rows. The number of different signs
    approximates the angle of the second.

    Args:
        rows: Vectors, float32, shape ``[N, D]``.

    Attributes:
        bytes_per_row: Size of the code of a row in bytes.
    """

    def __init__(self, rows: np.ndarray):
        num_rows, dim = rows.shape
        self._words = -(-dim // 64)
        self.bytes_per_row = 8 * self._words
        chunks = chunk_slices(num_rows, CHUNK_ROWS)
        mean = (sum((rows[chunk].sum(0, dtype=np.float64) for chunk in chunks), np.zeros(dim)) / num_rows).astype(np.float32)
        self._bits = np.empty((self._words, num_rows), np.uint64)
        for chunk in chunks:
            self._bits[:, chunk] = _pack(rows[chunk] > mean, self._words).T

    def nearest(self, query: np.ndarray, count: int) -> np.ndarray:
        """Find the rows with the smallest Hamming distance to the signs of a query.

        Args:
            query: Query vector, shape ``[D]``.
            count: Maximum number of rows.

        Returns:
            Rows, best first, equal distances in the order of rows.
        """
        signs = _pack((query > 0)[None], self._words)[0]
        distances = np.empty(self._bits.shape[1], np.uint16)
        for chunk in chunk_slices(len(distances), CHUNK_ROWS):
            distances[chunk] = sum(map(_count_bits, (self._bits[word, chunk] ^ signs[word] for word in range(self._words))))
        bound = np.searchsorted(np.cumsum(np.bincount(distances)), min(count, len(distances)))
        rows = np.flatnonzero(distances <= bound)
        return rows[np.argsort(distances[rows], kind="stable")[:count]]


def _pack(bits: np.ndarray, words: int) -> np.ndarray:
    """Bits ``[N, D]`` as 64-bit integers ``[N, words]``, padded with zeros."""
    packed = np.packbits(bits, axis=1)
    return np.pad(packed, ((0, 0), (0, 8 * words - packed.shape[1]))).view(np.uint64)


def _count_bits(numbers: np.ndarray) -> np.ndarray:
    if hasattr(np, "bitwise_count"):  # numpy >= 2.0
        return np.bitwise_count(numbers).astype(np.uint16)
    return _BIT_COUNTS[numbers.view(np.uint16)].reshape(-1, 4).sum(1, dtype=np.uint16)


@dataclass(frozen=True)
class VectorEncoding:
    """Size, recall and search time of an encoding.

    Attributes:
        name: Name of the encoding.
        embedding_dim: Number of dimensions that the first pass reads.
        scanned_bytes: Bytes per item that the first pass reads.
        stored_bytes: Bytes per item that are stored in total.
        rescored: Candidates per query that are scored again with full vectors. 0: the first pass is the search.
        recall_at_10: Recall of the true top 10 in percent.
        caption_recall_at_10: Share of caption queries whose item is in the top 10, in percent. None if queries are not captions.
        milliseconds: Median time of one query in ms.
    """

    name: str
    embedding_dim: int
    scanned_bytes: float
    stored_bytes: float
    rescored: int
    recall_at_10: float
    caption_recall_at_10: float | None
    milliseconds: float


@dataclass(frozen=True)
class CompressionReport:
    """Encodings of the vectors of an index.

    Attributes:
        num_items: Number of items.
        num_queries: Number of queries.
        query_source: Description of the queries.
        encodings: Measured encodings.
        recommendation: Recommended encoding, in one or two sentences.
    """

    num_items: int
    num_queries: int
    query_source: str
    encodings: tuple[VectorEncoding, ...]
    recommendation: str


def compare_encodings(
    rows: np.ndarray,
    queries: np.ndarray,
    matryoshka_dims: Sequence[int] = (),
    *,
    positives: Sequence[int] | None = None,
    query_source: str = "queries",
    memory: MemoryLimit = None,
) -> CompressionReport:
    """Measure encodings of vectors.

    Args:
        rows: Vectors, float32, shape ``[N, D]``, at least one.
        queries: Query vectors, shape ``[Q, D]``, at least one.
        matryoshka_dims: Smaller dimensions that the vectors were trained for.
        positives: Row of the item of each query, if queries are captions.
        query_source: Description of the queries.
        memory: Memory limit of a search.

    Returns:
        Measured encodings and a recommendation.
    """
    queries, dim = np.ascontiguousarray(queries, np.float32), rows.shape[1]
    min_scores = ExactSearch(rows, memory=memory).search(queries, MEASURED_TOP)[0][:, -1]
    benchmark = EncodingBenchmark(queries, len(rows), min_scores, lambda some, query: exact_scores(rows[some], query), positives)
    encodings = [benchmark.measure("float32", _search_rows(rows, memory, int8=False), dim, 4 * dim, 4 * dim)]
    if supports_int8_matmul():
        encodings.append(benchmark.measure("int8", _search_rows(rows, memory, int8=True), dim, dim, 5 * dim))
    codes = BinaryCodes(rows)
    encodings.append(benchmark.measure_rescored("1 bit", codes.nearest, dim, codes.bytes_per_row, 4 * dim))
    for short_dim in matryoshka_dims:
        int8 = supports_int8_matmul() and short_dim >= MIN_DIM
        nearest = _search_rows(_normalize(rows[:, :short_dim]), memory, int8=int8)
        scanned = short_dim if int8 else 4 * short_dim
        name = f"first {short_dim} in {'int8' if int8 else 'float32'}"
        encodings.append(benchmark.measure_rescored(name, nearest, short_dim, scanned, 4 * dim))
        stored = 5 * short_dim if int8 else scanned
        encodings.append(benchmark.measure(f"first {short_dim} only", nearest, short_dim, scanned, stored))
    return CompressionReport(len(rows), len(queries), query_source, tuple(encodings), recommend_encoding(encodings))


def recommend_encoding(encodings: Sequence[VectorEncoding]) -> str:
    """Recommend the smallest encoding that an index can have and that reaches the target recall, else the default.

    Args:
        encodings: Measured encodings, float32 first.

    Returns:
        The recommendation, in one or two sentences.
    """
    plain = encodings[0]
    target = f"the true top {MEASURED_TOP}"
    truncated = [encoding for encoding in encodings if encoding.embedding_dim < plain.embedding_dim and not encoding.rescored]
    for encoding in sorted(truncated, key=lambda encoding: encoding.stored_bytes):
        recall, full_recall, measure = encoding.recall_at_10, 100.0, f"of {target}"
        if encoding.caption_recall_at_10 is not None and plain.caption_recall_at_10 is not None:
            recall, full_recall = encoding.caption_recall_at_10, plain.caption_recall_at_10
            measure = f"of captions with their item among the first {MEASURED_TOP}"
        if recall >= TARGET_RECALL * full_recall:
            return (
                f"Use --embedding-dim {encoding.embedding_dim}: {recall:.1f} % {measure} (all dimensions: {full_recall:.1f} %), "
                f"{encoding.stored_bytes:,.0f} instead of {plain.stored_bytes:,.0f} bytes per vector, {encoding.milliseconds:.2g} ms per query."
            )
    exact = [encoding for encoding in encodings if encoding.embedding_dim == plain.embedding_dim and not encoding.rescored]
    default = min(exact, key=lambda encoding: encoding.milliseconds)
    keep = f"Keep the default: {default.name}, {default.milliseconds:.2g} ms per query, always {target}."
    faster = [
        encoding
        for encoding in encodings
        if encoding.rescored
        and encoding.recall_at_10 >= 100 * TARGET_RECALL
        and encoding.milliseconds < MAX_TIME_RATIO * default.milliseconds
    ]
    if not faster:
        return f"{keep} No encoding finds {100 * TARGET_RECALL:.0f} % of it faster."
    fastest = min(faster, key=lambda encoding: encoding.milliseconds)
    return (
        f"{keep} {fastest.name} with {fastest.rescored} re-scored candidates finds {fastest.recall_at_10:.1f} % of it in "
        f"{fastest.milliseconds:.2g} ms."
    )


def noisy_queries(vectors: np.ndarray) -> np.ndarray:
    """Make queries from stored vectors by adding noise of length ``NOISE_NORM`` with a fixed seed.

    Args:
        vectors: Stored vectors, shape ``[N, D]``.

    Returns:
        Unit vectors, float32, shape ``[N, D]``.
    """
    noise = np.random.default_rng(0).standard_normal(vectors.shape)
    noise *= NOISE_NORM / np.linalg.norm(noise, axis=1, keepdims=True)
    return _normalize(_normalize(vectors) + noise)


class EncodingBenchmark:
    """Measures encodings with the same queries and true results.

    Args:
        queries: The queries.
        num_rows: Number of items.
        min_scores: Exact score of the last of the true top ``MEASURED_TOP`` of each query, shape ``[Q]``.
        exact: Computes the exact scores of rows: ``(rows, query) -> scores``.
        positives: Row of the item of each query, if queries are captions.
    """

    def __init__(
        self,
        queries: Sequence[Any] | np.ndarray,
        num_rows: int,
        min_scores: np.ndarray,
        exact: Callable[[np.ndarray, Any], np.ndarray],
        positives: Sequence[int] | None,
    ):
        self.queries, self.num_rows, self.min_scores, self.exact, self.positives = queries, num_rows, min_scores, exact, positives
        self.top = min(MEASURED_TOP, num_rows)

    def measure(
        self, name: str, nearest: NearestFunction, dim: int, scanned_bytes: float, stored_bytes: float, rescored: int = 0
    ) -> VectorEncoding:
        """Measure a search.

        Args:
            name: Name of the encoding.
            nearest: The search.
            dim: Number of dimensions that it reads.
            scanned_bytes: Bytes per item that it reads.
            stored_bytes: Bytes per item that are stored.
            rescored: Candidates that are scored again.

        Returns:
            Recall and time.
        """
        results = [nearest(query, self.top) for query in self.queries]
        caption_recall = None
        if self.positives is not None:
            caption_recall = 100 * float(np.mean([row in rows for row, rows in zip(self.positives, results, strict=True)]))
        recall = 100 * self._recall(self._correct(results))
        return VectorEncoding(name, dim, scanned_bytes, stored_bytes, rescored, recall, caption_recall, self._milliseconds(nearest))

    def measure_rescored(self, name: str, nearest: NearestFunction, dim: int, scanned_bytes: float, full_bytes: float) -> VectorEncoding:
        """Measure a first pass followed by scores with full vectors, for the fewest candidates that reach the target recall.

        Args:
            name: Name of the encoding.
            nearest: The first pass.
            dim: Number of dimensions that it reads.
            scanned_bytes: Bytes per item that it reads.
            full_bytes: Bytes per item of the full vectors.

        Returns:
            Recall and time of both passes.
        """
        max_rescored = min(MAX_RESCORED, self.num_rows)
        correct = self._correct([nearest(query, max_rescored) for query in self.queries])
        rescored = min(8, max_rescored)
        while rescored < max_rescored and self._recall([hits[:rescored] for hits in correct]) < TARGET_RECALL:
            rescored = min(2 * rescored, max_rescored)
        rescored = max(rescored, self.top)

        def search(query: Any, top: int) -> np.ndarray:
            rows = np.sort(nearest(query, rescored))
            best: np.ndarray = rows[np.lexsort((rows, -self.exact(rows, query)))[:top]]
            return best

        return self.measure(name, search, dim, scanned_bytes, scanned_bytes + full_bytes, rescored)

    def _correct(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Whether each result of each query is in the true top, by its exact score."""
        return [self.exact(rows, query) >= min_score for rows, query, min_score in zip(results, self.queries, self.min_scores, strict=True)]

    def _recall(self, correct: Sequence[np.ndarray]) -> float:
        return float(np.mean([min(int(hits.sum()), self.top) / self.top for hits in correct]))

    def _milliseconds(self, nearest: NearestFunction) -> float:
        queries = [*self.queries[:WARMUP_QUERIES], *self.queries[:TIMED_QUERIES]]
        seconds = [timeit(partial(nearest, query, self.top), number=1) for query in queries]
        return 1000 * float(np.median(seconds[min(WARMUP_QUERIES, len(self.queries)) :]))


def _search_rows(rows: np.ndarray, memory: MemoryLimit, *, int8: bool) -> NearestFunction:
    """Search by the first dimensions of a query. They are not normalized, which does not change the order."""
    dim, search = rows.shape[1], ExactSearch(rows, coarse=Int8Pass.from_vectors(rows) if int8 else None, memory=memory)
    return lambda query, top: search.search(query[None, :dim], top)[1][0]


def _normalize(rows: np.ndarray) -> np.ndarray:
    unit_rows = np.empty(rows.shape, np.float32)
    for chunk in chunk_slices(len(rows), CHUNK_ROWS):
        length = np.linalg.norm(rows[chunk], axis=1, keepdims=True)
        unit_rows[chunk] = rows[chunk] / np.where(length == 0, 1, length)
    return unit_rows
