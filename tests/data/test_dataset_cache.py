"""A data set that was opened before: the cache returns what reading the files again would, after any
change of them.
"""

from __future__ import annotations

import os
import random
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from visavis.core.errors import DataError
from visavis.core.storage import cache, disk
from visavis.data import dataset_cache, dataset_reader
from visavis.data.dataset import ContentFingerprint, Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import ByteRange
from visavis.data.image_validation import open_valid_dataset


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of files that changed a moment ago, too. Each test has its own cache."""
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset_cache, "SAFE_AGE_S", -1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for number in range(4):
        _write_image(folder / f"{number}.png", number)
    _write_list(folder, [(f"{number}.png", f"a dog {number}") for number in range(4)])
    return folder


def _write_image(path: Path, color: int) -> None:
    Image.new("RGB", (8, 8), (color, 0, 0)).save(path)


def _write_list(folder: Path, rows: list[tuple[str, str]]) -> None:
    lines = ["filename,caption", *(f"{name},{caption}" for name, caption in rows)]
    (folder / "captions.csv").write_text("\n".join(lines) + "\n")


def _content(path: Path, *, decode_images: bool = False, skip_bad: bool = False) -> object:
    """All that a data set holds, or the message of its error."""
    try:
        data = (open_valid_dataset if decode_images else open_dataset)(path, skip_bad=skip_bad)
    except DataError as error:
        return str(error)
    values = vars(data).copy()
    arrays = ("image_of", "image_origin", "caption_origin")
    return {
        key: value.tolist() if key in arrays and value is not None else value
        for key, value in values.items()
        if key in Dataset.__dataclass_fields__
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Sources that were read, not taken from the cache."""
    sources: list[Path] = []
    read = dataset_reader.list_source
    monkeypatch.setattr(
        dataset_reader,
        "list_source",
        lambda kind, source, **options: (sources.append(source), read(kind, source, **options))[1],
    )
    return sources


def test_unchanged_data_set_is_read_once(folder: Path, reads: list[Path]) -> None:
    first = _content(folder, decode_images=True)
    dataset_cache._read.cache_clear()
    assert _content(folder, decode_images=True) == first
    assert len(reads) == 1


def test_options_and_the_current_folder_have_their_own_entries(
    folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _content(folder)
    _content(folder, decode_images=True)
    monkeypatch.chdir(folder.parent)
    assert _content(Path("photos")) == _content(Path("photos"))
    assert len(reads) == 3


def test_relative_path_is_found_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    open_dataset("photos")
    open_dataset("photos")
    monkeypatch.chdir(folder)
    for image in open_dataset(folder).images:
        assert image.read()


def test_cache_is_used_only_after_files_are_old_enough(
    folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_cache, "SAFE_AGE_S", 3600.0)
    _content(folder)
    _content(folder)
    assert len(reads) == 2


@pytest.mark.parametrize("step", [10**9, 2 * 10**9], ids=["HFS+", "FAT"])
def test_content_changes_within_a_step_of_time(tmp_path, step, monkeypatch):
    file, start = tmp_path / "0.bmp", 10**18
    times, contents = range(start, start + step, step // 4), set()
    for number, now in enumerate(times):
        monkeypatch.setattr(disk, "time", SimpleNamespace(time_ns=count(now).__next__))
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
        # A file of the same size and time, as on a drive that stores times in steps.
        os.utime(file, ns=(start, start))
        fingerprint = ContentFingerprint.compute({"0.bmp": ByteRange(file)})
        contents.add(fingerprint.content_hash)
    assert len(contents) == len(times)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1.5, 2.5, -1.5, -2.5])
@pytest.mark.parametrize("fraction", [0, 1])
def test_time_of_recent_file_in_whole_seconds_is_new(tmp_path, seconds, fraction, monkeypatch):
    modified = 10**18 + fraction
    (tmp_path / "file").write_bytes(b"")
    os.utime(tmp_path / "file", ns=(modified, modified))
    clock = count(modified + int(seconds * 1e9), 5000)
    monkeypatch.setattr(disk, "time", SimpleNamespace(time_ns=clock.__next__))
    found = [cache.modified_ns(os.stat(tmp_path / "file")) for _ in range(3)]
    if fraction or abs(seconds) > 2:
        assert found == [modified] * 3
    else:
        assert len({modified, *found}) == 4
        assert all(0 < time_ns - modified <= 10**6 for time_ns in found)


@pytest.mark.parametrize("seed", range(6))
def test_cache_equals_a_new_reading_after_any_change(
    folder: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, rows = random.Random(seed), [(f"{number}.png", f"a dog {number}") for number in range(4)]
    cached, time_ns = str(tmp_path / "cache"), 10**18
    for step in range(14):
        file = folder / draw.choice(["", "sub", ".hidden"]) / f"{draw.randrange(6)}.png"
        file.parent.mkdir(exist_ok=True)
        change = draw.choice(["write", "remove", "break", "caption", "row", "text", "nothing"])
        if change == "write":
            _write_image(file, draw.randrange(250))
        elif change == "remove":
            file.unlink(missing_ok=True)
        elif change == "break":
            file.write_bytes(b"no image")
        elif change == "caption":
            row = draw.randrange(len(rows))
            rows[row] = rows[row][0], f"a cat {draw.randrange(10)}"
        elif change == "row":
            rows.append((file.relative_to(folder).as_posix(), "one more"))
        elif change == "text":
            (folder / "notes.txt").write_text("x" * step)
        if change in ("caption", "row"):
            _write_list(folder, rows)
        for path in (file, folder / "captions.csv"):
            if path.exists() and change != "nothing":
                os.utime(path, ns=(time_ns + step, time_ns + step))
        options = {"skip_bad": draw.random() < 0.7, "decode_images": draw.random() < 0.5}
        monkeypatch.setenv("VISAVIS_CACHE", cached)
        if draw.random() < 0.5:
            dataset_cache._read.cache_clear()
        from_cache = _content(folder, **options)
        monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / f"new-{step}"))
        assert from_cache == _content(folder, **options), (step, change, file)


def test_missing_images_are_searched_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "0.png").rename(tmp_path / "0.png")
    assert len(open_dataset(folder, skip_bad=True).images) == 3
    monkeypatch.setenv("VISAVIS_IMAGE_ROOTS", str(tmp_path))
    assert len(open_dataset(folder, skip_bad=True).images) == 4
    monkeypatch.delenv("VISAVIS_IMAGE_ROOTS")
    assert len(open_dataset(folder, skip_bad=True).images) == 3


def test_archives_and_rows_of_features_survive(folder: Path) -> None:
    import tarfile

    with tarfile.open(folder / "more.tar", "w") as archive:
        archive.add(folder / "3.png", "3.png")
    (folder / "3.png").unlink()
    _write_list(folder, [("1.png", ""), *((f"{n}.png", f"dog {n}") for n in (0, 2, 3))])
    first = open_dataset(folder, skip_bad=True)
    dataset_cache._read.cache_clear()
    second = open_dataset(folder, skip_bad=True)
    assert first is not second
    assert np.array_equal(first.image_rows, second.image_rows)
    assert [image.read() for image in first.images] == [image.read() for image in second.images]


def test_damaged_entry_is_computed_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _content(folder)
    (entry,) = (folder.parent / "cache" / "datasets").iterdir()
    entry.write_text(entry.read_text().replace("a dog 1", "a dog 7"))
    assert _content(folder) == first
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("place", ["link", "hidden folder"])
def test_files_that_are_not_scanned_are_read_again(
    place: str, folder: Path, tmp_path: Path, reads: list[Path]
) -> None:
    if place == "link":  # as in the cache of the Hugging Face Hub
        (folder / "captions.csv").rename(tmp_path / "list")
        (folder / "captions.csv").symlink_to(tmp_path / "list")
    else:
        (folder / ".hidden").mkdir()
        (folder / "0.png").rename(folder / ".hidden" / "0.png")
        _write_list(folder, [(".hidden/0.png", "a dog"), ("1.png", "a dog")])
    _content(folder)
    _content(folder)
    assert len(reads) == 2
