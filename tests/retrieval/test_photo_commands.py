"""Dates and companions of photos, as the commands ``index``, ``search``, ``serve`` and ``mcp`` show
them. These tests hold for each store.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import ExifTags, Image
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.core import own_code
from visavis.core.errors import DataError
from visavis.retrieval import source_files
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.mcp_server import OpenedIndexes, Search
from visavis.retrieval.server.search_service import ServedIndex

from .. import photos as make
from ..videos import write_video


@pytest.fixture
def zone(monkeypatch):
    """Sets the time zone of the machine."""
    if not hasattr(time, "tzset"):
        pytest.skip("this system sets no time zone for a process")

    def choose(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield choose
    monkeypatch.undo()
    time.tzset()


def write_photo(path: Path, seed: int = 0, **tags: str) -> Path:
    """A JPEG with EXIF of ``photos.exif``."""
    content = make.encode(make.scene(seed), "JPEG", exif=make.exif(1, **tags))
    return make.write(path, content)


def found(index: Path, **filters: str) -> list[str]:
    """Files that ``visavis search`` finds."""
    conditions = {"duplicates": "show", **filters}
    results = visavis.search(index, "a red star", top=50, filter=conditions)
    return sorted(hit.item.path for hit in results)


def newest(index: Path) -> list[str]:
    """Files that ``mcp`` finds for an empty query, newest first."""
    answer, _ = Search(query="", limit=50).run(OpenedIndexes({"index": index}))
    return [hit["key"] for hit in answer.model_dump(mode="json")["hits"]]


def served(index: Path, path: str):
    """An answer of ``serve``."""
    opened = open_index(index)
    app = create_app([ServedIndex(opened)])
    with closing(opened.store), TestClient(app, base_url="http://localhost") as client:
        return client.get(path)


DATES = {
    "first.jpg": "0001:01:01 00:00:00",
    "monk.jpg": "1601:01:01 00:00:00",
    "before.jpg": "1969:12:31 23:59:59",
    "new.jpg": "2024:05:31 18:30:15",
    "last.jpg": "9999:12:31 23:59:59",
}


@pytest.mark.parametrize("zone_name", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12"])
def test_any_date_is_kept_sorted_and_filtered(zone_name, zone, run, tmp_path):
    zone(zone_name)
    folder, index = tmp_path / "photos", tmp_path / "index"
    for seed, (name, date) in enumerate(DATES.items()):
        write_photo(folder / name, seed, time=date)
    write_photo(folder / "edge.jpg", 6, time="9999:12:31 23:59:59", offset="-12:00")
    # Cameras without a clock write zeros.
    write_photo(folder / "zeros.jpg", 7, time="0000:00:00 00:00:00")
    write_photo(folder / "scan.jpg", 8)
    write_photo(folder / "atlas.jpg", 9)
    os.utime(folder / "zeros.jpg", (-86_400 * 400, -86_400 * 400))
    (folder / "attributes.csv").write_text("filename,taken\nscan.jpg,1650-01-01\natlas.jpg,1700\n")
    report = visavis.index(run, folder, out=index)
    assert (report.num_items, report.undated) == (9, {})
    order = [
        *("first.jpg", "monk.jpg", "scan.jpg", "atlas.jpg", "zeros.jpg", "before.jpg", "new.jpg"),
        *("edge.jpg", "last.jpg"),
    ]
    assert newest(index)[::-1] == order
    assert found(index, before="1650") == ["first.jpg", "monk.jpg"]
    assert found(index, after="1650", before="1650-01-02") == ["scan.jpg"]
    assert found(index, after="9999") == ["edge.jpg", "last.jpg"]
    assert found(index, after="2020-02-01") == ["edge.jpg", "last.jpg", "new.jpg"]
    assert found(index, before="0001-01-01") == []
    assert found(index, after="0001-01-01") == sorted(order)
    assert found(index, before="9999-12-31T23:59:59-14:00") == sorted(order)
    shown = CliRunner().invoke(
        cli.app, ["search", str(index), "star", "--json", "--filter", "before=1650", "--top", "9"]
    )
    assert shown.exit_code == 0 and "monk.jpg" in shown.output
    assert served(index, "/").status_code == 200
    assert served(index, "/api/facets").json()["years"] == {
        "1": 1,
        "1601": 1,
        "1650": 1,
        "1700": 1,
        "1968": 1,
        "1969": 1,
        "2024": 1,
        "9999": 2,
    }
    for day, names in (("9999-12-31", ["edge.jpg", "last.jpg"]), ("0001-01-01", ["first.jpg"])):
        answer = served(index, f"/api/search?text=star&since={day}&until={day}").json()
        assert sorted(hit["path"] for hit in answer["sides"][0]["hits"]) == names
    again = visavis.index(run, folder, out=index)
    assert (again.num_unchanged, again.num_encoded) == (9, 0)


@pytest.mark.parametrize("seconds", [-(2**40), 2**40])
def test_modification_time_out_of_range_is_kept(seconds, zone, run, tmp_path):
    zone("Europe/Berlin")
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number, name in enumerate(("a.jpg", "b.jpg")):
        write_photo(folder / name, number)
    os.utime(folder / "b.jpg", (0, seconds))
    visavis.index(run, folder, out=index)
    assert newest(index) == (["b.jpg", "a.jpg"] if seconds > 0 else ["a.jpg", "b.jpg"])
    assert found(index, before="2020") == (["b.jpg"] if seconds < 0 else [])
    assert served(index, "/api/facets").status_code == 200


def test_filters_compare_the_day_on_the_photo(zone, run, tmp_path):
    zone("Europe/Berlin")
    folder, index = tmp_path / "photos", tmp_path / "index"
    write_photo(folder / "boston.jpg", 1, time="2023:12:31 22:00:00", offset="-05:00")
    write_photo(folder / "tokyo.jpg", 2, time="2024:01:01 05:00:00", offset="+09:00")
    write_photo(folder / "unknown.jpg", 3, time="2023:12:31 23:30:00")
    write_photo(folder / "file.jpg", 4)
    # 2024-01-01 00:30 by the clock of this machine.
    os.utime(folder / "file.jpg", (1_704_065_400, 1_704_065_400))
    visavis.index(run, folder, out=index)
    everything = ["boston.jpg", "file.jpg", "tokyo.jpg", "unknown.jpg"]
    assert found(index, before="2024-01-01") == ["boston.jpg", "unknown.jpg"]
    for period in ("2024", "2024-01", "2024-01-01", "20240101"):
        assert found(index, after=period) == ["file.jpg", "tokyo.jpg"]
        assert found(index, before=period) == ["boston.jpg", "unknown.jpg"]
    assert found(index, after="2023", before="2025") == everything
    # With an offset, the instant counts.
    assert found(index, before="2024-01-01T00:00+01:00") == ["tokyo.jpg", "unknown.jpg"]
    assert newest(index) == ["tokyo.jpg", "file.jpg", "unknown.jpg", "boston.jpg"]
    for wrong in ("2024-13", "yesterday", "31/12/2023", "0000"):
        with pytest.raises(DataError, match="time: expected a year or date such as 2024"):
            found(index, after=wrong)


def test_report_counts_unreadable_capture_times(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    write_photo(folder / "german.jpg", 1, time="31.05.2019 18:30")
    write_photo(folder / "read.jpg", 2, time="2019/05/31 06:30:15 PM")
    write_photo(folder / "table.jpg", 3, time="broken")
    write_photo(folder / "scan.jpg", 4)
    write_photo(folder / "none.jpg", 5)
    (folder / "attributes.csv").write_text(
        "filename,taken\ntable.jpg,2019-05-31\nscan.jpg,around 1650\n"
    )
    arguments = ["index", str(run), str(folder), "--out", str(index)]
    printed = " ".join(CliRunner().invoke(cli.app, arguments).output.split())
    assert "2 files with an unreadable capture time, such as '31.05.2019 18:30'" in printed
    assert found(index, after="2019-05-31T18:30", before="2019-06-01") == ["read.jpg"]
    report = visavis.index(run, folder, out=index)
    assert report.num_unchanged == 5
    assert report.undated == {"german.jpg": "31.05.2019 18:30", "scan.jpg": "around 1650"}


def test_time_of_a_table_in_the_form_of_files_is_unchanged(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    write_photo(folder / "a.jpg", time="2024:05:31 18:30:15")
    (folder / "attributes.csv").write_text("filename,taken\na.jpg,1999-01-01T00:00:00.000\n")
    visavis.index(run, folder, out=index)
    assert visavis.index(run, folder, out=index).num_unchanged == 1
    (folder / "attributes.csv").write_text("filename,taken\na.jpg,1998-01-01T00:00:00.000\n")
    visavis.index(run, folder, out=index)
    assert found(index, before="1999") == ["a.jpg"]


def write_clip(path: Path, seconds: float = 2, **metadata: str) -> Path:
    """A clip whose container has some metadata, such as ``creation_time``."""
    frames = [np.asarray(make.scene(50, (64, 48)))] * round(5 * seconds)
    # Only this option lets FFmpeg write the keys of Apple.
    options = {"movflags": "use_metadata_tags"}
    values = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_video(path, frames, rate=5, options=options, metadata=values)


def damage(content: bytes) -> bytes:
    """A file that ends early."""
    return content[: len(content) // 2]


def test_healthy_companion_is_indexed_in_place_of_damaged_photo(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    taken = make.exif(1, "2024:05:31 18:30:15", "+02:00")
    jpeg = make.encode(make.scene(1), "JPEG", exif=taken)
    heic = make.encode(make.scene(2), "HEIF", exif=taken)
    raw = make.encode_dng(make.scene(3), preview=make.scene(3, (640, 480)))
    make.write(folder / "R1.dng", raw)
    visavis.index(run, folder, out=index)
    for name, content in {
        "R1.jpg": damage(jpeg),
        "R2.heic": b"",
        "R2.dng": raw,
        "R3.jpg": jpeg,
        "R3.dng": raw,
        "R4.heic": damage(heic),
        "R4.dng": damage(raw),
        "P5.HEIC": damage(heic),
        "P6.jpg": damage(jpeg),
        "P7.heic": damage(heic),
        "P7.dng": raw,
        "P8.jpg": b"text",
    }.items():
        make.write(folder / name, content)
    for number in range(4, 9):
        write_clip(folder / f"P{number}.MOV", creation_time="2024-05-31T16:30:14Z")
    (folder / "P4.MOV").rename(folder / "R4.MOV")
    items = ["P5.MOV", "P6.MOV", "P7.MOV", "P7.dng", "P8.MOV", "R1.dng", "R2.dng", "R3.jpg"]
    report = visavis.index(run, folder, out=index)
    assert found(index) == sorted([*items, "R4.MOV"])
    assert report.removed == ()
    assert report.companions == {"R3.dng": "R3.jpg"}
    notes = " ".join(report.skipped)
    for name in ("R1.dng", "R2.dng", "R4.MOV", "P5.MOV", "P6.MOV", "P7.MOV, P7.dng"):
        assert f"Indexed in its place: {name}" in notes
    assert sum(report.files.values()) == len(list(folder.iterdir()))
    again = visavis.index(run, folder, out=index)
    assert (again.num_encoded, again.num_unchanged, again.removed) == (0, 9, ())
    assert again.files == report.files and set(again.skipped) == set(report.skipped)
    # The intact photo replaces its companion.
    make.write(folder / "R1.jpg", jpeg)
    visavis.index(run, folder, out=index)
    assert "R1.jpg" in found(index) and "R1.dng" not in found(index)
    # A photo that is damaged later gives its place to its companion.
    make.write(folder / "R1.jpg", damage(jpeg))
    report = visavis.index(run, folder, out=index)
    assert report.removed == ("R1.jpg",) and "R1.dng" in found(index)


BERLIN = {"com__apple__quicktime__creationdate": "2024-05-31T18:30:14+0200"}
IDENTIFIER = "6B1C5F2A-0D1E-4C3B-9A77-0123456789AB"


def apple_note(identifier: str) -> bytes:
    """The note of an Apple phone, whose tag 17 is the identifier of a Live Photo."""
    text = identifier.encode() + b"\0"
    head = b"Apple iOS\0\0\1MM" + struct.pack(">HHHII", 1, 17, 2, len(text), 14 + 2 + 12 + 4)
    return head + bytes(4) + text


def live_photo(seed: int, kind: str = "JPEG", identifier: str = "", **tags: str) -> bytes:
    """A photo with the time of an Apple phone, and possibly its identifier."""
    exif = Image.Exif()
    exif.load(make.exif(1, **tags))
    if identifier:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] = apple_note(identifier)
    return make.encode(make.scene(seed), kind, exif=exif.tobytes())


def test_clip_belongs_to_photo_of_its_time_or_identifier(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    here = {"time": "2024:05:31 18:30:15", "offset": "+02:00"}
    utc = {"creation_time": "2024-05-31T16:30:14Z"}
    later = {"creation_time": "2024-05-31T16:32:14Z"}
    key = {"com__apple__quicktime__content__identifier": IDENTIFIER}
    parts = {
        "IMG_1.MOV": ("IMG_1.JPG", here, BERLIN),
        "IMG_2_HEVC.MOV": ("IMG_2.JPG", here, utc),
        "img_3.mp4": ("IMG_3.jpg", here, utc),
        "IMG_4.HEIC.MOV": ("IMG_4.HEIC", here, BERLIN),
        # The camera does not record its offset, which is a multiple of quarter hours.
        "IMG_5.MOV": ("IMG_5.JPG", {"time": "2024:05:31 22:15:15"}, utc),
        "IMG_6.MOV": ("IMG_6.JPG", {"time": "2024:05:31 18:30:15"}, BERLIN),
        # An edited time, and a long clip, with the identifier.
        "IMG_7.MOV": ("IMG_7.JPG", {"time": "2010:01:01 00:00:00"}, key),
        "IMG_8.MOV": ("IMG_8.HEIC", {}, key),
    }
    separate = {
        "IMG_1.MP4": ("IMG_1.JPG", here, later),
        "DSC_7.MOV": ("DSC_7.JPG", {"time": "2010:05:31 18:30:15"}, utc),
        "screen.mov": ("screen.png", {}, utc),
        "none.mov": ("none.jpg", here, {}),
        "long.mov": ("long.jpg", here, utc),
        "zone.mov": ("zone.jpg", {"time": "2024:05:31 22:20:15"}, utc),
        "other.mov": ("other.jpg", {"time": "2010:01:01 00:00:00"}, key),
    }
    for seed, (clip, (photo, tags, metadata)) in enumerate({**parts, **separate}.items()):
        kind = {"HEIC": "HEIF", "png": "PNG"}.get(photo.rpartition(".")[2], "JPEG")
        has_key = IDENTIFIER if clip in ("IMG_7.MOV", "IMG_8.MOV") else ""
        make.write(folder / photo, live_photo(seed, kind, has_key, **tags))
        write_clip(folder / clip, 30 if clip in ("long.mov", "IMG_8.MOV") else 2, **metadata)
    report = visavis.index(run, folder, out=index)
    assert report.companions == {clip: photo for clip, (photo, _, _) in parts.items()}
    assert set(separate) == set(found(index, kind="video"))
    assert sum(report.files.values()) == len(list(folder.iterdir()))
    # Pairs are opened once.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "is_live_pair", None)
        again = visavis.index(run, folder, out=index)
    assert (again.num_encoded, again.companions) == (0, report.companions)
    # Another clip with the name of a companion is an item.
    write_clip(folder / "IMG_1.MOV", 30, **BERLIN)
    assert "IMG_1.MOV" not in visavis.index(run, folder, out=index).companions
    assert "IMG_1.MOV" in found(index, kind="video")


def test_clip_is_an_item_while_its_metadata_cannot_be_read(run, tmp_path, monkeypatch):
    folder, index = tmp_path / "photos", tmp_path / "index"
    make.write(folder / "IMG_1.JPG", live_photo(1, time="2024:05:31 18:30:15", offset="+02:00"))
    clip = write_clip(folder / "IMG_1.MOV", **BERLIN)
    write_photo(folder / "IMG_2.JPG", 2)
    make.write(folder / "IMG_2.MOV", damage(clip.read_bytes()))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        report = visavis.index(run, folder, out=index)
    assert report.companions == {}
    for name in ("IMG_1.MOV", "IMG_2.MOV"):
        [sentence] = [text for text in report.skipped if name in text]
        assert "pip install 'visavis[video]'" in sentence
    # PyAV is installed later. The answer without it was not recorded.
    report = visavis.index(run, folder, out=index)
    assert report.companions == {"IMG_1.MOV": "IMG_1.JPG"}
    [sentence] = report.skipped
    assert "IMG_2.MOV" in sentence and "damaged" in sentence


def test_time_comes_from_gps_raw_file_or_takeout(zone, run, tmp_path):
    zone("Europe/Berlin")
    folder, index = tmp_path / "photos", tmp_path / "index"
    gps = Image.Exif()
    gps[ExifTags.IFD.GPSInfo] = {29: "2019:05:31", 7: (16.0, 30.0, 15.0)}
    for seed, (name, kind) in enumerate((("gps.jpg", "JPEG"), ("gps.heic", "HEIF"))):
        make.write(folder / name, make.encode(make.scene(seed), kind, exif=gps.tobytes()))
    raw = make.encode_dng(make.scene(3), time="2018:05:31 18:30:15", preview=make.scene(3))
    write_photo(folder / "pair.jpg", 3)
    make.write(folder / "pair.dng", raw)
    content = json.dumps({"photoTakenTime": {"timestamp": "1496255415"}})
    long_name = "a" * 44 + ".jpg"
    tables = {
        "one.jpg": "one.jpg.json",
        "two.jpg": "two.jpg.supplemental-metadata.json",
        "three(1).jpg": "three.jpg.supplemental-metadata(1).json",
        "four(2).jpg": "four.jpg(2).json",
        long_name: long_name[:46] + ".json",
        "middle-of-a-long-name-12345.jpg": "middle-of-a-long-name-12345.jpg.supplemental-m.json",
        "dated.jpg": "dated.jpg.json",
        "broken.jpg": "broken.jpg.json",
    }
    for seed, (name, table) in enumerate(tables.items(), 10):
        write_photo(folder / name, seed, time="2016:01:01 00:00:00" if "dated" in name else "")
        make.write(folder / table, b"{" if "broken" in name else content.encode())
    visavis.index(run, folder, out=index)
    assert found(index, after="2019-05-31T18:30", before="2019-06") == ["gps.heic", "gps.jpg"]
    assert found(index, after="2018-05-31T18:30", before="2018-06") == ["pair.jpg"]
    dated = sorted(name for name in tables if name not in ("dated.jpg", "broken.jpg"))
    assert found(index, after="2017-05-31T20:30", before="2017-06") == dated
    assert found(index, before="2017") == ["dated.jpg"]


def test_json_of_takeout_that_is_added_later_dates_its_photo(zone, run, tmp_path):
    zone("Europe/Berlin")
    folder, index = tmp_path / "photos", tmp_path / "index"
    times = {"none.jpg": "", "bad.jpg": "31/05/2019 18:30", "dated.jpg": "2016:01:01 00:00:00"}
    for seed, (name, text) in enumerate(times.items()):
        write_photo(folder / name, seed, time=text)
    write_clip(folder / "clip.mp4", 9)
    content = json.dumps({"photoTakenTime": {"timestamp": "1496255415"}}).encode()
    make.write(folder / "none.jpg.json", b"{}")
    visavis.index(run, folder, out=index)
    assert found(index, after="2017", before="2018") == []
    for name in (*times, "clip.mp4"):
        make.write(folder / f"{name}.json", content)
    report = visavis.index(run, folder, out=index)
    assert report.num_encoded == 0
    assert set(found(index, after="2017", before="2018")) == {"none.jpg", "bad.jpg", "clip.mp4"}
    assert found(index, before="2017") == ["dated.jpg"]
    assert visavis.index(run, folder, out=index).num_unchanged == 4


def test_path_patterns_ignore_case(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number, name in enumerate(("Spain/IMG_1.JPG", "spain/img_2.jpg", "ÜBER.Jpg", "[a].png")):
        write_photo(folder / name, number)
    visavis.index(run, folder, out=index)
    assert found(index, path="*.JPG") == ["Spain/IMG_1.JPG", "spain/img_2.jpg", "ÜBER.Jpg"]
    assert found(index, path="spain/img_?.jpg") == ["Spain/IMG_1.JPG", "spain/img_2.jpg"]
    assert found(index, path="über*") == ["ÜBER.Jpg"]
    assert found(index, path="[A]*") == ["[a].png"]
    hits = served(index, "/api/search?path=SPAIN").json()["sides"][0]["hits"]
    assert len(hits) == 2


def test_report_counts_moved_files_apart_from_removed_ones(run, tmp_path):
    folder, index = tmp_path / "photos", tmp_path / "index"
    for number in range(6):
        write_photo(folder / "old" / f"{number}.jpg", number)
    arguments = ["index", str(run), str(folder), "--out", str(index)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    (folder / "old" / "5.jpg").unlink()
    (folder / "old").rename(folder / "new")
    write_photo(folder / "copy.jpg", 0)
    printed = " ".join(CliRunner().invoke(cli.app, arguments).output.split())
    assert "Files: 5 moved, 1 with known content, 1 removed." in printed
    assert "Removed, 1: old/5.jpg" in printed


def test_home_folder_is_expanded_where_a_shell_does_not(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv(own_code.VARIABLE, "")  # so that later tests do not name this file
    write_photo(tmp_path / "photos" / "a.jpg")
    arguments = ["index", str(run), "~/photos", "--out=~/index"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    arguments = ["search", "~/index", "star", "--image=~/photos/a.jpg", "--json"]
    assert "a.jpg" in CliRunner().invoke(cli.app, arguments).output
    (tmp_path / "home_hn.py").write_text(
        "from dataclasses import dataclass\n"
        "from visavis.objectives import TripletHN\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class HomeHN(TripletHN):\n"
        '    """A triplet loss of its own."""\n'
    )
    assert repr(visavis.parse("~/home_hn.py:HomeHN(margin=0.3)")).startswith("home_hn.py:HomeHN(")
