"""Reports of users of photo libraries about folders: drives that go offline, permissions,
thumbnails of storage devices, moved files.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image
from tests.permissions import as_ordinary_user
from tests.platforms import posix

import visavis
from visavis.data.formats.image_files import scan_folder
from visavis.retrieval.source_files import list_source_files

needs_permissions = pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")


def save(*paths: Path) -> None:
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * number, 255 - 20 * number, 90)).save(path)


@pytest.fixture
def library(tmp_path):
    save(
        *(
            tmp_path / "library" / folder / f"{number}.png"
            for number, folder in enumerate(("a", "a", "b", "b"))
        )
    )
    return tmp_path / "library"


@pytest.fixture
def update(dual_encoders, library, tmp_path):
    return lambda **options: visavis.index(
        dual_encoders / "clip", library, out=tmp_path / "index", **options
    )


def listed(folder: Path) -> list[str]:
    return [file.path for file in list_source_files(folder).files]


@pytest.mark.report(
    "immich-app/immich#17290",
    "the drive went offline, and everything was read again when it was back",
)
@pytest.mark.report(
    "thielepaul/photoprism-mobile#137",
    "the drive was not mounted after a restart, and the library was empty",
)
def test_library_survives_drive_that_goes_offline(update, library, tmp_path):
    update()
    library.rename(tmp_path / "drive")
    library.mkdir()
    report = update()
    assert (report.num_items, report.num_kept) == (4, 4)
    library.rmdir()
    (tmp_path / "drive").rename(library)
    report = update()
    assert (report.num_encoded, report.num_unchanged) == (0, 4)


@posix
@pytest.mark.report(
    "photoprism/photoprism#2299",
    "an update without access to the folder marked all files as deleted",
)
@needs_permissions
def test_update_without_access_deletes_nothing(update, library):
    update()
    library.chmod(0)
    with as_ordinary_user():
        report = update()
    library.chmod(0o755)
    assert report.num_items == 4 and "Permission denied" in report.warnings[0]


@pytest.mark.report(
    "photoprism/photoprism#3426", "files that were really deleted stay, because the folder is empty"
)
def test_deleted_library_is_removed_on_request(update, library, tmp_path):
    update()
    for path in library.rglob("*.png"):
        path.unlink()
    assert "visavis indexes prune" in update().warnings[0]
    assert visavis.indexes_prune(tmp_path / "index").num_items == 0


@pytest.mark.report("photoprism/photoprism#1010", "deleted folders stay in the index")
def test_deleted_folder_is_removed(update, library):
    update()
    for path in (library / "a").iterdir():
        path.unlink()
    (library / "a").rmdir()
    assert update().removed == ("a/0.png", "a/1.png")


@pytest.mark.report("photoprism/photoprism#1341", "a renamed folder must not be read again")
@pytest.mark.report("photoprism/photoprism#568", "moved files cannot be indexed again")
def test_renamed_folder_keeps_vectors(update, library):
    update()
    (library / "a").rename(library / "c")
    report = update()
    assert (report.num_encoded, report.num_moved, report.num_items) == (0, 2, 4)


@pytest.mark.report("immich-app/immich#5995", "new exclude patterns do not apply to indexed files")
def test_new_pattern_removes_indexed_files(update):
    update()
    assert update(exclude="a").removed == ("a/0.png", "a/1.png")


@posix
@pytest.mark.report("immich-app/immich#13253", "folders after one without permission are not read")
@pytest.mark.report(
    "immich-app/immich#16644", "unrelated folders are left out after a permission error"
)
@pytest.mark.report("jellyfin/jellyfin#2402", "one folder without permission ends the scan")
@needs_permissions
def test_folders_after_one_without_permission_are_read(library):
    (library / "a").chmod(0)
    with as_ordinary_user():
        collection = list_source_files(library)
    (library / "a").chmod(0o755)
    assert [file.path for file in collection.files] == ["b/2.png", "b/3.png"]
    assert collection.skipped[0].startswith("'a': the folder cannot be read: Permission denied.")


@posix
@pytest.mark.report(
    "ajslater/codex#795", "the recycle bin of a storage device without permission ends the scan"
)
@pytest.mark.report("navidrome/navidrome#328", "lost+found without permission ends the scan")
@pytest.mark.report(
    "photoview/photoview#475", "System Volume Information without permission ends the scan"
)
@pytest.mark.report("immich-app/immich#15515", "a hidden folder without permission ends the scan")
@needs_permissions
@pytest.mark.parametrize(
    "name", ["#recycle", "lost+found", "System Volume Information", ".luckybackup-snaphots"]
)
def test_system_folder_without_permission_is_excluded(library, name):
    (library / name).mkdir(mode=0)
    with as_ordinary_user():
        collection = list_source_files(library)
    assert len(collection.files) == 4 and collection.excluded == (name,) and not collection.skipped


@pytest.mark.report("immich-app/immich#7980", "thumbnails of a storage device become photos")
@pytest.mark.report("LibrePhotos/librephotos#64", "thumbnails in @eaDir become photos")
@pytest.mark.report("simulot/immich-go#319", "SYNOFILE_THUMB_M.jpg becomes a photo")
def test_thumbnails_of_storage_device_are_excluded(library):
    save(library / "a" / "@eaDir" / "0.png" / "SYNOFILE_THUMB_M.jpg")
    assert len(listed(library)) == 4


@pytest.mark.report("karrick/godirwalk#64", "a link to a folder above is followed without end")
@pytest.mark.report("twisted/twisted#3098", "a link to a folder above is followed without end")
def test_link_to_folder_above_ends(library):
    (library / "a" / "up").symlink_to(library)
    assert len(scan_folder(library).files) == 4


@pytest.mark.report(
    "s3tools/s3cmd#23",
    "a link to a folder in the same place is not a loop, and its files are left out",
)
def test_link_to_neighbor_is_read_once(library):
    (library / "main").symlink_to(library / "b")
    assert listed(library) == ["a/0.png", "a/1.png", "b/2.png", "b/3.png"]


@pytest.mark.report("Georgefwt/AquaLoRA#8", "images without a row in metadata.jsonl are an error")
@pytest.mark.report(
    "jeremykawahara/derm7pt#11", "the table has fewer rows than the folder has images"
)
def test_images_without_row_in_table_are_indexed(library):
    (library / "metadata.jsonl").write_text('{"file_name": "a/0.png", "text": "a circle"}\n')
    assert len(listed(library)) == 4
    assert list_source_files(library).files[0].metadata["caption"] == "a circle"
