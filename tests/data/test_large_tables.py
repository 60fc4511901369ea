"""Tables of millions of captions: lazy sequences, conversion, problems, and training on stored
features.
"""

from __future__ import annotations

import csv
import json
import pickle
import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from visavis.core.errors import DataError, RecipeError
from visavis.data import dataset_reader
from visavis.data.columns import unique_texts
from visavis.data.dataset import Dataset
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features import arrays
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.formats import large_table
from visavis.data.image_file import Image
from visavis.data.loader import BatchSchedule
from visavis.data.noise import ShuffledCaptions, add_noise
from visavis.data.sequences import CaptionGroups
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.vocabulary import Vocabulary
from visavis.data.words import tokenize
from visavis.training.recipes import open_data
from visavis.training.recipes.recipe import build_recipe
from visavis.training.training_run import prepare_training, resolve, start_training

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    ("b/1.jpg", "two dogs, run", "train"),
    ("a.jpg", "a cat", "val"),
    ("b/1.jpg", "two brown dogs", "train"),
    ("c.jpg", "Ünïcode İs here", "train"),
    ("a.jpg", "the cat sleeps", "val"),
    ("d.jpg", "a\x1fboat-house", "test"),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path):
    """More than one record batch in each column, and a cache of its own."""
    monkeypatch.setattr("visavis.data.columns.ROWS_PER_CHUNK", 16)
    monkeypatch.setattr(large_table, "ROWS_PER_CHUNK", 16)
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))


def write_table(folder, rows, name="captions.parquet"):
    columns = {
        key: [row[number] for row in rows]
        for number, key in enumerate(("filename", "caption", "split"))
    }
    folder.mkdir(exist_ok=True)
    table = pa.table(columns)
    if name.endswith(".parquet"):
        pq.write_table(table, folder / name)
    else:
        with pa.ipc.new_file(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    return folder


def many_rows(count=100, captions=3):
    splits = ["train", "train", "train", "val", "test"]
    return [
        (f"{i:03d}.jpg", f"caption {k} of {i}" + " word" * (i % 7), splits[i % 5])
        for k in range(captions)
        for i in range(count)
    ]


def as_tuples(data: Dataset) -> Dataset:
    """The same data set with Python objects."""
    return replace(data, images=tuple(data.images), captions=tuple(data.captions))


def test_table_has_content_of_csv(tmp_path):
    (tmp_path / "csv").mkdir()
    with open(tmp_path / "csv" / "captions.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("filename", "caption", "split"), *ROWS])
    for name, _, _ in ROWS:
        path = tmp_path / "csv" / name
        path.parent.mkdir(exist_ok=True)
        PILImage.new("RGB", (4, 4)).save(path)
    listed = open_dataset(tmp_path / "csv")
    for name in ("captions.parquet", "captions.arrow"):
        data = open_dataset(write_table(tmp_path / name, ROWS, name))
        assert data.captions == listed.captions
        assert [(image.name, image.split) for image in data.images] == [
            (image.name, image.split) for image in listed.images
        ]
        assert data.image_of.tolist() == listed.image_of.tolist()
        assert data.splits == listed.splits == ("train", "val", "test")


def test_lazy_data_set_equals_tuples_in_every_operation(tmp_path):
    lazy = open_dataset(write_table(tmp_path / "data", many_rows()))
    eager = as_tuples(lazy)
    operations = [
        lambda data: data.split("train"),
        lambda data: data.split("train").split("train").take(np.array([5, 1, 30])),
        lambda data: data.first_captions(2),
        lambda data: data.with_captions(np.array([7, 3, 250])),
        lambda data: data.subsample(20, 2, seed=3),
        lambda data: add_noise(data, ShuffledCaptions(share=0.3), 1),
        lambda data: data.redraw(("train", "val"), 3),
    ]
    for operation in operations:
        left, right = operation(lazy), operation(eager)
        assert left.is_lazy
        assert left.captions == right.captions
        assert tuple(left.images) == right.images
        assert left.splits == right.splits
        for name in ("image_of", "image_rows", "caption_rows", "caption_lengths"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
        for schedule in (
            BatchSchedule(batch_size=8, length_buckets=2),
            BatchSchedule(batch_size=8, captions_per_image=2),
        ):
            batches = zip(schedule.batches(left, 1, 2), schedule.batches(right, 1, 2), strict=True)
            assert all(np.array_equal(a, b) for pair in batches for a, b in zip(*pair, strict=True))


def test_lazy_sequences_behave_like_tuples(tmp_path):
    data = open_dataset(write_table(tmp_path / "data", many_rows(60)))
    captions, images = tuple(data.captions), tuple(data.images)
    for lazy, items in (
        (data.captions, captions),
        (data.images, images),
        (data.split("train").captions, data.split("train").captions[:]),
    ):
        assert len(lazy) == len(items)
        assert lazy[-1] == items[-1]
        assert tuple(lazy[3:40:7]) == tuple(items[i] for i in range(3, 40, 7))
        assert tuple(lazy[np.array([50, 2, 2])]) == (items[50], items[2], items[2])
        assert items[17] in lazy
        assert lazy == items
        assert lazy != items[:-1]
        assert pickle.loads(pickle.dumps(lazy)) == items
        with pytest.raises(IndexError):
            lazy[len(items)]


def test_fingerprint_of_table_follows_its_content(tmp_path):
    rows = many_rows(20)
    data = open_dataset(write_table(tmp_path / "one", rows))
    assert open_dataset(write_table(tmp_path / "two", rows)).fingerprint == data.fingerprint
    assert (
        open_dataset(
            write_table(tmp_path / "three", [(rows[0][0], "other", rows[0][2]), *rows[1:]])
        ).fingerprint
        != data.fingerprint
    )
    assert (
        len({data.fingerprint, data.split("train").fingerprint, data.first_captions(1).fingerprint})
        == 3
    )


def test_table_problems_are_refused_or_skipped(tmp_path):
    rows = [
        *ROWS,
        (None, "no file", "train"),
        ("e.jpg", "  ", "train"),
        ("a.jpg", "moved", "train"),
        ("f.jpg", "no split", None),
    ]
    folder = write_table(tmp_path / "data", rows)
    with pytest.raises(
        DataError,
        match=r"unusable items .*1 x image in two splits.*Run `visavis data check .*--skip-bad",
    ):
        open_dataset(folder)
    data = open_dataset(folder, skip_bad=True)
    assert [image.name for image in data.images] == ["b/1.jpg", "c.jpg", "d.jpg"]
    assert data.image_rows.tolist() == [0, 2, 3]
    assert data.caption_rows.tolist() == [0, 2, 3, 5]
    assert data.skipped[0].startswith(
        "2 of 6 images and 5 of 9 captions of captions.parquet (1 x caption without image"
    )
    report = check_dataset(folder)
    assert not report.ok
    assert {finding.kind for finding in report.findings if finding.loses_data} == {
        "caption without image", "image in two splits", "image without split",
    }  # fmt: skip


def test_table_errors_name_column_and_fix(tmp_path):
    for columns, message in (
        (
            {"caption": ["x"]},
            (
                r"expected one column with the image file, got 0 \(caption\)\. Name one of them "
                r"filename\."
            ),
        ),
        (
            {"filename": ["a"], "text": ["x"], "title": ["y"]},
            r"expected one column with the caption, got 2",
        ),
        ({"filename": ["a"], "caption": [3]}, r"column caption: expected texts, got int64"),
        (
            {"filename": pa.array([], pa.string()), "caption": pa.array([], pa.string())},
            "has no usable image: the table has no rows",
        ),
        (
            {"filename": ["", None], "caption": ["a", "b"]},
            r"captions\.parquet has no usable image: no row names an image file\.",
        ),
    ):
        pq.write_table(pa.table(columns), tmp_path / "captions.parquet")
        with pytest.raises(DataError, match=message):
            open_dataset(tmp_path)
    (tmp_path / "captions.parquet").write_bytes(b"PAR1 not parquet")
    with pytest.raises(DataError, match=r"captions\.parquet cannot be read as a table"):
        open_dataset(tmp_path)


def test_damaged_cache_of_table_is_made_again(tmp_path):
    folder = write_table(tmp_path / "data", ROWS)
    open_dataset(folder)
    (summary,) = (tmp_path / "cache" / "tables").glob("*/table.json")
    summary.write_text("{")
    assert list(open_dataset(folder).captions) == [row[1] for row in ROWS]


@settings(max_examples=15)
@given(
    st.lists(
        st.text(
            st.sampled_from(
                string.ascii_letters + string.punctuation + " \t\x1c\x0béİß\u2003\u0130"
            ),
            max_size=20,
        ),
        max_size=30,
    )
)
def test_words_of_a_column_are_those_of_tokenize(tmp_path_factory, captions):
    from visavis.data.vocabulary import _count_words, _count_words_of_column

    rows = [("a.jpg", caption, "train") for caption in captions if caption.strip()] or [
        ("a.jpg", "x", "train")
    ]
    data = open_dataset(write_table(tmp_path_factory.mktemp("words"), rows))
    assert dict(_count_words_of_column(data.captions)) == dict(_count_words(data.captions))
    vocabulary = Vocabulary.from_captions(data.captions, 1)
    assert set(vocabulary.words[4:]) == {
        word for caption in data.captions for word in tokenize(caption)
    }
    index = np.arange(len(data.captions))[::-1]
    lazy, eager = (
        TokenizedCaptions(texts, vocabulary).read(index)
        for texts in (data.captions, tuple(data.captions))
    )
    assert lazy.vectors.equal(eager.vectors)


@given(
    st.lists(st.lists(st.none() | st.text("aäé😀", max_size=3), max_size=9), max_size=6),
    st.integers(0, 2),
)
def test_unique_texts_are_those_of_one_dictionary(blocks, offset):
    texts = [text for block in blocks for text in block]
    indices, unique = unique_texts(
        pa.array(["x"] * offset + block, pa.large_string())[offset:] for block in blocks
    )
    assert unique.to_pylist() == list(dict.fromkeys(text for text in texts if text is not None))
    assert [None if index < 0 else unique[index].as_py() for index in indices.tolist()] == texts


@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.lists(st.integers(0, 5), max_size=8),
    st.integers(1, 3),
)
def test_caption_groups_select_equals_a_loop(image_of, images, most):
    groups = CaptionGroups.from_images(np.array(image_of, dtype=np.int64), 6)
    expected = [[i for i, image in enumerate(image_of) if image == each] for each in range(6)]
    assert [group.tolist() for group in groups] == expected
    assert groups.counts.tolist() == [len(group) for group in expected]
    assert groups.select(np.array(images, dtype=np.int64)).tolist() == [
        caption for image in images for caption in expected[image]
    ]
    assert groups.select(np.array(images, dtype=np.int64), most).tolist() == [
        i for image in images for i in expected[image][:most]
    ]


def test_caption_array_follows_rows_of_the_whole_list(tmp_path):
    np.save(tmp_path / "texts.npy", np.arange(12.0, dtype=np.float32).reshape(6, 2))
    data = Dataset(
        "d", (Image("a", "train"), Image("b", "val")), tuple("uvwxyz"), np.array([0, 1, 1, 0, 0, 1])
    )
    stored = ArrayFeatures.open(tmp_path / "texts.npy", data, "caption")
    assert stored.read(data.split("val").caption_rows).vectors[:, 0].tolist() == [2.0, 4.0, 10.0]
    with pytest.raises(DataError, match=r"expected 5 rows of features, one for each caption of d"):
        ArrayFeatures.open(
            tmp_path / "texts.npy",
            replace(data, captions=tuple("uvwxy"), image_of=data.image_of[:5]),
            "caption",
        )


def test_training_on_table_equals_training_on_tuples(tmp_path, monkeypatch):
    write_table(tmp_path / "data", many_rows(60, 2))
    random = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", random.standard_normal((60, 4)).astype(np.float16))
    np.save(tmp_path / "texts.npy", random.standard_normal((120, 4)).astype(np.float16))
    values = {
        "name": "large",
        "data": {"path": str(tmp_path / "data")},
        "visual": {"features": str(tmp_path / "images.npy")},
        "text": {"features": str(tmp_path / "texts.npy"), "granularity": "pooled"},
        "model": {"kind": "Heads", "embedding_dim": 4},
        "training": {"batch_size": 16, "device": "cpu"},
        "phases": [{"epochs": 1, "objective": "InfoNCE()"}],
    }
    lazy = start_training(resolve(build_recipe(values, {}, "large")), tmp_path / "lazy")
    monkeypatch.setattr(
        open_data,
        "open_dataset",
        lambda *args, **options: as_tuples(open_dataset(*args, **options)),
    )
    eager = start_training(resolve(build_recipe(values, {}, "large")), tmp_path / "eager")
    assert lazy.test.num_images == 12
    assert lazy.test.to_json() == eager.test.to_json()
    with pytest.raises(
        RecipeError,
        match=r'text\.granularity: expected "pooled", because .*texts\.npy holds one vector per caption, got "words"',
    ):
        prepare_training(build_recipe(values, {"text.granularity": "words"}, "large"))


@given(st.lists(st.integers(0, 8), max_size=12))
def test_rows_of_a_large_array_are_read_without_its_map(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("features") / "images.npy"
    np.save(path, np.arange(54, dtype=np.float16).reshape(9, 2, 3))
    data = Dataset("d", tuple(Image(str(i), "train") for i in range(9)), ("x",) * 9, np.arange(9))
    mapped = ArrayFeatures.open(path, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "MAX_MAPPED_BYTES", 0)
        for index in (np.array(rows, dtype=np.int64), np.arange(2, 7)):
            assert (
                ArrayFeatures.open(path, data)
                .read(index)
                .vectors.equal(torch.from_numpy(np.load(path)[index]).float())
            )
    assert mapped.read(np.arange(9)).vectors.shape == (9, 2, 3)


CELL = st.text(st.sampled_from('ab ,;"\n\t[]é\u2003\x1f'), max_size=6)
LIST_CELL = st.lists(CELL, max_size=3).map(json.dumps)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a.jpg", "b.jpg", ""]),
            CELL | LIST_CELL,
            CELL,
            st.sampled_from(["", "val", "dev"]),
        ),
        min_size=1,
    ),
    st.sampled_from(
        [
            ("caption", "caption_2"),
            ("captions", "text"),
            ("Text", "notes"),
            ("text", "title"),
            ("caption", "text"),
        ]
    ),
    st.sampled_from([",", ";", "\t"]),
    st.booleans(),
)
@pytest.mark.slow
def test_large_csv_has_content_of_small_csv(
    tmp_path_factory, rows, columns, delimiter, byte_order_mark
):
    folder = tmp_path_factory.mktemp("csv")
    for name in ("a.jpg", "b.jpg"):
        PILImage.new("RGB", (4, 4)).save(folder / name)
    with open(
        folder / "captions.csv",
        "w",
        encoding="utf-8-sig" if byte_order_mark else "utf-8",
        newline="",
    ) as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(
            [("Image_Path", *columns, "split"), *rows]
        )
    contents = []
    for large in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dataset_reader, "LARGE_FILE_BYTES", 0 if large else 10**6)
            try:
                data = open_dataset(folder, skip_bad=True)
            except DataError:
                contents.append(None)
                continue
        assert data.is_lazy == large
        contents.append(
            (
                [(image.name, image.split) for image in data.images],
                list(data.captions),
                data.image_of.tolist(),
            )
        )
    assert contents[0] == contents[1]


def test_table_reads_numbered_caption_columns(tmp_path):
    pq.write_table(
        pa.table(
            {
                "caption_2": ["b", None, "d"],
                "filename": ["x", "y", "x"],
                "Caption": ["a", "c", None],
            }
        ),
        tmp_path / "captions.parquet",
    )
    with pytest.raises(DataError, match=r"1 x empty caption"):
        open_dataset(tmp_path)
    data = open_dataset(tmp_path, skip_bad=True)
    assert [[data.captions[i] for i in own] for own in data.captions_of] == [["b", "a", "d"], ["c"]]


@pytest.mark.parametrize("count", [127, 128, 129, 300])
def test_table_with_many_splits_keeps_them(tmp_path, count):
    data = open_dataset(
        write_table(tmp_path / "data", [(f"{i}.jpg", "x", f"fold{i}") for i in range(count)])
    )
    assert [image.split for image in data.images] == [f"fold{i}" for i in range(count)]
