"""Batches of a data set: coverage, reproducibility, and resuming."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset
from visavis.data.image_file import ByteRange, Image
from visavis.data.item_sources import PixelSource, StoredFeatures
from visavis.data.loader import BatchSchedule, Loader, derive_seed
from visavis.data.random_transforms import RandomCrops
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.vocabulary import Vocabulary

FIRST_WORDS = ["a", "the cat", "one red dog runs", "two boats lie on the blue lake today"]


def dataset(counts):
    """One image per count, with this number of captions of different lengths."""
    image_of = np.repeat(np.arange(len(counts)), counts)
    captions = tuple(f"{FIRST_WORDS[i * 7 % 4]} number {i}" for i in range(len(image_of)))
    return Dataset(
        "toy", tuple(Image(f"{i}.jpg", "train") for i in range(len(counts))), captions, image_of
    )


class Numbers:
    """A store whose row i is (i, i)."""

    def read(self, rows):
        return Encoded(torch.as_tensor(rows)[:, None].expand(-1, 2).float())


def loader(data, plan, seed=3):
    vocabulary = Vocabulary.from_captions(data.captions, min_count=1)
    return Loader(
        data,
        StoredFeatures(Numbers(), np.arange(len(data.images)) + 100),
        TokenizedCaptions(data.captions, vocabulary),
        plan,
        seed,
    )


counts = st.lists(st.integers(0, 6), min_size=1, max_size=20).filter(any)
sizes = st.integers(2, 9)


@given(counts, sizes, st.integers(0, 3), st.integers(0, 5))
def test_schedule_of_pairs_has_each_caption_once_per_epoch(counts, batch_size, buckets, epoch):
    data = dataset(counts)
    plan = BatchSchedule(batch_size=batch_size, length_buckets=buckets).batches(data, 0, epoch)
    captions = np.concatenate([captions for _, captions in plan])
    assert sorted(captions) == list(range(len(data.captions)))
    for images, captions in plan:
        assert 0 < len(captions) <= batch_size
        assert (images == data.image_of[captions]).all()


@given(counts, sizes, st.integers(1, 6), st.integers(0, 5))
def test_schedule_of_images_has_k_captions_each(counts, batch_size, k, epoch):
    data = dataset(counts)
    plan = BatchSchedule(batch_size=batch_size, captions_per_image=k).batches(data, 0, epoch)
    images = np.concatenate([images for images, _ in plan])
    assert sorted(images) == [image for image, count in enumerate(counts) if count]
    for images, captions in plan:
        assert len(images) <= batch_size
        assert len(set(captions)) == len(captions)
        drawn = np.bincount(data.image_of[captions], minlength=len(counts))
        assert all(drawn[image] == min(k, counts[image]) for image in images)
        assert drawn.sum() == drawn[images].sum()


def test_schedule_of_images_uses_all_captions_over_epochs():
    data, plan = dataset([5] * 4), BatchSchedule(batch_size=2, captions_per_image=1)
    seen = {
        int(i)
        for epoch in range(60)
        for _, captions in plan.batches(data, 0, epoch)
        for i in captions
    }
    assert seen == set(range(20))


def test_batch_has_its_split():
    data = dataset([1, 2, 3])
    renamed = Dataset(
        "toy",
        tuple(Image(image.name, "val") for image in data.images),
        data.captions,
        data.image_of,
    )
    for part, split in ((data, "train"), (renamed, "val")):
        batches = loader(part, BatchSchedule(batch_size=2))
        assert batches.split == split
        assert {batch.to("cpu").split for batch in batches.epoch(0)} == {split}


@pytest.mark.parametrize("k", [None, 2])
def test_schedule_drop_last_has_full_batches(k):
    data = dataset([3] * 7)
    plan = BatchSchedule(batch_size=4, captions_per_image=k, drop_last=True).batches(data, 0, 0)
    assert len(plan) == (5 if k is None else 1)
    assert all(len(images) == 4 for images, _ in plan)


@pytest.mark.parametrize(("k", "unit"), [(None, "captions"), (2, "images")])
def test_schedule_without_batch_is_an_error(k, unit):
    with pytest.raises(
        DataError,
        match=f"data set toy is smaller than one batch of 50 {unit}. Set a smaller training.batch_size",
    ):
        BatchSchedule(batch_size=50, captions_per_image=k, drop_last=True).batches(
            dataset([3] * 7), 0, 0
        )


def to_lists(plan):
    return [(images.tolist(), captions.tolist()) for images, captions in plan]


@pytest.mark.parametrize(
    "plan",
    [
        BatchSchedule(batch_size=4),
        BatchSchedule(batch_size=4, length_buckets=2),
        BatchSchedule(batch_size=4, captions_per_image=2),
    ],
)
def test_schedule_depends_on_seed_and_epoch(plan):
    data = dataset([3] * 9)
    np.random.seed(1)  # noqa: NPY002 - it must not matter
    first = to_lists(plan.batches(data, 5, 2))
    torch.manual_seed(9)
    np.random.seed(2)  # noqa: NPY002
    assert to_lists(plan.batches(data, 5, 2)) == first
    assert to_lists(plan.batches(data, 5, 3)) != first
    assert to_lists(plan.batches(data, 6, 2)) != first


def padding(data, plan):
    """Share of padding tokens."""
    masks = [batch.text.mask for epoch in range(3) for batch in loader(data, plan).epoch(epoch)]
    return 1 - sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)


def test_length_buckets_reduce_padding_and_mix_batches():
    data = dataset([5] * 40)
    plain, bucketed = (
        padding(data, BatchSchedule(batch_size=10, length_buckets=n)) for n in (0, 20)
    )
    assert plain > 0.3
    assert bucketed < plain / 4
    lengths = [
        batch.text.vectors.shape[1]
        for batch in loader(data, BatchSchedule(batch_size=10, length_buckets=20)).epoch(0)
    ]
    assert lengths != sorted(lengths)


def same(one, other):
    assert (one.epoch, one.index) == (other.epoch, other.index)
    assert one.captions.tolist() == other.captions.tolist()
    for side in ("visual", "text"):
        assert torch.equal(getattr(one, side).vectors, getattr(other, side).vectors)
    assert torch.equal(one.image_ids, other.image_ids)
    assert torch.equal(one.text_ids, other.text_ids)


def test_number_of_batches_is_known_without_sampling_them():
    data = dataset([3, 0, 1, 2, 5])
    for k, size, drop_last, limit in itertools.product(
        (None, 1, 2), (2, 3, 4), (False, True), (0, 1, 2)
    ):
        schedule = BatchSchedule(
            batch_size=size, captions_per_image=k, drop_last=drop_last, batches_per_epoch=limit
        )
        assert schedule.num_batches(data) == len(schedule.batches(data, 0, 1))


@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_epoch_resumes_from_any_batch(start):
    batches = loader(dataset([3] * 9), BatchSchedule(batch_size=4, length_buckets=3))
    whole = list(batches.epoch(2))
    assert [batch.index for batch in whole] == list(range(batches.num_batches))
    rest = list(batches.epoch(2, start=start))
    assert len(rest) == len(whole) - start
    for one, other in zip(whole[start:], rest, strict=True):
        same(one, other)


def test_batch_ids_match_images_and_captions():
    data = dataset([2, 3, 1])
    for batch in loader(data, BatchSchedule(batch_size=2, captions_per_image=2)).epoch(0):
        assert batch.visual.vectors[:, 0].tolist() == [
            100 + image for image in batch.image_ids.tolist()
        ]
        assert batch.text_ids.tolist() == data.image_of[batch.captions].tolist()
        assert set(batch.text_ids.tolist()) == set(batch.image_ids.tolist())


def test_stored_features_average_crops():
    class Crops:
        def read(self, rows):
            return Encoded(torch.arange(10.0)[None, :, None].expand(len(rows), 10, 3))

    assert (
        StoredFeatures(Crops(), np.arange(2), crops=10).read(np.array([0, 1])).vectors.tolist()
        == [[4.5] * 3] * 2
    )


class WholeImages:
    """Preprocessing that changes nothing."""

    def preprocess(self, images):
        return torch.stack(
            [torch.from_numpy(np.asarray(image.resize((8, 8))).copy()) for image in images]
        )


@pytest.fixture
def pixels(tmp_path):
    from PIL import Image as Pictures

    noise = np.random.default_rng(0)
    for i in range(6):
        Pictures.fromarray(noise.integers(0, 255, (20, 24, 3), np.uint8)).save(
            tmp_path / f"{i}.png"
        )
    images = tuple(Image(f"{i}.png", "train", ByteRange(tmp_path / f"{i}.png")) for i in range(6))
    data = Dataset("images", images, tuple(f"image {i}" for i in range(6)), np.arange(6))
    tokens = TokenizedCaptions(data.captions, Vocabulary.from_captions(data.captions, min_count=1))
    return lambda augment, seed: Loader(
        data,
        PixelSource(
            data.images,
            WholeImages().preprocess,
            RandomCrops(WholeImages().preprocess) if augment else None,
        ),
        tokens,
        BatchSchedule(batch_size=2),
        seed,
    )


def test_random_transforms_depend_on_seed_epoch_and_batch(pixels):
    augmented = pixels(True, 0)
    whole = list(augmented.epoch(1))
    torch.manual_seed(5)
    for one, other in zip(whole[1:], augmented.epoch(1, start=1), strict=True):
        same(one, other)
    images = {
        epoch: {
            int(i): v
            for b in augmented.epoch(epoch)
            for i, v in zip(b.images, b.visual.vectors, strict=True)
        }
        for epoch in (1, 2)
    }
    assert not all(torch.equal(images[1][i], images[2][i]) for i in range(6)), (
        "another epoch, another crop"
    )


def test_pixel_source_uses_crops_only_in_training(pixels):
    read = pixels(True, 0).visual
    read.preprocess, read.read_crops.preprocess = (
        lambda images, n=n: torch.full((len(images), 1), n) for n in (1.0, 2.0)
    )
    assert read.read(np.arange(2), np.arange(2)).vectors.tolist() == [[2.0], [2.0]]
    assert read.read(np.arange(2)).vectors.tolist() == [[1.0], [1.0]]


def test_pixel_source_is_deterministic_without_augmentation(pixels):
    plain = list(pixels(False, 0).epoch(1))
    for one, other in zip(plain, pixels(True, 0).epoch(1, training=False), strict=True):
        same(one, other)


def test_unreadable_image_in_batch_is_one_error(pixels, tmp_path):
    batches = pixels(True, 0)
    (tmp_path / "3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"3\.png"):
        list(batches.epoch(0))


@given(
    st.lists(st.integers(1, 6), min_size=6, max_size=20),
    st.integers(4, 9),
    st.none() | st.integers(1, 3),
    st.integers(1, 4),
)
def test_parts_of_ranks_make_the_global_batch(counts, batch_size, k, world_size):
    size = batch_size if k is None else 6
    whole = loader(
        dataset(counts), BatchSchedule(batch_size=size, captions_per_image=k, drop_last=True)
    )
    parts = [
        replace(whole, rank=rank, world_size=world_size).epoch(1) for rank in range(world_size)
    ]
    for expected, *ranks in zip(whole.epoch(1), *parts, strict=True):
        assert expected.global_images.tolist() == expected.images.tolist()
        images, captions = (
            [part.tolist() for part in np.array_split(items, world_size)]
            for items in (expected.images, expected.captions)
        )
        assert [batch.images.tolist() for batch in ranks] == images
        assert [batch.captions.tolist() for batch in ranks] == captions
        for rank, batch in enumerate(ranks):
            assert (batch.image_start, batch.caption_start) == (
                sum(map(len, images[:rank])),
                sum(map(len, captions[:rank])),
            )
            assert batch.global_images.tolist() == expected.images.tolist()
            assert batch.global_captions.tolist() == expected.captions.tolist()
        for name in ("image_ids", "text_ids"):
            assert torch.equal(
                torch.cat([getattr(batch, name) for batch in ranks]), getattr(expected, name)
            )
        assert torch.equal(
            torch.cat([batch.visual.vectors for batch in ranks]), expected.visual.vectors
        )


def test_batch_with_fewer_items_than_ranks_is_an_error():
    batches = replace(loader(dataset([1] * 9), BatchSchedule(batch_size=4)), world_size=3)
    with pytest.raises(
        DataError,
        match="expected at least 3 images and captions in a batch, one for each process, got 1",
    ):
        list(batches.epoch(0))


def test_random_transforms_do_not_depend_on_ranks(pixels):
    whole = list(pixels(True, 0).epoch(1))
    parts = [list(replace(pixels(True, 0), rank=rank, world_size=2).epoch(1)) for rank in range(2)]
    for expected, *ranks in zip(whole, *parts, strict=True):
        assert torch.equal(
            torch.cat([batch.visual.vectors for batch in ranks]), expected.visual.vectors
        )


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_derive_seed_gives_different_valid_seeds(numbers):
    assert 0 <= derive_seed(*numbers) < 2**32
    assert derive_seed(*numbers) != derive_seed(*numbers[:-1], numbers[-1] + 1)
    assert derive_seed(*numbers) == derive_seed(*numbers)
