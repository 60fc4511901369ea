"""Streams of shards: every item once per epoch for any processes, resuming, formats of shards, and
damaged shards.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.platforms import changes_open_files

from visavis.core.errors import DataError, RecipeError
from visavis.core.progress import NoProgress
from visavis.data.formats.webdataset import TarSamples
from visavis.data.item_sources import PixelSource
from visavis.data.loader import share_workers
from visavis.data.shard_stream import ShardStream, StreamLoader, StreamPlan, StreamSchedule
from visavis.data.shards import CACHE_SIZE, list_shards, open_filesystem
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.vocabulary import Vocabulary
from visavis.models.encoders.preprocessing import ImageConverter, Preprocessing
from visavis.training.recipes.open_data import open_stream
from visavis.training.recipes.recipe import build_recipe

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
wds = pytest.importorskip(
    "webdataset", reason="webdataset is not installed: pip install -e '.[dev]'"
)

COUNTS = (7, 3, 9, 1, 6)


def image_bytes(number, kind="PNG"):
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(content, kind)
    return content.getvalue()


def write_shards(folder, counts=COUNTS, key=lambda shard, number: f"{number:05d}", sample=None):
    """Shards of WebDataset. The color of an image and its caption are the number of the item."""
    folder.mkdir(exist_ok=True)
    number = 0
    for shard, count in enumerate(counts):
        with wds.TarWriter(str(folder / f"train-{shard:03d}.tar")) as writer:
            for row in range(count):
                content = (
                    sample(number)
                    if sample
                    else {"png": image_bytes(number), "txt": f"caption {number}"}
                )
                writer.write({"__key__": key(shard, number) if key else f"{row:05d}", **content})
                number += 1
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


def read_pixels(images):
    """Pixels of 4 x 4 images."""
    return torch.stack(
        [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() for image in images]
    )


def make_loader(pattern, batch_size=4, interleave=3, skip_bad=False, **options):
    stream = ShardStream.open(str(pattern), max_open=2, skip_bad=skip_bad)
    vocabulary = Vocabulary.from_captions([str(number) for number in range(100)] + ["caption"], 1)
    sources = (
        PixelSource(stream.dataset.images, read_pixels),
        TokenizedCaptions(stream.dataset.captions, vocabulary),
    )
    return StreamLoader(
        stream.dataset,
        *sources,
        StreamSchedule(batch_size=batch_size, interleave=interleave),
        5,
        **options,
    )


def numbers(*batches):
    """Numbers of the items of batches by the colors of their images."""
    return [
        number for batch in batches for number in batch.visual.vectors[:, 0, 0, 0].int().tolist()
    ]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 99),
    st.integers(1, 4),
)
def test_plan_has_every_item_once(counts, batch_size, interleave, seed, epoch):
    starts = np.concatenate([[0], np.cumsum(counts)])
    plan = StreamPlan(starts, batch_size, interleave, seed, epoch)
    batches = [items for items, _ in plan]
    assert sorted(np.concatenate(batches).tolist()) == list(range(sum(counts)))
    sizes = {len(items) for items in batches}
    assert max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    again = StreamPlan(starts, batch_size, interleave, seed, epoch)
    for number in reversed(range(len(batches))):
        assert np.array_equal(again[number][0], batches[number]), (
            "a batch is found without those before it"
        )


def test_plan_mixes_shards_and_differs_by_epoch():
    starts = np.arange(0, 1001, 100)
    first, second = (StreamPlan(starts, 50, 5, 1, epoch) for epoch in (1, 2))
    assert all(len(np.unique(items // 100)) in (5, 6, 7) for items, _ in first), (
        "a batch has items of five shards, or of their successors"
    )
    assert not np.array_equal(first[0][0], second[0][0])
    # Each of five processes reads two shards, and those at its borders.
    assert all(
        len(
            np.unique(
                np.concatenate([items[10 * rank : 10 * rank + 10] for items, _ in first]) // 100
            )
        )
        <= 3
        for rank in range(5)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_read_parts_of_one_global_batch(shards, world_size):
    alone = list(make_loader(shards).epoch(3))
    parts = [
        list(make_loader(shards, rank=rank, world_size=world_size).epoch(3))
        for rank in range(world_size)
    ]
    for number, batch in enumerate(alone):
        of_ranks = [part[number] for part in parts]
        assert np.array_equal(np.concatenate([part.images for part in of_ranks]), batch.images)
        assert all(np.array_equal(part.global_images, batch.images) for part in of_ranks)
        assert torch.equal(torch.cat([part.image_ids for part in of_ranks]), batch.image_ids)
        assert numbers(*of_ranks) == numbers(batch) == batch.images.tolist()
        assert [part.image_start for part in of_ranks] == np.cumsum(
            [0, *(len(part.images) for part in of_ranks)]
        )[:-1].tolist()
    assert sorted(numbers(*alone)) == list(range(sum(COUNTS)))


def test_resumed_epoch_equals_undisturbed_one(shards, monkeypatch):
    loader = make_loader(shards)
    whole = list(loader.epoch(2))
    assert loader.num_batches == len(whole) == 7
    opened = []
    read = ShardStream.image
    monkeypatch.setattr(
        ShardStream, "image", lambda self, item: opened.append(item) or read(self, item)
    )
    rest = list(make_loader(shards).epoch(2, start=5))
    assert [batch.index for batch in rest] == [5, 6]
    assert len(opened) == sum(len(batch.images) for batch in rest), "no image before is decoded"
    for batch, expected in zip(rest, whole[5:], strict=True):
        assert torch.equal(batch.visual.vectors, expected.visual.vectors)
        assert torch.equal(batch.text.vectors, expected.text.vectors)
    copy = pickle.loads(pickle.dumps(loader.stream))
    assert copy.fingerprint == loader.stream.fingerprint
    assert copy.dataset.captions[4] == "caption 4"


def test_captions_of_an_item_are_sampled_by_epoch(tmp_path):
    def sample(number):
        return {
            "png": image_bytes(number),
            "json": {
                "captions": [
                    f"caption {number}",
                    f"caption {number + 40}",
                    f"caption {number + 80}",
                ]
            },
        }

    loader = make_loader(write_shards(tmp_path / "shards", (12, 8), sample=sample), batch_size=20)
    seen = {}
    for epoch in range(1, 12):
        (batch,) = loader.epoch(epoch)
        words = [loader.text.vocabulary.words[int(token)] for token in batch.text.vectors[:, 2]]
        for item, word in zip(numbers(batch), words, strict=True):
            seen.setdefault(item, set()).add(int(word) - item)
    assert set().union(*seen.values()) == {0, 40, 80}
    assert sum(len(values) for values in seen.values()) > 40
    (first,), (again,) = loader.epoch(0, training=False), loader.epoch(0, training=False)
    assert torch.equal(first.text.vectors, again.text.vectors)


def test_equal_keys_are_the_same_image(tmp_path):
    stream = make_loader(
        write_shards(tmp_path / "shards", (4, 4), key=lambda _, number: f"photo-{number // 2}")
    ).stream
    assert len(stream) == 4, "members with the same key are one sample"
    stream = make_loader(
        write_shards(
            tmp_path / "other",
            (3, 3),
            key=lambda shard, number: f"{number if shard == 0 else number - 2}",
        )
    ).stream
    ids = stream.ids(np.arange(6))
    assert ids[1] == ids[3] and ids[2] == ids[4] and len(set(ids.tolist())) == 4
    assert (ids >= 0).all()
    folder = write_shards(tmp_path / "restarted", (3, 3), key=None)
    (folder / "index.json").write_text(
        json.dumps({"shardlist": [{"url": f"train-00{i}.tar", "nsamples": 3} for i in range(2)]})
    )
    for pattern in (folder, folder / "index.json"):
        restarted = make_loader(pattern).stream
        assert len(set(restarted.ids(np.arange(6)).tolist())) == 6, (
            "keys that begin again in each shard do not name an image"
        )


def test_patterns_name_shards(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "shards", (2, 2, 2))
    for pattern in ("train-{000..002}.tar", "train-*.tar", "train-00[0-2].tar"):
        assert [file.name for file in list_shards(str(folder / pattern))] == [
            f"train-00{i}.tar" for i in range(3)
        ]
    assert len(list_shards(str(folder))) == 3
    assert len(list_shards(str(folder / "train-001.tar"))) == 1
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    assert (
        len(list_shards("shards/train-{000..001}.tar"))
        == len(list_shards("shards/train-00[01].tar"))
        == 2
    )
    with pytest.raises(DataError, match=r"train-003\.tar: expected an existing path"):
        list_shards(str(folder / "train-{000..003}.tar"))
    with pytest.raises(
        DataError, match=r"val-\*\.tar: expected shards \(\.tar or \.parquet files\), found none"
    ):
        list_shards(str(folder / "val-*.tar"))
    (folder / "x.parquet").touch()
    with pytest.raises(DataError, match=r"expected shards of one kind"):
        list_shards(str(folder))


def test_index_file_gives_counts(tmp_path):
    folder = write_shards(tmp_path / "shards", (2, 3))
    index = {
        "wids_version": 1,
        "name": "x",
        "shardlist": [
            {"url": f"train-00{i}.tar", "nsamples": i + 2, "filesize": 1} for i in (1, 0)
        ],
    }
    (folder / "index.json").write_text(json.dumps(index))
    stream = ShardStream.open(str(folder / "index.json"), max_open=2)
    assert [shard.count for shard in stream.shards] == [3, 2]
    assert stream.dataset.captions[0] == "caption 2"
    index["shardlist"][0]["nsamples"] = 5
    (folder / "index.json").write_text(json.dumps(index))
    stream = ShardStream.open(str(folder / "index.json"), max_open=2)
    with pytest.raises(
        DataError,
        match=r"train-001\.tar: expected 5 samples, got 3\. Copy the shard again, or train with --skip-bad",
    ):
        stream.dataset.captions[4]


def test_cut_shard_is_refused_or_read_up_to_the_cut(tmp_path, caplog, monkeypatch):
    folder = write_shards(tmp_path / "shards", (6, 6))
    content = (folder / "train-001.tar").read_bytes()
    whole = ShardStream.open(str(folder), max_open=2)
    assert len(whole) == 12
    for size in (len(content) // 2, len(content) // 1024 * 512):
        (folder / "train-001.tar").write_bytes(content[:size])
        with pytest.raises(
            DataError,
            match=r"train-001\.tar: .*(truncated|cut short|damaged).*\. Copy the shard again, or train with --skip-bad",
        ):
            ShardStream.open(str(folder), max_open=2)
    stream = ShardStream.open(str(folder), max_open=2, skip_bad=True)
    assert 6 < len(stream) < 12
    # A shard that was cut after it was counted.
    with pytest.raises(
        DataError, match=r"train-001\.tar: expected 6 samples, got \d \(.*\)\. Copy the shard again"
    ):
        whole.dataset.captions[11]
    (folder / "train-001.tar").write_bytes(content[:100])
    opened, read = [], TarSamples.read
    monkeypatch.setattr(
        TarSamples, "read", lambda *arguments: opened.append(arguments) or read(*arguments)
    )
    whole = pickle.loads(pickle.dumps(whole))
    for _ in range(3):
        with pytest.raises(DataError, match=r"train-001\.tar: expected 6 samples, got 0 \(.*\)"):
            whole.dataset.captions[11]
    assert len(opened) == 1, "a shard without readable samples stays open"
    (folder / "train-001.tar").write_bytes(content[: len(content) // 1024 * 512])
    loader = make_loader(folder, skip_bad=True)
    with caplog.at_level(logging.WARNING, "visavis"):
        batches = list(loader.epoch(1))
    found = numbers(*batches)
    assert found and set(found) <= set(range(len(stream)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"png": b"not an image", "txt": "caption 3"}, r"train-000\.tar: 00003"),
        ({"png": image_bytes(3)}, r"train-000\.tar: 00003: expected a caption, got none"),
        (
            {"png": image_bytes(3), "txt": " "},
            r"train-000\.tar: 00003: expected a caption, got none or an empty one",
        ),
        ({"txt": "caption 3"}, r"train-000\.tar: 00003: expected one image \(\.jpg, .*\), got txt"),
        ({"png": image_bytes(3), "json": b"{"}, r"train-000\.tar: 00003\.json is not readable"),
    ],
)
def test_bad_item_is_refused_or_skipped_and_counted(bad, message, tmp_path, caplog):
    def sample(number):
        return bad if number == 3 else {"png": image_bytes(number), "txt": f"caption {number}"}

    folder = write_shards(tmp_path / "shards", (5, 4), sample=sample)
    with pytest.raises(DataError, match=message):
        list(make_loader(folder).epoch(1))
    with caplog.at_level(logging.WARNING, "visavis"):
        batches = list(make_loader(folder, skip_bad=True).epoch(1))
    assert sorted(numbers(*batches)) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert all(len(batch.images) == len(batch.image_ids) == len(batch.text) for batch in batches)
    assert (
        caplog.messages[1]
        == f"Skipped in batches 1 to {len(batches)} of epoch 1: 1 unusable items of {folder}."
    )


def test_parquet_of_datasets_is_read(tmp_path):
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install -e '.[dev]'"
    )
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        rows = range(shard * 5, shard * 5 + 5)
        content = {
            "image": [{"bytes": image_bytes(row), "path": f"{row}.png"} for row in rows],
            "text": [f"caption {row}" for row in rows],
        }
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        datasets.Dataset.from_dict(content, features=features).to_parquet(
            str(tmp_path / "shards" / f"train-{shard}.parquet"), batch_size=2
        )
    loader = make_loader(tmp_path / "shards" / "train-*.parquet")
    assert [shard.count for shard in loader.stream.shards] == [2, 2, 1, 2, 2, 1], (
        "row groups are read one after the other"
    )
    batches = list(loader.epoch(1))
    assert sorted(numbers(*batches)) == list(range(10))
    assert loader.data.captions[7] == "caption 7"
    assert len(set(loader.stream.ids(np.arange(10)).tolist())) == 10


def test_settings_that_need_all_items_are_refused(tmp_path):
    folder = write_shards(tmp_path / "shards", (2,))
    values = {
        "name": "stream",
        "data": {"stream": str(folder)},
        "visual": {"encoder": "small-cnn", "granularity": "pixels"},
        "model": {"kind": "VSE++"},
        "phases": [{"epochs": 1, "objective": "InfoNCE()"}],
    }
    assert len(open_stream(build_recipe(values, {}, "x"), NoProgress())) == 2
    for changes, setting in (
        (
            {"visual.granularity": "pooled", "visual.encoder": "mobilenet-v2"},
            'visual.granularity = "pixels"',
        ),
        ({"data.noise": "ShuffledImages()"}, "no data.noise"),
        ({"training.captions_per_image": 2}, "no training.captions_per_image"),
        ({"phases.0.supervision": "NoisySupervision()"}, "PairSupervision in all phases"),
    ):
        with pytest.raises(RecipeError, match=f"^data\\.stream: expected {setting}, because"):
            open_stream(build_recipe(values, changes, "x"), NoProgress())


@pytest.mark.slow
@changes_open_files
def test_shards_on_object_storage_are_copied_once(object_storage, tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    folder = write_shards(tmp_path / "shards", (3, 4))
    filesystem, _ = open_filesystem(object_storage)
    for path in sorted(folder.iterdir()):
        with filesystem.open_output_stream(f"bucket/streams/{path.name}") as file:
            file.write(path.read_bytes())
    index = {"shardlist": [{"url": f"train-00{i}.tar", "nsamples": i + 3} for i in range(2)]}
    with filesystem.open_output_stream("bucket/streams/index.json") as file:
        file.write(json.dumps(index).encode())
    for pattern in ("train-{000..001}.tar", "train-*.tar", "", "index.json"):
        batches = list(make_loader(f"{object_storage}/streams/{pattern}").epoch(1))
        assert sorted(numbers(*batches)) == list(range(7))
    copies = list((tmp_path / "cache" / "shards").glob("*.tar"))
    assert len(copies) == 2
    monkeypatch.setenv(CACHE_SIZE, "0")
    for path in copies:
        path.unlink()
    batches = list(make_loader(f"{object_storage}/streams/index.json").epoch(2))
    assert sorted(numbers(*batches)) == list(range(7)), (
        "an open shard is read although its copy is removed"
    )
    assert len(list((tmp_path / "cache" / "shards").glob("*.tar"))) == 1
    for value in ("", "much", "-1", "nan"):
        monkeypatch.setenv(CACHE_SIZE, value)
        with pytest.raises(
            DataError,
            match=rf"{CACHE_SIZE}: expected a number of GB >= 0, got '{value}'\. Correct or remove",
        ):
            list(make_loader(f"{object_storage}/streams/index.json").epoch(2))
    with pytest.raises(
        DataError, match=r"s3://bucket/streams/none\.tar: expected an existing shard, got none"
    ):
        list_shards(f"{object_storage}/streams/none.tar")


@pytest.mark.slow
def test_worker_processes_read_the_same_batches(shards):
    alone = make_loader(shards)
    alone = replace(
        alone,
        visual=PixelSource(
            alone.data.images, ImageConverter(Preprocessing(resize=(8, 8), crop=None))
        ),
    )
    (loader,) = share_workers([alone], 2)
    try:
        for start in (0, 3):
            for batch, expected in zip(
                loader.epoch(1, start=start), alone.epoch(1, start=start), strict=True
            ):
                assert (
                    batch.index == expected.index
                    and batch.images.tolist() == expected.images.tolist()
                )
                assert torch.equal(batch.image_ids, expected.image_ids)
                assert torch.equal(batch.visual.vectors, expected.visual.vectors)
                assert torch.equal(batch.text.vectors, expected.text.vectors)
    finally:
        loader.close()
