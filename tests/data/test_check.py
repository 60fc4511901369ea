"""Check of damaged data sets: each kind of damage in each format is found, refused and skipped
exactly.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from tests import photos

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_validation import open_valid_dataset

NAMES = ("a.png", "b.png", "c.png", "d.png")
SPLITS = ("train", "train", "val", "test")


def png(color: str, size: tuple[int, int] = (24, 16)) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").point(lambda value: value // 2).save(
        file, "PNG", comment=color
    )
    return file.getvalue()


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


@dataclass
class World:
    """Four images with two captions each, which can be damaged, in one of four formats."""

    folder: Path
    format_name: str
    files: dict[str, bytes] = field(default_factory=lambda: {name: png(name) for name in NAMES})
    rows: list[dict] = field(
        default_factory=lambda: [
            {"filename": name, "split": split, "captions": [f"{name} one", f"{name} two"]}
            for name, split in zip(NAMES, SPLITS, strict=True)
        ]
    )

    @property
    def source(self) -> Path:
        return self.folder / {"jsonl": "captions.jsonl", "csv": "captions.csv"}.get(
            self.format_name, "dataset_world.json"
        )

    def write(self) -> None:
        if self.format_name == "tar":
            with tarfile.open(self.folder / "all-0000.tar", "w") as tar:
                for name, content in self.files.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        else:
            (self.folder / "images").mkdir()
            for name, content in self.files.items():
                (self.folder / "images" / name).write_bytes(content)
        if self.format_name == "jsonl":
            self.source.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        elif self.format_name == "csv":
            with open(self.source, "w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["filename", "split", "caption"])
                table.writerows(
                    [row["filename"], row["split"], caption]
                    for row in self.rows
                    for caption in row["captions"]
                )
        else:
            self.source.write_text(
                json.dumps(
                    {"images": [karpathy(index, row) for index, row in enumerate(self.rows)]},
                    indent=1,
                )
            )

    def replace(self, old: bytes, new: bytes) -> None:
        content = self.source.read_bytes()
        assert old in content
        self.source.write_bytes(content.replace(old, new, 1))


def karpathy(index: int, row: dict) -> dict:
    sentences = [
        {"raw": caption, "tokens": caption.split(), "sentid": 2 * index + k}
        for k, caption in enumerate(row["captions"])
    ]
    return {
        "filename": row["filename"],
        "imgid": index,
        "split": row["split"],
        "sentences": sentences,
    }


Damage = Callable[[World], object]
ALL, JSON, TABLES = ("karpathy", "tar", "jsonl", "csv"), ("karpathy", "tar"), ("jsonl", "csv")


def content(new: Callable[[World], bytes]) -> Damage:
    return lambda world: world.files.update({"b.png": new(world)})


def caption(text: str) -> Damage:
    return lambda world: world.rows[1]["captions"].__setitem__(1, text)


def row(index: int, **change: object) -> Damage:
    return lambda world: world.rows[index].update(change)


# Change before the files are written, formats, kind of the finding, location, remaining images,
# number of captions.
BEFORE = {
    "missing": (lambda world: world.files.pop("b.png"), ALL, "missing image", "b.png", "acd", 6),
    "truncated": (
        content(lambda world: world.files["b.png"][:-400]),
        ALL,
        "truncated image",
        "b.png",
        "acd",
        6,
    ),
    "cut in the header": (
        content(lambda world: world.files["b.png"][:12]),
        ALL,
        "truncated image",
        "b.png",
        "acd",
        6,
    ),
    "empty file": (content(lambda world: b""), ALL, "truncated image", "b.png", "acd", 6),
    "text instead": (
        content(lambda world: b"<html>not found</html>"),
        ALL,
        "not an image",
        "b.png",
        "acd",
        6,
    ),
    "animated": (content(lambda world: animation()), ALL, "animated image", "b.png", "acd", 6),
    "bomb": (
        content(lambda world: photos.png_bomb(50_000, 50_000)),
        ALL,
        "decompression bomb",
        "b.png",
        "acd",
        6,
    ),
    "empty caption": (caption(""), ALL, "empty caption", "", "abcd", 7),
    "blank caption": (caption(" \t "), ALL, "empty caption", "", "abcd", 7),
    "no caption in a split": (
        row(2, captions=[]),
        ("karpathy", "tar", "jsonl"),
        "image without caption",
        "c.png",
        "abd",
        6,
    ),
    "only empty captions in a split": (
        row(2, captions=["", ""]),
        ALL,
        "image without caption",
        "c.png",
        "abd",
        6,
    ),
    "copy in another split": (
        content(lambda world: world.files["d.png"]),
        ALL,
        "image in two splits",
        "b.png",
        "acd",
        6,
    ),
    "listed in two splits": (
        lambda w: w.rows.append({**w.rows[0], "split": "test"}),
        JSON,
        "image in two splits",
        "a.png",
        "bcda",
        8,
    ),
    "two splits by rows": (
        lambda w: w.rows.append({**w.rows[0], "split": "test", "captions": ["a again"]}),
        TABLES,
        "image in two splits",
        ":",
        "bcd",
        6,
    ),
    "listed twice": (
        lambda w: w.rows.append({**w.rows[0], "captions": ["a again"]}),
        JSON,
        "duplicate name",
        "a.png",
        "abcd",
        8,
    ),
    "no file name": (
        row(1, filename="", captions=["b"]),
        TABLES,
        "caption without image",
        ":",
        "acd",
        6,
    ),
    "no file name in JSON": (row(1, filename=None), JSON, "caption without image", "1", "acd", 6),
    "no split": (row(1, split=""), ALL, "image without split", "b.png", "acd", 6),
    "caption no text": (
        row(1, captions=[7, "b"]),
        ("jsonl",),
        "malformed line",
        "captions.jsonl:2",
        "acd",
        6,
    ),
}

# Change of the written list.
AFTER = {
    "duplicate id": (b'"imgid": 2', b'"imgid": 1', JSON, "duplicate id", "c.png", "abd", 6),
    "sentid twice": (
        b'"sentid": 3',
        b'"sentid": 2',
        JSON,
        "duplicate id",
        "b.png, caption 2",
        "abcd",
        7,
    ),
    "bytes in JSON": (
        b"b.png two",
        b"b.png \xfftwo",
        (*JSON, "jsonl", "csv"),
        "broken UTF-8",
        "",
        "abcd",
        7,
    ),
    "half a surrogate": (
        b"b.png two",
        b"b.png \\ud83d",
        (*JSON, "jsonl"),
        "broken UTF-8",
        "",
        "abcd",
        7,
    ),
    "sentence is a number": (
        b'"raw": "b.png two"',
        b'"raw": 2',
        JSON,
        "malformed entry",
        "b.png, caption 2",
        "abcd",
        7,
    ),
    "sentences a text": (
        b'"sentences": [',
        b'"sentences": "x", "old": [',
        JSON,
        "malformed entry",
        "a.png",
        "bcd",
        6,
    ),
    "line cut": (
        b'{"filename": "b.png"',
        b'{"filename": "b.p',
        ("jsonl",),
        "malformed line",
        "captions.jsonl:2",
        "acd",
        6,
    ),
    "line no object": (
        b'{"filename": "a.png"',
        b'7\n{"filename": "a.png"',
        ("jsonl",),
        "malformed line",
        "captions.jsonl:1",
        "abcd",
        8,
    ),
    "too wide": (
        b"b.png two",
        b"b.png, two",
        ("csv",),
        "wrong column count",
        "captions.csv:5",
        "abcd",
        7,
    ),
    "too narrow": (
        b"b.png,train,b.png two",
        b"b.png,train",
        ("csv",),
        "wrong column count",
        "captions.csv:5",
        "abcd",
        7,
    ),
    "text after a quote": (
        b"b.png two",
        b'"b.png" two',
        ("csv",),
        "malformed line",
        "captions.csv:5",
        "abcd",
        7,
    ),
    "open quote": (
        b"d.png two",
        b'"d.png two',
        ("csv",),
        "malformed line",
        "captions.csv:9",
        "abcd",
        7,
    ),
}

CASES = [pytest.param(format_name, *case, id=f"{name}-{format_name}") for name, (change, formats, *rest) in BEFORE.items() for format_name in formats
         for case in [(change, None, *rest)]]  # fmt: skip
CASES += [pytest.param(format_name, None, (old, new), *rest, id=f"{name}-{format_name}") for name, (old, new, formats, *rest) in AFTER.items()
          for format_name in formats]  # fmt: skip


def state(folder: Path) -> list[tuple[str, int, str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        (str(path), path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    ]


@pytest.mark.parametrize(
    ("format_name", "before", "after", "kind", "where", "kept", "num_captions"), CASES
)
def test_check_finds_each_kind_of_damage_exactly(
    tmp_path, format_name, before, after, kind, where, kept, num_captions
):
    world = World(tmp_path, format_name)
    if before:
        before(world)
    world.write()
    if after:
        world.replace(*after)
    earlier = state(tmp_path)

    report = check_dataset(tmp_path)
    found = [finding for finding in report.findings if finding.loses_data and finding.kind == kind]
    assert not report.ok
    assert len(found) == 1, report.findings
    assert where in found[0].location
    assert "\n" not in str(found[0])
    assert str(found[0]).encode()

    with pytest.raises(DataError, match="visavis data check") as refused:
        open_valid_dataset(tmp_path)
    assert str(found[0]) in str(refused.value)
    assert str(tmp_path) in str(refused.value)

    data = open_valid_dataset(tmp_path, skip_bad=True)
    assert "".join(image.name[0] for image in data.images) == kept
    assert len(data.captions) == num_captions
    assert all(
        data.captions[i][0] == data.images[data.image_of[i]].name[0] for i in range(num_captions)
    )
    assert str(found[0]) in data.skipped
    assert sum(count.images for count in report.splits.values()) == len(kept)
    assert state(tmp_path) == earlier


@pytest.mark.parametrize("format_name", ALL)
def test_check_of_valid_data_has_no_findings(tmp_path, format_name):
    world = World(tmp_path, format_name)
    world.write()
    report = check_dataset(tmp_path)
    assert report.ok
    assert report.findings == ()
    assert {split: (count.images, count.captions) for split, count in report.splits.items()} == {
        "train": (2, 4),
        "val": (1, 2),
        "test": (1, 2),
    }
    assert report.captions_per_image == (2, 2)
    assert report.image_sizes == {"24x16": 4}
    assert report.duplicate_captions == 0
    assert report.format_name == {"jsonl": "captions.jsonl", "csv": "captions.csv"}.get(
        format_name, "Karpathy JSON"
    )
    data = open_valid_dataset(tmp_path)
    assert data.skipped == ()
    assert data.image_origin is None
    assert data.images[0].open().size == (24, 16)


@pytest.mark.parametrize("format_name", ALL)
def test_skipped_images_keep_their_feature_rows(tmp_path, format_name):
    world = World(tmp_path, format_name)
    world.files.pop("a.png")
    world.rows[2]["captions"][0] = " "
    world.write()
    data = open_dataset(tmp_path, skip_bad=True)
    assert data.image_rows.tolist() == [1, 2, 3]
    assert data.caption_rows.tolist() == [2, 3, 5, 6, 7]
    assert data.split("test").caption_rows.tolist() == [6, 7]
    assert data.split("test").skipped == data.skipped


def test_open_dataset_counts_problems_and_lists_three(tmp_path):
    world = World(tmp_path, "karpathy")
    del world.files["a.png"], world.files["b.png"], world.files["c.png"]
    world.rows[3]["captions"][0] = ""
    world.write()
    with pytest.raises(DataError) as refused:
        open_dataset(tmp_path)
    text = str(refused.value)
    assert "3 x missing image, 1 x empty caption" in text
    assert "a.png" in text
    assert "d.png" not in text
    assert (
        f"Run `visavis data check {tmp_path}` for the whole list, and correct it. To skip broken "
        "items, pass --skip-bad to `visavis train`" in text
    )
    assert len(check_dataset(tmp_path).findings) == 5  # and the empty splits


ODD = {
    "duplicate caption": lambda world: world.rows[1].update(captions=["same", "same"]),
    "image without caption": lambda world: world.files.update({"stray.png": png("stray")}),
    "empty split": lambda world: world.rows[2].update(split="test"),
    "duplicate image": lambda world: world.files.update({"b.png": world.files["a.png"]}),
}


@pytest.mark.parametrize("format_name", ALL)
@pytest.mark.parametrize("kind", ODD)
def test_check_notes_oddities_without_loss(tmp_path, format_name, kind):
    world = World(tmp_path, format_name)
    ODD[kind](world)
    world.write()
    report = check_dataset(tmp_path)
    assert report.ok
    assert [finding.kind for finding in report.findings] == [kind]
    assert len(open_valid_dataset(tmp_path).images) == 4


def test_compressed_archive_is_refused(tmp_path):
    world = World(tmp_path, "tar")
    world.write()
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "dataset_world.json", "x.json")
    assert check_dataset(tmp_path).ok  # nothing in it is needed
    (tmp_path / "all.tar.gz").replace(tmp_path / "all-0000.tar")
    report = check_dataset(tmp_path)
    assert not report.ok
    assert "is a compressed archive" in next(
        str(finding) for finding in report.findings if finding.kind == "broken archive"
    )
    with pytest.raises(DataError, match=r"all-0000\.tar|missing image"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_damaged_archive_keeps_earlier_members(tmp_path, damage):
    world = World(tmp_path, "tar")
    world.write()
    path = tmp_path / "all-0000.tar"
    with tarfile.open(path) as tar:
        third = tar.getmember("c.png")
    whole = path.read_bytes()
    broken = (
        whole[: third.offset_data + 10]
        if damage == "cut"
        else whole[: third.offset] + b"?" * 512 + whole[third.offset + 512 :]
    )
    path.write_bytes(broken)
    kinds = [finding.kind for finding in check_dataset(tmp_path).findings if finding.loses_data]
    assert kinds == ["missing image", "missing image", "broken archive"]
    assert [image.name for image in open_dataset(tmp_path, skip_bad=True).images] == [
        "a.png",
        "b.png",
    ]


def test_ambiguous_file_name_is_an_error(tmp_path):
    world = World(tmp_path, "karpathy")
    world.write()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.png").write_bytes(png("other"))
    with pytest.raises(DataError, match=r"images/b.png or more/b.png\. List its folder"):
        open_dataset(tmp_path)


def test_image_validation_is_cached_until_a_file_changes(tmp_path):
    world = World(tmp_path, "karpathy")
    world.write()
    progress_calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        progress_calls.append((done, total))

    open_valid_dataset(tmp_path, on_progress=progress)
    assert progress_calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    open_valid_dataset(tmp_path, on_progress=progress)
    assert len(progress_calls) == 4
    (tmp_path / "images" / "b.png").write_bytes(b"gone")
    with pytest.raises(DataError, match="not an image"):
        open_valid_dataset(tmp_path, on_progress=progress)
    assert len(progress_calls) == 8
