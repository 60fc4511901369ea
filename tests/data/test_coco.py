"""MS-COCO captions as downloaded: files and folders of each release, splits, images elsewhere, and
broken records.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_validation import open_valid_dataset


def write_coco(
    folder: Path,
    *splits: str,
    count: int = 3,
    annotations: str = "annotations",
    pixels: bool = True,
) -> Path:
    """Captions and images of splits such as ``train2017``. Annotations are not in the order of the
    images, as in MS-COCO.
    """
    (folder / annotations).mkdir(parents=True, exist_ok=True)
    for position, split in enumerate(splits):
        prefix = f"COCO_{split}_" if split.endswith("2014") else ""
        ids = [100 * position + number for number in range(count)]
        images = [
            {
                "license": 1,
                "file_name": f"{prefix}{image:012d}.jpg",
                "id": image,
                "height": 4,
                "width": 4,
            }
            for image in ids
        ]
        captions = [
            {"image_id": image, "id": 1000 * k + image, "caption": f"caption {k} of {image}"}
            for k in range(2)
            for image in reversed(ids)
        ]
        content = {"info": {}, "licenses": [], "images": images, "annotations": captions}
        (folder / annotations / f"captions_{split}.json").write_text(json.dumps(content))
        if pixels:
            (folder / split).mkdir()
            for image in images:
                Image.new("RGB", (4, 4), (20 * image["id"] % 256, image["id"], 0)).save(
                    folder / split / image["file_name"]
                )
    return folder


def contents(data) -> list[tuple[str, str, list[str]]]:
    return [
        (image.name, image.split, [data.captions[i] for i in rows])
        for image, rows in zip(data.images, data.captions_of, strict=True)
    ]


@pytest.mark.parametrize("year", [2014, 2017])
def test_downloaded_folder_is_opened(tmp_path, year):
    folder = write_coco(tmp_path / "coco", f"train{year}", f"val{year}")
    data = open_valid_dataset(folder)
    prefixes = {split: f"COCO_{split}2014_" if year == 2014 else "" for split in ("train", "val")}
    assert (data.name, data.splits, data.skipped) == ("coco", ("train", "val"), ())
    assert contents(data)[4] == (
        f"{prefixes['val']}{101:012d}.jpg",
        "val",
        ["caption 0 of 101", "caption 1 of 101"],
    )
    assert [image.location.path for image in data.images] == [
        folder / f"{split}{year}" / f"{prefixes[split]}{image:012d}.jpg"
        for split, start in (("train", 0), ("val", 100))
        for image in range(start, start + 3)
    ]
    assert data.images[4].open().size == (4, 4)
    report = check_dataset(folder)
    assert (report.ok, report.format_name) == (True, "COCO captions")
    assert [(finding.kind, finding.message) for finding in report.findings] == [
        ("empty split", "no image in split test")
    ]
    assert open_dataset(folder / "annotations").fingerprint == data.fingerprint


def test_single_file_has_split_of_its_name(tmp_path):
    folder = write_coco(tmp_path / "coco", "train2017", "val2017", count=40)
    val = open_dataset(folder / "annotations" / "captions_val2017.json")
    assert (val.name, val.splits, len(val.images)) == ("coco", ("val",), 40)
    assert val.images[7].open().size == (4, 4)
    train = open_dataset(folder / "annotations" / "captions_train2017.json")
    assert sorted(train.splits) == ["test", "train", "val"], "a train file alone is divided by hash"


def test_file_of_any_name_is_recognized_by_content(tmp_path):
    folder = write_coco(tmp_path / "coco", "val2017")
    (folder / "annotations" / "captions_val2017.json").rename(folder / "my_captions.json")
    assert contents(open_dataset(folder / "my_captions.json"))[0][0] == f"{0:012d}.jpg"
    assert check_dataset(folder / "my_captions.json").format_name == "COCO captions"


def test_karpathy_list_has_priority(tmp_path):
    folder = write_coco(tmp_path / "coco", "train2017", "val2017")
    (folder / "dataset_coco.json").write_text(
        json.dumps(
            {
                "images": [
                    {"filename": f"{0:012d}.jpg", "split": "test", "sentences": [{"raw": "x"}]}
                ]
            }
        )
    )
    assert open_dataset(folder).splits == ("test",)


def test_images_are_found_in_image_roots(tmp_path, monkeypatch):
    folder, elsewhere = (
        write_coco(tmp_path / "coco", "train2017", "val2017"),
        tmp_path / "elsewhere",
    )
    elsewhere.mkdir()
    for split in ("train2017", "val2017"):
        (folder / split).rename(elsewhere / split)
    assert all(image.location is None for image in open_dataset(folder).images), "captions only"
    for roots in (str(elsewhere), f"{elsewhere / 'train2017'}:{elsewhere / 'val2017'}"):
        monkeypatch.setenv("VISAVIS_IMAGE_ROOTS", roots)
        data = open_dataset(folder)
        assert [image.location.path.parent.name for image in data.images] == ["train2017"] * 3 + [
            "val2017"
        ] * 3
        assert all(image.open().size == (4, 4) for image in data.images)


def test_two_releases_are_refused(tmp_path):
    folder = write_coco(tmp_path / "coco", "train2014", "val2017")
    with pytest.raises(
        DataError,
        match=r"one release, got captions_train2014\.json, captions_val2017\.json\. .* name one file\.$",
    ):
        open_dataset(folder)


BROKEN = {
    "annotation of unknown image": (
        lambda c: c["annotations"][0].update(image_id=7),
        "caption without image",
    ),
    "annotation without text": (lambda c: c["annotations"][0].pop("caption"), "malformed entry"),
    "annotation that is a list": (lambda c: c["annotations"].append([1]), "malformed entry"),
    "annotation of a list": (
        lambda c: c["annotations"][0].update(image_id=[1]),
        "caption without image",
    ),
    "empty caption": (lambda c: c["annotations"][0].update(caption=" "), "empty caption"),
    "image without id": (lambda c: c["images"].append({"file_name": "x.jpg"}), "malformed entry"),
    "image without file": (lambda c: c["images"].append({"id": 9}), "malformed entry"),
    "image that is null": (lambda c: c["images"].append(None), "malformed entry"),
    "missing image": (
        lambda c: c["images"].append({"id": 9, "file_name": "x.jpg"}),
        "missing image",
    ),
    "duplicate id": (lambda c: c["images"].append({"id": 1, "file_name": "x.jpg"}), "duplicate id"),
    "duplicate name": (
        lambda c: c["images"].append({"id": 9, "file_name": f"{1:012d}.jpg"}),
        "duplicate name",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_record_is_a_finding_and_skipped(tmp_path, case):
    folder, (damage, kind) = write_coco(tmp_path / "coco", "val2017"), BROKEN[case]
    path = folder / "annotations" / "captions_val2017.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    Image.new("RGB", (4, 5)).save(folder / "val2017" / f"{1:012d}.png")
    assert kind in {
        finding.kind for finding in check_dataset(folder).findings if finding.loses_data
    }
    with pytest.raises(DataError, match=kind):
        open_dataset(folder)
    data = open_dataset(folder, skip_bad=True)
    assert len(data.images) == 3
    assert len(data.captions) in (5, 6)


@pytest.mark.parametrize(
    "text",
    [
        '{"images": []}',
        '{"annotations": [], "images": {}}',
        "[]",
        '{"images": [], "images": [], "annotations": []}',
    ],
)
def test_file_without_lists_is_one_error(tmp_path, text):
    (tmp_path / "captions_val2017.json").write_text(text)
    with pytest.raises(
        DataError, match=r"^\S+captions_val2017\.json: expected \{'images'[^\n]*\.$"
    ):
        open_dataset(tmp_path)
