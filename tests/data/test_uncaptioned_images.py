"""Images without captions in every format: candidates of evaluations, in ``Dataset.unpaired``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.test_check import World, png

from visavis.core.errors import DataError
from visavis.data.dataset import Dataset
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_validation import open_valid_dataset
from visavis.data.loader import BatchSchedule
from visavis.retrieval.source_files import list_source_files


def write_world(folder: Path, format_name: str, captions: list[str]) -> Path:
    """Images a to d, of which b, of the training split, has the given captions."""
    world = World(folder, format_name)
    world.rows[1]["captions"] = captions
    world.write()
    return folder


def write_parquet(folder: Path, captions: list[str] | None, *, embedded: bool) -> Path:
    names, texts = ["a.png", "b.png", "c.png"], [["a"], captions, ["c"]]
    content = [{"bytes": png(name), "path": name} for name in names]
    columns = {"image": content} if embedded else {"filename": names}
    table = pa.table(columns | {"caption": texts, "split": ["train", "train", "test"]})
    pq.write_table(table, folder / ("x.parquet" if embedded else "captions.parquet"))
    for name in [] if embedded else names:
        (folder / name).write_bytes(png(name))
    return folder


def write_shard(folder: Path, text: str | None) -> Path:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(folder / "train-0.tar")) as writer:
        writer.write({"__key__": "a", "png": png("a"), "txt": "a"})
        writer.write({"__key__": "b", "png": png("b")} | ({} if text is None else {"txt": text}))
    return folder


def write_coco(folder: Path) -> Path:
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(3)]
    content = {
        "images": images,
        "annotations": [{"image_id": 0, "caption": "a"}, {"image_id": 2, "caption": "c"}],
    }
    (folder / "captions_train2014.json").write_text(json.dumps(content))
    for image in images:
        (folder / image["file_name"]).write_bytes(png(image["file_name"]))
    return folder


CASES = {
    **{
        f"{name}, {what}": lambda folder, name=name, captions=captions: write_world(
            folder, name, captions
        )
        for name in ("karpathy", "tar", "jsonl", "csv")
        for what, captions in (("no caption", []), ("empty captions", ["", " "]))
        if name != "csv" or captions
    },
    **{
        f"{kind}, {what}": lambda folder, embedded=embedded, captions=captions: write_parquet(
            folder, captions, embedded=embedded
        )
        for kind, embedded in (("large table", False), ("image table", True))
        for what, captions in (("null", None), ("no caption", []), ("empty captions", ["", " "]))
    },
    "webdataset, no text": lambda folder: write_shard(folder, None),
    "webdataset, empty text": lambda folder: write_shard(folder, " \n"),
    "coco": write_coco,
}


@pytest.mark.parametrize("case", CASES)
def test_image_without_caption_is_unpaired(tmp_path: Path, case: str) -> None:
    folder = CASES[case](tmp_path)
    for _ in range(2):  # the second time from the cache
        data = open_valid_dataset(folder)
        assert data.skipped == ()
        assert len(data.unpaired) == 1
        [image] = data.unpaired_images
        assert image.split == "train"
        assert image.open().size == (24, 16)
        assert image.name not in [other.name for other in data.images]
        assert data.unpaired[0].image_rows.tolist() == [1]
        assert 1 not in data.image_rows
        assert len(data.split("train").unpaired_images) == 1
    report = check_dataset(folder)
    assert report.ok
    assert [each.location for each in report.findings if each.kind == "uncaptioned image"] == [
        image.name
    ]


def test_split_without_its_own_unpaired_images_has_none(tmp_path: Path) -> None:
    data = open_dataset(write_world(tmp_path, "jsonl", []))
    assert data.split("test").unpaired == ()
    assert [image.name for image in data.split("train").unpaired_images] == ["b.png"]


def test_training_batches_hold_no_unpaired_image(tmp_path: Path) -> None:
    train = open_dataset(write_world(tmp_path, "csv", [""])).split("train")
    for captions_per_image in (None, 1):
        schedule = BatchSchedule(batch_size=4, captions_per_image=captions_per_image)
        for images, captions in schedule.batches(train, seed=0, epoch=0):
            assert {train.images[image].name for image in images} == {"a.png"}
            assert len(captions) == (captions_per_image or 2)


@pytest.mark.parametrize("format_name", ["karpathy", "jsonl", "csv"])
def test_split_without_any_caption_is_a_mistake(tmp_path: Path, format_name: str) -> None:
    world = World(tmp_path, format_name)
    world.rows[2]["captions"] = [""]
    world.write()
    with pytest.raises(DataError, match=r"1 x image without caption"):
        open_dataset(tmp_path)


def test_image_with_a_broken_caption_is_not_unpaired(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"caption too long"):
        open_dataset(write_world(tmp_path, "jsonl", ["a dog " * 9_999]))


def test_index_of_a_list_holds_images_without_captions(tmp_path: Path) -> None:
    folder = write_world(tmp_path, "jsonl", [])
    files = list_source_files(folder / "captions.jsonl").files
    assert sorted(Path(file.path).name for file in files) == ["a.png", "b.png", "c.png", "d.png"]


def test_large_table_counts_only_its_own_problems(tmp_path: Path) -> None:
    count = 100
    names = [f"{i}.jpg" for i in range(count)]
    captions = [f"caption {i}" if i % 3 else " " for i in range(count)]
    table = {
        "filename": [*names, names[1]],
        "caption": [*captions, ""],
        "split": ["train", "test"] * (count // 2) + ["test"],
    }
    pq.write_table(pa.table(table), tmp_path / "captions.parquet")
    with pytest.raises(DataError, match=r"\(1 x empty caption\)"):
        open_dataset(tmp_path)
    data = open_dataset(tmp_path, skip_bad=True)
    assert data.skipped[0].startswith("0 of 100 images and 1 of 67 captions")
    assert isinstance(data.unpaired[0], Dataset)
    assert data.unpaired[0].image_rows.tolist() == list(range(0, count, 3))
    assert [image.name for image in data.unpaired[0].split("test").images] == names[3::6]
    assert np.union1d(data.image_rows, data.unpaired[0].image_rows).tolist() == list(range(count))
