"""Tables with images in them: Parquet and Arrow files of Hugging Face datasets, columns, splits,
broken rows, and reading in place.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from visavis.core.errors import DataError
from visavis.data.dataset import Dataset
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.file_names import is_video
from visavis.data.formats import arrow_tables
from visavis.data.formats.arrow_tables import EmbeddedImage
from visavis.data.formats.listing import caption_problem
from visavis.data.image_validation import open_valid_dataset

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
pq = pytest.importorskip("pyarrow.parquet")

SPLITS = {"train": "train", "validation": "val", "test": "test"}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30).filter(
    lambda text: caption_problem(text) is None and unicodedata.is_normalized("NFC", text)
)
NAME = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda name: not is_video(name)
)


def png(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 3), (number % 256, number // 256, 7)).save(content, "PNG")
    return content.getvalue()


def contents(data: Dataset) -> dict[str, tuple[str, list[str], int]]:
    """Split, captions and color of each image by name."""
    return {
        image.name: (
            image.split,
            [data.captions[i] for i in rows],
            image.open().getpixel((0, 0))[0],
        )
        for image, rows in zip(data.images, data.captions_of, strict=True)
    }


def write_parquet(path: Path, columns: dict, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def write_arrow(
    path: Path,
    columns: dict,
    kind=pa.ipc.new_stream,
    compression: str | None = None,
    batch: int = 2,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    with kind(
        str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def rows(*numbers: int, struct: bool = True, **columns) -> dict:
    images = [
        {"bytes": png(number), "path": f"{number}.png"} if struct else png(number)
        for number in numbers
    ]
    return {
        "image": images,
        "caption": [[f"caption {number}", f"text {number}"] for number in numbers],
        **columns,
    }


def expected(split: str, *numbers: int) -> dict:
    return {
        f"{number}.png": (split, [f"caption {number}", f"text {number}"], number)
        for number in numbers
    }


@pytest.mark.parametrize("where", ["", "data/", "{split}/", "data/{split}/"])
def test_files_of_the_hub_are_one_data_set(tmp_path, where):
    for split, part, numbers in (
        ("train", "0-of-00002", (0, 1, 2)),
        ("train", "1-of-00002", (3, 4)),
        ("validation", "0", (5,)),
        ("test", "0", (6, 7)),
    ):
        name = f"0000{part}.parquet" if "split" in where else f"{split}-0000{part}.parquet"
        write_parquet(tmp_path / where.format(split=split) / name, rows(*numbers), row_group_size=2)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    data = open_valid_dataset(tmp_path)
    assert data.splits == ("test", "train", "val")
    assert contents(data) == expected("train", 0, 1, 2, 3, 4) | expected("val", 5) | expected(
        "test", 6, 7
    )
    assert data.name == tmp_path.name
    report = check_dataset(tmp_path)
    assert (report.ok, report.findings, report.format_name) == (True, (), "image tables")
    assert pickle.loads(pickle.dumps(data)).images[2].open().size == (4, 3)


def test_data_sets_saved_by_datasets_are_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    features = datasets.Features(
        {"image": datasets.Image(), "sentences": datasets.List({"raw": datasets.Value("string")})}
    )

    def dataset(*numbers):
        images = [Image.open(io.BytesIO(png(number))) for number in numbers]
        sentences = [
            [{"raw": f"caption {number}"}, {"raw": f"text {number}"}] for number in numbers
        ]
        return datasets.Dataset.from_dict(
            {"image": images, "sentences": sentences}, features=features
        )

    parts = datasets.DatasetDict(
        {"train": dataset(0, 1, 2), "validation": dataset(3), "test": dataset(4)}
    )
    parts.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "validation": 1, "test": 1})
    parts["train"].save_to_disk(tmp_path / "one")
    for name, part in parts.items():
        part.to_parquet(tmp_path / "parquet" / f"{name}-00000-of-00001.parquet")
    numbers = {0: "train", 1: "train", 2: "train", 3: "val", 4: "test"}
    for source in ("saved", "parquet"):
        data = open_valid_dataset(tmp_path / source)
        assert sorted(contents(data).values()) == sorted(
            (split, [f"caption {number}", f"text {number}"], number)
            for number, split in numbers.items()
        )
        assert {type(image.location) for image in data.images} == (
            {EmbeddedImage} if source == "parquet" else {arrow_tables.ByteRange}
        )
    assert [color for _, _, color in contents(open_dataset(tmp_path / "one")).values()] == [0, 1, 2]


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("struct", [True, False])
def test_arrow_files_are_read_in_place(tmp_path, kind, compression, struct):
    names = [f"{number}.png" for number in range(5)]
    path = write_arrow(
        tmp_path / "captions.arrow",
        rows(*range(5), struct=struct, filename=names, split=["val"] * 5),
        kind,
        compression,
    )
    for source in (tmp_path, path):
        data = open_dataset(source)
        assert contents(data) == expected("val", *range(5))
        assert all(
            isinstance(image.location, EmbeddedImage) == (compression is not None)
            for image in data.images
        )
        assert sorted(os.listdir(tmp_path)) == ["captions.arrow"]


def test_rows_of_one_name_are_captions_of_one_image(tmp_path):
    columns = {
        "image": [png(0), png(0), png(1), png(0)],
        "caption": ["a", "b", "c", "d"],
        "image_id": [7, 7, 8, 7],
        "split": ["train", "train", "dev", "train"],
    }
    data = open_dataset(write_parquet(tmp_path / "x.parquet", columns))
    assert contents(data) == {"7": ("train", ["a", "b", "d"], 0), "8": ("val", ["c"], 1)}


def test_numbered_caption_columns_are_read(tmp_path):
    columns = {
        "image": [png(0)],
        "caption_0": ["a"],
        "caption_1": ["b"],
        "filename": ["x"],
        "split": ["train"],
    }
    assert contents(open_dataset(write_parquet(tmp_path / "x.parquet", columns))) == {
        "x": ("train", ["a", "b"], 0)
    }


@pytest.mark.parametrize("same", [True, False])
def test_repeated_paths_are_one_image_if_bytes_are_equal(tmp_path, same):
    images = [{"bytes": png(0 if same else number), "path": "image.jpg"} for number in range(3)]
    path = write_parquet(tmp_path / "test.parquet", {"image": images, "text": ["a", "b", "c"]})
    data = open_dataset(path)
    expect = {"image.jpg": ("test", ["a", "b", "c"], 0)}
    if not same:
        expect = {
            f"test/{number + 1}": ("test", [text], number) for number, text in enumerate("abc")
        }
    assert contents(data) == expect
    assert ("repeated path" in {finding.kind for finding in check_dataset(path).findings}) != same


def test_tables_without_a_split_are_divided_by_name(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", rows(*range(60)))
    data = open_dataset(tmp_path)
    assert sorted(data.splits) == ["test", "train", "val"]


def test_paths_of_images_are_found_next_to_tables(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
    write_parquet(
        tmp_path / "data" / "train.parquet",
        {"image_path": ["images/0.png", "1.png"], "caption": ["a", "b"]},
    )
    write_parquet(
        tmp_path / "data" / "val.parquet",
        {"image": [{"bytes": None, "path": "2.png"}], "caption": ["c"]},
    )
    write_arrow(tmp_path / "data" / "test.arrow", {"file_name": ["3.png"], "captions": [["d"]]})
    assert contents(open_dataset(tmp_path)) == {
        "images/0.png": ("train", ["a"], 0),
        "1.png": ("train", ["b"], 1),
        "2.png": ("val", ["c"], 2),
        "3.png": ("test", ["d"], 3),
    }


def test_split_tables_of_text_are_one_data_set(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    (tmp_path / "train.csv").write_text('image_path,captions\n0.png,"[""a"", ""b""]"\n')
    (tmp_path / "validation.tsv").write_text("filepath\tcaption\n1.png\t[c]\n")
    (tmp_path / "test.jsonl").write_text('{"file_name": "2.png", "text": "d"}\n')
    (tmp_path / "prices.csv").write_text("filename,price\n0.png,3\n")
    data = open_dataset(tmp_path)
    assert contents(data) == {
        "0.png": ("train", ["a", "b"], 0),
        "1.png": ("val", ["[c]"], 1),
        "2.png": ("test", ["d"], 2),
    }


def test_folders_of_images_of_datasets_are_one_data_set(tmp_path):
    for number, split in enumerate(("train", "validation", "test")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.png").write_bytes(png(number))
        (tmp_path / split / "metadata.csv").write_text(f"file_name,text\na.png,caption {number}\n")
    assert contents(open_dataset(tmp_path)) == {
        "test/a.png": ("test", ["caption 2"], 2),
        "train/a.png": ("train", ["caption 0"], 0),
        "validation/a.png": ("val", ["caption 1"], 1),
    }


DAMAGED = {
    "no bytes": ({"image": [None, png(1)]}, "missing image"),
    "struct without bytes": (
        {"image": [{"bytes": None, "path": None}, {"bytes": png(1), "path": None}]},
        "missing image",
    ),
    "path without file": (
        {"image": [{"bytes": None, "path": "x.png"}, {"bytes": png(1), "path": None}]},
        "missing image",
    ),
    "no image": ({"image": [b"not an image", png(1)]}, "not an image"),
    "two splits": ({"filename": ["x", "x"], "split": ["val", "test"]}, "image in two splits"),
    "no split": ({"split": [None, "test"]}, "image without split"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_broken_row_is_a_finding_and_skipped(tmp_path, case, write):
    change, kind = DAMAGED[case]
    columns = {
        "image": [png(0), png(1), png(2)],
        "caption": ["a", "b", "c"],
        "filename": ["1", "2", "3"],
        "split": ["test"] * 3,
    }
    for name, values in change.items():
        last = (
            values[1]
            if name not in ("filename", "image")
            else "3"
            if name == "filename"
            else png(2)
        )
        columns[name] = [
            *values,
            {"bytes": png(2), "path": None} if isinstance(values[1], dict) else last,
        ]
    path = write(tmp_path / f"x{'.parquet' if write is write_parquet else '.arrow'}", columns)
    kinds = {finding.kind for finding in check_dataset(path).findings if finding.loses_data}
    assert kind in kinds or (case == "no image" and kinds), kinds
    with pytest.raises(DataError, match="unusable items"):
        open_valid_dataset(path)
    assert len(open_valid_dataset(path, skip_bad=True).images) == (1 if case == "two splits" else 2)


UNCLEAR = {
    "no image": (
        {"caption": ["a"], "label": [1]},
        r"column with the image \(.*, got caption \(string\), label \(int64\)\. Rename",
    ),
    "no caption": (
        {"image": [png(0)], "label": ["a"]},
        r"column with the caption \(.*, got image \(binary\), label \(string\)\. Rename",
    ),
    "two images": (
        {"left": [png(0)], "right": [png(0)], "caption": ["a"]},
        r"column with the image \(.*, got left \(binary\), right",
    ),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_unclear_columns_are_one_error(tmp_path, case):
    columns, message = UNCLEAR[case]
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", columns)
    with pytest.raises(
        DataError, match=rf"^\S+train-00000-of-00001\.parquet: expected a {message}[^\n]*\.$"
    ):
        open_dataset(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.slow
def test_damaged_tables_are_an_error_or_read(tmp_path, suffix):
    path = (write_parquet if suffix == "parquet" else write_arrow)(
        tmp_path / f"data-train.{suffix}", rows(*range(20))
    )
    whole = path.read_bytes()
    for number in range(0, len(whole), max(1, len(whole) // 60)):
        for damaged in (
            whole[:number],
            whole[:number] + bytes([whole[number] ^ 0xFF]) + whole[number + 1 :],
        ):
            path.write_bytes(damaged)
            with suppress(DataError):
                for image in open_valid_dataset(tmp_path, skip_bad=True).images:
                    image.open()


def test_links_out_of_the_folder_are_refused(tmp_path, monkeypatch):
    secret = write_parquet(tmp_path / "secret" / "x.parquet", rows(0))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").symlink_to(secret)
    with pytest.raises(DataError, match="points outside"):
        open_dataset(tmp_path / "data")
    monkeypatch.setenv("VISAVIS_IMAGE_ROOTS", str(tmp_path / "secret"))
    data = open_dataset(tmp_path / "data")
    assert data.images[0].open().size == (4, 3)
    monkeypatch.delenv("VISAVIS_IMAGE_ROOTS")
    with pytest.raises(DataError, match="points outside"):
        data.images[0].open()


def test_row_groups_stay_in_memory_up_to_a_limit(tmp_path, monkeypatch):
    path = write_parquet(
        tmp_path / "x.parquet",
        rows(*range(40), filename=[f"{i}.png" for i in range(40)]),
        row_group_size=10,
    )
    data = open_dataset(path)
    read = []
    original = arrow_tables._TableFile.read_group
    monkeypatch.setattr(
        arrow_tables._TableFile,
        "read_group",
        lambda self, number, columns: read.append(number) or original(self, number, columns),
    )
    for image in data.images:
        image.open()
    assert read == [0, 1, 2, 3]
    monkeypatch.setattr(arrow_tables, "CACHED_BYTES", 1)
    for image in data.images:
        image.open()
    assert read == [0, 1, 2, 3, 1, 2, 3], "the group that was read last stays"
    monkeypatch.setattr(arrow_tables, "_LARGE_GROUP_BYTES", 1)
    assert [
        (finding.kind, finding.loses_data)
        for finding in check_dataset(path).findings
        if finding.kind == "large row group"
    ] == [("large row group", False)]
    write_parquet(tmp_path / "x.parquet", rows(5))
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as a table: [^\n]*\.$"):
        data.images[39].open()


def test_image_of_compressed_file_decompresses_one_batch(tmp_path, monkeypatch):
    path = write_arrow(tmp_path / "x.arrow", rows(*range(20)), pa.ipc.new_file, "lz4")
    data, read, open_file = open_dataset(path), [], pa.ipc.open_file

    class Reader:
        def __init__(self, buffer):
            self.reader = open_file(buffer)
            self.schema, self.num_record_batches = (
                self.reader.schema,
                self.reader.num_record_batches,
            )

        def get_batch(self, number):
            read.append(number)
            return self.reader.get_batch(number)

    monkeypatch.setattr(pa.ipc, "open_file", Reader)
    for image in data.images:
        image.open()
    assert read == list(range(10))


@settings(max_examples=25)
@given(
    st.dictionaries(NAME, st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_round_trip_of_any_text(described, struct, as_list, as_arrow):
    pairs = (
        list(described.items())
        if as_list
        else [(name, text) for name, texts in described.items() for text in texts]
    )
    numbers = {name: number for number, name in enumerate(described)}
    columns = {
        "image": [
            {"bytes": png(numbers[name]), "path": None} if struct else png(numbers[name])
            for name, _ in pairs
        ],
        "filename": [name for name, _ in pairs],
        "text": [texts for _, texts in pairs],
        "split": ["test"] * len(pairs),
    }
    with tempfile.TemporaryDirectory() as root:
        path = (
            write_arrow(Path(root) / "x.arrow", columns)
            if as_arrow
            else write_parquet(Path(root) / "x.parquet", columns)
        )
        data = open_valid_dataset(path)
        assert contents(data) == {
            name: ("test", texts, numbers[name]) for name, texts in described.items()
        }
        assert data.skipped == ()
