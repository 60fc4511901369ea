"""Sources of an index that change, and files of them that cannot be read, are excluded or have no
caption.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile

import pytest
from PIL import Image
from tests.permissions import as_ordinary_user
from tests.platforms import posix
from tests.videos import random_clip
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RunError
from visavis.core.progress import NoProgress
from visavis.data import video
from visavis.data.formats.image_files import Exclusion, scan_folder
from visavis.data.formats.listing import Listing
from visavis.data.image_validation import _cache_key
from visavis.retrieval.build.default_index import index_if_images
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import read_manifest
from visavis.retrieval.open_index import open_index
from visavis.retrieval.run_images import open_image_collection

needs_permissions = pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two images in the folder ``photos``, and two in each of two subfolders."""
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate(("", "", "sub", "sub", "usb", "usb")):
        path = tmp_path / "photos" / folder / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (40 * number, 200 - 30 * number, 90)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def build(run):
    def build_or_update(source, out="index", **options):
        return build_index(run, source, out, **{"progress": NoProgress()} | options)

    return build_or_update


def paths(folder="index"):
    index = open_index(folder)
    found = sorted(index.items)
    index.store.close()
    return found


def lock_folder(folder):
    folder.chmod(0)


def lock_files(folder):
    folder.chmod(0o444)


def unmount(folder):
    (folder.parent.parent / "drive").mkdir()
    for file in list(folder.iterdir()):
        file.rename(folder.parent.parent / "drive" / file.name)


def loop(folder):
    folder.rename(folder.parent.parent / "drive")
    folder.symlink_to(folder)


def broken_link(folder):
    folder.rename(folder.parent.parent / "drive")
    folder.symlink_to("/nowhere")


def outside_link(folder):
    folder.symlink_to(folder.rename(folder.parent.parent / "drive"))


UNREADABLE = {
    lock_folder: "the folder cannot be read: Permission denied",
    lock_files: "'sub/2.png': it cannot be read: Permission denied",
    unmount: "the folder is empty",
    loop: "it is a broken link: Too many levels of symbolic links",
    broken_link: "it is a broken link: No such file",
    outside_link: "it is a link to a location outside",
}


@posix
@needs_permissions
@pytest.mark.parametrize(
    "change",
    [
        change if change in (lock_folder, unmount) else pytest.param(change, marks=pytest.mark.slow)
        for change in UNREADABLE
    ],
)
def test_index_keeps_items_of_unreadable_folder(build, photos, change, caplog):
    build(photos)
    change(photos / "sub")
    with as_ordinary_user():
        report = build(photos)
        assert (report.num_unchanged, report.num_removed, report.num_kept) == (4, 0, 2)
        assert len(paths()) == report.num_items == 6
        assert "'sub" in report.warnings[0] and UNREADABLE[change] in report.warnings[0]
        assert "keeps" in caplog.text and "'sub" in caplog.text
        (photos / "0.png").unlink()
        assert build(photos).removed == ("0.png",)
    if (photos / "sub").is_symlink():
        (photos / "sub").unlink()
    else:
        (photos / "sub").chmod(0o755)
    report = build(photos, remove_missing=True)
    assert report.num_kept == 0 and not report.warnings
    assert paths() == [
        path.relative_to(photos).as_posix() for path in sorted(photos.rglob("*.png"))
    ]


@pytest.mark.parametrize("change", ["empty", "absent", "other"])
def test_index_keeps_items_if_more_than_half_are_missing(build, photos, change, tmp_path, caplog):
    build(photos)
    photos.rename(tmp_path / "drive")
    if change != "absent":
        photos.mkdir()
    if change == "other":
        Image.new("RGB", (32, 32), "white").save(photos / "white.png")
    for _ in range(2):
        report = build(photos)
        assert (report.num_kept, report.num_removed, report.num_items) == (
            6,
            0,
            6 + (change == "other"),
        )
    assert {
        "empty": "the folder is empty",
        "absent": "the folder does not exist",
        "other": "6 of 6 files are missing",
    }[change] in caplog.text
    if change != "absent":
        report = build(photos, remove_missing=True)
        assert (report.num_kept, report.num_removed) == (0, 6)


def test_index_removes_half_of_the_files_and_moved_files(build, photos):
    build(photos)
    shutil.rmtree(photos / "usb")
    (photos / "0.png").unlink()
    report = build(photos)
    assert sorted(report.removed) == ["0.png", "usb/4.png", "usb/5.png"]
    (photos / "sub").rename(photos / "renamed")
    (photos / "1.png").rename(photos / "renamed" / "7.png")
    report = build(photos)
    assert (report.num_encoded, report.num_moved, report.num_removed, report.num_kept) == (
        0,
        3,
        0,
        0,
    )
    assert paths() == ["renamed/2.png", "renamed/3.png", "renamed/7.png"]


@posix
@pytest.mark.slow
@needs_permissions
def test_search_and_serve_of_folder_keep_items(run, photos, recorder, caplog):
    """As ``search --collection FOLDER`` and ``serve FOLDER`` update an index."""
    index_if_images(photos, run, recorder)
    (photos / "damaged.png").write_bytes(b"\x89PNG")
    lock_folder(photos / "sub")
    with as_ordinary_user():
        folder = index_if_images(photos, run, recorder)
        assert "'sub': the folder cannot be read" in caplog.text
        assert any(
            message.startswith("Left out, 1: image damaged.png") for message in recorder.messages
        )
        assert len(paths(folder)) == 6
        results = visavis.search(
            "a red circle", collection=photos, top=10, filter={"duplicates": "show"}
        )
        assert len(results) == 6
    (photos / "sub").chmod(0o755)
    photos.rename(photos.parent / "drive")
    assert index_if_images(photos, None, recorder) == folder
    assert "the folder does not exist" in caplog.text


@posix
@needs_permissions
def test_search_of_run_names_unreadable_folder(run, photos, recorder):
    lock_folder(photos / "sub")
    (photos / "@eaDir").mkdir()
    shutil.copy(photos / "0.png", photos / "@eaDir")
    with as_ordinary_user():
        found = visavis.search(run, "a red circle", collection=photos, top=10, progress=recorder)
    assert sorted(hit.name for hit in found) == ["0.png", "1.png", "usb/4.png", "usb/5.png"]
    assert any(
        "Skipped: 'sub': the folder cannot be read" in message for message in recorder.messages
    )


def test_unreadable_archive_keeps_items_of_data_set(build, photos, tmp_path):
    """Also images that the list names without their folder."""
    names = ["0.png", "2.png", "3.png"]
    (photos / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{name},a circle\n" for name in names)
    )
    build(photos / "captions.csv")
    assert paths() == names
    (photos / "sub").rename(tmp_path / "drive")
    (photos / "sub").symlink_to("nowhere")
    report = build(photos / "captions.csv")
    assert report.num_kept == 2 and paths() == names
    assert any("'2.png'" in warning for warning in report.warnings)


@posix
@needs_permissions
def test_unreadable_shard_keeps_items_of_data_set(build, photos):
    for number, folder in enumerate(("sub", "usb")):
        with tarfile.open(photos / f"train-{number}.tar", "w") as shard:
            for path in sorted((photos / folder).iterdir()):
                (photos / f"{path.stem}.txt").write_text("a circle")
                shard.add(path, path.name)
                shard.add(photos / f"{path.stem}.txt", f"{path.stem}.txt")
        shutil.rmtree(photos / folder)
    assert build(photos).num_items == 6
    (photos / "train-0.tar").chmod(0)
    with as_ordinary_user():
        report = build(photos)
    (photos / "train-0.tar").chmod(0o644)
    assert (report.num_items, report.num_kept, report.num_removed) == (6, 4, 0)
    assert "train-0.tar cannot be read: Permission denied" in report.warnings[0]
    assert build(photos).num_unchanged == 6


@posix
@needs_permissions
def test_index_command_names_what_it_keeps(run, photos):
    arguments = ["index", str(run), str(photos), "--out", "index"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    lock_folder(photos / "sub")
    (photos / "@eaDir").mkdir()
    with as_ordinary_user():
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Files: 4 unchanged, 2 kept without their file." in result.output
    assert "Excluded, 1:\n  @eaDir\n" in result.output
    assert (
        f"warning: {photos}: 'sub': the folder cannot be read: Permission denied." in result.output
    )
    with as_ordinary_user():
        result = CliRunner().invoke(app, ["indexes", "prune", "index", "--json"])
    report = json.loads(result.stdout)
    assert (report["removed"], report["num_kept"]) == ([], 2)
    result = CliRunner().invoke(app, [*arguments, "--exclude", "usb", "--json"])
    assert json.loads(result.stdout)["removed"] == ["usb/4.png", "usb/5.png"]


@posix
@needs_permissions
def test_index_reads_file_again_after_its_cause_is_gone(build, photos, monkeypatch):
    (photos / "0.png").chmod(0)
    with as_ordinary_user():
        assert ["Permission denied" in problem for problem in build(photos).skipped] == [True]
        assert build(photos).num_encoded == 0
    (photos / "0.png").chmod(0o644)
    assert build(photos).num_encoded == 1
    (photos / "damaged.png").write_bytes(b"\x89PNG")
    assert len(build(photos).skipped) == 1
    read = []
    monkeypatch.setattr(
        "visavis.data.image_file.ByteRange.read",
        lambda location: read.append(location.path.name) or b"\x89PNG",
    )
    assert len(build(photos).skipped) == 1 and not read
    monkeypatch.setattr("PIL.__version__", "99.0")
    assert len(build(photos).skipped) == 1 and read == ["damaged.png"]
    assert " 99.0 " in read_manifest(photos.parent / "index").decoders


def test_index_reads_video_after_its_package_is_installed(build, photos, monkeypatch):
    pytest.importorskip("av", reason="PyAV is not installed: pip install 'visavis[video]'")
    random_clip(photos / "clip.mp4")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        [problem] = build(photos).skipped
        assert "is not installed" in problem
    report = build(photos)
    assert report.num_encoded == 1 and not report.skipped


def test_decoder_versions_contain_pyav(monkeypatch, tmp_path):
    before = _cache_key(Listing(tmp_path), 0, False, False)
    assert (
        f", av {video.version('av')}" in video.decoder_versions()
        and "JPEG" in video.decoder_versions()
    )
    monkeypatch.setattr(
        video, "version", lambda name: (_ for _ in ()).throw(video.PackageNotFoundError(name))
    )
    assert ", av " not in video.decoder_versions()
    assert _cache_key(Listing(tmp_path), 0, False, False) != before


@posix
@needs_permissions
def test_unreadable_new_content_keeps_earlier_item(build, photos):
    build(photos)
    Image.new("RGB", (32, 32), "white").save(photos / "0.png")
    (photos / "0.png").chmod(0)
    with as_ordinary_user():
        report = build(photos)
        assert (report.num_kept, report.num_removed, report.num_items) == (1, 0, 6)
        [warning] = report.warnings
        assert "0.png" in warning and warning.endswith("The index keeps its earlier content.")
    (photos / "0.png").chmod(0o644)
    assert build(photos).num_encoded == 1


def test_moved_source_keeps_vectors(build, photos, tmp_path):
    build(photos)
    moved = photos.rename(tmp_path / "moved")
    os.utime(moved / "0.png")
    (moved / "1.png").rename(moved / "renamed.png")
    with pytest.raises(
        RunError,
        match=r"source: expected .*photos, .*moved\. Make another .* If the folder was moved, run visavis indexes move .*index .*moved\.$",
    ):
        build(moved)
    report = build(moved, moved=True)
    assert (report.num_encoded, report.num_moved, report.num_unchanged, report.num_removed) == (
        0,
        2,
        4,
        0,
    )
    assert read_manifest(tmp_path / "index").source == str(moved)
    assert build(moved).num_unchanged == 6
    (tmp_path / "other").mkdir()
    Image.new("RGB", (32, 32), "white").save(tmp_path / "other" / "white.png")
    with pytest.raises(
        RunError,
        match=r"other: expected the files of .*moved, got 6 missing ones\. Pass the folder to which",
    ):
        build(tmp_path / "other", moved=True)
    assert len(paths()) == 6
    with pytest.raises(RunError, match="new: expected an index"):
        visavis.indexes_move(tmp_path / "new", moved)


JUNK = (
    "@eaDir",
    "#recycle",
    ".thumbnails",
    "$RECYCLE.BIN",
    "sub/$Recycle.Bin",
    ".Trash-1000",
    "__MACOSX",
    "lost+found",
    "sub/@eaDir",
)


def test_index_excludes_thumbnails_and_recycle_bins(build, photos):
    for folder in JUNK:
        (photos / folder).mkdir()
        shutil.copy(photos / "0.png", photos / folder)
    (photos / "._0.png").write_bytes(b"resource fork")
    (photos / ".DS_Store").write_bytes(b"")
    report = build(photos)
    assert (report.num_items, sorted(report.excluded)) == (6, sorted([*JUNK, "._0.png"]))
    assert sorted(scan_folder(photos).excluded) == sorted(report.excluded)
    report = build(photos, exclude=["s?b/", "us*/4*"])
    assert sorted(report.removed) == ["sub/2.png", "sub/3.png", "usb/4.png"]
    assert {"sub", "usb/4.png"} <= set(report.excluded)
    report = build(photos)
    assert (report.num_items, report.num_unchanged) == (3, 3)
    assert read_manifest(photos.parent / "index").exclude == ("s?b/", "us*/4*")
    assert build(photos, exclude=[""]).num_items == 6


def test_excluded_items_are_removed_from_an_older_index(build, photos):
    """Thumbnails may be more than half of the items."""
    for number in range(8):
        shutil.copy(photos / "0.png", photos / f"x{number}.thumb.png")
    assert build(photos).num_items == 14
    report = build(photos, exclude=["*.thumb.png"])
    assert (report.num_items, report.num_removed, report.num_kept) == (6, 8, 0)


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("raw", "raw/1.png a/raw/1.png"),
        ("RAW/", "raw/1.png a/raw/1.png"),
        ("/raw", "raw/1.png"),
        ("a/*", "a/raw/1.png a/2.png"),
        ("*.png", "raw/1.png a/raw/1.png a/2.png 3.png"),
        ("[", ""),
    ],
)
def test_exclusion_matches_names_and_paths(pattern, excluded):
    names = ["raw/1.png", "a/raw/1.png", "a/2.png", "3.png"]
    assert [name for name in names if Exclusion((pattern,)).covers(name)] == excluded.split()


def test_index_takes_photos_without_captions(build, photos):
    (photos / "captions.csv").write_text(
        "filename,caption,split\n0.png,a circle,test\n2.png,a square,train\n"
    )
    assert build(photos).num_items == 6
    index = open_index("index")
    assert dict(index.items["0.png"].metadata) == {"caption": "a circle", "split": "test"}
    # The second file is listed by its name only.
    assert "2.png" in index.items and "sub/2.png" not in index.items
    assert not index.items["1.png"].metadata
    assert all(index.locate(item).read() for item in index.items.values())
    index.store.close()
    report = build(photos / "captions.csv", out="listed")
    assert (
        report.num_items == 2 and sum("got no entry" in problem for problem in report.skipped) == 4
    )
    assert len(open_image_collection(photos).images) == 6
    assert len(open_image_collection(photos / "captions.csv").images) == 2


def test_index_of_new_folder_names_reason_for_no_files(build, photos):
    for path in photos.rglob("*.png"):
        path.unlink()
    (photos / "a.png").symlink_to("nowhere")
    with pytest.raises(
        DataError,
        match=r"expected images or videos, got none .* The first of 1 problems: 'a\.png': it is a broken link",
    ):
        build(photos)
