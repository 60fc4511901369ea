"""Data set formats: round trip with unusual names and texts, paths, splits and rows of features."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from visavis.core.errors import DataError
from visavis.data import dataset, image_file
from visavis.data.dataset_reader import FORMATS, find_source, list_dataset, open_dataset
from visavis.data.file_names import split_by_hash
from visavis.data.formats.listing import caption_problem, clean_name
from visavis.data.formats.published_lists import load_precomp_features


def write_image(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(folder / name, "PNG")


def karpathy(folder: Path, *images: dict) -> None:
    (folder / "dataset_x.json").write_text(json.dumps({"images": list(images)}))


def test_split_names_are_normalized(tmp_path):
    karpathy(
        tmp_path,
        *(
            {"imgid": i, "split": split, "sentences": [{"raw": "x"}]}
            for i, split in enumerate(["restval", "dev", "test", "1k"])
        ),
    )
    assert [image.split for image in open_dataset(tmp_path).images] == [
        "train",
        "val",
        "test",
        "1k",
    ]


def test_karpathy_without_files_uses_ids_as_names(tmp_path):
    karpathy(
        tmp_path,
        {"imgid": 7, "split": "test", "sentences": [{"tokens": ["two", "dogs"]}]},
        {
            "imgid": 8,
            "cocoid": 391895,
            "split": "test",
            "sentences": [{"raw": "A cat .", "tokens": ["a", "cat"]}, "plain text"],
        },
    )
    data = open_dataset(tmp_path)
    assert [image.name for image in data.images] == ["7", "391895"]
    assert data.captions == ("two dogs", "A cat .", "plain text")
    assert data.image_of.tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="image 7 has no pixels"):
        data.images[0].open()


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"filename": "a.png"}, "a.png"),
        ({"filename": "a.png"}, "deep/er/a.png"),
        ({"filename": "a.png", "filepath": "val2014"}, "val2014/a.png"),
        ({"filename": "a.png", "filepath": "val2014"}, "images/a.png"),
        ({"filename": "x/a.png"}, "x/a.png"),
        ({"filename": ".hidden.png"}, ".hidden.png"),
    ],
)
def test_images_are_found_in_subfolders(tmp_path, record, place):
    write_image(tmp_path, place)
    karpathy(tmp_path, {**record, "split": "train", "sentences": [{"raw": "x"}]})
    image = open_dataset(tmp_path / "dataset_x.json").images[0]
    assert image.location.path == tmp_path / place
    assert image.open().size == (2, 2)


def test_images_are_found_in_listed_roots_and_through_links(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "VISAVIS_IMAGE_ROOTS",
        os.pathsep.join(["", str(tmp_path / "nowhere"), str(tmp_path / "elsewhere")]),
    )
    write_image(tmp_path, "elsewhere/a.png")
    write_image(tmp_path, "elsewhere/b.png")
    data = tmp_path / "data"
    data.mkdir()
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "loop").symlink_to(data)
    (data / "captions.csv").write_text(
        f"filename,caption\n{tmp_path}/elsewhere/a.png,A\nb.png,B\n../elsewhere/b.png,C\n"
    )
    assert [image.open().size for image in open_dataset(data).images] == [(2, 2)] * 3


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_archives_are_read_in_place(tmp_path, kind):
    long = "n" * 150 + "é.png" if kind != tarfile.USTAR_FORMAT else "n" * 90 + ".png"
    names = ["a.png", f"folder/{long}"]
    contents = {}
    with tarfile.open(tmp_path / "train-0000.tar", "w", format=kind) as tar:
        for width, name in enumerate(names, 1):
            file = io.BytesIO()
            Image.new("RGB", (width, 5)).save(file, "PNG")
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(contents.setdefault(name, file.getvalue()))
            tar.addfile(member, io.BytesIO(contents[name]))
    karpathy(
        tmp_path,
        *(
            {"filename": name.rpartition("/")[2], "split": "train", "sentences": [{"raw": name}]}
            for name in names
        ),
    )
    data = open_dataset(tmp_path)
    assert [image.location.read() for image in data.images] == list(contents.values())
    assert [image.open().size for image in data.images] == [(1, 5), (2, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset_x.json", "train-0000.tar"]


def test_file_names_match_in_any_unicode_form(tmp_path):
    write_image(tmp_path, "cafe\u0301.png")
    (tmp_path / "captions.jsonl").write_text(
        json.dumps({"filename": "caf\u00e9.png", "caption": "A cup."})
    )
    assert open_dataset(tmp_path).images[0].open().size == (2, 2)


NAME = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..") and name.strip() and len(name.encode()) < 200)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40).filter(
    lambda text: caption_problem(text) is None
)
CAPTIONS = st.dictionaries(
    NAME.map(lambda name: f"{name}.png"),
    st.lists(TEXT, min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)
HARD = {
    "a, b.png": ['She said "hi", twice', "two\nlines", "two\r\nlines"],  # language: quoted
    "שלום.png": ["כלב רץ", "👩‍👩‍👧 family", " padded "],
    "line\u2028end.png": ["a\u2028b"],
    "new\nline.png": ["tab\there", "semi;colon"],
}


def same(folder: Path, described: dict[str, list[str]]) -> None:
    data = open_dataset(folder)
    described = {
        name: [unicodedata.normalize("NFC", caption) for caption in captions]
        for name, captions in described.items()
    }
    assert {
        image.name: [data.captions[i] for i in data.captions_of[k]]
        for k, image in enumerate(data.images)
    } == described
    assert all(image.open().size == (2, 2) for image in data.images)
    assert data.skipped == ()


def folder_of(root: str, names: list[str]) -> Path:
    for name in names:
        write_image(Path(root), name)
    return Path(root)


def unique(described: dict[str, list[str]]) -> bool:
    """Names that differ on every file system and in every spelling."""
    return len({clean_name(name).casefold() for name in described}) == len(described)


@given(CAPTIONS.filter(unique))
def test_jsonl_round_trip(described):
    for rows in (
        [{"filename": name, "captions": captions} for name, captions in described.items()],
        [
            {"filename": name, "caption": caption}
            for name, captions in described.items()
            for caption in captions
        ],
    ):
        with tempfile.TemporaryDirectory() as root:
            folder = folder_of(root, list(described))
            (folder / "captions.jsonl").write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), newline=""
            )
            same(folder, described)


@given(
    CAPTIONS.filter(unique),
    st.sampled_from([("captions.csv", ","), ("captions.csv", ";"), ("captions.tsv", "\t")]),
)
def test_table_round_trip(described, kind):
    name, delimiter = kind
    with tempfile.TemporaryDirectory() as root:
        folder = folder_of(root, list(described))
        with open(folder / name, "w", newline="", encoding="utf-8-sig") as file:
            table = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL)
            table.writerow(["filename", "caption"])
            table.writerows(
                [image, caption] for image, captions in described.items() for caption in captions
            )
        same(folder, {clean_name(image): captions for image, captions in described.items()})


@pytest.mark.parametrize("dataset_format", ["karpathy", "jsonl", "csv", "columns"])
def test_unusual_names_and_texts_round_trip(tmp_path, dataset_format):
    folder = folder_of(str(tmp_path), list(HARD))
    if dataset_format == "karpathy":
        karpathy(
            folder,
            *(
                {"filename": name, "split": "train", "sentences": [{"raw": text} for text in texts]}
                for name, texts in HARD.items()
            ),
        )
    elif dataset_format == "jsonl":
        (folder / "captions.jsonl").write_text(
            "\n".join(
                json.dumps({"file_name": name, "text": texts}) for name, texts in HARD.items()
            )
        )
    else:
        with open(folder / "captions.csv", "w", newline="") as file:
            table = csv.writer(file)
            if dataset_format == "csv":
                table.writerows(
                    [
                        ["image", "title"],
                        *([name, text] for name, texts in HARD.items() for text in texts),
                    ]
                )
            else:
                header = ["filename", "caption", "caption_2", "caption_3"]
                table.writerows(
                    [header, *([name, *texts, "", ""][:4] for name, texts in HARD.items())]
                )
    same(folder, HARD)


def test_interleaved_rows_keep_their_order(tmp_path):
    folder = folder_of(str(tmp_path), ["a.png", "b.png"])
    (folder / "captions.csv").write_text(
        "caption,filename,split\na1,a.png,train\nb1,b.png,test\na2,a.png,\n"
    )
    data = open_dataset(folder)
    assert data.captions == ("a1", "b1", "a2")
    assert data.image_of.tolist() == [0, 1, 0]
    assert data.splits == ("train", "test")


def test_splits_are_assigned_by_name(tmp_path):
    names = [f"{i}.png" for i in range(40)]
    folder = folder_of(str(tmp_path), names)
    (folder / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{name},x\n" for name in names)
    )
    first = {image.name: image.split for image in open_dataset(folder).images}
    (folder / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{name},x\n" for name in names[:20])
    )
    assert all(first[image.name] == image.split for image in open_dataset(folder).images)
    splits = [split_by_hash(f"photo {i}.jpg") for i in range(10_000)]
    assert [round(splits.count(split) / 1000) for split in ("train", "val", "test")] == [8, 1, 1]
    assert (
        split_by_hash("1000268201_693b08cb0e.jpg") == "train"
    )  # pinned: existing runs depend on it


def precomp(folder: Path, stem: str, features: np.ndarray, captions: int) -> None:
    np.save(folder / f"{stem}_ims.npy", features)
    (folder / f"{stem}_caps.txt").write_text("".join(f"{stem} {i}\n" for i in range(captions)))


@pytest.mark.parametrize("shape", [(3, 8), (3, 4, 8)])
@pytest.mark.parametrize("stored", ["once", "for each caption"])
@pytest.mark.parametrize("each", [1, 2, 3, 5, 20])
def test_precomp_rows_per_image_and_per_caption(tmp_path, shape, stored, each):
    features = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows = features.repeat(each, 0) if stored == "for each caption" else features
    precomp(tmp_path, "dev", rows, 3 * each)
    precomp(tmp_path, "train", features[:2], 10)
    data = open_dataset(tmp_path)
    assert data.splits == ("train", "val")
    val = data.split("val")
    assert [image.name for image in val.images] == ["val-0", "val-1", "val-2"]
    assert val.captions == tuple(f"dev {i}" for i in range(3 * each))
    assert val.image_of.tolist() == [i // each for i in range(3 * each)]
    kept = load_precomp_features(tmp_path)["val"]
    assert isinstance(kept, np.memmap)
    np.testing.assert_array_equal(kept, features)
    assert open_dataset(tmp_path / "train_ims.npy").fingerprint == data.fingerprint


def test_precomp_with_images_stored_unequally_often_is_refused(tmp_path):
    """Taken as different images, R@1 of texts would be 0 without an error."""
    features = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    precomp(tmp_path, "dev", features.repeat([3, 3, 3, 2, 3, 3], 0), 17)
    with pytest.raises(DataError, match=r"each image of dev_ims\.npy the same number of times"):
        load_precomp_features(tmp_path)
    precomp(tmp_path, "dev", features[[0, 1, 1, 2, 3, 4, 5]], 7)
    assert len(load_precomp_features(tmp_path)["val"]) == 7, "two equal images are two images"


@pytest.mark.parametrize(
    "stems", [("dev", "val"), ("train", "training"), ("test", "testing"), ("valid", "validation")]
)
def test_precomp_with_two_names_of_a_split_is_refused(tmp_path, stems):
    for stem in stems:
        np.save(tmp_path / f"{stem}_ims.npy", np.zeros((1, 2), np.float32))
        (tmp_path / f"{stem}_caps.txt").write_text("a dog\n")
    with pytest.raises(
        DataError,
        match=rf"{stems[0]}_ims\.npy and {stems[1]}_ims\.npy, which are names of the same split",
    ):
        open_dataset(tmp_path)


def test_first_captions_keeps_the_order():
    data = dataset.Dataset(
        "d",
        tuple(image_file.Image(name, "test") for name in "abc"),
        tuple("uvwxyz"),
        np.array([0, 1, 0, 2, 0, 1]),
    )
    first = data.first_captions(2)
    assert first.captions == ("u", "v", "w", "x", "z")
    assert first.image_of.tolist() == [0, 1, 0, 2, 1]
    assert first.caption_rows.tolist() == [0, 1, 2, 3, 5]
    assert data.take(np.array([2, 0])).first_captions(1).caption_rows.tolist() == [3, 0]


def test_open_dataset_searches_visavis_data(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    (tmp_path / "photos").mkdir()
    karpathy(tmp_path / "photos", {"imgid": 0, "split": "test", "sentences": [{"raw": "x"}]})
    assert open_dataset("photos").name == "photos"
    assert open_dataset("photos/dataset_x.json").name == "photos"
    expected = r"A data set is a folder with one of captions.csv, captions.tsv, .* \(`visavis catalog formats` describes them\)"
    with pytest.raises(
        DataError,
        match=rf"^fotos: expected an existing path, here or under VISAVIS_DATA \({tmp_path}\), got none\. Use photos\. {expected}\.$",
    ):
        open_dataset("fotos")
    with pytest.raises(
        DataError, match=r"got none\. Correct the path, or use one of photos\. A data set"
    ):
        open_dataset("elsewhere")
    for unset in (
        lambda: monkeypatch.setenv("VISAVIS_DATA", ""),
        lambda: monkeypatch.delenv("VISAVIS_DATA"),
    ):
        unset()
        with pytest.raises(
            DataError,
            match=rf"^photos: expected .* VISAVIS_DATA, where it is searched next, is not set\. Correct .*\. {expected}\.$",
        ):
            open_dataset("photos")


def test_open_dataset_reports_missing_data_set(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^[^\n]*: expected one of captions.csv, [^\n]*, got none of them\. Add one, or pass another folder\.$",
    ) as refused:
        open_dataset(tmp_path)
    assert all(
        pattern in str(refused.value)
        for dataset_format in FORMATS
        for pattern in dataset_format.patterns
    )
    write_image(tmp_path, "a.png")
    with pytest.raises(
        DataError,
        match=r"expected a folder, or a list of images and captions that ends in .*, got another file\. Pass the",
    ):
        open_dataset(tmp_path / "a.png")
    (tmp_path / "captions.csv").write_text("filename,caption\na.png,x\n")
    (tmp_path / "captions.jsonl").write_text('{"filename": "a.png", "caption": "x"}\n')
    with pytest.raises(
        DataError,
        match=r"expected one list of images and captions, got captions.csv, captions.jsonl\. Pass one of them",
    ):
        open_dataset(tmp_path)
    assert open_dataset(tmp_path / "captions.csv").captions == ("x",)


def test_format_is_recognized_by_folder_and_file(tmp_path):
    files = {
        "captions.csv": "captions.csv",
        "captions.jsonl": "metadata.jsonl",
        "captions.parquet": "captions.arrow",
        "Karpathy JSON": "dataset_x.json",
        "MSR-VTT": "train_val_videodatainfo.json",
        "MSVD": "AllVideoDescriptions.txt",
        "precomp": "dev_ims.npy",
        "COCO captions": "captions_val2017.json",
        "Flickr30k table": "results.csv",
        "train.csv": "train.csv",
        "image tables": "train-00000-of-00001.parquet",
        "WebDataset": "train-000.tar",
    }
    assert set(files) == {dataset_format.name for dataset_format in FORMATS}
    for dataset_format in FORMATS:
        folder = tmp_path / dataset_format.name
        folder.mkdir()
        (folder / files[dataset_format.name]).write_text(
            "image,caption\n" if dataset_format.recognizes else ""
        )
        (folder / "notes.md").touch()
        file = folder / files[dataset_format.name]
        reads_folder = dataset_format.reads_whole_folder or dataset_format.reads_several_files
        matches = [other for other in FORMATS if other.find_sources(folder)]
        assert [other for other in matches if other.fallback_level < 2] == (
            [] if dataset_format.fallback_level == 2 else [dataset_format]
        )
        assert dataset_format.find_sources(folder) == [folder if reads_folder else file]
        assert find_source(folder) == (folder if reads_folder else file)
        if dataset_format.name == "train.csv":
            assert (
                next(other.name for other in FORMATS if other.source_for_file(file))
                == "captions.csv"
            ), "one file is an ordinary list"
        elif dataset_format.name != "Flickr30k table":
            assert (
                next(other.name for other in FORMATS if other.source_for_file(file))
                == dataset_format.name
            )
            assert dataset_format.source_for_file(file) == (
                folder if dataset_format.reads_whole_folder else file
            )
        assert dataset_format.source_for_file(folder / "notes.md") is None


@pytest.mark.data
def test_flickr8k():
    data = open_dataset("flickr8k")
    assert (data.name, len(data.images), len(data.captions)) == ("flickr8k", 7_999, 39_995)
    assert [len(data.split(split).images) for split in ("train", "val", "test")] == [
        5_999,
        1_000,
        1_000,
    ]
    assert data.images[0].name == "1000268201_693b08cb0e.jpg"
    assert data.images[0].open().size == (224, 224)
    assert (
        data.captions[0]
        == "A child in a pink dress is climbing up a set of stairs in an entry way ."
    )
    assert data.image_of.tolist() == [i // 5 for i in range(39_995)]
    assert data.image_origin is None


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("coco_5k_test_text", {"test": 5_000}), ("flickr30k_text", {"val": 1_014, "test": 1_000})],
)
def test_text_only_data_sets(name, sizes):
    data = open_dataset(name)
    assert {split: len(data.split(split).images) for split in data.splits} == sizes
    assert len(data.captions) == 5 * len(data.images)


@pytest.mark.parametrize(("stored", "listed", "missing"), [
    (["a/1.png"], ["a/1.png", "b/1.png"], ["b/1.png"]),
    (["a/1.png"], ["b/1.png", "a/1.png"], ["b/1.png"]),
    (["c/1.png"], ["a/1.png", "b/1.png"], ["b/1.png"]),
    (["c/1.png"], ["1.png", "c/1.png"], ["1.png"]),
    (["c/1.png", "2.png"], ["a/1.png", "2.png"], []),
    (["c/1.png"], ["./c/1.png"], []),
])  # fmt: skip
def test_file_of_another_image_does_not_replace_a_missing_one(tmp_path, stored, listed, missing):
    for number, name in enumerate(stored):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / name)
    (tmp_path / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{name},a dog\n" for name in listed)
    )
    listing = list_dataset(tmp_path)
    assert [image.name for image in listing.images if not image.usable] == missing
    assert all("belongs to another listed image" in loss.message for loss in listing.losses)
