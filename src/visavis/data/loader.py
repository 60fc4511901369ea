"""From a data set to batches: which images and captions are in a batch, and what a model reads of them.

The plan of an epoch is a function of (seed, epoch) alone, and so is every random transform of a batch; a run that
was stopped continues with exactly the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.data.captions import Vocabulary, pad_numbers
from visavis.data.dataset import Dataset
from visavis.data.experts import ExpertStore
from visavis.data.features import FeatureStore
from visavis.data.judged import JudgedSplit
from visavis.data.own_features import ArrayFeatures, PrecompFeatures
from visavis.data.region_features import RegionFeatures
from visavis.data.standardization import Standardization
from visavis.errors import DataError
from visavis.types import Encoded, concatenate

Features = FeatureStore | ArrayFeatures | PrecompFeatures | RegionFeatures | ExpertStore


class Source(Protocol):
    """What a model reads of the items of one side of a data set."""

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        """The items at ``index``; a generator means training: random transforms draw from it."""
        ...


@dataclass(frozen=True)
class Rows:
    """Features of a store, by the rows of this data set's items; several crops are averaged, then standardized."""

    store: Features
    rows: np.ndarray
    crops: int = 1
    standardization: Standardization | None = None

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        encoded = self.store.read(self.rows[index])
        encoded = encoded.map(lambda part: part.mean(1)) if self.crops > 1 else encoded
        return encoded if self.standardization is None else self.standardization(encoded)


@dataclass(frozen=True)
class Joined:
    """The items of two sources, those of the second numbered after the ``count`` of the first."""

    first: Source
    second: Source
    count: int

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        after = index >= self.count
        if not after.any():
            return self.first.read(index, generator)
        if after.all():
            return self.second.read(index - self.count, generator)
        parts = self.first.read(index[~after], generator), self.second.read(index[after] - self.count, generator)
        return concatenate(parts)[torch.from_numpy(np.argsort(np.argsort(after, kind="stable")))]


class Tokens:
    """Captions as token ids of a vocabulary, tokenized once."""

    def __init__(self, captions: Sequence[str], vocabulary: Vocabulary):
        self.numbers = [vocabulary.numbers(caption) for caption in captions]

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        return pad_numbers([self.numbers[i] for i in index])


@dataclass(frozen=True)
class Batch:
    """The images and captions of one training step.

    images ``[V]``, captions ``[T]``: indices in the split. image_ids ``[V]``, text_ids ``[T]``: equal where they belong
    together. visual, text: what the model reads. epoch, number: its position in the run. loader: the loader that made it.
    """

    images: np.ndarray
    captions: np.ndarray
    image_ids: Tensor
    text_ids: Tensor
    visual: Encoded
    text: Encoded
    epoch: int
    number: int
    loader: Loader

    @property
    def split(self) -> str:
        """The split its items belong to."""
        return self.loader.split

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self,
            image_ids=self.image_ids.to(device),
            text_ids=self.text_ids.to(device),
            visual=self.visual.to(device),
            text=self.text.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an epoch is divided into batches.

    batch_size: pairs, or images where ``captions_per_image`` is given. captions_per_image: None draws over captions, each
    with its image, as the papers' codes do (an image can then occur twice); k draws over images, each with k of its
    captions at random (all of them if it has fewer). length_buckets: n sorts captions by length within n batches, to save
    padding; 0: no sorting. drop_last: leave out a last batch that is not full. batches_per_epoch: an epoch has the first n of its
    batches, which are other ones in each epoch; 0: all.
    """

    batch_size: int = 128
    captions_per_image: int | None = None
    length_buckets: int = 0
    drop_last: bool = False
    batches_per_epoch: int = 0

    def batches(self, data: Dataset, seed: int, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The (images, captions) of every batch of an epoch. Raises DataError if there are too few items for a single batch."""
        random = np.random.default_rng((seed, epoch))
        plan = self._pairs(data, random) if self.captions_per_image is None else self._images(data, random)
        if not plan:
            unit = "captions" if self.captions_per_image is None else "images"
            raise DataError(
                f"data set {data.name} is smaller than one batch of {self.batch_size} {unit}: choose a smaller training.batch_size."
            )
        return plan[: self.batches_per_epoch or None]

    def _pairs(self, data: Dataset, random: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        order = random.permutation(len(data.captions))
        if self.length_buckets:
            lengths = np.array([caption.count(" ") for caption in data.captions])
            chunk = self.length_buckets * self.batch_size
            chunks = [order[start : start + chunk] for start in range(0, len(order), chunk)]
            order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in chunks])
        batches = self._cut(order)
        if self.length_buckets:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return [(data.image_of[captions], captions) for captions in batches]

    def _images(self, data: Dataset, random: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self.captions_per_image is not None
        described = np.array([i for i, own in enumerate(data.captions_of) if len(own)])
        plan = []
        for images in self._cut(random.permutation(described)):
            chosen = [random.permutation(data.captions_of[i])[: self.captions_per_image] for i in images]
            plan.append((images, np.concatenate(chosen)))
        return plan

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        return batches[:-1] if self.drop_last and len(batches[-1]) < self.batch_size else batches


@dataclass(frozen=True)
class Loader:
    """The batches of one split; the next one is read while the model works.

    ``loader.epoch(3, start=10)`` continues with the eleventh batch of epoch 3, exactly as if it had read the first ten.
    judged: what people judged of the split, whose texts ``text`` then reads; what does not fit a batch is brought into it.
    """

    data: Dataset
    visual: Source
    text: Source
    plan: Plan
    seed: int
    judged: JudgedSplit | None = None

    @cached_property
    def split(self) -> str:
        """The name of the split."""
        (name,) = self.data.splits
        return name

    def batches_in(self, epoch: int) -> int:
        return len(self.plan.batches(self.data, self.seed, epoch))

    def epoch(self, epoch: int, *, start: int = 0, training: bool = True) -> Iterator[Batch]:
        """The batches of an epoch from ``start`` on; with ``training=False`` without random transforms."""
        plan = self.plan.batches(self.data, self.seed, epoch)[start:]
        with ThreadPoolExecutor(1) as reader:
            waiting = [reader.submit(self._read, *plan[0], epoch, start, training)] if plan else []
            for number in range(len(plan)):
                batch = waiting.pop().result()
                if number + 1 < len(plan):
                    waiting.append(reader.submit(self._read, *plan[number + 1], epoch, start + number + 1, training))
                yield batch

    def _read(self, images: np.ndarray, captions: np.ndarray, epoch: int, number: int, training: bool) -> Batch:
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, number)) if training else None
        image_of = self.data.image_of
        if self.judged is not None:
            images, captions = self.judged.meet(images, captions, np.random.default_rng((self.seed, epoch, number)))
            image_of = self.judged.image_of
        return Batch(
            images,
            captions,
            torch.from_numpy(images),
            torch.from_numpy(image_of[captions]),
            self.visual.read(images, generator),
            self.text.read(captions, generator),
            epoch,
            number,
            self,
        )


def seed_of(*numbers: int) -> int:
    """A seed for a position in a run: ``seed_of(run_seed, epoch, batch)``, well mixed and the same on every machine."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
