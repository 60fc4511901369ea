"""Index of photos of phones and cameras: companions, capture times, and an account of each file."""

from __future__ import annotations

import io
import json
import os
import sys

import numpy as np
import pytest
from PIL import Image

import visavis
from visavis.cli.console import print_result
from visavis.data.capture_time import modified_time, parse_time
from visavis.data.images import decode_image
from visavis.data.video import recording_time
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.image_cache import render_jpeg
from visavis.retrieval.source_files import list_source_files

from .. import photos as make
from ..data.test_photos import damaged_photos, encoded
from ..videos import write_video
from .device_photos import device_photos

pytest.importorskip("pillow_heif", reason="photos need: pip install 'visavis[photos]'")
pytest.importorskip("pillow_jxl", reason="photos need: pip install 'visavis[photos]'")
pytest.importorskip("rawpy", reason="photos need: pip install 'visavis[photos]'")


TIME = "2024:05:31 18:30:15"
EXIF = make.exif(1, TIME, "+00:00")


def live_clip(path, image=None):
    """A short clip that was recorded when the photos with ``EXIF`` were taken."""
    frames = [np.asarray(image or make.scene(1))] * 2
    return write_video(path, frames, metadata={"creation_time": "2024-05-31T18:30:14Z"})


def number_of_files(folder):
    return sum(len(files) for _, _, files in os.walk(folder))


def items_of(index):
    return {item.path: item for item in open_index(index).items.values()}


@pytest.mark.slow
def test_index_of_sixty_device_photos(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    files = device_photos(tmp_path)
    for file in files:
        make.write(folder / file.name, file.content)
    report = visavis.index(run, folder, out=index)
    assert report.skipped == () and report.num_items == sum(map(bool, (f.expected for f in files)))
    assert report.files == {
        "indexed": report.num_items,
        "companions": 4,
        "skipped": 0,
        "other": 0,
    }
    assert sum(report.files.values()) == len(files) == number_of_files(folder) >= 60
    assert report.companions == {
        "pairs/IMG_1.MOV": "pairs/IMG_1.HEIC",
        "pairs/IMG_2.mov": "pairs/IMG_2.JPG",
        "pairs/IMG_3.DNG": "pairs/IMG_3.JPG",
        "pairs/IMG_4.dng": "pairs/IMG_4.HEIC",
    }
    opened, items = open_index(index), items_of(index)
    for file in files:
        if file.expected is None:
            continue
        item = items[file.name]
        assert item.metadata["taken"] == file.time
        assert item.time == parse_time(file.time)
        # What the page shows is upright, too, with the right colors.
        shown = Image.open(io.BytesIO(render_jpeg(opened.locate(item), item, "thumbnail")))
        expected = file.expected.resize(shown.size)
        shown, expected = (np.asarray(image.resize((20, 15)), float) for image in (shown, expected))
        assert np.abs(shown - expected).mean() < 0.02 * 255, file.name
    # The mean of all is in the middle of the filters.
    half = sorted(item.time.replace(tzinfo=None) for item in items.values())[30]
    assert opened.store.count(ItemFilter(after=half)) == len(items) - 30
    assert opened.store.count(ItemFilter(before=half)) == 30
    again = visavis.index(run, folder, out=index)
    assert (again.num_encoded, again.num_unchanged) == (0, len(items))
    assert again.files == report.files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["HEIF", "JPEG XL", "camera raw", "AVIF"])
def test_index_with_200_damaged_photos_is_complete(kind, run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    suffix = {"HEIF": "heic", "JPEG XL": "jxl", "camera raw": "dng", "AVIF": "avif"}[kind]
    make.write(folder / f"good.{suffix}", encoded(kind, seed=7))
    for number, content in enumerate(damaged_photos(encoded(kind), 200, seed=1)):
        make.write(folder / f"{number:03}.{suffix}", content)
        if number % 20 == 0:
            make.write(folder / f"{number:03}.jpg", encoded("JPEG", seed=number))
    report = visavis.index(run, folder, out=index)
    items = items_of(index)
    assert f"good.{suffix}" in items
    assert {f"{number:03}.jpg" for number in range(0, 200, 20)} <= items.keys()
    missing = [
        f"{number:03}.{suffix}" for number in range(200) if f"{number:03}.{suffix}" not in items
    ]
    # A raw image of a JPEG of the same name is its companion.
    missing = [name for name in missing if name not in report.companions]
    assert len(missing) >= 80
    reasons = " ".join(report.skipped)
    assert all(f"image {name} " in reasons for name in missing)
    assert report.files["skipped"] == len(report.skipped) == len(missing)
    assert sum(report.files.values()) == number_of_files(folder)


def test_companions_belong_to_a_photo_of_their_folder(tmp_path):
    clip = live_clip(tmp_path / "clip.mov").read_bytes()
    for name in ("a/live.JPG", "a/alone.jpg", "b/live.jpg", "a/raw.jpg", "a/both.heic"):
        make.write(tmp_path / "photos" / name, make.encode(make.scene(1), "JPEG", exif=EXIF))
    for name in ("a/LIVE.mov", "b/other.mov", "a/both.MOV", "a/raw-only.mov"):
        make.write(tmp_path / "photos" / name, clip)
    make.write(tmp_path / "photos" / "a/alone.mp4", clip)
    for name in ("a/raw.DNG", "a/both.dng", "a/raw-only.dng", "b/raw.dng"):
        content = make.encode_dng(make.scene(1), time=TIME, offset="+00:00")
        make.write(tmp_path / "photos" / name, content)
    # A clip of this size is a video, whatever the photo of its name shows.
    make.write(tmp_path / "photos" / "b/live.MOV", clip)
    os.truncate(tmp_path / "photos" / "b/live.MOV", 2**25 + 1)
    collection = list_source_files(tmp_path / "photos")
    assert collection.companions == {
        "a/LIVE.mov": "a/live.JPG",
        "a/alone.mp4": "a/alone.jpg",
        "a/both.MOV": "a/both.heic",
        "a/both.dng": "a/both.heic",
        "a/raw-only.mov": "a/raw-only.dng",
        "a/raw.DNG": "a/raw.jpg",
    }
    files = {file.path: file for file in collection.files}
    assert files.keys() & collection.companions.keys() == set()
    assert files["a/both.heic"].metadata == {"companions": "both.MOV, both.dng"}
    assert len(files) + len(collection.companions) == number_of_files(tmp_path / "photos")


def test_listed_files_are_never_companions(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        make.write(tmp_path / name, encoded("JPEG", seed=ord(name[0])))
    for name in ("a.dng", "b.dng"):
        make.write(tmp_path / name, encoded("camera raw"))
    (tmp_path / "captions.csv").write_text(
        "filename,caption\na.jpg,developed\na.dng,raw\nb.jpg,developed\n"
    )
    collection = list_source_files(tmp_path)
    assert {file.path for file in collection.files} == {"a.jpg", "a.dng", "b.jpg"}
    assert collection.companions == {"b.dng": "b.jpg"}


def test_live_photo_without_decoder_keeps_its_clip(tmp_path, monkeypatch):
    live_clip(tmp_path / "a.mov")
    make.write(tmp_path / "a.heic", make.encode(make.scene(1), "HEIF", exif=EXIF))
    assert list_source_files(tmp_path).companions == {"a.mov": "a.heic"}
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    collection = list_source_files(tmp_path)
    assert not collection.companions
    assert [file.path for file in collection.files] == ["a.heic", "a.mov"]


def test_index_accounts_for_each_file(run, tmp_path, monkeypatch, capsys):
    folder, index = tmp_path / "photos", tmp_path / "index"
    taken = make.exif(1, "2020:02:03 04:05:06", "+00:00")
    make.write(folder / "photo.heic", make.encode(make.scene(1), "HEIF", exif=taken))
    make.write(folder / "plain.png", make.encode(make.scene(2), "PNG"))
    make.write(folder / "raw.dng", encoded("camera raw"))
    make.write(folder / "raw.jpg", make.encode(make.scene(3), "JPEG"))
    make.write(folder / "old.jxr", b"content")
    make.write(folder / "cut.heic", encoded("HEIF")[:100])
    make.write(folder / "photo.AAE", b"edits")
    make.write(folder / "notes.txt", b"text")
    (folder / "attributes.csv").write_text("filename,taken\nplain.png,2021-05-31\n")
    # Without the decoder, the photo is reported with the command that installs it.
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pillow_heif", None)
        report = visavis.index(run, folder, out=index)
    assert report.files == {"indexed": 2, "companions": 1, "skipped": 3, "other": 3}
    assert sum("pip install 'visavis[photos]'" in reason for reason in report.skipped) == 2
    # It is read after the installation, although the file has not changed.
    report = visavis.index(run, folder, out=index)
    assert report.files == {"indexed": 3, "companions": 1, "skipped": 2, "other": 3}
    assert sum(report.files.values()) == number_of_files(folder)
    assert report.num_encoded == 1 and len(report.skipped) == 2
    assert json.loads(json.dumps(report.to_json()))["files"] == report.files
    print_result(report)
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "9 files in the source: 3 indexed, 1 part of another photo, 2 left out, 3 neither images "
        "nor videos." in printed
    )
    items = items_of(index)
    # The time of a table counts more than none.
    times = {"photo.heic": "2020-02-03T04:05:06+00:00", "plain.png": "2021-05-31"}
    for path, text in times.items():
        assert items[path].time == parse_time(text)
    assert items["raw.jpg"].time == modified_time(items["raw.jpg"].modified_ns)
    store = open_index(index).store
    chosen = ItemFilter(
        after=parse_time("2020-01-01T00:00+00:00"), before=parse_time("2022-01-01T00:00+00:00")
    )
    assert store.count(chosen) == 2


def test_capture_time_stays_with_moved_and_touched_photos(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number, kind in enumerate(("HEIF", "JPEG")):
        taken = make.exif(1, f"2020:02:0{number + 1} 04:05:06", "+00:00")
        make.write(folder / f"{kind}.x.jpg", make.encode(make.scene(number), kind, exif=taken))
    visavis.index(run, folder, out=index)
    before = {path: item.time for path, item in items_of(index).items()}
    os.utime(folder / "JPEG.x.jpg", (0, 0))
    (folder / "HEIF.x.jpg").rename(folder / "moved.jpg")
    report = visavis.index(run, folder, out=index)
    assert (report.num_encoded, report.num_moved) == (0, 2)
    after = {path: item.time for path, item in items_of(index).items()}
    assert after == {"JPEG.x.jpg": before["JPEG.x.jpg"], "moved.jpg": before["HEIF.x.jpg"]}
    # A table replaces the time of a file, and gives it back.
    (folder / "attributes.csv").write_text("filename,taken\nmoved.jpg,1999-01-01\n")
    visavis.index(run, folder, out=index)
    assert items_of(index)["moved.jpg"].metadata["taken"] == "1999-01-01"
    (folder / "attributes.csv").unlink()
    visavis.index(run, folder, out=index)
    assert items_of(index)["moved.jpg"].time == before["HEIF.x.jpg"]


def test_companion_that_was_an_item_is_removed(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number in range(3):
        clip = live_clip(tmp_path / "clip.mov", make.scene(number, (64, 48)))
        make.write(folder / f"{number}.mov", clip.read_bytes())
    visavis.index(run, folder, out=index)
    assert len(items_of(index)) == 3
    # The photos were copied later than the clips.
    for number in range(3):
        content = make.encode(make.scene(number), "HEIF", exif=EXIF)
        make.write(folder / f"{number}.heic", content)
    report = visavis.index(run, folder, out=index)
    assert report.warnings == () and items_of(index).keys() == {"0.heic", "1.heic", "2.heic"}
    for number in range(3):
        (folder / f"{number}.heic").unlink()
    visavis.indexes_prune(index)
    assert items_of(index).keys() == {"0.mov", "1.mov", "2.mov"}


def test_clip_has_its_recording_time(tmp_path):
    path = write_video(tmp_path / "plain.mp4", [np.asarray(make.scene(1))] * 2)
    assert recording_time(path, "plain.mp4") == ""
    for value, expected in (
        ("2024-05-31T16:30:15.000000Z", "2024-05-31T16:30:15Z"),
        ("1904-01-01T00:00:00.000000Z", ""),
    ):
        frames = [np.asarray(make.scene(1))] * 2
        copy = write_video(tmp_path / "copy.mov", frames, metadata={"creation_time": value})
        assert parse_time(recording_time(copy, "copy.mov")) == parse_time(expected)


@pytest.mark.parametrize("kind", ["HEIF", "JPEG XL", "camera raw"])
def test_search_by_photo_finds_it(kind, run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number in range(4):
        make.write(folder / f"{number}.png", make.encode(make.scene(number), "PNG"))
    query = make.write(tmp_path / "query.heic", encoded(kind, seed=2))
    visavis.index(run, folder, out=index)
    decoded = decode_image(query.read_bytes(), query.name)
    plain = make.write(tmp_path / "query.png", make.encode(decoded, "PNG"))
    found, expected = (visavis.search(index, image=path).hits for path in (query, plain))
    assert [hit.name for hit in found] == [hit.name for hit in expected]
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-5)
    assert kind == "camera raw" or found[0].name == "2.png"
    vectors = visavis.load(run).encode_images([query, plain])
    assert (vectors[0] - vectors[1]).abs().max() < 1e-5
