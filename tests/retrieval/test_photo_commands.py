"""Dates and companions of photos, as the commands ``index``, ``search``, ``serve`` and ``mcp`` show
them. These tests hold for each store.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.core.errors import DataError
from visavis.retrieval.index_folder import Index
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.mcp_server import OpenedIndexes, Search
from visavis.retrieval.server.search_service import ServedIndex

from .. import photos as make


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
    results = visavis.search(index, "a red star", top=50, group_duplicates=False, **filters)
    return sorted(hit.item.path for hit in results)


def newest(index: Path) -> list[str]:
    """Files that ``mcp`` finds for an empty query, newest first."""
    answer, _ = Search(query="", limit=50).run(OpenedIndexes({"index": index}))
    return [hit["key"] for hit in answer.model_dump(mode="json")["hits"]]


def served(index: Path, path: str):
    """An answer of ``serve``."""
    opened = Index.open(index)
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
        cli.app, ["search", str(index), "star", "--json", "--before", "1650", "--top", "9"]
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
