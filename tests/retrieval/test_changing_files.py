"""Files that change while they are indexed: an item is one content, with its size and time."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import threading
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.videos import random_clip, write_video

from visavis.core.errors import DataError
from visavis.core.progress import NoProgress
from visavis.data.capture_time import TAKEN
from visavis.retrieval.build import file_changes
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.items import CHECKSUM, IndexItem
from visavis.retrieval.open_index import open_index
from visavis.retrieval.source_files import SourceFile, list_source_files
from visavis.retrieval.stores.item_table import ItemTable


class AfterListing(NoProgress):
    """Calls a function when the files of a source are listed."""

    def __init__(self, change):
        self.change = change

    @contextmanager
    def activity(self, task):
        yield
        if task == "listing files":
            self.change()


def noise(seed, side=40):
    """A PNG of random pixels, whose size depends on its side."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(noise(number))
    return folder


def update(run, source, change=lambda: None):
    return build_index(run, source, source.parent / "index", progress=AfterListing(change))


def items(source):
    index = open_index(source.parent / "index")
    found = {item.key: item for item in index.store.table().items()}
    index.store.close()
    return found


def digest(content):
    return hashlib.sha256(content).hexdigest()[:32]


def replace_image(folder):
    (folder / "0.png").write_bytes(noise(10, side=50))


def replace_by_known_content(folder):
    """The content of another file, which is in the index."""
    shutil.copy(folder / "1.png", folder / "0.png")


def replace_clip(folder):
    frames = np.random.default_rng(1).integers(0, 256, (20, 48, 48, 3), np.uint8)
    write_video(folder / "0.mp4", frames)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("0.png", replace_image),
        ("0.png", replace_by_known_content),
        ("0.mp4", replace_clip),
    ],
)
def test_item_is_content_that_changed_after_listing(run, photos, name, change):
    if name == "0.mp4":
        pytest.importorskip("av", reason="PyAV is not installed: pip install 'visavis[video]'")
        random_clip(photos / name)
    update(run, photos)
    # Known content is looked up for files of a stored size only.
    os.utime(photos / name, (10**9, 10**9))
    report = update(run, photos, lambda: change(photos))
    assert report.num_encoded + report.num_moved == 1
    status = os.stat(photos / name)
    changed = [item for item in items(photos).values() if item.path == name]
    assert changed
    for item in changed:
        assert item.content == digest((photos / name).read_bytes())
        assert (item.size, item.modified_ns) == (status.st_size, status.st_mtime_ns)
    assert update(run, photos).num_encoded == 0


def test_archive_changed_after_listing_is_read_at_next_update(run, photos):
    def write_archive(seeds):
        with tarfile.open(photos / "train-0.tar", "w") as archive:
            for seed in seeds:
                for name, content in ((f"{seed}.png", noise(seed)), (f"{seed}.txt", b"a star")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    for path in photos.iterdir():
        path.unlink()
    write_archive((1, 2))
    update(run, photos, lambda: write_archive((2, 1)))
    update(run, photos)
    assert {item.key.rpartition("/")[2]: item.content for item in items(photos).values()} == {
        f"{seed}.png": digest(noise(seed)) for seed in (1, 2)
    }


def test_index_reads_whole_contents_of_file_that_changes(run, photos):
    versions = [noise(seed, side) for seed, side in ((1, 300), (2, 310), (3, 320))]
    sizes = {digest(content): len(content) for content in versions}
    ended = threading.Event()

    def write():
        while not ended.is_set():
            for content in versions:
                # In two parts, so that a reader may find one of them.
                with (photos / "0.png").open("wb") as file:
                    file.write(content[: len(content) // 2])
                    file.flush()
                    file.write(content[len(content) // 2 :])
                ended.wait(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            update(run, photos)
            found = items(photos).get("0.png")
            assert found is None or sizes.get(found.content) == found.size
    finally:
        ended.set()
        writer.join()
    update(run, photos)
    assert items(photos)["0.png"].content == digest((photos / "0.png").read_bytes())
    assert len(items(photos)) == 3


@pytest.mark.parametrize("is_damaged", [False, True])
def test_file_that_changes_at_each_read_is_a_problem_of_now(photos, is_damaged):
    """A half-written file is not damaged, so that the next update reads it again."""
    file = list_source_files(photos).files[0]

    def read_and_change(current):
        content = current.location.read()
        (photos / "0.png").write_bytes(content + b"0")
        if is_damaged:
            raise DataError("image 0.png is damaged.")
        return content

    with pytest.raises(DataError, match=r"^0\.png: .* one that changes while it is read\. Run"):
        file.read_unchanged(read_and_change)
    assert file.read_unchanged(lambda current: current.size) == (photos / "0.png").stat().st_size


def test_file_that_changes_once_is_read_again(photos):
    file = list_source_files(photos).files[0]
    read = []

    def read_and_change_once(current):
        read.append(current.size)
        if len(read) == 1:
            (photos / "0.png").write_bytes(noise(5, side=60))
        return current.location.read()

    assert file.read_unchanged(read_and_change_once) == noise(5, side=60)
    assert read == [len(noise(0)), len(noise(5, side=60))]


PATHS = ("0", "a", "a b", "a/b", "b", "clip.mp4", "é", "𝄞", "￿")
STATES = st.tuples(st.integers(0, 1), st.integers(-1, 1))
METADATA = st.sampled_from([{}, {"split": "train"}, {TAKEN: "2020-01-02T03:04:05.000"}])


@given(
    st.dictionaries(st.sampled_from(PATHS), st.tuples(STATES, METADATA)),
    st.dictionaries(
        st.sampled_from(PATHS), st.lists(st.tuples(STATES, METADATA), min_size=1, max_size=2)
    ),
    st.integers(1, 4),
)
def test_comparison_equals_a_comparison_of_all_items(listed, stored, files_at_once):
    """Blocks of files and items give the result of comparing each file with each of its items."""
    # A listing is in the order of paths.
    listed = dict(sorted(listed.items()))
    files = [
        SourceFile(path, path, None, size, time, metadata)
        for path, ((size, time), metadata) in listed.items()
    ]
    items = [
        IndexItem(
            f"{path}#{number}",
            path,
            "video" if len(own) > 1 else "image",
            "",
            size,
            time,
            start=float(number) if len(own) > 1 else None,
            metadata=metadata,
        )
        for path, own in stored.items()
        for number, ((size, time), metadata) in enumerate(own)
    ]
    table = ItemTable.in_memory(item.to_row() | {CHECKSUM: 0} for item in items)
    with patch.object(file_changes, "FILES_COMPARED_AT_ONCE", files_at_once):
        compared = file_changes._compare_with_items(table, files)

    def is_unchanged(path):
        # The time that was read from a file is not given by a table.
        given = {TAKEN: ""} if TAKEN not in listed[path][1] else {}
        [state, metadata] = listed[path]
        return path in stored and all(
            own_state == state
            and {name: value for name, value in own.items() if name not in given} == metadata
            for own_state, own in stored[path]
        )

    assert [file.path for file in compared.changed] == [
        path for path in listed if not is_unchanged(path)
    ]
    assert sorted(compared.absent_paths) == sorted(stored.keys() - listed.keys())
    assert compared.num_unchanged == len(listed) - len(compared.changed)
    assert compared.num_stored == len(stored)
