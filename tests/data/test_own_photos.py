"""Own photos: subfolders with spaces and accents in either Unicode form, one to three captions
each, and a table.
"""

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
from visavis.data.formats.image_files import find_files
from visavis.data.synthetic.captions import write_captions
from visavis.data.synthetic.rendering import render_scene
from visavis.data.synthetic.scene import sample_scene

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
    """The folder, and the captions of each photo by its file name."""
    folder, described = tmp_path_factory.mktemp("my images") / "Mes photos é", {}
    random = np.random.default_rng(7)
    scenes = [sample_scene(random, training=True) for _ in range(SCENES)]
    images = [render_scene(scene, 32) for scene in scenes]
    for number in range(PHOTOS):
        scene, moved = (
            scenes[number % SCENES],
            ImageChops.offset(images[number % SCENES], number // SCENES),
        )
        name = f"{FOLDERS[number % len(FOLDERS)]}/{'café ' if number % 2 else 'IMG '}{number:03d}.{'jpg' if number % 3 else 'JPG'}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        moved.save(folder / name, "JPEG")
        described[name] = [
            caption.text for caption in write_captions(scene, 1 + number % 3, random)
        ]
    return folder, described


def as_listed(described: dict[str, list[str]], form: str) -> dict[str, list[str]]:
    return {
        unicodedata.normalize(form, name) if form else name: texts
        for name, texts in described.items()
    }


def write_list(folder: Path, format_name: str, described: dict[str, list[str]]) -> Path:
    """Write the only list of the folder in a format."""
    for old in (*folder.glob("captions.*"), *folder.glob("dataset*.json")):
        old.unlink()
    rows = [(name, text) for name, texts in described.items() for text in texts]
    if format_name in ("csv", "tsv"):
        with open(
            path := folder / f"captions.{format_name}", "w", newline="", encoding="utf-8"
        ) as file:
            csv.writer(file, delimiter="," if format_name == "csv" else "\t").writerows(
                [("filename", "caption"), *rows]
            )
    elif format_name == "jsonl":
        path = folder / "captions.jsonl"
        path.write_text(
            "".join(
                json.dumps({"filename": name, "captions": texts}) + "\n"
                for name, texts in described.items()
            )
        )
    else:
        path = folder / "dataset_photos.json"
        parts = [(name.rpartition("/"), texts) for name, texts in described.items()]
        images = [
            {"filepath": at, "filename": name, "sentences": [{"raw": text} for text in texts]}
            for (at, _, name), texts in parts
        ]
        path.write_text(json.dumps({"images": images}))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("format_name", ["csv", "tsv", "jsonl", "karpathy"])
def test_own_photos_are_read_with_any_spelling_of_names(photos, format_name, form):
    folder, described = photos
    listed = as_listed(described, form)
    path = write_list(folder, format_name, listed)
    data = open_dataset(folder)
    assert (len(data.images), len(data.captions)) == (PHOTOS, 2 * PHOTOS)
    if format_name != "karpathy":  # which names a photo by its file alone
        assert {
            image.name: [data.captions[i] for i in own]
            for image, own in zip(data.images, data.captions_of, strict=True)
        } == listed
    for image, name in zip(
        data.images[:: PHOTOS // 40], list(described)[:: PHOTOS // 40], strict=True
    ):
        assert image.location.path == folder / name
        assert image.open().size == (32, 32)
    assert open_dataset(path).fingerprint == data.fingerprint


def test_own_photos_have_no_findings(photos):
    folder, described = photos
    write_list(folder, "csv", described)
    report = check_dataset(folder)
    assert report.ok
    assert report.findings == ()
    assert report.captions_per_image == (1, 3)
    assert report.image_sizes == {"32x32": PHOTOS}
    assert sum(split.images for split in report.splits.values()) == PHOTOS
    assert sum(split.captions for split in report.splits.values()) == 2 * PHOTOS
    assert len(open_dataset(folder, decode_images=True).images) == PHOTOS


def test_assigned_splits_are_stable_when_photos_are_added(photos):
    folder, described = photos
    write_list(folder, "csv", described)
    whole = {image.name: image.split for image in open_dataset(folder).images}
    count = Counter(whole.values())
    assert count["train"] > 0.7 * PHOTOS
    assert min(count["val"], count["test"]) > 0.05 * PHOTOS
    half = dict(sorted(described.items(), key=lambda photo: photo[1])[: PHOTOS // 2])
    write_list(folder, "csv", half)
    assert {image.name: image.split for image in open_dataset(folder).images} == {
        name: whole[name] for name in half
    }


def test_photo_without_caption_is_noted(photos):
    folder, described = photos
    last = list(described)[-1]
    write_list(folder, "csv", {name: texts for name, texts in described.items() if name != last})
    (finding,) = check_dataset(folder).findings
    assert (finding.kind, finding.location, finding.loses_data) == (
        "image without caption",
        unicodedata.normalize("NFC", last),
        False,
    )


def test_find_files_lists_photos(photos):
    folder, described = photos
    assert sorted(find_files(folder).images) == sorted(as_listed(described, "NFC"))
