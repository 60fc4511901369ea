"""Unusual files in real folders: broken links, pipes, devices, cyclic folders, invalid headers and
texts.
"""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.platforms import posix

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.image_validation import open_valid_dataset
from visavis.retrieval.run_images import open_image_collection

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="links, pipes and names of this kind are not of Windows"
)
NAMES = ("a.png", "b.png", "c.png")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three images, one per split, in a folder next to their list."""
    (tmp_path / "images").mkdir()
    rows = []
    for number, name in enumerate(NAMES):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / "images" / name)
        rows.append(
            {
                "filename": name,
                "split": ("train", "val", "test")[number],
                "captions": [f"a dog number {number}"],
            }
        )
    write(tmp_path, rows)
    return tmp_path


def write(folder: Path, rows: list[dict]) -> None:
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[str, str]]:
    return [
        (finding.kind, str(finding))
        for finding in check_dataset(folder).findings
        if finding.loses_data
    ]


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(40 * 2**30)


UNREADABLE = {
    "dangling": (lambda path: path.symlink_to("nowhere"), "broken link: No such file"),
    "looping": (lambda path: path.symlink_to(path), "broken link: Too many levels"),
    "pipe": (lambda path: os.mkfifo(path), "a named pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "sparse": (sparse, "got 42,949,672,960"),
    "folder": (lambda path: path.mkdir(), "the image is missing"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_irregular_image_file_is_a_finding(photos, kind):
    make, what = UNREADABLE[kind]
    (photos / "images" / "b.png").unlink()
    make(photos / "images" / "b.png")
    (found,) = losses(photos)
    assert found[0] in ("missing image", "unreadable image")
    assert found[1].startswith("b.png: ")
    assert what in found[1]
    assert [image.name for image in open_valid_dataset(photos, skip_bad=True).images] == [
        "a.png",
        "c.png",
    ]


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
@pytest.mark.parametrize(
    "name",
    [
        "captions.jsonl",
        "captions.csv",
        "dataset_x.json",
        "train_caps.txt",
        "train_ims.npy",
        "all.tar",
    ],
)
def test_irregular_lists_and_archives_are_refused(tmp_path, name, kind):
    if name == "train_caps.txt":
        np.save(tmp_path / "train_ims.npy", np.ones((2, 3)))
    if name == "train_ims.npy":
        (tmp_path / "train_caps.txt").write_text("a dog\n" * 2)
    if name == "all.tar":
        write(tmp_path, [{"filename": "a.png", "caption": "a dog"}])
    UNREADABLE[kind][0](tmp_path / name)
    for path in (tmp_path, tmp_path / ("captions.jsonl" if name == "all.tar" else name)):
        with pytest.raises(DataError):
            open_dataset(path, skip_bad=True)


def test_files_under_ends_with_cyclic_links(photos):
    (photos / "images" / "again").symlink_to(photos)
    here = os.getcwd()
    os.chdir(photos)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Image.new("RGB", (8, 6)).save("deep.png")
        os.chdir(here)
        report = check_dataset(photos)
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", photos / "d"], check=True)  # shutil would go too deep
    assert report.ok
    assert [finding.kind for finding in report.findings] == ["image without caption"]


@posix
def test_image_collection_ignores_other_files(photos, monkeypatch):
    (photos / "captions.jsonl").unlink()
    (photos / "images" / "link.png").symlink_to("nowhere")
    os.mkfifo(photos / "images" / "pipe.jpg")
    (photos / "images" / "again").symlink_to(photos)
    whole = open_image_collection(photos)
    assert [image.name for image in whole.images] == [f"images/{name}" for name in NAMES]
    monkeypatch.chdir(photos.parent)
    assert open_image_collection(Path(photos.name)).name == whole.name


TEXTS = {
    "half a surrogate in a name": ({"filename": "b\ud800.png"}, "missing image"),
    "half a surrogate in a name without a split": (
        {"filename": "b\ud800.png", "split": None},
        "missing image",
    ),
    "half a surrogate in a split": ({"split": "va\ud800l"}, "broken UTF-8"),
    "half a surrogate in a caption": ({"captions": ["a \ud83d"]}, "broken UTF-8"),
    "bytes in a split": ({"split": "va\udce9"}, "broken UTF-8"),
    "a NUL in a name": ({"filename": "b\0.png"}, "missing image"),
    "an endless name": ({"filename": "b" * 100_000}, "missing image"),
    "an endless caption": ({"captions": ["a dog " * 200_000]}, "caption too long"),
    "a number as split": ({"split": 5}, "malformed line"),
    "a number beyond 64 bits": ({"filename": 10**30}, "caption without image"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_odd_texts_are_findings(photos, case):
    change, kind = TEXTS[case]
    rows = rows_of(photos)
    rows[1] |= change
    write(photos, rows)
    found = losses(photos)
    assert kind in [kind for kind, _ in found]
    assert all(len(sentence) < 250_000 and sentence.encode() for _, sentence in found)
    assert (
        {"a.png", "c.png"}
        <= {image.name for image in open_valid_dataset(photos, skip_bad=True).images}
        <= {*NAMES}
    )


def test_duplicate_keys_are_findings(photos):
    lines = (photos / "captions.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace("{", '{"filename": "a.png", ', 1)
    (photos / "captions.jsonl").write_text("\n".join(lines))
    assert losses(photos)[0][0] == "malformed line"
    image = (
        '{"filename": "a.png", "split": "test", "split": "train", "sentences": [{"raw": "a dog"}]}'
    )
    (photos / "dataset_x.json").write_text(
        f'{{"images": [{image}, {image.replace("a.png", "b.png").replace("split", "x", 1)}]}}'
    )
    report = check_dataset(photos / "dataset_x.json")
    assert [
        (finding.kind, finding.location) for finding in report.findings if finding.loses_data
    ] == [("malformed entry", "a.png")]
    (photos / "dataset_x.json").write_text('{"images": [], "images": []}')
    with pytest.raises(DataError, match="each key once"):
        open_dataset(photos / "dataset_x.json")


def test_deep_and_huge_values_are_findings(photos):
    deep = "[" * 900 + "]" * 900
    entry = '{"filename": "%s", "split": "test", "sentences": [{"raw": "a dog"}], "%s": %s}'
    odd = [
        entry % ("a.png", "cocoid", deep),
        deep,
        entry % ("b.png", "filepath", deep),
        entry % ("c.png", "imgid", "1" + "0" * 4000),
    ]
    (photos / "dataset_x.json").write_text(f'{{"images": [{", ".join(odd)}]}}')
    report = check_dataset(photos / "dataset_x.json")
    assert {finding.location for finding in report.findings if finding.loses_data} >= {
        "a.png",
        "b.png",
    }
    assert [
        image.name for image in open_dataset(photos / "dataset_x.json", skip_bad=True).images
    ] == ["c.png"]


def test_huge_table_field_is_a_finding(photos):
    (photos / "captions.jsonl").unlink()
    with open(photos / "captions.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [
                ["filename", "caption"],
                ["a.png", "a dog"],
                ["b.png", "a dog " * 50_000],
                ["c.png", "a cat"],
            ]
        )
    assert losses(photos)[0][0] == "malformed line"
    assert [image.name for image in open_dataset(photos, skip_bad=True).images] == [
        "a.png",
        "c.png",
    ]


def test_file_names_that_are_not_utf_8(photos):
    rows = rows_of(photos)
    try:
        os.rename(photos / "images" / "b.png", os.fsencode(photos / "images") + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    (photos / "captions.jsonl").write_bytes(
        json.dumps(rows[0]).encode()
        + b'\n{"filename": "caf\xe9.png", "split": "val", "caption": "a dog"}\n'
    )
    assert [kind for kind, _ in losses(photos)] == ["broken UTF-8"]
    write(photos, [rows[0]])
    noted = [
        str(finding)
        for finding in check_dataset(photos).findings
        if finding.kind == "image without caption"
    ]
    assert any(r"caf\xe9.png" in sentence for sentence in noted)
    os.mkdir(os.fsencode(photos) + b"/\xe9")
    with pytest.raises(DataError, match=r"\\xe9.*: expected a path in UTF-8"):
        open_dataset(os.fsdecode(os.fsencode(photos) + b"/\xe9"))


def archive(path: Path, content: bytes) -> tuple[bytes, int]:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in NAMES:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with tarfile.open(path) as tar:
        return path.read_bytes(), tar.getmember("b.png").offset


@pytest.mark.parametrize("size", [2**33, 2**62, 2**63 + 5, 2**80, -1, -512, -(2**62), -(2**70)])
@pytest.mark.parametrize("kind", [b"0", b"L", b"K", b"x", b"g", b"S"])
def test_invalid_archive_header_keeps_earlier_members(photos, size, kind):
    content = (photos / "images" / "b.png").read_bytes()
    whole, offset = archive(photos / "all.tar", content)
    for name in NAMES:
        (photos / "images" / name).unlink()
    number = size.to_bytes(12, "big", signed=True)
    field = bytes([0x80 if size > 0 else 0xFF]) + number[1:]
    header = bytearray(whole[offset : offset + 512])
    header[124:136], header[156:157] = field, kind
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    (photos / "all.tar").write_bytes(whole[:offset] + header + whole[offset + 512 :])
    found = losses(photos)
    assert "missing image" in [kind for kind, _ in found]
    assert "a.png" in [image.name for image in open_dataset(photos, skip_bad=True).images]


@pytest.mark.parametrize(
    "dtype", [">f4", "complex64", "U3", "bool", "datetime64[s]", "longdouble", "O"]
)
def test_stored_features_of_other_dtypes_are_refused(tmp_path, dtype):
    np.save(tmp_path / "train_ims.npy", np.ones((2, 3)).astype(dtype), allow_pickle=True)
    (tmp_path / "train_caps.txt").write_text("a dog\na cat\n")
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        open_dataset(tmp_path)
    write(tmp_path, [{"filename": f"{i}.png", "caption": "a dog"} for i in range(2)])
    for i in range(2):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"{i}.png")
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        ArrayFeatures.open(tmp_path / "train_ims.npy", open_dataset(tmp_path / "captions.jsonl"))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "uint64"])
def test_stored_features_are_read_as_float32(tmp_path, dtype):
    np.save(tmp_path / "train_ims.npy", np.arange(6).reshape(2, 3).astype(dtype))
    (tmp_path / "train_caps.txt").write_text("a dog\na cat\n")
    assert ArrayFeatures.open_precomp(tmp_path).read(np.array([1, 0])).vectors.tolist() == [
        [3, 4, 5],
        [0, 1, 2],
    ]


@pytest.mark.parametrize("shape", [(2, 1), (2, 4), (2, 3, 3)])
def test_precomp_shapes_must_match_between_splits(tmp_path, shape):
    for stem, values in (("train", np.ones((2, 3))), ("dev", np.ones(shape))):
        np.save(tmp_path / f"{stem}_ims.npy", values)
        (tmp_path / f"{stem}_caps.txt").write_text("a dog\na cat\n")
    for read in (open_dataset, ArrayFeatures.open_precomp):
        with pytest.raises(
            DataError,
            match=r"expected features of one shape, got \(3,\) per image in train and .* in val",
        ):
            read(tmp_path)


def test_invalid_npy_header_is_refused(tmp_path):
    (tmp_path / "train_caps.txt").write_text("a dog\n")
    for shape in ("(10**30, 3)", "(99999999999999999999, 3)", "(-1, 3)", "(2, 0)", "()", "(2,)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        (tmp_path / "train_ims.npy").write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64
        )
        with pytest.raises(DataError, match=r"train_ims\.npy"):
            open_dataset(tmp_path)
