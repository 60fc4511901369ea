"""Somebody's own photos: sub-folders with spaces and accents in either Unicode form, one to three captions each, a table at the top."""

from __future__ import annotations

import csv
import json
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageChops

from visavis.data import check_dataset, open_dataset
from visavis.data.archives import find_files
from visavis.data.scenes.captions import captions
from visavis.data.scenes.draw import draw
from visavis.data.scenes.world import draw_scene

PHOTOS, SCENES = 600, 60
FOLDERS = (
    "Summer 2019",
    "Été à la plage",
    "Noël/Chez Zoë & Jürgen",
    unicodedata.normalize("NFD", "Déjà vu/Ångström"),
    "東京 旅行",
    "o'Brien, 50% #1",
)
FORMS = ("NFC", "NFD")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """The folder, and the captions of each photo by its name as it lies there."""
    folder, described = tmp_path_factory.mktemp("my pictures") / "Mes photos é", {}
    random = np.random.default_rng(7)
    scenes = [draw_scene(random, training=True) for _ in range(SCENES)]
    pictures = [draw(scene, 32) for scene in scenes]
    for number in range(PHOTOS):
        scene, moved = scenes[number % SCENES], ImageChops.offset(pictures[number % SCENES], number // SCENES)
        name = f"{FOLDERS[number % len(FOLDERS)]}/{'café ' if number % 2 else 'IMG '}{number:03d}.{'jpg' if number % 3 else 'JPG'}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        moved.save(folder / name, "JPEG")
        described[name] = [caption.text for caption in captions(scene, 1 + number % 3, random)]
    return folder, described


def as_listed(described: dict[str, list[str]], form: str) -> dict[str, list[str]]:
    return {unicodedata.normalize(form, name) if form else name: texts for name, texts in described.items()}


def write_list(folder: Path, layout: str, described: dict[str, list[str]]) -> Path:
    """The list of a layout; the folder's only one."""
    for old in (*folder.glob("captions.*"), *folder.glob("dataset*.json")):
        old.unlink()
    rows = [(name, text) for name, texts in described.items() for text in texts]
    if layout in ("csv", "tsv"):
        with open(path := folder / f"captions.{layout}", "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="," if layout == "csv" else "\t").writerows([("filename", "caption"), *rows])
    elif layout == "jsonl":
        path = folder / "captions.jsonl"
        path.write_text("".join(json.dumps({"filename": name, "captions": texts}) + "\n" for name, texts in described.items()))
    else:
        path = folder / "dataset_photos.json"
        parts = [(name.rpartition("/"), texts) for name, texts in described.items()]
        images = [{"filepath": at, "filename": name, "sentences": [{"raw": text} for text in texts]} for (at, _, name), texts in parts]
        path.write_text(json.dumps({"images": images}))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["csv", "tsv", "jsonl", "karpathy"])
def test_every_photo_and_caption_is_read_whichever_way_names_are_spelled(photos, layout, form):
    folder, described = photos
    listed = as_listed(described, form)
    path = write_list(folder, layout, listed)
    data = open_dataset(folder)
    assert (len(data.images), len(data.captions)) == (PHOTOS, 2 * PHOTOS)
    if layout != "karpathy":  # which names a photo by its file alone
        assert {image.name: [data.captions[i] for i in own] for image, own in zip(data.images, data.captions_of, strict=True)} == listed
    for image, name in zip(data.images[:: PHOTOS // 40], list(described)[:: PHOTOS // 40], strict=True):
        assert image.bytes.path == folder / name
        assert image.open().size == (32, 32)
    assert open_dataset(path).fingerprint == data.fingerprint


def test_check_says_that_all_is_well(photos):
    folder, described = photos
    write_list(folder, "csv", described)
    report = check_dataset(folder)
    assert report.ok
    assert report.findings == ()
    assert report.captions_per_image == (1, 3)
    assert report.image_sizes == {"32x32": PHOTOS}
    assert sum(split.images for split in report.splits.values()) == PHOTOS
    assert sum(split.captions for split in report.splits.values()) == 2 * PHOTOS
    assert len(open_dataset(folder, pixels=True).images) == PHOTOS


def test_without_a_split_column_all_three_are_there_and_stay_when_photos_come(photos):
    folder, described = photos
    write_list(folder, "csv", described)
    whole = {image.name: image.split for image in open_dataset(folder).images}
    count = Counter(whole.values())
    assert count["train"] > 0.7 * PHOTOS
    assert min(count["val"], count["test"]) > 0.05 * PHOTOS
    half = dict(sorted(described.items(), key=lambda photo: photo[1])[: PHOTOS // 2])
    write_list(folder, "csv", half)
    assert {image.name: image.split for image in open_dataset(folder).images} == {name: whole[name] for name in half}


def test_a_photo_that_nobody_described_is_noted_by_its_folder(photos):
    folder, described = photos
    last = list(described)[-1]
    write_list(folder, "csv", {name: texts for name, texts in described.items() if name != last})
    (finding,) = check_dataset(folder).findings
    assert (finding.kind, finding.where, finding.loses) == ("image without caption", unicodedata.normalize("NFC", last), False)


def test_the_photos_of_a_folder_are_found_without_a_list(photos):
    folder, described = photos
    assert sorted(find_files(folder).images) == sorted(as_listed(described, "NFC"))
