"""Vector encodings of an index: size, search time and recall, compared with the exact scores of
whole float32 vectors.

The searches that an index can have are measured: whole vectors in float32 or int8 (exact), the
first dimensions of Matryoshka vectors, and for late interaction the search that selects candidates
by pooled vectors, and compressed vectors of some sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np

from visavis.core.errors import VisavisError
from visavis.core.memory_budget import MemoryLimit, chunk_slices
from visavis.core.ragged import MaxSimDirection
from visavis.core.table import Column, Table
from visavis.retrieval.index_folder import Index
from visavis.retrieval.stores.base import MaxSimQuery, SetEncoding, VectorSets
from visavis.retrieval.stores.exact_search import (
    MIN_DIM,
    ExactSearch,
    Int8Pass,
    exact_scores,
    has_int8_products,
)
from visavis.retrieval.stores.maxsim_search import (
    MIN_CANDIDATES,
    MIN_ITEMS,
    POOLED_VECTORS,
    MaxSimSearch,
    pool_vectors,
)
from visavis.retrieval.stores.set_codec import SetCodec

CHUNK_ROWS = 2**14
MEASURED_TOP, TARGET_RECALL = 10, 0.98
MEASURED_QUERIES, MEASURED_SETS = 200, 50
"""Number of queries, of one vector or of several."""
NOISE_NORM = 0.3
"""Length of the noise that is added to a stored unit vector to make a query."""
NOISY_VECTORS = 12
"""Vectors of a query that is made from an item with several vectors."""
MEASURED_ITEM_BYTES = (1000, 2000, 4000)
"""Sizes of items of late interaction whose best encodings are measured."""
SAMPLED_ITEMS, SAMPLED_QUERIES = 2000, 50
"""Items and queries on which encodings of one size are compared."""
MIN_BITS_PER_DIM = 0.5
TIMED_QUERIES, WARMUP_QUERIES = 50, 3
"""Queries whose median time is measured, and queries before them that are not counted."""

NearestFunction = Callable[[Any, int], np.ndarray]
"""Returns the rows nearest to a query (``[D]``, or of late interaction), best first: ``(query,
count) -> rows``.
"""


@dataclass(frozen=True)
class VectorEncoding:
    """Size, recall and search time of an encoding.

    Attributes:
        name: Name of the encoding.
        embedding_dim: Number of dimensions that the first pass reads.
        scanned_bytes: Bytes per item that the first pass reads.
        stored_bytes: Bytes per item that are stored in total.
        rescored: Candidates per query that are scored again with all vectors. 0: there is one pass.
        recall_at_10: Recall of the true top 10 in percent.
        caption_recall_at_10: Share of caption queries whose item is in the top 10, in percent. None
            if queries are not captions.
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
        recommendation: Recommended encoding, or the measured search, in one or a few sentences.
    """

    num_items: int
    num_queries: int
    query_source: str
    encodings: tuple[VectorEncoding, ...]
    recommendation: str

    def table(self) -> Table:
        """Make a table of recall, bytes and latency of each encoding."""
        has_captions = any(each.caption_recall_at_10 is not None for each in self.encodings)
        columns = [
            Column("vectors", is_text=True),
            Column("bytes", ",.0f"),
            Column("stored", ",.0f"),
            Column("rescored", missing="-"),
            Column("recall@10", ".1f"),
            *([Column("caption@10", ".1f")] if has_captions else []),
            Column("ms per query", ".3g"),
        ]
        rows = [
            (
                each.name,
                each.scanned_bytes,
                each.stored_bytes,
                each.rescored or None,
                each.recall_at_10,
                *([each.caption_recall_at_10] if has_captions else []),
                each.milliseconds,
            )
            for each in self.encodings
        ]
        captions = (
            " caption@10: captions whose own item is among the first 10, in percent."
            if has_captions
            else ""
        )
        note = (
            f"{self.num_items:,} items, {self.num_queries:,} queries: {self.query_source}. bytes: "
            "per item, read by the first pass. stored: per item, in total. recall@10: share of the "
            f"true top 10 by float32 vectors, in percent.{captions} ms per query: median of single "
            "queries."
        )
        return Table(tuple(columns), tuple(rows), (note, self.recommendation))


def measure_compression(index: Index, memory: MemoryLimit = None) -> CompressionReport:
    """Measure encodings of the vectors of an index."""
    items, vectors = index.store.all_items()
    if not items:
        return CompressionReport(
            0, 0, "none", (), "Nothing was measured, because the index has no items."
        )
    count = min(MEASURED_SETS if isinstance(vectors, VectorSets) else MEASURED_QUERIES, len(items))
    # A fixed seed, so that two reports compare the same queries.
    rows = np.sort(np.random.default_rng(0).choice(len(items), count, replace=False))
    captions = [items[row].metadata.get("caption", "") for row in rows.tolist()]
    options: dict[str, Any] = {
        "query_source": f"vectors of the items with noise of length {NOISE_NORM:g}",
        "memory": memory,
    }
    # Queries are captions if all sampled items have one, else sampled vectors with noise.
    has_captions = all(map(str.strip, captions))
    if has_captions:
        options |= {"positives": rows.tolist(), "query_source": "captions of the items"}
    if isinstance(vectors, VectorSets):
        assert index.manifest.late_interaction is not None
        if vectors.codec is not None:
            return CompressionReport(
                len(items),
                0,
                "none",
                (),
                f"Compressed to {vectors.rows.size / len(vectors):,.0f} bytes per item. Recall was "
                "not measured, because the index has no float32 vectors.",
            )
        set_queries = noisy_set_queries(vectors[rows])
        if has_captions:
            set_queries = [
                MaxSimQuery.from_vectors((1.0, words))
                for words in index.model.encode_texts(captions)
            ]
        return compare_set_encodings(
            vectors, set_queries, index.manifest.late_interaction, **options
        )
    queries = noisy_queries(vectors[rows])
    if has_captions:
        queries = np.stack(index.model.encode_texts(captions))
    dims = index.model.shorter_dims
    return compare_encodings(vectors, queries, dims, **options)


def compare_encodings(
    rows: np.ndarray,
    queries: np.ndarray,
    matryoshka_dims: Sequence[int] = (),
    *,
    positives: Sequence[int] | None = None,
    query_source: str = "queries",
    memory: MemoryLimit = None,
) -> CompressionReport:
    """Measure encodings of vectors ``[N, D]``. ``positives``: the row that each query ``[Q, D]``
    describes, if queries are captions.
    """
    queries = np.ascontiguousarray(queries, np.float32)
    dim = rows.shape[1]
    # A result counts if its exact score reaches the last true one, so that ties are right either
    # way.
    min_scores = ExactSearch(rows, memory=memory).search(queries, MEASURED_TOP)[0][:, -1]
    benchmark = EncodingBenchmark(
        queries,
        min(MEASURED_TOP, len(rows)),
        min_scores,
        lambda selected, query: exact_scores(rows[selected], query),
        positives,
    )
    encodings = [
        benchmark.measure("float32", _search_rows(rows, memory, int8=False), dim, 4 * dim, 4 * dim)
    ]
    if has_int8_products():
        # Stored: codes of 1 byte for the first pass, and float32 vectors for exact scores.
        encodings.append(
            benchmark.measure("int8", _search_rows(rows, memory, int8=True), dim, dim, 5 * dim)
        )
    for short_dim in matryoshka_dims:
        int8 = has_int8_products() and short_dim >= MIN_DIM
        nearest = _search_rows(_normalize(rows[:, :short_dim]), memory, int8=int8)
        scanned, stored = (short_dim, 5 * short_dim) if int8 else (4 * short_dim, 4 * short_dim)
        encodings.append(
            benchmark.measure(f"first {short_dim} only", nearest, short_dim, scanned, stored)
        )
    return CompressionReport(
        len(rows), len(queries), query_source, tuple(encodings), recommend_encoding(encodings)
    )


def recommend_encoding(encodings: Sequence[VectorEncoding]) -> str:
    """Recommend the smallest encoding that an index can have and that reaches the target recall,
    else the default.
    """
    plain = encodings[0]
    target = f"the true top {MEASURED_TOP}"
    truncated = [encoding for encoding in encodings if encoding.embedding_dim < plain.embedding_dim]
    for encoding in sorted(truncated, key=lambda encoding: encoding.stored_bytes):
        recall = encoding.recall_at_10
        full_recall = 100.0
        measure = f"of {target}"
        if encoding.caption_recall_at_10 is not None and plain.caption_recall_at_10 is not None:
            recall = encoding.caption_recall_at_10
            full_recall = plain.caption_recall_at_10
            measure = f"of captions with their item among the first {MEASURED_TOP}"
        # Sorted by size: the first that is good enough is the smallest.
        if recall >= TARGET_RECALL * full_recall:
            return (
                f"Use --embedding-dim {encoding.embedding_dim}: {recall:.1f} % {measure} (all "
                f"dimensions: {full_recall:.1f} %), "
                f"{encoding.stored_bytes:,.0f} instead of {plain.stored_bytes:,.0f} bytes per "
                f"vector, {encoding.milliseconds:.2g} ms per query."
            )
    exact = [encoding for encoding in encodings if encoding.embedding_dim == plain.embedding_dim]
    default = min(exact, key=lambda encoding: encoding.milliseconds)
    return f"Keep the default: {default.name}, {default.milliseconds:.2g} ms per query, always {target}."


def noisy_queries(vectors: np.ndarray) -> np.ndarray:
    """Make queries from stored vectors by adding noise of length ``NOISE_NORM`` with a fixed seed."""
    noise = np.random.default_rng(0).standard_normal(vectors.shape)
    noise *= NOISE_NORM / np.linalg.norm(noise, axis=1, keepdims=True)
    return _normalize(_normalize(vectors) + noise)


def noisy_set_queries(sets: VectorSets) -> list[MaxSimQuery]:
    """Make a query from each item: some of its vectors with noise, with a fixed seed."""
    generator = np.random.default_rng(0)
    samples = [rows[generator.permutation(len(rows))[:NOISY_VECTORS]] for rows in sets]
    return [MaxSimQuery.from_vectors((1.0, noisy_queries(rows))) for rows in samples]


def compare_set_encodings(
    sets: VectorSets,
    queries: Sequence[MaxSimQuery],
    direction: MaxSimDirection,
    *,
    positives: Sequence[int] | None = None,
    query_source: str = "queries",
    memory: MemoryLimit = None,
) -> CompressionReport:
    """Measure searches of items with several vectors: exact, with candidates selected by pooled
    vectors as in a large index, and in compressed vectors.
    """
    exact = MaxSimSearch(sets, direction, memory=memory)
    dim = sets.rows.shape[1]
    full_bytes = 4 * dim * len(sets.rows) / len(sets)
    min_scores = exact.search(queries, MEASURED_TOP)[0][:, -1]
    benchmark = EncodingBenchmark(
        queries, min(MEASURED_TOP, len(sets)), min_scores, exact.exact_scores, positives
    )
    encodings = [benchmark.measure("float32", _search_sets(exact), dim, full_bytes, full_bytes)]
    description = f"Search: exact, {encodings[0].milliseconds:.2g} ms per query."
    if len(sets) >= MIN_ITEMS:
        pooled = pool_vectors(sets, POOLED_VECTORS)
        pooled_bytes = 4 * dim * len(pooled.rows) / len(sets)
        search = _search_sets(MaxSimSearch(sets, direction, pooled=pooled, memory=memory))
        pooled_search = benchmark.measure(
            "search", search, dim, pooled_bytes, pooled_bytes + full_bytes, MIN_CANDIDATES
        )
        description = (
            f"Search: {POOLED_VECTORS} pooled vectors per item, then exact scores of "
            f"{pooled_search.rescored:,} candidates. It finds "
            f"{pooled_search.recall_at_10:.1f} % of the true top {MEASURED_TOP} in "
            f"{pooled_search.milliseconds:.2g} ms. "
            f"Exact search takes {encodings[0].milliseconds:.2g} ms."
        )
        encodings.append(pooled_search)
    for item_bytes in MEASURED_ITEM_BYTES:
        try:
            codec = choose_codec(sets, item_bytes, direction, queries)
        except VisavisError:  # no encoding is small enough
            continue
        codes = codec.encode(sets)
        kept = codec.encoding.num_vectors
        size = codes.rows.size / len(sets)
        if size >= full_bytes or size == encodings[-1].stored_bytes:
            continue
        name = f"{'all' if kept is None else f'{kept} pooled'}, {8 * codec.encoding.vector_bytes / dim:.3g} bits"
        search = _search_sets(MaxSimSearch(codes, direction, memory=memory))
        rescored = MIN_CANDIDATES if len(sets) > MIN_CANDIDATES else 0
        # The first pass of a large collection reads the mean of each item, a byte per dimension.
        scanned = dim if rescored else size
        encodings.append(benchmark.measure(name, search, dim, scanned, size, rescored))
        if encodings[-1].recall_at_10 >= 100 * TARGET_RECALL:
            description += (
                f" Use visavis indexes compress INDEX {item_bytes}: {encodings[-1].recall_at_10:.1f} % of the true top "
                f"{MEASURED_TOP} with {size:,.0f} instead of {full_bytes:,.0f} bytes per item."
            )
            break
    return CompressionReport(len(sets), len(queries), query_source, tuple(encodings), description)


def possible_encodings(sets: VectorSets, item_bytes: int) -> Iterator[SetEncoding]:
    """List encodings of at most ``item_bytes`` per item on average: all vectors, or a half, a
    quarter, ... of them with more bits each.
    """
    dim = sets.dim
    largest = int(sets.counts.max())
    count: int | None = None
    while count is None or count >= 1:
        kept = np.minimum(sets.counts, largest if count is None else count).mean()
        for vector_bytes in range(dim, int(dim * MIN_BITS_PER_DIM / 8), -1):
            encoding = SetEncoding(count, vector_bytes)
            if encoding.item_bytes(float(kept), dim) <= item_bytes:
                yield encoding
                # More bits than 8 per dimension do not exist, so that fewer vectors gain nothing.
                if vector_bytes == dim:
                    return
                break
        count = (largest if count is None else count) // 2


def choose_codec(
    sets: VectorSets,
    item_bytes: int,
    direction: MaxSimDirection,
    queries: Sequence[MaxSimQuery] | None = None,
) -> SetCodec:
    """Choose the encoding of at most ``item_bytes`` that finds most of the true top 10 of a sample
    of items. Without queries, vectors of items with noise are searched for.
    """
    codecs = [SetCodec.fit(sets, each) for each in possible_encodings(sets, item_bytes)]
    if not codecs:
        smallest = SetEncoding(1, max(int(sets.dim * MIN_BITS_PER_DIM / 8), 1) + 1)
        raise VisavisError(
            f"item_bytes: expected at least {smallest.item_bytes(1, sets.dim):,.0f} for vectors of "
            f"{sets.dim} dimensions, got {item_bytes:,}. Pass a larger size."
        )
    if len(codecs) == 1:
        return codecs[0]
    # Queries of a caller belong to all items, and rank those of the sample, too.
    random = np.random.default_rng(0)
    chosen = np.sort(random.choice(len(sets), min(SAMPLED_ITEMS, len(sets)), replace=False))
    sample = sets[chosen]
    queries = noisy_set_queries(sample[:SAMPLED_QUERIES]) if queries is None else queries
    top = min(MEASURED_TOP, len(sample))
    exact = MaxSimSearch(sample, direction)
    limits = exact.search(queries, top)[0][:, -1]

    def recall(codec: SetCodec) -> float:
        found = MaxSimSearch(codec.encode(sample), direction).search(queries, top)[1]
        pairs = zip(queries, found, limits, strict=True)
        return float(
            np.mean([exact.exact_scores(rows, query) >= limit for query, rows, limit in pairs])
        )

    return max(codecs, key=recall)


@dataclass(frozen=True)
class EncodingBenchmark:
    """Measures encodings with the same queries and true results.

    Attributes:
        queries: The queries.
        top: Number of true results of a query.
        min_scores: Exact score of the last of the true results of each query, shape ``[Q]``.
        exact: Computes the exact scores of rows: ``(rows, query) -> scores``.
        positives: Row of the item of each query, if queries are captions.
    """

    queries: Sequence[Any] | np.ndarray
    top: int
    min_scores: np.ndarray
    exact: Callable[[np.ndarray, Any], np.ndarray]
    positives: Sequence[int] | None

    def measure(
        self,
        name: str,
        nearest: NearestFunction,
        dim: int,
        scanned_bytes: float,
        stored_bytes: float,
        rescored: int = 0,
    ) -> VectorEncoding:
        """Measure the recall and the median time of a search."""
        results = [nearest(query, self.top) for query in self.queries]
        caption_recall = None
        if self.positives is not None:
            caption_recall = 100 * float(
                np.mean([row in rows for row, rows in zip(self.positives, results, strict=True)])
            )
        recalls = [
            (self.exact(rows, query) >= min_score).sum() / self.top
            for rows, query, min_score in zip(results, self.queries, self.min_scores, strict=True)
        ]
        recall = 100 * float(np.mean(recalls))
        timed_queries = [*self.queries[:WARMUP_QUERIES], *self.queries[:TIMED_QUERIES]]
        seconds = [timeit(partial(nearest, query, self.top), number=1) for query in timed_queries]
        return VectorEncoding(
            name,
            dim,
            scanned_bytes,
            stored_bytes,
            rescored,
            recall,
            caption_recall,
            1000 * float(np.median(seconds[min(WARMUP_QUERIES, len(self.queries)) :])),
        )


def _search_rows(rows: np.ndarray, memory: MemoryLimit, *, int8: bool) -> NearestFunction:
    """Search by the first dimensions of a query. They are not normalized, which does not change the
    order.
    """
    dim = rows.shape[1]
    coarse = Int8Pass.from_vectors(rows) if int8 else None
    search = ExactSearch(rows, coarse=coarse, memory=memory)
    return lambda query, top: search.search(query[None, :dim], top)[1][0]


def _search_sets(search: MaxSimSearch) -> NearestFunction:
    return lambda query, top: search.search([query], top)[1][0]


def _normalize(rows: np.ndarray) -> np.ndarray:
    unit_rows = np.empty(rows.shape, np.float32)
    for chunk in chunk_slices(len(rows), CHUNK_ROWS):
        norms = np.linalg.norm(rows[chunk], axis=1, keepdims=True)
        unit_rows[chunk] = rows[chunk] / np.where(norms == 0, 1, norms)
    return unit_rows
