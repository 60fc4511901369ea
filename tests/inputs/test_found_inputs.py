"""The smallest input of each fault that the generated inputs have found."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import struct
import zipfile
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tests import photos
from tests.inputs.image_inputs import with_wrong_png_checksum
from tests.videos import gray, write_video

import visavis
from visavis.api.arguments import read_bank
from visavis.core import storage
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.data.dataset_check import check_dataset
from visavis.data.features.expert_store import RegionFeatures
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.images import ImageError, decode_image, image_size, make_thumbnail
from visavis.data.video import first_frame, recording_time
from visavis.models.encoders.checkpoint_files import read_checkpoint
from visavis.models.text_tower import TextTower
from visavis.retrieval.zero_shot import read_templates


@pytest.mark.parametrize("read", [decode_image, image_size, lambda *args: make_thumbnail(*args, 9)])
def test_png_with_wrong_checksum_is_refused(read):
    """Pillow decodes it to other pixels."""
    content = photos.encode(photos.scene(0, (40, 30)), "PNG")
    assert read(content, "a.png")
    for seed in range(20):
        damaged = with_wrong_png_checksum(content, random.Random(seed))
        with pytest.raises(ImageError, match=r"a\.png is truncated or damaged"):
            read(damaged, "a.png")


def test_png_that_ends_in_its_pixels_is_refused():
    content = photos.encode(photos.scene(0, (40, 30)), "PNG")
    with pytest.raises(ImageError, match="is truncated or damaged"):
        decode_image(content[:-13], "a.png")


def test_png_without_its_end_is_read():
    """Its pixels are complete. Browsers show it, too."""
    content = photos.encode(photos.scene(0, (40, 30)), "PNG")
    assert decode_image(content[:-12], "a.png").size == (40, 30)


def test_heif_with_a_crop_beyond_its_pixels_is_refused():
    """The decoder cuts the crop to the image, so header and pixels have two sizes."""
    pytest.importorskip("pillow_heif")
    content = photos.encode(photos.scene(0, (8, 30)), "HEIF")
    assert decode_image(content, "a.heic").size == (8, 30)
    crop_height = content.index(b"clap") + 12
    damaged = content[:crop_height] + struct.pack(">I", 655) + content[crop_height + 4 :]
    with pytest.raises(ImageError, match=r"expected \(8, 655\) pixels as in its header"):
        decode_image(damaged, "a.heic")


def test_clip_with_metadata_that_is_not_utf8_is_read(tmp_path):
    """As cameras write it in other encodings."""
    path = write_video(tmp_path / "a.mp4", [gray(9), gray(200)], metadata={"title": "cafe"})
    content = path.read_bytes()
    assert content.count(b"cafe") == 1
    path.write_bytes(content.replace(b"cafe", b"caf\xe9"))
    assert first_frame(path, "a.mp4").size == (48, 48)
    assert recording_time(path, "a.mp4") == ""


def test_name_with_nul_in_a_large_table_is_a_finding(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    names = ["a.png", "a\0.png"]
    photos.write(tmp_path / names[0], photos.encode(photos.scene(), "PNG"))
    table = pa.table({"filename": names, "caption": ["a dog", "a cat"], "split": ["train", "test"]})
    pq.write_table(table, tmp_path / "captions.parquet")
    report = check_dataset(tmp_path / "captions.parquet")
    [finding] = [finding for finding in report.findings if finding.loses_data]
    assert finding.location == "a\0.png"


def test_error_of_an_array_has_no_address_of_an_object(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': falsy, 'shape': (1,), }\n"
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(4))
    with pytest.raises(DataError) as refused:
        storage.read_array(path)
    assert "0x" not in str(refused.value)


@pytest.mark.parametrize("damage", ["compression", "version"])
def test_damaged_npz_is_one_error(tmp_path, damage):
    path = tmp_path / "7.npz"
    np.savez_compressed(path, x=np.ones((2, 3), np.float32))
    content = bytearray(path.read_bytes())
    if damage == "version":
        content[content.index(b"PK\x01\x02") + 6] = 255
    else:
        start = 30 + sum(struct.unpack("<HH", content[26:30]))
        content[start : start + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"7\.npz is not a readable \.npz of numbers"):
        RegionFeatures.open(tmp_path, lambda *_: None)


def saved(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.arange(64.0)}, path)
    return path


def test_checkpoint_with_damaged_directory_is_one_error(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    for old, new in ((b"PK\x01\x02", b"PK\x01\x03"), (b"PK\x06\x07\0", b"PK\x06\x07\x09")):
        path.write_bytes(content.replace(old, new))
        with pytest.raises(DataError, match="got a damaged file"):
            read_checkpoint(path)


def test_checkpoint_with_wrong_checksum_is_refused(tmp_path):
    path = saved(tmp_path)
    weight = torch.arange(64.0).numpy().tobytes()
    content = path.read_bytes()
    assert content.count(weight) == 1
    path.write_bytes(content.replace(weight, weight[:-1] + b"\x43"))
    with pytest.raises(DataError, match=r"model/data/0' has a wrong checksum"):
        read_checkpoint(path)


def test_checkpoint_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert {member.CRC for member in archive.infolist()} == {0}
    assert read_checkpoint(path)["weight"].equal(torch.arange(64.0))


def test_safetensors_with_a_name_twice_are_refused(tmp_path):
    content = save({"a": torch.ones(2)})
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])["a"]
    header = b'{"a": %s, "a": %s}' % ((json.dumps(entry).encode(),) * 2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])
    for read in (storage.read_tensors, storage.read_arrays, storage.tensor_names, read_checkpoint):
        with pytest.raises(DataError, match="duplicate key 'a'"):
            read(path)


def test_item_vectors_without_numbers_are_refused(tmp_path):
    np.save(tmp_path / "v.npy", np.ones((2, 0), np.float32))
    (tmp_path / "v.ids.txt").write_text("a\nb\n")
    with pytest.raises(
        DataError, match=r"expected vectors of one number or more, got shape \[2, 0"
    ):
        ItemVectors.open_items(tmp_path / "v.npy")


def test_damaged_parquet_of_vectors_is_one_line(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"identifier": ["a"], "vector": [[1.0, 2.0]]}), path)
    content = path.read_bytes()
    for damaged in (
        content[:4] + bytes(200) + content[204:],
        content.replace(b"identifier", b"\xffdentifier"),
        content[:40],
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="Write it again") as refused:
            ItemVectors.open_items(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0b", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_line_breaks_end_a_line_of_texts(tmp_path, character, end):
    texts = [f"a{character}dog {{}}", "{}"]
    path = tmp_path / "texts.txt"
    path.write_bytes(end.join([*texts, ""]).encode())
    assert read_templates(path) == read_bank(path) == texts
    np.save(tmp_path / "v.npy", np.eye(2, dtype=np.float32))
    path.rename(tmp_path / "v.ids.txt")
    assert texts[0] in ItemVectors.open_items(tmp_path / "v.npy")


@pytest.fixture
def index_with_text_encoder(tiny_run, few_scenes, tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_TEXT_TOWERS", "1")
    visavis.index(tiny_run, few_scenes / "images", out=tmp_path / "index")
    [folder] = (tmp_path / "index" / "text-towers").iterdir()
    return tmp_path / "index", folder


@pytest.mark.parametrize("limit", [2**26, 0])
def test_damaged_weights_of_a_text_encoder_are_refused(index_with_text_encoder, monkeypatch, limit):
    index, folder = index_with_text_encoder
    monkeypatch.setattr("visavis.core.storage.cache.MAX_BYTES_HASHED_AT_OPEN", limit)
    for name in ("text_encoder.bin", "vocabulary.json"):
        visavis.search(index, "a red circle")
        content = (folder / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        (folder / name).write_bytes(bytes(changed))
        with pytest.raises(RunError, match=f"checksum mismatch of {name}"):
            TextTower.open(folder)
        (folder / name).write_bytes(content)
        os.utime(folder / name)


@pytest.mark.parametrize(
    "change", ["\"end\" = 'x'", "key = x'ff00'", "size = 'large'", "dhash = 3.5"]
)
def test_item_with_a_value_of_another_type_is_damaged(tiny_run, few_scenes, tmp_path, change):
    visavis.index(tiny_run, few_scenes / "images", out=tmp_path / "index")
    with closing(sqlite3.connect(tmp_path / "index" / "index.db")) as database, database:
        database.execute(f"UPDATE items SET {change} WHERE row = 0")
    with pytest.raises(VisavisError, match="damaged"):
        visavis.search(tmp_path / "index", "a red circle", top=100)


def test_request_with_bytes_in_its_query_is_not_found(tiny_index):
    from tests.inputs.server_inputs import Server

    with closing(Server(tiny_index)) as server:
        for path in (b"/api/image", b"/nowhere"):
            status, _, content = server.request("GET", path, b"key=\x89")
            assert status == 404 and json.loads(content)["error"], content
        content = server.request("GET", b"/a\nb")[2]
        assert json.loads(content)["error"].startswith("'/a\\nb': not found")
