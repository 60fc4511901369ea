"""WebDataset shards as an ordinary data set: folders and patterns, splits, keys, captions, and
damaged shards.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from visavis import api
from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_validation import open_valid_dataset
from visavis.data.shard_stream import ShardStream

from .test_image_tables import contents, png

wds = pytest.importorskip(
    "webdataset", reason="webdataset is not installed: pip install -e '.[dev]'"
)
COUNTS = {"train-000": 3, "train-001": 2, "val-000": 2, "test-000": 1}


def write_shard(path: Path, *samples: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wds.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def sample(number: int, key: str | None = None, **members) -> dict:
    return {
        "__key__": key or f"{number:05d}",
        "png": png(number),
        **(members or {"txt": f"caption {number}"}),
    }


@pytest.fixture
def shards(tmp_path):
    number = 0
    for name, count in COUNTS.items():
        write_shard(
            tmp_path / "shards" / f"{name}.tar", *(sample(number + row) for row in range(count))
        )
        number += count
    return tmp_path / "shards"


def expected(*numbers: int) -> dict:
    splits = ["train"] * 5 + ["val"] * 2 + ["test"]
    return {
        f"{number:05d}.png": (splits[number], [f"caption {number}"], number) for number in numbers
    }


def test_folder_of_shards_is_opened(shards):
    data = open_valid_dataset(shards)
    assert (data.name, contents(data)) == ("shards", expected(*range(8)))
    report = check_dataset(shards)
    assert (report.ok, report.findings, report.format_name) == (True, (), "WebDataset")
    (shards / "._train-000.tar").write_bytes(b"written by macOS")
    assert contents(open_dataset(shards)) == expected(*range(8))
    (shards / "data").mkdir()
    for path in shards.glob("*.tar"):
        path.rename(shards / "data" / path.name)
    assert contents(open_dataset(shards)) == expected(*range(8))


def test_patterns_select_shards(shards, monkeypatch):
    monkeypatch.setenv("VISAVIS_DATA", str(shards.parent))
    for pattern in (
        shards / "{train-001,val-000,test-000}.tar",
        "shards/{train-001,val-000,test-000}.tar",
    ):
        data = open_dataset(pattern)
        assert (data.name, contents(data)) == ("shards", expected(3, 4, 5, 6, 7))
    assert contents(open_dataset(str(shards / "val-*.tar"))) == expected(5, 6)
    assert contents(open_dataset(shards / "val-000.tar")) == expected(5, 6)
    assert api.data_check(str(shards / "val-*.tar")).ok
    train = open_dataset(str(shards / "train-{000..001}.tar"))
    assert len(train.images) == 5, "shards named train alone are divided by hash"
    for pattern in ("train-{000..003}.tar", "none-*.tar", "none/train-{000..001}.tar"):
        with pytest.raises(DataError, match=r"expected an existing (path|shard)[^\n]*\.$"):
            open_dataset(shards / pattern)
    with pytest.raises(DataError, match=r"train-\{0\{1\}\.tar: expected balanced braces"):
        open_dataset(shards / "train-{0{1}.tar")


def test_stream_and_data_set_read_the_same(shards):
    stream = ShardStream.open(str(shards / "*.tar"), max_open=4)
    data = open_dataset(shards)
    assert [stream.captions(item) for item in range(8)] == [
        [data.captions[i] for i in rows] for rows in data.captions_of
    ]
    assert [stream.image(item).read() for item in range(8)] == [
        image.read() for image in data.images
    ]


def test_captions_in_json_are_read(tmp_path):
    write_shard(
        tmp_path / "shard.tar",
        sample(0, json={"caption": "a", "split": "train"}),
        sample(1, json={"sentences": [{"raw": "b"}, {"raw": "c"}], "split": "validation"}),
        sample(2, json=["d", "e"]),
    )
    data = open_dataset(tmp_path, skip_bad=True)
    assert contents(data) == {"00000.png": ("train", ["a"], 0), "00001.png": ("val", ["b", "c"], 1)}
    assert "the image has no split" in data.skipped[1]


def test_split_in_json_next_to_a_text_is_read(tmp_path):
    splits = ["train", "validation", "test"] * 4
    samples = (
        sample(number, txt=f"caption {number}", json={"split": split, "width": 4})
        for number, split in enumerate(splits)
    )
    data = open_dataset(write_shard(tmp_path / "shard.tar", *samples))
    assert [image.split for image in data.images] == ["train", "val", "test"] * 4
    write_shard(tmp_path / "shard.tar", sample(0, txt="a", json=b"{"))
    with pytest.raises(
        DataError, match=r"00000\.json is not readable: .*\. Write the member again"
    ):
        open_dataset(tmp_path)


def test_repeated_members_are_a_finding(tmp_path):
    path = tmp_path / "val-0.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(3):
            for name, content in (("x.png", png(number)), ("x.txt", f"caption {number}".encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    with pytest.raises(
        DataError,
        match=r"1 x duplicate name.*val-0\.tar: x: the shard has a member of this sample twice",
    ):
        open_dataset(path)
    assert contents(open_dataset(path, skip_bad=True)) == {"x.png": ("val", ["caption 2"], 2)}


def test_equal_keys_are_one_image_unless_shards_number_from_zero(tmp_path):
    write_shard(tmp_path / "a" / "test-0.tar", sample(0, "x"), sample(1, "y"))
    write_shard(tmp_path / "a" / "test-1.tar", sample(2, "z"), sample(1, "y", txt="another"))
    assert contents(open_dataset(tmp_path / "a"))["y.png"] == ("test", ["caption 1", "another"], 1)
    write_shard(tmp_path / "b" / "test-0.tar", sample(0, "0"), sample(1, "1"))
    write_shard(tmp_path / "b" / "test-1.tar", sample(2, "0"), sample(3, "1"))
    assert list(contents(open_dataset(tmp_path / "b"))) == [
        "test-0/0.png",
        "test-0/1.png",
        "test-1/0.png",
        "test-1/1.png",
    ]


BROKEN = {
    "no image": ({"__key__": "x", "txt": "a dog"}, "missing image"),
    "broken caption": ({"__key__": "x", "png": png(9), "json": b"{"}, "image without caption"),
    "broken image": ({"__key__": "x", "png": b"nothing", "txt": "a dog"}, "not an image"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_sample_is_a_finding_and_skipped(tmp_path, case):
    broken, kind = BROKEN[case]
    path = write_shard(tmp_path / "val-0.tar", sample(0), broken, sample(1))
    assert any(
        kind == finding.kind or case == "broken image"
        for finding in check_dataset(path).findings
        if finding.loses_data
    )
    with pytest.raises(DataError, match="unusable items"):
        open_valid_dataset(path)
    assert list(contents(open_valid_dataset(path, skip_bad=True))) == [
        "00000.png",
        "00001.png",
    ]


def test_cut_shard_is_a_finding(tmp_path):
    path = write_shard(tmp_path / "val-0.tar", *(sample(number) for number in range(6)))
    os.truncate(path, 6_000)
    assert "broken archive" in {finding.kind for finding in check_dataset(path).findings}
    with pytest.raises(DataError, match="broken archive"):
        open_dataset(path)
    assert 0 < len(open_dataset(path, skip_bad=True).images) < 6


def test_list_next_to_archives_has_priority(tmp_path):
    write_shard(tmp_path / "images-0.tar", sample(0))
    (tmp_path / "captions.csv").write_text("filename,caption\n00000.png,a list\n")
    assert open_dataset(tmp_path).captions == ("a list",)
