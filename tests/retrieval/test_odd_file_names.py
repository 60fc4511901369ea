"""File names that are not UTF-8, or that have spaces, newlines and other control characters: they
are indexed, shown, served and exported.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import closing

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.permissions import as_ordinary_user
from tests.platforms import posix
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.data.file_names import escape_name, is_valid_unicode, unescape_name
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.mcp_server import Details, OpenedIndexes, Search
from visavis.retrieval.server.search_service import ServedIndex

from .. import photos as make

NAMES = {
    b"ok.jpg": "ok.jpg",
    b"caf\xe9.jpg": r"caf\xe9.jpg",
    rb"caf\xe9.jpg": r"caf\x5cxe9.jpg",
    "café.jpg".encode(): "café.jpg",
    b"\xed\xa0\x80.jpg": r"\xed\xa0\x80.jpg",
    b"back\\slash.jpg": r"back\slash.jpg",
    b" space .jpg": " space .jpg",
    b"two\nlines.jpg": "two\nlines.jpg",
    b"red\x1b[31m.jpg": "red\x1b[31m.jpg",
    b"#t=0,4.jpg": "#t=0,4.jpg",
    b"folder\xff/a.jpg": r"folder\xff/a.jpg",
}
ODD = st.text(st.sampled_from("\\x5ce9/\udce9\udc80\udcff\udc5c\ue9ff"))


@given(st.one_of(ODD, st.text(), st.binary().map(os.fsdecode)))
def test_escaped_name_has_an_inverse(name):
    escaped = escape_name(name)
    assert unescape_name(escaped) == name
    assert is_valid_unicode(escaped) == is_valid_unicode(re.sub("[\udc80-\udcff]", "", name))


@pytest.fixture
def folder(tmp_path):
    """One photo of each name."""
    place = tmp_path / "photos"
    for seed, name in enumerate(NAMES):
        path = os.path.join(os.fsencode(place), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(path, "wb") as file:
                file.write(make.encode(make.scene(seed), "JPEG"))
        except OSError:
            pytest.skip("this file system takes names in UTF-8 alone")
    return place


@pytest.fixture
def index(run, folder, tmp_path):
    built = visavis.index(run, folder, out=tmp_path / "index")
    assert (built.num_encoded, built.skipped) == (len(NAMES), ())
    return tmp_path / "index"


@posix
def test_odd_names_are_found_and_updated(run, folder, index):
    found = visavis.search(index, "star", top=50, filter={"duplicates": "show"})
    assert sorted(hit.name for hit in found) == sorted(NAMES.values())
    # Each hit shows the file of its name.
    contents = {shown: (folder / os.fsdecode(name)).read_bytes() for name, shown in NAMES.items()}
    for hit in found:
        assert hit.image is not None and hit.image.location.read() == contents[hit.name]
        copies = visavis.search(index, image=hit.image.location.path, top=1)
        assert copies[0].name == hit.name
    assert visavis.index(run, folder, out=index).num_unchanged == len(NAMES)
    # The name that is shown excludes the file.
    report = visavis.index(run, folder, out=index, exclude=[r"folder\xff", r"caf\xe9.jpg"])
    assert report.removed == (r"caf\xe9.jpg", r"folder\xff/a.jpg")
    report = visavis.index(run, folder, out=index, exclude=[""])
    assert report.num_encoded == 2
    os.rename(
        os.path.join(os.fsencode(folder), b"caf\xe9.jpg"),
        os.path.join(os.fsencode(folder), b"folder\xff", b"\xe8.jpg"),
    )
    report = visavis.index(run, folder, out=index)
    assert (report.num_moved, report.removed) == (1, ())


@posix
def test_odd_names_are_printed_on_one_line_and_as_valid_json(run, folder, index):
    arguments = ["search", str(index), "star", "--top", "50", "--filter", "duplicates=show"]
    shown = CliRunner().invoke(app, arguments)
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0 and len(lines) == len(NAMES)
    assert {line.split("  ", 2)[2] for line in lines} >= {
        r"two\nlines.jpg",
        r"red\x1b[31m.jpg",
        r"caf\xe9.jpg",
    }
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    # Also for readers that refuse lone surrogates.
    assert "\\ud" not in shown.stdout
    assert {hit["name"] for hit in json.loads(shown.stdout)["hits"]} == set(NAMES.values())
    (folder / "two\nlines.jpg").unlink()
    shown = CliRunner().invoke(app, ["index", str(run), str(folder), "--out", str(index)])
    assert "Removed, 1:\n  two\\nlines.jpg\n" in shown.stdout


@posix
def test_odd_names_are_served(folder, index):
    opened = open_index(index)
    application = create_app([ServedIndex(opened)])
    with closing(opened.store), TestClient(application, base_url="http://localhost") as client:
        answer = client.get("/api/search", params={"text": "star", "limit": 50})
        hits = answer.json()["sides"][0]["hits"]
        assert {hit["key"] for hit in hits} == set(NAMES.values())
        for hit in hits:
            place = {"key": hit["key"], "content_version": hit["content_version"]}
            for route in ("thumbnail", "image"):
                assert client.get(f"/api/{route}", params=place).status_code == 200
            similar = client.get("/api/search", params={"like": hit["key"], "limit": 3})
            assert similar.status_code == 200
    indexes = OpenedIndexes({"index": index})
    answer, _ = Search(query="star", limit=50).run(indexes)
    assert {hit["key"] for hit in answer.model_dump(mode="json")["hits"]} == set(NAMES.values())
    for name in NAMES.values():
        details, _ = Details(item=name).run(indexes)
        values = json.loads(details.model_dump_json())
        again, _ = Details(item=values["path"]).run(indexes)
        assert values["key"] == again.key == name


@posix
def test_odd_names_are_exported(index, tmp_path):
    visavis.indexes_export(index, out=tmp_path / "items.parquet")
    table = parquet.read_table(tmp_path / "items.parquet")
    assert sorted(table["path"].to_pylist()) == sorted(NAMES.values())


@posix
def test_folder_of_odd_name_without_permission_keeps_its_items(run, folder, index):
    locked = os.path.join(os.fsencode(folder), b"folder\xff")
    os.chmod(locked, 0)
    with as_ordinary_user():
        report = visavis.index(run, folder, out=index)
    os.chmod(locked, 0o755)
    assert (report.num_kept, report.num_removed) == (1, 0)
    [warning] = report.warnings
    assert "the folder cannot be read: Permission denied" in warning
