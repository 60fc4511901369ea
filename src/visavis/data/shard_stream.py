"""Training data in shards: a lazy data set, and its batches.

An item is read from its shard when a batch needs it. Items are numbered through all shards. A
process keeps a few shards open. Shards of object storage are copied to ``VISAVIS_CACHE`` first.

The order of the batches is a function of the seed and the epoch alone. How an epoch is divided into
batches:

1. The shards are shuffled, and the items of each shard are shuffled. Concatenated, they are one
   sequence of all items.
2. The sequence is cut into ``interleave`` parts of equal length (a difference of one item). A part
   is read shard by shard.
3. Batch k has every item number k of the parts in turn, so that it holds items of ``interleave``
   shards. Within a batch, items are sorted by part. So each process, which reads a contiguous
   section of the batch, reads from its own shards, apart from those at a border.
4. The items are divided over the smallest number of batches that are not larger than
   ``batch_size``. Sizes differ by one item. None is left out.

An item is located without reading the items before it. So a training resumes at any batch, with any
number of processes and workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, LazyImages, ProgressCallback, require
from visavis.data.image_file import Image
from visavis.data.item_sources import ItemSource, read_unnormalized
from visavis.data.loader import Batch, BatchSchedule, Loader
from visavis.data.parallel import map_in_order
from visavis.data.sequences import LazySequence
from visavis.data.shards import (
    EmbeddedBytes,
    Shard,
    ShardFile,
    ShardReader,
    count_samples,
    damaged_shard,
    list_shards,
    open_shard,
)
from visavis.data.workers import BatchRequest, WorkerPool

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
        self.pattern = pattern
        self.shards = shards
        self.max_open = max_open
        self.skip_bad = skip_bad
        self.starts = np.concatenate([[0], np.cumsum([shard.count for shard in shards])])
        first_keys = [shard.first_key for shard in shards if shard.first_key is not None]
        # Some tools number the samples of each shard from 0. Such keys are names within a shard.
        self.has_local_keys = len(set(first_keys)) < len(first_keys)
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        pattern: str,
        *,
        max_open: int,
        skip_bad: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> ShardStream:
        """List shards and their number of samples, which is counted once and cached."""
        files = list_shards(pattern)
        shards = [shard for shard in _count(pattern, files, skip_bad, on_progress) if shard.count]
        require(
            shards,
            f"{pattern}: expected samples, got {len(files)} empty shards. Check the pattern.",
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
        """Open the shard of an item. Return it with the row of the item in it."""
        # "right": an item that begins a shard is in it, and not at the end of the one before.
        number = int(np.searchsorted(self.starts, item, "right")) - 1
        row = item - int(self.starts[number])
        shard = self.shards[number]
        # Images are decoded in several threads.
        with self._lock:
            reader = self._readers.pop(number, None)
            # A damaged shard may have no readable sample, and is not opened again for each item.
            reader = open_shard(shard) if reader is None else reader
            self._readers[number] = reader
            # The shard that was used least recently is closed.
            if len(self._readers) > self.max_open:
                self._readers.popitem(last=False)
        if row >= len(reader):
            reason = f" ({reader.damage.removesuffix('.')})" if reader.damage else ""
            raise damaged_shard(
                shard.file.url, f"expected {shard.count:,} samples, got {len(reader):,}{reason}"
            )
        return reader, row

    def ids(self, items: np.ndarray) -> np.ndarray:
        """Return the ids of items, from 0 to 2^63. Items with the same key are the same image."""
        keys = []
        for item in items.tolist():
            reader, row = self.locate(item)
            key = reader.key(row)
            if key is None:
                # No key begins with a zero byte, so that numbered items are never equal to named
                # ones.
                keys.append(f"\0{item}")
            else:
                keys.append(f"{reader.name}/{key}" if self.has_local_keys else key)
        hashes = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
        # 63 bits: ids are int64 and never negative.
        return np.array([int.from_bytes(digest) >> 1 for digest in hashes], dtype=np.int64)

    def captions(self, item: int) -> list[str]:
        """Read the captions of an item."""
        reader, row = self.locate(item)
        return reader.captions(row)

    def image(self, item: int) -> Image:
        """Read the bytes of an image."""
        reader, row = self.locate(item)
        name = f"{reader.name}: {reader.key(row) or row}"
        return Image(name, SPLIT, EmbeddedBytes(Path(name), content=reader.image(row)))


class _StreamItems(LazySequence[T]):
    """Items of a stream, some of them or all. ``items`` holds their numbers in the stream."""

    def __init__(self, stream: ShardStream, items: np.ndarray | None = None):
        self.stream = stream
        self.items = items

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

    def with_splits(self, codes: np.ndarray) -> StreamImages:
        return self  # all images have the same split

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
        # The index of a caption includes the number of the sampled caption.
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


PlannedBatch = tuple[np.ndarray, np.ndarray]


class StreamPlan(Sequence[PlannedBatch]):
    """The batches of an epoch of a stream, which are computed when they are read.

    Args:
        starts: Number of the first item of each shard, and the number of all items, shape ``[shards + 1]``.
        batch_size: Maximum number of items of a batch.
        interleave: Number of parts of the sequence.
        seed: Random seed.
        epoch: The epoch.

    Example:
        >>> plan = StreamPlan(np.array([0, 4, 8]), batch_size=3, interleave=2, seed=1, epoch=1)
        >>> [len(items) for items, _ in plan], sorted(np.concatenate([items for items, _ in plan]).tolist())
        ([2, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7])
    """

    def __init__(self, starts: np.ndarray, batch_size: int, interleave: int, seed: int, epoch: int):
        self.starts = starts
        self.seed = seed
        self.epoch = epoch
        self.num_items = int(starts[-1])
        self.num_batches = -(-self.num_items // batch_size)
        # Not more parts than items in a batch, or a batch would lack some of them.
        self.interleave = max(1, min(interleave, self.num_items // self.num_batches))
        self.shards = np.random.default_rng((seed, epoch)).permutation(len(starts) - 1)
        counts = np.diff(starts)[self.shards]
        self.positions = np.concatenate([[0], np.cumsum(counts)])
        # The part of item number p is p modulo the number of parts.
        lengths = self._items_before(self.num_items)
        self.part_starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        # Consecutive batches read the same shards, a few of which are kept.
        self._shuffled = lru_cache(2 * self.interleave + 2)(self._shuffle)

    def _items_before(self, number: int) -> np.ndarray:
        """Number of items of each part among the first ``number`` items."""
        return (number - np.arange(self.interleave) + self.interleave - 1) // self.interleave

    def _shuffle(self, shard: int) -> np.ndarray:
        first, end = self.starts[shard : shard + 2].tolist()
        return first + np.random.default_rng((self.seed, self.epoch, shard)).permutation(
            end - first
        )

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        index = range(len(self))[index]
        first, end = (
            self._items_before(number * self.num_items // self.num_batches)
            for number in (index, index + 1)
        )
        # Items of each part in this batch, [parts].
        counts = end - first
        # 0, 1, ... within each part.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(self.part_starts + first, counts) + offsets
        # The place of the shard of each item in the shuffled order of shards.
        order = np.searchsorted(self.positions, positions, "right") - 1
        items = np.empty(len(positions), np.int64)
        for shard_position in np.unique(order).tolist():
            inside = order == shard_position
            shuffled_items = self._shuffled(int(self.shards[shard_position]))
            items[inside] = shuffled_items[positions[inside] - self.positions[shard_position]]
        return items, items


@dataclass(frozen=True, kw_only=True)
class StreamSchedule(BatchSchedule):
    """How an epoch of a stream is divided into batches.

    Attributes:
        interleave: Number of shards that a batch is read from.
    """

    interleave: int = 16

    def batches(self, data: Dataset, seed: int, epoch: int) -> Sequence[PlannedBatch]:  # type: ignore[override]
        """Plan the batches of an epoch: the numbers of the images and of the captions of each."""
        assert isinstance(data.images, StreamImages)
        plan = StreamPlan(data.images.stream.starts, self.batch_size, self.interleave, seed, epoch)
        return plan[: self.batches_per_epoch] if self.batches_per_epoch else plan

    def num_batches(self, data: Dataset) -> int:
        """Count the batches of an epoch, as ``BatchSchedule.num_batches``. The last one is as large
        as the others.
        """
        count = -(-len(data.images) // self.batch_size)
        return min(count, self.batches_per_epoch or count)


# Model input of the images and captions, ids of the items, whether each item of the request is in
# the batch, and the problems of the others.
StreamContents = tuple[Encoded, Encoded, np.ndarray, np.ndarray, list[str]]


@dataclass(frozen=True)
class StreamBatch(Batch):
    """A batch of a stream.

    Attributes:
        skipped: Problems of the items that are left out.
    """

    skipped: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class StreamLoader(Loader):
    """The batches of a stream. An item has one of its captions, sampled by the seed, the epoch and
    its position.

    Attributes:
        data: The split.
        visual: Model input of the images.
        text: Model input of the captions, and of judged texts after these.
        schedule: How an epoch is divided into batches.
        seed: Random seed.
        extension: Adds negatives to each batch. Not used by shards.
        rank: Rank of this process. It reads the part ``rank`` of ``world_size`` of each batch,
            images and captions separately.
        world_size: Number of ranks.
        pool: Worker processes that read the batches of a training. None: this process reads them.
        reader_number: Number of ``batch_reader`` among the readers of the pool.
    """

    @property
    def stream(self) -> ShardStream:
        """The stream."""
        assert isinstance(self.data.images, StreamImages)
        return self.data.images.stream

    def epoch(
        self,
        epoch: int,
        *,
        start: int = 0,
        stop: int | None = None,
        training: bool = True,
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch, as ``Loader.epoch``, and log the number of skipped items."""
        # The first problem is logged at once, the number of all at the end.
        skipped = 0
        end = start
        log = logging.getLogger(__name__)
        for batch in super().epoch(epoch, start=start, stop=stop, training=training, device=device):
            assert isinstance(batch, StreamBatch)
            if batch.skipped and not skipped:
                log.warning("Skipped: %s", batch.skipped[0])
            skipped += len(batch.skipped)
            end = batch.index + 1
            yield batch
        if skipped and training:
            items = f"{skipped:,} unusable items of {self.stream.pattern}"
            log.warning(
                "Skipped in batches %d to %d of epoch %d: %s.", start + 1, end, epoch, items
            )

    def _read_in_workers(
        self, pool: WorkerPool, requests: Iterable[BatchRequest], device: torch.device | str
    ) -> Iterator[StreamContents]:
        return pool.read(requests, self.reader_number)

    @property
    def batch_reader(self) -> StreamReader:
        return StreamReader(self.stream, self.visual, self.text)

    def _batch(
        self,
        request: BatchRequest,
        contents: StreamContents,  # type: ignore[override]
        epoch: int,
        number: int,
    ) -> StreamBatch:
        visual, text, numbers, usable, skipped = contents
        items = request.images[request.own_images][usable]
        ids = torch.from_numpy(numbers)
        # An item is an image and its caption, so both have the same numbers.
        return StreamBatch(
            images=items,
            captions=items,
            image_ids=ids,
            text_ids=ids,
            visual=visual,
            text=text,
            epoch=epoch,
            index=number,
            loader=self,
            global_images=request.images,
            global_captions=request.images,
            image_start=request.own_images.start,
            caption_start=request.own_images.start,
            skipped=tuple(skipped),
        )


@dataclass(frozen=True)
class StreamReader:
    """Reads the items of a batch of a stream, in this process or in a worker.

    Attributes:
        stream: The stream.
        visual: Model input of the images.
        text: Model input of the captions.
    """

    stream: ShardStream
    visual: ItemSource
    text: ItemSource

    def __call__(self, request: BatchRequest) -> StreamContents:
        """Read the items of this process. An item that cannot be read is an error unless the stream
        skips it.
        """
        usable = np.ones(len(request.images[request.own_images]), bool)
        skipped = list[str]()
        try:
            return *self._read(request, usable), usable, skipped
        except DataError:
            if not self.stream.skip_bad:
                raise
        # One by one, to find which of them cannot be read.
        for index in range(len(usable)):
            try:
                self._read(request, np.array([index]))
            except DataError as error:
                usable[index] = False
                skipped.append(str(error))
        if not usable.any():
            raise DataError(
                f"{self.stream.pattern}: expected a usable item in a batch, got none: {skipped[0]}"
            )
        return *self._read(request, usable), usable, skipped

    def _read(
        self, request: BatchRequest, selected: np.ndarray
    ) -> tuple[Encoded, Encoded, np.ndarray]:
        """Read some of the items, with a caption sampled by the seed of each, or with their first
        captions.
        """
        items = request.images[request.own_images][selected]
        seeds = None if request.seeds is None else request.seeds[selected]
        choices = (
            np.zeros(len(items), np.int64)
            if seeds is None
            else seeds.astype(np.int64) % MAX_CAPTIONS
        )
        text = self.text.read(items + choices * len(self.stream))
        return read_unnormalized(self.visual, items, seeds), text, self.stream.ids(items)
