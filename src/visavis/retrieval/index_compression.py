"""Compress the vectors of a late-interaction index to a number of bytes per item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.blocking import chunk_slices
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.retrieval.index_folder import (
    CODEC_FILE,
    IndexManifest,
    open_index_store,
    read_manifest,
    write_manifest,
)
from visavis.retrieval.stores.arrow_tables import items_from_table
from visavis.retrieval.stores.base import MaxSimQuery, VectorSets
from visavis.retrieval.stores.catalog import open_store
from visavis.retrieval.stores.maxsim_search import MaxSimSearch
from visavis.retrieval.stores.set_codec import SetCodec, SetEncoding

SAMPLED_ITEMS, SAMPLED_QUERIES = 2000, 50
"""Items and queries on which encodings of one size are compared."""
MIN_BITS_PER_DIM = 0.5
BATCH_ITEMS = 2**12


def check_item_bytes(
    item_bytes: int | None, direction: MaxSimDirection | None, manifest: IndexManifest | None
) -> None:
    """Check that an index can be compressed, before it is updated.

    Args:
        item_bytes: Requested bytes per item. None: not requested.
        direction: Which means of MaxSim the model's score contains. None: one vector per item.
        manifest: Manifest of an existing index.

    Raises:
        VisavisError: If the model has one vector per item.
        RunError: If the index was compressed to another size, or its store is elsewhere.
    """
    if item_bytes is None:
        return
    if direction is None:
        raise VisavisError(
            "item_bytes: expected a model with several vectors per item, got one with one vector. "
            "Use --embedding-dim instead."
        )
    if manifest is not None and manifest.item_bytes not in (None, item_bytes):
        raise RunError(
            f"item_bytes: expected {manifest.item_bytes}, the value of this index, got {item_bytes}. "
            "Make another index with --out."
        )
    if manifest is not None and ("://" in manifest.store or Path(manifest.store).is_absolute()):
        raise RunError(
            f"item_bytes: expected a store inside the folder of the index, got {manifest.store}. "
            "Make the index without --store."
        )


def compress_index(
    folder: Path, item_bytes: int | None, memory: MemoryLimit, progress: Progress
) -> None:
    """Choose the best encoding of a size, and replace the store by a compressed one. The caller
    holds the lock of the index.

    A killed process leaves the index as it was.

    Args:
        folder: Folder of an index whose store is inside.
        item_bytes: Maximum bytes per item. None, or an index that is compressed already or has no
            items: nothing is changed.
        memory: Memory limit of a search.
        progress: Receives progress.

    Raises:
        VisavisError: If no encoding is small enough.
    """
    manifest = read_manifest(folder)
    if item_bytes is None or manifest.encoding is not None or manifest.late_interaction is None:
        return
    with closing(open_index_store(folder, manifest, memory)) as store:
        sets, table = store.all_vectors(), store.table()
        if not len(table):
            return
        assert isinstance(sets, VectorSets)
        with progress.activity("choosing an encoding"):
            codec = choose_codec(sets, item_bytes, manifest.late_interaction)
        codec.write(folder / CODEC_FILE)
        name = f"items-{item_bytes}.lance"
        # A killed process may have left a part of it.
        storage.remove_folder(folder / name)
        compressed = open_store(
            folder / name,
            manifest.embedding_dim,
            memory,
            index_id=manifest.index_id,
            late_interaction=manifest.late_interaction,
            codec=codec,
        )
        with closing(compressed):
            for number, chunk in enumerate(chunk_slices(len(table), BATCH_ITEMS), 1):
                items = items_from_table(table.slice(chunk.start, chunk.stop - chunk.start))
                compressed.add(items, sets[chunk])
                progress.update("compressed items", number * BATCH_ITEMS, len(table), 0.0)
            new = replace(
                manifest,
                store=name,
                digest=compressed.digest(),
                encoding=codec.encoding,
                item_bytes=item_bytes,
                codec_hash=storage.content_hash(folder / CODEC_FILE),
            )
    write_manifest(folder, new)
    storage.remove_folder(folder / manifest.store)


def possible_encodings(sets: VectorSets, item_bytes: int) -> Iterator[SetEncoding]:
    """List encodings that fit: all vectors, or a half, a quarter, ... of them with more bits each.

    Args:
        sets: Vectors of the items.
        item_bytes: Maximum mean bytes per item.

    Yields:
        Encodings with as many bits as fit.
    """
    dim, largest = sets.dim, int(sets.counts.max())
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
    """Choose the encoding that finds most of the true top 10 of a sample of items.

    Args:
        sets: Unit vectors of the items, at least one item.
        item_bytes: Maximum mean bytes per item.
        direction: Which means the score contains.
        queries: Queries. None: vectors of items with noise.

    Returns:
        The codec, fitted to the items.

    Raises:
        VisavisError: If no encoding is small enough.
    """
    from visavis.retrieval.compression import MEASURED_TOP, noisy_set_queries

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
