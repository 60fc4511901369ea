"""Compress the vectors of a late-interaction index to a number of bytes per item."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from visavis.core import storage
from visavis.core.blocking import chunk_slices
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.retrieval.compression import choose_codec
from visavis.retrieval.index_folder import (
    CODEC_FILE,
    STORE_FOLDER,
    IndexManifest,
    open_index_store,
    read_manifest,
    write_manifest,
)
from visavis.retrieval.stores.arrow_tables import items_from_table
from visavis.retrieval.stores.base import VectorSets
from visavis.retrieval.stores.catalog import open_store

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
    if item_bytes is not None and manifest.encoding is None:
        new = _write_compressed(folder, manifest, item_bytes, memory, progress)
        if new is None:
            return
        write_manifest(folder, new)
        storage.remove_folder(folder / manifest.store)
    elif manifest.encoding is not None:
        # A killed process may have left the store of float32 vectors.
        storage.remove_folder(folder / STORE_FOLDER)


def _write_compressed(
    folder: Path, manifest: IndexManifest, item_bytes: int, memory: MemoryLimit, progress: Progress
) -> IndexManifest | None:
    """Write the compressed store next to the other, and return its manifest. None: no items."""
    assert manifest.late_interaction is not None
    with closing(open_index_store(folder, manifest, memory)) as store:
        sets = store.all_vectors()
        table = store.table()
        if not len(table):
            return None
        assert isinstance(sets, VectorSets)
        with progress.activity("choosing an encoding"):
            codec = choose_codec(sets, item_bytes, manifest.late_interaction)
        encoding = codec.encoding
        progress.message(
            f"Compressed to at most {item_bytes:,} bytes per item: "
            f"{'all' if encoding.num_vectors is None else f'at most {encoding.num_vectors}'} vectors "
            f"of an item, {8 * encoding.vector_bytes / codec.dim:.2g} bits per dimension."
        )
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
                progress.update(
                    "compressed items", min(number * BATCH_ITEMS, len(table)), len(table), 0.0
                )
            return replace(
                manifest,
                store=name,
                digest=compressed.digest(),
                encoding=codec.encoding,
                item_bytes=item_bytes,
                codec_hash=storage.content_hash(folder / CODEC_FILE),
            )
