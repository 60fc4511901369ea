"""Batches of a data set: which images and captions are in a batch, and what a model reads of them.

The batches of an epoch depend only on the seed and the epoch. A random transform also depends on
the position of the image in its batch. So a stopped run continues with the same batches, for any
number of processes and of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, tee
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded, concatenate
from visavis.data.dataset import Dataset, require
from visavis.data.item_sources import ItemSource, PixelSource
from visavis.data.parallel import map_in_order
from visavis.data.workers import BatchReader, BatchRequest, WorkerPool

# Images of a batch that a worker reads at once. A larger batch is shared out, so that it arrives
# sooner and workers hold less of it.
MAX_IMAGES_PER_READ = 128


class BatchExtension(Protocol):
    """Adds negatives to a batch, such as pairs that people judged not relevant, or mined hard
    negatives.
    """

    @property
    def image_of(self) -> np.ndarray:
        """Image of each text that a batch may hold, shape ``[T]``. Negative for a text without an
        image.
        """
        ...

    def add_negatives(
        self, images: np.ndarray, captions: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add negatives to a batch. Return the images and texts of the batch and of negatives."""
        ...


@dataclass(frozen=True)
class Batch:
    """The images and captions of one training step, or the part of them that one rank reads.

    Attributes:
        images: Indices of images in the split, shape ``[V]``.
        captions: Indices of captions in the split, shape ``[T]``.
        image_ids: Ids of the images, shape ``[V]``. Equal ids of images and texts are positives.
        text_ids: Ids of the captions, shape ``[T]``.
        visual: Model input of the images.
        text: Model input of the captions.
        epoch: Epoch of the batch.
        index: Number of the batch in its epoch.
        loader: The loader that made it.
        global_images: Indices of the images of all ranks, in the order of ranks.
        global_captions: Indices of the captions of all ranks.
        image_start: Position of the first image in ``global_images``.
        caption_start: Position of the first caption in ``global_captions``.
    """

    images: np.ndarray
    captions: np.ndarray
    image_ids: Tensor
    text_ids: Tensor
    visual: Encoded
    text: Encoded
    epoch: int
    index: int
    loader: Loader
    global_images: np.ndarray
    global_captions: np.ndarray
    image_start: int = 0
    caption_start: int = 0

    @property
    def split(self) -> str:
        """Name of the split of its items."""
        return self.loader.split

    def to(self, device: torch.device | str) -> Batch:
        """Move all tensors to a device.

        Args:
            device: The device.

        Returns:
            The moved batch.
        """
        on_gpu = torch.device(device).type == "cuda"
        return replace(
            self,
            image_ids=self.image_ids.to(device),
            text_ids=self.text_ids.to(device),
            visual=self.visual.to(device, non_blocking=on_gpu),
            text=self.text.to(device, non_blocking=on_gpu),
        )


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """How an epoch is divided into batches.

    Attributes:
        batch_size: Number of pairs, or of images if ``captions_per_image`` is set.
        captions_per_image: None: sample captions, each with its image, as the papers' code does. An
            image can then occur twice in a batch. A number: sample images, each with this number of
            random captions, or with all if it has fewer.
        length_buckets: Number of batches within which captions are sorted by length, to reduce
            padding. 0: not sorted.
        drop_last: Skip a last batch that is not full.
        batches_per_epoch: Number of batches of an epoch. 0: all.
    """

    batch_size: int = 128
    captions_per_image: int | None = None
    length_buckets: int = 0
    drop_last: bool = False
    batches_per_epoch: int = 0

    def batches(self, data: Dataset, seed: int, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Sample the batches of an epoch: indices of the images and of the captions of each."""
        count = self.num_batches(data)
        random = np.random.default_rng((seed, epoch))
        return (
            self._pairs(data, random)
            if self.captions_per_image is None
            else self._images(data, random)
        )[:count]

    def num_batches(self, data: Dataset) -> int:
        """Count the batches of an epoch, the same for each, without sampling them."""
        items = len(data.captions)
        unit = "captions"
        if self.captions_per_image is not None:
            items = int(np.count_nonzero(data.captions_of.counts))
            unit = "images"
        count = items // self.batch_size if self.drop_last else -(-items // self.batch_size)
        require(
            count,
            f"data set {data.name} is smaller than one batch of {self.batch_size} {unit}. Set "
            "a smaller training.batch_size.",
        )
        return min(count, self.batches_per_epoch or count)

    def _pairs(
        self, data: Dataset, random: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        # The order of the calls of the generator is a part of a seed: a permutation of the
        # captions, then one of the batches.
        order = random.permutation(len(data.captions))
        if self.length_buckets:
            lengths = data.caption_lengths
            chunk = self.length_buckets * self.batch_size
            chunks = [order[start : start + chunk] for start in range(0, len(order), chunk)]
            # Only within a chunk, so that batches of an epoch differ from those of the next.
            order = np.concatenate(
                [part[np.argsort(lengths[part], kind="stable")] for part in chunks]
            )
        batches = self._cut(order)
        if self.length_buckets:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return [(data.image_of[captions], captions) for captions in batches]

    def _images(
        self, data: Dataset, random: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self.captions_per_image is not None
        # Images without captions are never sampled.
        counts = data.captions_of.counts
        plan = []
        for images in self._cut(random.permutation(np.flatnonzero(counts))):
            if (counts[images] == 1).all():  # a permutation of one caption reads no random numbers
                plan.append((images, data.captions_of.select(images)))
                continue
            chosen = [
                random.permutation(data.captions_of[i])[: self.captions_per_image]
                for i in images.tolist()
            ]
            plan.append((images, np.concatenate(chosen)))
        return plan

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        batches = [
            order[start : start + self.batch_size]
            for start in range(0, len(order), self.batch_size)
        ]
        return batches[:-1] if self.drop_last and len(batches[-1]) < self.batch_size else batches


@dataclass(frozen=True)
class Loader:
    """The batches of one split. Worker processes read them while the model trains.

    ``loader.epoch(3, start=10)`` continues with the eleventh batch of epoch 3, exactly as if the
    first ten had been read.

    Attributes:
        data: The split.
        visual: Model input of the images.
        text: Model input of the captions, and of judged texts after these.
        schedule: How an epoch is divided into batches.
        seed: Random seed.
        extension: Adds negatives to each batch. None: a batch holds the pairs of the schedule only.
        rank: Rank of this process. It reads the part ``rank`` of ``world_size`` of each batch,
            images and captions separately.
        world_size: Number of ranks.
        pool: Worker processes that read the batches of a training. None: this process reads them.
        reader_number: Number of ``batch_reader`` among the readers of the pool.
    """

    data: Dataset
    visual: ItemSource
    text: ItemSource
    schedule: BatchSchedule
    seed: int
    extension: BatchExtension | None = None
    rank: int = 0
    world_size: int = 1
    pool: WorkerPool | None = None
    reader_number: int = 0

    @cached_property
    def split(self) -> str:
        """Name of the split."""
        (name,) = self.data.splits
        return name

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch, the same for all epochs and ranks."""
        return self.schedule.num_batches(self.data)

    def epoch(
        self,
        epoch: int,
        *,
        start: int = 0,
        stop: int | None = None,
        training: bool = True,
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """Yield the batches ``start`` to ``stop`` of an epoch, in training with random transforms. A
        training epoch must not begin before the last batch of an earlier call was read.
        """
        # The last epoch is kept, because validations can divide it.
        if epoch not in self._plans:
            self._plans.clear()
            self._plans[epoch] = self.schedule.batches(self.data, self.seed, epoch)
        plan = self._plans[epoch]
        # Workers take requests ahead of the batches.
        requests, sent = tee(
            self._request(*plan[number], epoch, number, training)
            for number in range(len(plan))[start:stop]
        )
        contents = self._read(sent, device, starts_workers=training)
        for number, request in enumerate(requests, start):
            batch = self._batch(request, next(contents), epoch, number).to(device)
            # Bytes have a quarter of the size of normalized pixels. No reference keeps them during
            # a training step.
            yield replace(batch, visual=self._normalize(batch.visual))

    @cached_property
    def _plans(self) -> dict[int, Sequence[tuple[np.ndarray, np.ndarray]]]:
        return {}

    def read_images(
        self, batches: Iterable[np.ndarray], device: torch.device | str = "cpu"
    ) -> Iterator[Encoded]:
        """Yield images without random transforms and without captions. Worker processes read them
        if they are running and idle.
        """
        nothing = np.zeros(0, int)
        no_captions = slice(0, 0)
        requests = (
            BatchRequest(images, nothing, slice(0, len(images)), no_captions, None)
            for images in batches
        )
        for visual, _ in self._read(requests, device):
            yield self._normalize(visual.to(device))

    def _read(
        self,
        requests: Iterable[BatchRequest],
        device: torch.device | str,
        *,
        starts_workers: bool = False,
    ) -> Iterator[Any]:
        # Workers read the batches of trainings, and stay for the next epoch. If they are running and
        # no epoch is in progress, they also read batches without random transforms.
        if self.pool is not None and (starts_workers or self.pool.is_idle):
            return self._read_in_workers(self.pool, requests, device)
        # Other batches are read in this process.
        if isinstance(self.visual, PixelSource):
            # All cores decode a batch, then all train. At the same time, they would slow each other
            # down.
            return map(self.batch_reader, requests)
        # A thread reads stored features while the model trains on the batch before.
        return map_in_order(self.batch_reader, requests, threads=1, ahead=1)

    def _read_in_workers(
        self, pool: WorkerPool, requests: Iterable[BatchRequest], device: torch.device | str
    ) -> Iterator[Any]:
        """Read batches in worker processes, a large one in parts."""
        split, sent = tee(request.split(MAX_IMAGES_PER_READ) for request in requests)
        contents = pool.read((part for parts, _ in sent for part in parts), self.reader_number)
        for parts, positions in split:
            visual, text = next(contents)
            yield (
                (
                    visual
                    if len(parts) == 1
                    else _arrange(visual, islice(contents, len(parts) - 1), positions, device)
                ),
                text,
            )

    def _normalize(self, visual: Encoded) -> Encoded:
        return self.visual.normalize(visual) if isinstance(self.visual, PixelSource) else visual

    def for_all_ranks(self) -> Loader:
        """Return a loader that reads the whole batches of all ranks."""
        # The pool is shared: its readers do not depend on the rank.
        return replace(self, rank=0, world_size=1)

    def close(self) -> None:
        """End the worker processes. A later training epoch starts new ones."""
        if self.pool is not None:
            self.pool.close()

    @property
    def batch_reader(self) -> Callable[[BatchRequest], Any]:
        """Reads the items of a batch, in this process or in a worker. ``_batch`` receives its
        result.
        """
        return BatchReader(self.visual, self.text)

    def _request(
        self, images: np.ndarray, captions: np.ndarray, epoch: int, number: int, training: bool
    ) -> BatchRequest:
        if self.extension is not None:
            images, captions = self.extension.add_negatives(
                images, captions, np.random.default_rng((self.seed, epoch, number))
            )
        # Negatives are added before the batch is divided, so that all ranks sample the same ones.
        own_images = self._part(len(images))
        own_captions = self._part(len(captions))
        # A seed for each position of the global batch, so that the number of ranks changes no crop.
        seeds = (
            np.random.SeedSequence((self.seed, epoch, number)).generate_state(len(images))[
                own_images
            ]
            if training
            else None
        )
        return BatchRequest(images, captions, own_images, own_captions, seeds)

    def _batch(
        self, request: BatchRequest, contents: tuple[Encoded, Encoded], epoch: int, number: int
    ) -> Batch:
        image_of = self.data.image_of if self.extension is None else self.extension.image_of
        images = request.images[request.own_images]
        captions = request.captions[request.own_captions]
        return Batch(
            images,
            captions,
            torch.from_numpy(images),
            torch.from_numpy(image_of[captions]),
            *contents,
            epoch,
            number,
            self,
            request.images,
            request.captions,
            request.own_images.start,
            request.own_captions.start,
        )

    def _part(self, count: int) -> slice:
        """Positions of this rank in a batch of ``count`` items. The first ranks have one more if
        the parts are not equal.
        """
        require(
            count >= self.world_size,
            f"data set {self.data.name}: expected at least {self.world_size} images and "
            "captions in a batch, one for each process, "
            f"got {count}. Set a larger training.batch_size, or start fewer processes.",
        )
        # Contiguous parts, so that ranks in order concatenate to the global batch.
        size, larger = divmod(count, self.world_size)
        start = self.rank * size + min(self.rank, larger)
        return slice(start, start + size + (self.rank < larger))


def share_workers(loaders: Sequence[Loader], workers: int) -> list[Loader]:
    """Let worker processes, 0: none, read the batches of some loaders. They start with the first
    training epoch.
    """
    pool = (
        WorkerPool([loader.batch_reader for loader in loaders], workers, "training.workers")
        if workers
        else None
    )
    return [
        replace(loader, pool=pool, reader_number=number) for number, loader in enumerate(loaders)
    ]


def _arrange(
    first: Encoded,
    others: Iterable[tuple[Encoded, None]],
    positions: np.ndarray,
    device: torch.device | str,
) -> Encoded:
    """Copy the parts of a batch to their positions in it. Pixels go to the device part by part, and
    are in its memory only once.
    """
    # Without images that occur twice, the parts are in the order of the batch, and each is one
    # slice.
    order = torch.from_numpy(positions).to(device)
    in_order = (np.diff(positions) > 0).all()
    start = 0
    if not isinstance(first.vectors, Tensor) or first.mask is not None:
        return concatenate([first, *(visual for visual, _ in others)]).to(device)[order.argsort()]
    arranged = first.vectors.new_empty(len(order), *first.vectors.shape[1:], device=device)
    for part, _ in chain([(first, None)], others):
        assert isinstance(part.vectors, Tensor)
        rows = slice(start, start + len(part))
        pixels = part.vectors.to(device, non_blocking=torch.device(device).type == "cuda")
        arranged[rows if in_order else order[rows]] = pixels
        start += len(part)
    return Encoded(arranged)


def derive_seed(*numbers: int) -> int:
    """Derive a seed from the seed of a run and a position in it, such as epoch and batch. It is well
    mixed, and equal on all machines.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
