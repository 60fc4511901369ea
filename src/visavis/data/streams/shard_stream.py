"""Training data in shards, as a lazy data set: an item is read from its shard when a batch needs
it.

Items are numbered through all shards. A process keeps a few shards open. Shards of object storage
are copied to ``VISAVIS_CACHE`` first.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, Image, LazyImages, ProgressCallback
from visavis.data.parallel import map_in_order
from visavis.data.sequences import LazySequence
from visavis.data.streams.shard_files import ShardFile, list_shards
from visavis.data.streams.shard_readers import (
    EmbeddedBytes,
    Shard,
    ShardReader,
    count_samples,
    damaged_shard,
    open_shard,
    sample_ids,
)

T = TypeVar("T")
SPLIT = "train"
# Captions of an item that are sampled.
MAX_CAPTIONS = 2**20


class ShardStream:
    """Items of shards.

    Args:
        pattern: The shards, as for ``list_shards``.
        shards: The shards with their number of samples.
        max_open: Number of shards that a process keeps open.
        skip_bad: Whether to use the samples before the damage of a shard.

    Attributes:
        starts: Number of the first item of each shard, and the number of all items, shape ``[shards + 1]``.
    """

    def __init__(self, pattern: str, shards: list[Shard], max_open: int, *, skip_bad: bool = False):
        self.pattern, self.shards, self.max_open, self.skip_bad = (
            pattern,
            shards,
            max_open,
            skip_bad,
        )
        self.starts = np.concatenate([[0], np.cumsum([shard.count for shard in shards])])
        first_keys = [shard.first_key for shard in shards if shard.first_key is not None]
        # Some tools number the samples of each shard from 0. Such keys are names within a shard.
        self.has_local_keys = len(set(first_keys)) < len(first_keys)
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()  # images are decoded in several threads

    @classmethod
    def open(
        cls,
        pattern: str,
        *,
        max_open: int,
        skip_bad: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> ShardStream:
        """List shards and their number of samples, which is counted once and cached.

        Args:
            pattern: The shards, as for ``list_shards``.
            max_open: Number of shards that a process keeps open.
            skip_bad: Whether to use the samples before the damage of a shard.
            on_progress: Called with the number of counted shards and of all shards.

        Returns:
            The stream.

        Raises:
            DataError: If a shard is missing or damaged, or all are empty.
        """
        files = list_shards(pattern)
        shards = [shard for shard in _count(pattern, files, skip_bad, on_progress) if shard.count]
        if not shards:
            raise DataError(
                f"{pattern}: expected samples, got {len(files)} empty shards. Check the pattern."
            )
        return cls(pattern, shards, max_open, skip_bad=skip_bad)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardStream, skip_bad=self.skip_bad), (
            self.pattern,
            self.shards,
            self.max_open,
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of names, sizes and counts of all shards. Their content is not read."""
        parts = [
            [shard.file.name, shard.file.size, shard.row_group, shard.count]
            for shard in self.shards
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @cached_property
    def dataset(self) -> Dataset:
        """The items as a data set of one split, with the first caption of each."""
        count = len(self)
        return Dataset(
            Path(self.pattern).stem, StreamImages(self), StreamCaptions(self), np.arange(count)
        )

    def locate(self, item: int) -> tuple[ShardReader, int]:
        """Open the shard of an item.

        Args:
            item: Number of the item.

        Returns:
            The open shard, and the row of the item in it.

        Raises:
            DataError: If the shard is damaged, or ends before the item.
        """
        number = int(np.searchsorted(self.starts, item, "right")) - 1
        row, shard = item - int(self.starts[number]), self.shards[number]
        reader = self._reader(number)
        if row >= len(reader):
            reason = f" ({reader.damage.removesuffix('.')})" if reader.damage else ""
            raise damaged_shard(
                shard.file.url, f"expected {shard.count:,} samples, got {len(reader):,}{reason}"
            )
        return reader, row

    def ids(self, items: np.ndarray) -> np.ndarray:
        """Return the ids of items. Items with the same key are the same image.

        Args:
            items: Numbers of the items.

        Returns:
            Ids from 0 to 2^63.
        """
        keys = []
        for item in items.tolist():
            reader, row = self.locate(item)
            key = reader.key(row)
            keys.append(f"{reader.name}/{key}" if self.has_local_keys and key is not None else key)
        return sample_ids(keys, items)

    def captions(self, item: int) -> list[str]:
        """Read the captions of an item.

        Args:
            item: Number of the item.

        Returns:
            One caption or more.

        Raises:
            DataError: If it has none.
        """
        reader, row = self.locate(item)
        return reader.captions(row)

    def image(self, item: int) -> Image:
        """Read the bytes of an image.

        Args:
            item: Number of the item.

        Returns:
            The image.

        Raises:
            DataError: If the item has none.
        """
        reader, row = self.locate(item)
        name = f"{reader.name}: {reader.key(row) or row}"
        return Image(name, SPLIT, EmbeddedBytes(Path(name), content=reader.image(row)))

    def _reader(self, number: int) -> ShardReader:
        """The open shard. The one that was used least recently is closed."""
        with self._lock:
            reader = self._readers.pop(number, None)
            # A damaged shard may have no readable sample, and is not opened again for each item.
            self._readers[number] = reader = (
                open_shard(self.shards[number]) if reader is None else reader
            )
            if len(self._readers) > self.max_open:
                self._readers.popitem(last=False)
            return reader


class _StreamItems(LazySequence[T]):
    """Items of a stream, some of them or all. ``items`` holds their numbers in the stream."""

    def __init__(self, stream: ShardStream, items: np.ndarray | None = None):
        self.stream, self.items = stream, items

    def __len__(self) -> int:
        return len(self.stream) if self.items is None else len(self.items)

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        return indices if self.items is None else self.items[indices]

    def take(self, indices: np.ndarray) -> Self:
        return type(self)(self.stream, self.numbers(indices))

    @property
    def fingerprint(self) -> str:
        """Short hash of the shards."""
        return self.stream.fingerprint


class StreamImages(_StreamItems[Image], LazyImages):
    """Images of a stream.

    Args:
        stream: The stream.
        items: Number of each image in the stream. None: all.
    """

    @property
    def split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image."""
        return (SPLIT,), np.broadcast_to(np.int8(0), len(self))

    def read(self, indices: np.ndarray) -> list[Image]:
        return [self.stream.image(item) for item in self.numbers(indices).tolist()]


class StreamCaptions(_StreamItems[str]):
    """Captions of a stream. Index ``i + k * len(stream)`` is caption k of item i, counted around
    its captions.

    Args:
        stream: The stream.
        items: Number of the item of each caption in the stream. None: all.
    """

    def read(self, indices: np.ndarray) -> list[str]:
        choices, items = np.divmod(indices, len(self))
        captions = [self.stream.captions(item) for item in self.numbers(items).tolist()]
        return [
            texts[choice % len(texts)]
            for texts, choice in zip(captions, choices.tolist(), strict=True)
        ]


def _count(
    pattern: str, files: list[ShardFile], skip_bad: bool, on_progress: ProgressCallback | None
) -> list[Shard]:
    """Count the samples of all files in threads. The counts of unchanged files are read from one
    cached record.
    """
    record = storage.cache_folder() / "checks" / f"shards-{storage.stat_hash([], 3, pattern)}.json"
    counts: dict[str, list[Shard]] = (
        storage.read_checksummed_json(record, dict[str, list[Shard]]) or {}
    )
    # The first keys of two shards show whether each shard numbers its samples from the same key.
    keys = [storage.stat_hash([], asdict(file), number < 2) for number, file in enumerate(files)]
    missing = [number for number, key in enumerate(keys) if key not in counts]
    counted = map_in_order(
        lambda number: count_samples(files[number], skip_bad=skip_bad, read_key=number < 2), missing
    )
    try:
        for done, (number, shards) in enumerate(
            zip(missing, counted, strict=True), len(files) - len(missing) + 1
        ):
            counts[keys[number]] = shards
            if on_progress is not None:
                on_progress(done, len(files))
    finally:
        # The count of a damaged shard is not cached: without skip_bad it is an error.
        if missing and not skip_bad:
            kept = {key: [asdict(shard) for shard in counts[key]] for key in keys if key in counts}
            storage.write_checksummed_json(record, kept)
    return [shard for key in keys for shard in counts[key]]
