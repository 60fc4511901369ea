"""Caches of features and checks: damage, a full disk, and temporary errors."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, StorageError
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.arrays import ArrayFeatures, first_nonfinite_row
from visavis.data.features.store import FeatureStore, FeatureWriter, StoreDescription
from visavis.data.image_file import ByteRange
from visavis.data.image_validation import open_valid_dataset
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features

POOLED = StoreDescription("visual", "pooled", "encoder", "0" * 16, (64,), 200, "data")
KEYS = [f"{number}.png" for number in range(200)]
VALUES = torch.arange(200.0)[:, None].expand(200, 64).contiguous()
SCENES = EncoderSpec("visual", "scenes")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    rows = (
        f'{{"filename": "{number}.png", "split": "train", "caption": "a dog {number}"}}\n'
        for number in range(3)
    )
    (tmp_path / "photos" / "captions.jsonl").write_text("".join(rows))
    return tmp_path / "photos"


def damaged(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["vectors.npy", "keys.json", "progress.json", "features.json", "cut", "missing"]
)
def test_cache_replaces_damaged_store_with_warning(photos, cache, caplog, name):
    data = open_dataset(photos)
    store = cache_features(data, SCENES)
    whole, values = (
        {file: file.read_bytes() for file in store.folder.iterdir()},
        store.read(np.arange(3)).vectors,
    )
    assert cache_features(data, SCENES).read(np.arange(3)).vectors.equal(values)
    assert not caplog.messages
    if name == "cut":
        (store.folder / "vectors.npy").write_bytes(whole[store.folder / "vectors.npy"][:-1])
    elif name == "missing":
        (store.folder / "keys.json").unlink()
    else:
        content = whole[store.folder / name]
        # In progress.json a digit of the checksum is changed: changed file sizes or times would
        # only cause a verification.
        place = {"features.json": 5, "progress.json": content.find(b"sha256") + 12}.get(
            name, len(content) // 2
        )
        damaged(store.folder / name, place)
    folder, keys = store.folder, store.keys
    # Windows does not remove a file that is mapped.
    del store
    with pytest.raises(DataError):
        FeatureStore.open(folder)
    gc.collect()
    again = cache_features(data, SCENES)
    assert again.read(np.arange(3)).vectors.equal(values)
    (line,) = caplog.messages
    assert line.startswith(f"{folder} is damaged and is computed again: ")
    assert cache_features(data, SCENES).keys == keys
    assert len(caplog.messages) == 1


def test_cache_replaces_damaged_unfinished_store(tmp_path, caplog):
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES[:100]))
    writer.save()
    # Windows does not remove a file that is mapped.
    del writer
    damaged(tmp_path / "store" / "vectors.npy", 200)
    resumed = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    assert resumed.rows_written == 0
    assert len(caplog.messages) == 1
    resumed.append(Encoded(VALUES))
    assert resumed.finish().read(np.arange(200)).vectors.equal(VALUES)


def test_large_store_is_hashed_only_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr("visavis.core.storage.MAX_BYTES_HASHED_AT_OPEN", 1)
    writer = FeatureWriter.open(tmp_path / "store", POOLED, KEYS)
    writer.append(Encoded(VALUES))
    writer.finish()
    hashed: list[int] = []
    checksum = FeatureStore.checksum
    monkeypatch.setattr(
        FeatureStore, "checksum", lambda self, rows: hashed.append(rows) or checksum(self, rows)
    )
    FeatureStore.open(tmp_path / "store")
    assert not hashed
    os.utime(tmp_path / "store" / "vectors.npy", ns=(1, 1))
    for _ in range(2):
        FeatureStore.open(tmp_path / "store")
    assert hashed == [200]
    damaged(tmp_path / "store" / "vectors.npy")
    with pytest.raises(DataError, match="checksum mismatch"):
        FeatureStore.open(tmp_path / "store")


def test_feature_writer_survives_full_disk(small_disk):
    with pytest.raises(
        StorageError, match=r"vectors\.npy cannot be written: No space left on device"
    ):
        FeatureWriter.open(
            small_disk / "large",
            replace(POOLED, num_items=20_000),
            [str(number) for number in range(20_000)],
        )
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
    with pytest.raises(
        StorageError,
        match=r"(vectors\.npy|progress\.json) cannot be written: No space left on device",
    ):
        for rows in VALUES[100:].split(10):
            writer.append(Encoded(rows))
            writer.save()
    ballast.unlink()
    resumed = FeatureWriter.open(small_disk / "store", POOLED, KEYS)
    assert resumed.rows_written >= 100
    resumed.append(Encoded(VALUES[resumed.rows_written :]))
    assert resumed.finish().read(np.arange(200)).vectors.equal(VALUES)


def test_cache_features_resumes_after_full_disk(photos, small_disk, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(small_disk))
    data = open_dataset(photos)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (2**20 - 3 * 2**12))
    with pytest.raises(StorageError, match="No space left on device"):
        cache_features(data, SCENES)
    ballast.unlink()
    assert len(cache_features(data, SCENES)) == 3


def test_cache_reports_read_only_folder(photos, cache):
    cache.write_text("a file in its place")
    for use in (
        lambda: cache_features(open_dataset(photos), SCENES),
        lambda: open_valid_dataset(photos),
    ):
        with pytest.raises(StorageError, match=r"cannot be written: (Not a directory|File exists)"):
            use()


def test_image_validation_does_not_cache_temporary_errors(photos, cache, monkeypatch):
    real = ByteRange.read

    def fails(self):
        if self.path.name != "1.png":
            return real(self)
        with storage.reading_regular_file(self.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ByteRange, "read", fails)
    with pytest.raises(DataError, match=r"unreadable image.*1\.png.*Input/output error"):
        open_valid_dataset(photos)
    assert len(open_valid_dataset(photos, skip_bad=True).images) == 2
    monkeypatch.setattr(ByteRange, "read", real)
    assert len(open_valid_dataset(photos).images) == 3


def test_image_validation_cache_ignores_spelling_of_path(photos, cache, monkeypatch):
    progress_calls: list[int] = []
    open_valid_dataset(photos, on_progress=lambda done, total: progress_calls.append(done))
    monkeypatch.chdir(photos.parent)
    (photos.parent / "link").symlink_to(photos)
    for path in ("photos", "./photos/../photos", "link", str(photos)):
        open_valid_dataset(path, on_progress=lambda done, total: progress_calls.append(done))
    assert progress_calls == [1, 2, 3]
    (photos / "1.png").write_bytes(b"gone")
    for path in ("photos", photos):
        with pytest.raises(DataError, match="not an image"):
            open_valid_dataset(path)


def test_damaged_check_records_are_replaced_with_warning(photos, cache, caplog):
    np.save(photos / "array.npy", np.ones((3, 2)))
    for use in (
        lambda: open_valid_dataset(photos),
        lambda: first_nonfinite_row(ArrayFeatures.open(photos / "array.npy", open_dataset(photos))),
    ):
        use()
        for record in (cache / "checks").iterdir():
            content = record.read_bytes()
            for damage in (
                b"",
                content[:-9],
                content.replace(b"null", b"2   ").replace(b": 3", b": 4"),
                b"[" * 10_000,
            ):
                record.write_bytes(damage)
                use()
                assert [line for line in caplog.messages if str(record) in line]
                caplog.clear()
                use()
                assert not caplog.messages
                assert record.read_bytes() == content
            record.unlink()
