"""Compress the vectors of a late-interaction index to a number of bytes per item."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from visavis.core import storage
from visavis.core.errors import RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.ragged import MaxSimDirection
from visavis.retrieval.build.compression import choose_codec
from visavis.retrieval.index_folder import (
    CODEC_FILE,
    OWN_STORE,
    IndexManifest,
    open_index_store,
    read_manifest,
    set_manifest,
)
from visavis.retrieval.stores.base import VectorSets
from visavis.retrieval.stores.sqlite_store import SqliteStore


def check_item_bytes(
    item_bytes: int | None, direction: MaxSimDirection | None, manifest: IndexManifest | None
) -> None:
    """Check that an index can be compressed, before it is updated."""
    if item_bytes is None:
        return
    if direction is None:  # the model has one vector per item
        raise VisavisError(
            "item_bytes: expected a model with several vectors per item, got one with one vector. "
            "Use --embedding-dim instead."
        )
    if manifest is not None and manifest.item_bytes not in (None, item_bytes):
        raise RunError(
            f"item_bytes: expected {manifest.item_bytes}, the value of this index, got {item_bytes}. "
            "Make another index with --out."
        )
    if manifest is not None and manifest.store != OWN_STORE:
        raise RunError(
            f"item_bytes: expected a store inside the folder of the index, got {manifest.store}. "
            "Make the index without --store."
        )


def compress_index(
    folder: Path, item_bytes: int | None, memory: MemoryLimit, progress: Progress
) -> None:
    """Choose the best encoding of a size, and write all vectors again with it. The caller holds the
    lock of the index.
    """
    manifest = read_manifest(folder)
    if item_bytes is None or manifest.encoding is not None:
        return
    assert manifest.late_interaction is not None
    with closing(open_index_store(folder, manifest, memory)) as store:
        sets = store.all_vectors()
        if not len(sets):
            return
        assert isinstance(sets, VectorSets)
        assert isinstance(store, SqliteStore)
        with progress.activity("choosing an encoding"):
            codec = choose_codec(sets, item_bytes, manifest.late_interaction)
        encoding = codec.encoding
        progress.message(
            f"Compressed to at most {item_bytes:,} bytes per item: "
            f"{'all' if encoding.num_vectors is None else f'at most {encoding.num_vectors}'} vectors "
            f"of an item, {8 * encoding.vector_bytes / codec.dim:.2g} bits per dimension."
        )
        # A killed process leaves the index as it was. Without ``encoding`` in the manifest, the
        # file of the codec is not read, and one transaction changes the vectors and the manifest.
        codec.write(folder / CODEC_FILE)
        with progress.activity("compressing vectors"), store.database.change():
            store.rewrite(codec)
            new = replace(
                manifest,
                digest=store.digest(),
                encoding=codec.encoding,
                item_bytes=item_bytes,
                codec_hash=storage.content_hash(folder / CODEC_FILE),
            )
            set_manifest(store.database, new)
        store.prepare_search()
