"""Vector encodings of an index, with the captions of its items or noisy vectors as queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from visavis.memory_budget import MemoryLimit
from visavis.retrieval.compression import MEASURED_QUERIES, NOISE_NORM, CompressionReport, compare_encodings, noisy_queries
from visavis.retrieval.index_folder import Index
from visavis.retrieval.maxsim_compression import MEASURED_SETS, compare_set_encodings, noisy_set_queries
from visavis.retrieval.stores.vector_sets import MaxSimQuery, VectorSets


def measure_compression(index: Index, memory: MemoryLimit = None) -> CompressionReport:
    """Measure encodings of the vectors of an index.

    Queries are the captions of sampled items if all of them have one, else sampled vectors with noise.

    Args:
        index: The index.
        memory: Memory limit of a search.

    Returns:
        Measured encodings and a recommendation.
    """
    vectors, items = index.store.all_vectors(), list(index.items.values())
    if not items:
        return CompressionReport(0, 0, "none", (), "Nothing was measured, because the index has no items.")
    several = isinstance(vectors, VectorSets)
    count = min(MEASURED_SETS if several else MEASURED_QUERIES, len(items))
    rows = np.sort(np.random.default_rng(0).choice(len(items), count, replace=False))
    captions = [items[row].metadata.get("caption", "") for row in rows]
    options: dict[str, Any] = {"query_source": f"vectors of the items with noise of length {NOISE_NORM:g}", "memory": memory}
    has_captions = all(map(str.strip, captions))
    if has_captions:
        options |= {"positives": rows.tolist(), "query_source": "captions of the items"}
    if isinstance(vectors, VectorSets):
        assert index.manifest.late_interaction is not None
        queries = [MaxSimQuery.from_vectors((1.0, words.numpy())) for words in index.encode_texts(captions)] if has_captions else None
        queries = queries or noisy_set_queries(vectors[rows])
        return compare_set_encodings(vectors, queries, index.manifest.late_interaction, **options)
    single = index.model.encode_texts(captions).float().numpy() if has_captions else noisy_queries(vectors[rows])
    dims = () if index.model.embedding_dim else index.model.matcher.matryoshka_dims[:-1]
    return compare_encodings(vectors, single, dims, **options)
