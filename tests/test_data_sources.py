"""The same images and captions as MS-COCO, tables, Arrow files, WebDataset and captions.csv: equal
trainings and results of commands.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.retrieval.open_index import open_index
from visavis.retrieval.source_files import list_source_files

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
pq = pytest.importorskip("pyarrow.parquet")
wds = pytest.importorskip(
    "webdataset", reason="webdataset is not installed: pip install -e '.[dev]'"
)

Rows = list[tuple[str, str, bytes, list[str]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Rows:
    """Name, split, bytes and captions of each image, in the order of train and val."""
    folder = tmp_path_factory.mktemp("scenes") / "scenes"
    data = open_dataset(
        write_synthetic_scenes(
            folder, num_train=24, num_val=8, num_test=0, captions_per_image=2, size=32
        )
    )
    return [
        (Path(image.name).name, image.split, image.read(), [data.captions[i] for i in captions])
        for image, captions in zip(data.images, data.captions_of, strict=True)
    ]


def write_images(folder: Path, rows: Rows, where: str = "{name}") -> None:
    for name, split, content, _ in rows:
        path = folder / where.format(name=name, split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_csv(folder: Path, rows: Rows) -> None:
    write_images(folder, rows)
    with open(folder / "captions.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filename", "split", "caption"])
        table.writerows(
            [name, split, caption] for name, split, _, captions in rows for caption in captions
        )


def write_coco(folder: Path, rows: Rows) -> None:
    write_images(folder, rows, "{split}2017/{name}")
    (folder / "annotations").mkdir()
    for split in ("train", "val"):
        chosen = [
            (number, name, captions)
            for number, (name, own, _, captions) in enumerate(rows)
            if own == split
        ]
        content = {
            "images": [{"id": number, "file_name": name} for number, name, _ in chosen],
            "annotations": [
                {"image_id": number, "caption": caption}
                for number, _, captions in chosen
                for caption in captions
            ],
        }
        (folder / "annotations" / f"captions_{split}2017.json").write_text(json.dumps(content))


def table(rows: Rows, split: str):
    chosen = [row for row in rows if row[1] == split]
    images = [{"bytes": content, "path": name} for name, _, content, _ in chosen]
    return pa.table({"image": images, "captions": [captions for *_, captions in chosen]})


def write_parquet(folder: Path, rows: Rows) -> None:
    (folder / "data").mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        pq.write_table(
            table(rows, split), folder / "data" / f"{name}-00000-of-00001.parquet", row_group_size=5
        )


def write_saved(folder: Path, rows: Rows) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    parts = {
        name: datasets.Dataset(table(rows, split))
        for split, name in (("train", "train"), ("val", "validation"))
    }
    datasets.DatasetDict(parts).save_to_disk(folder)


def write_shards(folder: Path, rows: Rows) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        with wds.TarWriter(str(folder / f"{split}-000.tar")) as writer:
            for name, own, content, captions in rows:
                if own == split:
                    writer.write(
                        {"__key__": Path(name).stem, "png": content, "json": {"captions": captions}}
                    )


def write_split_tables(folder: Path, rows: Rows) -> None:
    write_images(folder, rows)
    for split in ("train", "val"):
        lines = [
            json.dumps({"image_path": name, "captions": captions})
            for name, own, _, captions in rows
            if own == split
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


SOURCES: dict[str, Callable[[Path, Rows], None]] = {
    "coco": write_coco,
    "parquet": write_parquet,
    "save_to_disk": write_saved,
    "webdataset": write_shards,
    "tables": write_split_tables,
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, rows):
    """Train on a source. Returns its folder, its run and the result."""
    folder = tmp_path_factory.mktemp("sources")
    write_recipe(folder / "tiny.toml")

    def train_on(name: str, write: Callable[[Path, Rows], None], *overrides: str):
        source, run = folder / name / "data", folder / name / "run"
        if not source.exists():
            write(source, rows)
        return (
            source,
            run,
            visavis.train(
                folder / "tiny.toml", data=source, out=run, overrides=["epochs=2", *overrides]
            ),
        )

    return train_on


@pytest.fixture(scope="module")
def listed(train):
    """The data set as captions.csv, its run and its result."""
    return train("captions", write_csv)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.slow
def test_training_equals_that_on_captions_csv(name, rows, listed, train):
    expected = open_dataset(listed[0])
    source, run, result = train(name, SOURCES[name])
    data = open_dataset(source)
    assert data.fingerprint == expected.fingerprint
    assert [image.read() for image in data.images] == [image.read() for image in expected.images]
    assert result.validation_rsum == listed[2].validation_rsum
    results = [visavis.evaluate(folder, split="val").metrics for folder in (run, listed[1])]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("coco", "webdataset") else pytest.mark.long)
        for name in SOURCES
    ],
)
@pytest.mark.slow
def test_other_commands_read_each_source(name, rows, tmp_path, listed):
    SOURCES[name](tmp_path / "data", rows)
    assert visavis.data_check(tmp_path / "data").ok
    [store] = visavis.features(tmp_path / "data", visual="scenes", out=tmp_path / "features")
    [expected] = visavis.features(listed[0], visual="scenes", out=tmp_path / "expected")
    assert store.read(range(len(store))).vectors.equal(expected.read(range(len(expected))).vectors)
    assert (
        visavis.evaluate(listed[1], split="val", data=tmp_path / "data").metrics["rsum"]
        == listed[2].validation_rsum
    )
    audit = visavis.data_audit(tmp_path / "data", parts="captions")
    assert audit.to_json()["captions"]
    files = list_source_files(tmp_path / "data").files
    assert sorted(file.path for file in files) == sorted(row[0] for row in rows)


def test_index_by_name_is_updated_and_read(rows, tmp_path, listed, monkeypatch):
    write_shards(tmp_path / "data sets" / "shards", rows)
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path / "data sets"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    reports = [visavis.index(listed[1], "shards") for _ in range(2)]
    assert [(Path(report.folder), report.num_encoded) for report in reports] == [
        (Path("indexes/shards"), len(rows)),
        (Path("indexes/shards"), 0),
    ]
    index = open_index("indexes/shards")
    assert all(index.locate(item).read() for item in index.items.values())


@pytest.mark.parametrize("name", ["parquet", "webdataset"])
def test_index_reads_images_in_place(name, rows, tmp_path, listed):
    SOURCES[name](tmp_path / "data", rows)
    report = visavis.index(listed[1], tmp_path / "data", out=tmp_path / "index")
    assert report.num_encoded == len(rows)
    again = visavis.index(listed[1], tmp_path / "data", out=tmp_path / "index")
    assert (again.num_encoded, again.num_unchanged) == (0, len(rows))
    assert len(visavis.search(tmp_path / "index", rows[0][3][0])) == 5
    index = open_index(tmp_path / "index")
    contents = {name: content for name, _, content, _ in rows}
    assert {item.path: index.locate(item).read() for item in index.items.values()} == contents


@pytest.mark.slow
def test_workers_read_images_of_tables(rows, tmp_path, train):
    pixels = (
        'visual.encoder="small-cnn"',
        'visual.granularity="pixels"',
        "visual.image_size=16",
        'model.region_pool="mean"',
    )
    results = [
        train(f"{name}-pixels", write, *pixels, f"training.workers={workers}")[2].validation_rsum
        for name, write, workers in (("captions", write_csv, 0), ("parquet", write_parquet, 1))
    ]
    assert results[0] == results[1]
