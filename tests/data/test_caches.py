"""What is kept in the cache: made anew where it is damaged, not lost on a full disk, and never a fault that passes."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visavis import storage
from visavis.data import open_dataset
from visavis.data.dataset import Bytes
from visavis.data.description import Description
from visavis.data.features import FeatureStore, FeatureWriter
from visavis.data.finite import first_broken_row
from visavis.data.own_features import ArrayFeatures
from visavis.errors import DataError, StorageError
from visavis.models.caching import cache_features
from visavis.models.towers import TowerSpec
from visavis.types import Encoded

POOLED = Description("visual", "pooled", "tower", "0" * 16, (64,), 200, "data")
KEYS = [f"{number}.png" for number in range(200)]
VALUES = torch.arange(200.0)[:, None].expand(200, 64).contiguous()
SCENES = TowerSpec("visual", "scenes")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    rows = (f'{{"filename": "{number}.png", "split": "train", "caption": "a dog {number}"}}\n' for number in range(3))
    (tmp_path / "photos" / "captions.jsonl").write_text("".join(rows))
    return tmp_path / "photos"


def damaged(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["vectors.npy", "keys.json", "progress.json", "features.json", "cut", "missing"])
def test_a_damaged_store_of_the_cache_is_made_anew_and_said(photos, cache, caplog, name):
    data = open_dataset(photos)
    store = cache_features(data, SCENES)
    whole, values = {file: file.read_bytes() for file in store.folder.iterdir()}, store.read(np.arange(3)).vectors
    assert cache_features(data, SCENES).read(np.arange(3)).vectors.equal(values)
    assert not caplog.messages
    if name == "cut":
        (store.folder / "vectors.npy").write_bytes(whole[store.folder / "vectors.npy"][:-1])
    elif name == "missing":
        (store.folder / "keys.json").unlink()
    else:
        damaged(store.folder / name, 5 if name == "features.json" else len(whole[store.folder / name]) // 2)
    with pytest.raises(DataError):
        FeatureStore.open(store.folder)
    again = cache_features(data, SCENES)
    assert again.read(np.arange(3)).vectors.equal(values)
    (line,) = caplog.messages
    assert line.startswith(f"{store.folder} is damaged and is made anew: ")
    assert cache_features(data, SCENES).keys == store.keys
    assert len(caplog.messages) == 1


def test_damaged_rows_of_an_unfinished_store_are_computed_again(tmp_path, caplog):
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES[:100]))
    writer.save()
    damaged(tmp_path / "store" / "vectors.npy", 200)
    resumed = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    assert resumed.done == 0
    assert len(caplog.messages) == 1
    resumed.append(Encoded(VALUES))
    assert resumed.finish().read(np.arange(200)).vectors.equal(VALUES)


def test_a_large_store_is_hashed_only_where_a_file_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("visavis.data.store_files.HASHED_AT_OPENING", 1)
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES))
    writer.finish()
    hashed: list[int] = []
    checksum = type(writer.files).checksum
    monkeypatch.setattr(type(writer.files), "checksum", lambda self, rows: hashed.append(rows) or checksum(self, rows))
    FeatureStore.open(tmp_path / "store")
    assert not hashed
    os.utime(tmp_path / "store" / "vectors.npy", ns=(1, 1))
    for _ in range(2):
        FeatureStore.open(tmp_path / "store")
    assert hashed == [200]
    damaged(tmp_path / "store" / "vectors.npy")
    with pytest.raises(DataError, match="do not have their checksum"):
        FeatureStore.open(tmp_path / "store")


def test_a_store_of_an_older_version_is_read(tmp_path):
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES))
    writer.finish()
    description = json.loads((tmp_path / "store" / "features.json").read_text())
    (tmp_path / "store" / "features.json").write_text(json.dumps({**description, "side": "vision"}))
    (tmp_path / "store" / "progress.json").write_text('{"done": 200}')
    assert FeatureStore.open(tmp_path / "store").description.side == "visual"


def test_a_full_disk_loses_no_features(small_disk):
    with pytest.raises(StorageError, match=r"vectors\.npy cannot be written: No space left on device; make room"):
        FeatureWriter.open(small_disk / "large", replace(POOLED, count=20_000), [str(number) for number in range(20_000)])
    assert not list(small_disk.iterdir())
    writer = FeatureWriter.open(small_disk / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES[:100]))
    writer.save()
    vectors = small_disk / "store" / "vectors.npy"
    content = vectors.read_bytes()
    with open(vectors, "r+b") as file:  # as on a file system that reserves nothing
        file.truncate(len(content) // 2 + 500)
        file.truncate(len(content))
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (2**12, 1):
            while True:
                try:
                    if not file.write(b"x" * size):
                        break
                except OSError:
                    break
    with pytest.raises(StorageError, match=r"(vectors\.npy|progress\.json) cannot be written: No space left on device"):
        for rows in VALUES[100:].split(10):
            writer.append(Encoded(rows))
            writer.save()
    ballast.unlink()
    resumed = FeatureWriter.open(small_disk / "store", POOLED, KEYS)
    assert resumed.done >= 100
    resumed.append(Encoded(VALUES[resumed.done :]))
    assert resumed.finish().read(np.arange(200)).vectors.equal(VALUES)


def test_features_on_a_full_disk_are_one_sentence_and_go_on(photos, small_disk, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(small_disk))
    data = open_dataset(photos)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (2**20 - 3 * 2**12))
    with pytest.raises(StorageError, match="No space left on device; make room"):
        cache_features(data, SCENES)
    ballast.unlink()
    assert len(cache_features(data, SCENES)) == 3


def test_a_cache_in_which_nothing_can_be_written_is_one_sentence(photos, cache):
    cache.write_text("a file in its place")
    for use in (lambda: cache_features(open_dataset(photos), SCENES), lambda: open_dataset(photos, pixels=True)):
        with pytest.raises(StorageError, match=r"cannot be written: (Not a directory|File exists)"):
            use()


def test_an_image_that_is_readable_again_is_read(photos, cache, monkeypatch):
    real = Bytes.read

    def fails(self):
        if self.path.name != "1.png":
            return real(self)
        with storage.regular_file(self.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Bytes, "read", fails)
    with pytest.raises(DataError, match=r"unreadable image.*1\.png.*Input/output error"):
        open_dataset(photos, pixels=True)
    assert len(open_dataset(photos, pixels=True, skip_bad=True).images) == 2
    monkeypatch.setattr(Bytes, "read", real)
    assert len(open_dataset(photos, pixels=True).images) == 3


def test_one_folder_has_one_record_by_whichever_path(photos, cache, monkeypatch):
    looks: list[int] = []
    open_dataset(photos, pixels=True, on_progress=lambda done, total: looks.append(done))
    monkeypatch.chdir(photos.parent)
    (photos.parent / "link").symlink_to(photos)
    for path in ("photos", "./photos/../photos", "link", str(photos)):
        open_dataset(path, pixels=True, on_progress=lambda done, total: looks.append(done))
    assert looks == [1, 2, 3]
    (photos / "1.png").write_bytes(b"gone")
    for path in ("photos", photos):
        with pytest.raises(DataError, match="not an image"):
            open_dataset(path, pixels=True)


def test_damaged_records_are_made_anew_and_said(photos, cache, caplog):
    np.save(photos / "array.npy", np.ones((3, 2)))
    for use in (
        lambda: open_dataset(photos, pixels=True),
        lambda: first_broken_row(ArrayFeatures.open(photos / "array.npy", open_dataset(photos))),
    ):
        use()
        for record in (cache / "checks").iterdir():
            content = record.read_bytes()
            for damage in (b"", content[:-9], content.replace(b"null", b"2   ").replace(b": 3", b": 4"), b"[" * 10_000):
                record.write_bytes(damage)
                use()
                assert [line for line in caplog.messages if str(record) in line]
                caplog.clear()
                use()
                assert not caplog.messages
                assert record.read_bytes() == content
            record.unlink()
