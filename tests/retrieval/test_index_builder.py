"""Building, updating and searching indexes of folders and data sets, also after killed processes."""

import dataclasses
import hashlib
import io
import json
import os
import random
import shutil
import time
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tests.processes import FORKED
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.core.storage import disk
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.retrieval.build import encoding
from visavis.retrieval.build.default_index import index_if_images
from visavis.retrieval.build.index_builder import STAGES, IndexReport, build_index
from visavis.retrieval.build.index_queries import restore_queries
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.open_index import check_index, open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.server.image_cache import render_jpeg
from visavis.retrieval.source_files import list_source_files

ODD = {
    "gray.png": Image.new("L", (40, 30), 90),
    "deep.png": Image.fromarray(np.full((20, 20), 30_000, np.uint16)),
    "palette.gif": Image.new("P", (20, 20), 3),
    "print.jpg": Image.new("CMYK", (20, 20), (0, 90, 10, 0)),
    "see-through.png": Image.new("RGBA", (20, 20), (9, 9, 200, 40)),
}


@pytest.fixture
def photos(scenes, tmp_path):
    """Forty images in two folders."""
    folder = tmp_path / "photos"
    images = sorted((scenes / "images").iterdir())[:40]
    for number, image in enumerate(images):
        place = folder / ("2024" if number % 2 else "2025/spring")
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, place / image.name)
    return folder


def build(run, source, out, **options):
    return build_index(run, source, out, **{"progress": NoProgress()} | options)


def content(folder, store=None):
    """Items of an index, and their vectors."""
    index = open_index(folder, store=store)
    items = index.store.table().items()
    vectors = index.store.vectors([item.key for item in items])
    index.store.close()
    return items, vectors


def equal(first, second):
    """Equal items, and vectors up to the rounding of matrix products of other batch sizes."""
    return first[0] == second[0] and np.abs(first[1] - second[1]).max() < 1e-5


def test_index_stores_vectors_of_images(run, photos, tmp_path):
    built = build(run, photos, tmp_path / "index")
    items, vectors = content(tmp_path / "index")
    assert built.num_items == built.num_encoded == len(items) == 40
    assert [item.key for item in items] == sorted(
        path.relative_to(photos).as_posix() for path in photos.rglob("*.png")
    )
    expected = visavis.load(run).encode_images([photos / item.path for item in items]).numpy()
    assert np.abs(vectors - expected).max() < 1e-5
    index = open_index(tmp_path / "index")
    for item in items[:5]:
        [hit] = search_collection(index, SearchQuery(like=((1.0, item.key),)), top=1).hits
        assert hit.item == item
        assert hit.score == pytest.approx(1, abs=1e-5)


def test_index_reads_unusual_images_and_skips_bad_files(run, photos, tmp_path):
    for name, image in ODD.items():
        image.save(photos / name)
    frames = [Image.new("RGB", (20, 20), (value, 0, 0)) for value in (10, 200)]
    frames[0].save(photos / "moving.gif", save_all=True, append_images=frames[1:])
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "text.png").write_text("not an image")
    (photos / "notes.txt").write_text("ignored")
    (photos / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    built = build(run, photos, tmp_path / "index")
    assert built.num_items == 40 + len(ODD) + 1
    skipped = " ".join(built.skipped)
    assert len(built.skipped) == 3
    assert all(name in skipped for name in ("empty.jpg", "text.png", "gone.jpg"))
    assert ", 2 files left out, such as: " in check_index(tmp_path / "index").value
    again = build(run, photos, tmp_path / "index")
    assert (again.num_encoded, again.num_unchanged, len(again.skipped)) == (0, built.num_items, 3)


def test_index_of_a_served_folder_lists_what_is_left_out(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("phone.jxr", "a.xmp", "b.xmp"):
        (photos / name).write_bytes(b"content")
    progress, messages = NoProgress(), []
    progress.message = messages.append
    assert index_if_images(photos, str(run), progress) == Path("indexes/photos")
    left_out, others = messages[-2:]
    assert left_out.startswith(
        "Left out, 1: 'phone.jxr': expected a JPEG, PNG or other supported image, got a .jxr file."
    )
    assert left_out.endswith(f" List all with visavis index {photos}.")
    assert others == "2 other files: .xmp."


def test_index_turns_photos_upright(run, scenes, tmp_path):
    """All files show the same photo, stored in another orientation."""
    photos, upright = (
        tmp_path / "photos",
        Image.open(min((scenes / "images").iterdir())).convert("RGB").crop((0, 0, 40, 24)),
    )
    photos.mkdir()
    turns = {
        2: "FLIP_LEFT_RIGHT",
        3: "ROTATE_180",
        4: "FLIP_TOP_BOTTOM",
        5: "TRANSPOSE",
        6: "ROTATE_90",
        7: "TRANSVERSE",
        8: "ROTATE_270",
    }
    for orientation, turn in turns.items():
        stored, exif = upright.transpose(Image.Transpose[turn]), Image.Exif()
        exif[0x0112] = orientation
        stored.save(photos / f"{orientation}.png", exif=exif)
        stored.save(
            photos / f"{orientation}.tif", tiffinfo={0x0112: orientation}, compression="tiff_lzw"
        )
    build(run, photos, tmp_path / "index")
    items, vectors = content(tmp_path / "index")
    assert len(items) == 14
    assert np.abs(vectors - vectors[0]).max() < 1e-6
    assert len({item.dhash for item in items}) == 1
    index = open_index(tmp_path / "index")
    shown = {render_jpeg(index.locate(item), item, "thumbnail") for item in items}
    assert [Image.open(io.BytesIO(jpeg)).size for jpeg in shown] == [(40, 24)]
    with Image.open(photos / "8.tif") as opened:
        found = search_collection(index, SearchQuery(images=((1.0, opened),)), top=14).hits
    assert min(hit.score for hit in found) == pytest.approx(1, abs=1e-5)


def test_index_lists_photos_of_unsupported_formats(run, photos, tmp_path):
    for name in ("phone.JXR", "camera.wdp", "notes.txt"):
        (photos / name).write_bytes(b"content")
    built = build(run, photos, tmp_path / "index")
    assert built.num_items == 40
    expected = "expected a JPEG, PNG or other supported image, got a {} file. Convert it to JPEG."
    assert built.skipped == (
        f"'camera.wdp': {expected.format('.wdp')}",
        f"'phone.JXR': {expected.format('.jxr')}",
    )
    assert built.other_files == "1 other file: .txt"


@pytest.mark.parametrize("step", [10**9, 2 * 10**9], ids=["HFS+", "FAT"])
def test_index_reads_file_changed_within_a_step_of_time(run, tmp_path, step, monkeypatch):
    photo, start = tmp_path / "photos" / "0.bmp", 10**18
    photo.parent.mkdir()

    def build_at(now, color):
        monkeypatch.setattr(disk, "time", SimpleNamespace(time_ns=count(now).__next__))
        Image.new("RGB", (48, 48), color).save(photo)
        # A file of the same size and time, as on a drive that stores times in steps.
        os.utime(photo, ns=(start, start))
        return build(run, photo.parent, tmp_path / "index")

    assert build_at(start, "red").num_encoded == 1
    assert build_at(start + step // 2, "blue").num_encoded == 1
    assert build_at(start + step - 1000, "lime").num_encoded == 1
    # The file is read once more, and its vector is kept.
    later = [build_at(start + 3 * 10**9, "lime") for _ in range(2)]
    assert [(built.num_encoded, built.num_unchanged) for built in later] == [(0, 0), (0, 1)]
    (item,), _ = content(tmp_path / "index")
    assert item.modified_ns == start


def test_index_update_equals_new_index(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    images = sorted(photos.rglob("*.png"))
    shutil.move(images[0], photos / "elsewhere.png")
    images[1].unlink()
    shutil.copy(images[2], photos / "copy.png")
    Image.new("RGB", (48, 48), (200, 30, 30)).save(images[3])
    os.utime(images[4])
    first, second = images[5].read_bytes(), images[6].read_bytes()
    images[5].write_bytes(second)
    images[6].write_bytes(first)
    Image.new("RGB", (48, 48), (30, 30, 200)).save(photos / "new.png")
    built = build(run, photos, tmp_path / "index")
    assert (built.num_encoded, built.num_moved, built.num_removed, built.num_unchanged) == (
        2,
        5,
        1,
        34,
    )
    build(run, photos, tmp_path / "new")
    assert equal(content(tmp_path / "index"), content(tmp_path / "new"))
    assert build(run, photos, tmp_path / "index").num_unchanged == 41


def test_report_shows_where_the_time_went(run, photos, tmp_path):
    started = time.monotonic()
    report = build(run, photos, tmp_path / "index")
    took = time.monotonic() - started
    assert set(report.times) <= set(STAGES)
    assert sum(report.times.values()) == pytest.approx(report.seconds)
    assert 0.9 * took < report.seconds <= took
    assert {"model", "listing", "comparing", "reading", "encoding", "writing"} < set(report.times)
    files_seconds = sum(report.times[stage] for stage in ("reading", "encoding", "writing"))
    assert report.files_per_second == pytest.approx(40 / files_seconds)
    assert report.to_json()["times"] == report.times
    again = build(run, photos, tmp_path / "index")
    assert again.files_per_second is None and "files_per_second" not in again.to_json()


def test_printed_duration_names_the_longest_stages():
    times = {"model": 2.0, "reading": 30.0, "encoding": 60.0, "writing": 1.0, "other": 7.0}
    report = IndexReport(
        folder="ix",
        num_items=900,
        num_encoded=900,
        num_unchanged=0,
        num_moved=0,
        num_removed=0,
        skipped=(),
        seconds=100.0,
        times=times,
        files_per_second=9.89,
    )
    [table] = report.tables()
    assert table.notes[0] == (
        "900 items in the index. Files: 900 encoded. 100 s, 9.9 files/s: 60.0 s encoding, 30.0 s "
        "reading photos, 10.0 s other."
    )
    unchanged = dataclasses.replace(report, num_encoded=0, seconds=0.4, files_per_second=None)
    assert unchanged.tables()[0].notes[0] == "900 items in the index. Files: no changes. 0 s."


def test_index_removes_stale_items_after_crash(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    expected = content(tmp_path / "index")
    index = open_index(tmp_path / "index")
    item = expected[0][0]
    stale = dataclasses.replace(
        item,
        key=f"{item.path}#t=4,8",
        kind="moment",
        content="old",
        modified_ns=1,
        start=4.0,
        end=8.0,
    )
    index.store.add([stale], expected[1][:1])
    write_manifest(tmp_path / "index", dataclasses.replace(index.manifest, digest=None))
    index.store.close()
    build(run, photos, tmp_path / "index")
    assert equal(content(tmp_path / "index"), expected)


def test_index_of_data_set_has_splits_and_captions(run, scenes, tmp_path):
    built = build(run, scenes, tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert built.num_items == 70
    assert index.store.count(ItemFilter(metadata={"split": "test"})) == 10
    caption = next(
        item.metadata["caption"]
        for item in index.items.values()
        if item.metadata["split"] == "train"
    )
    best = search_collection(
        index,
        SearchQuery.from_text(caption),
        top=1,
        item_filter=ItemFilter(metadata={"split": "train"}),
    ).hits[0]
    assert best.item.metadata["caption"] == caption
    assert index.locate(best.item).read()


def test_search_index_filters(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    old = photos / "2024" / min(os.listdir(photos / "2024"))
    os.utime(old, (1e9, 1e9))
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    query = SearchQuery(like=((1.0, next(iter(index.items))),))
    assert all(
        hit.item.path.startswith("2025")
        for hit in search_collection(index, query, 40, ItemFilter(path="2025*")).hits
    )
    assert [
        hit.item.path
        for hit in search_collection(
            index, query, 40, ItemFilter(before=datetime.fromtimestamp(1.1e9, UTC))
        ).hits
    ] == [f"2024/{old.name}"]
    assert not search_collection(index, query, 40, ItemFilter(kind="moment")).hits


def test_search_index_combines_weighted_parts(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    first, second = list(index.items)[:2]
    both = search_collection(
        index, SearchQuery(like=((1.0, first), (1.0, second))), top=2, group_duplicates=False
    )
    assert {hit.item.key for hit in both.hits} == {first, second}
    away = search_collection(
        index, SearchQuery(like=((1.0, first), (-0.9, second))), top=40, group_duplicates=False
    )
    there = search_collection(
        index, SearchQuery(like=((1.0, first),)), top=40, group_duplicates=False
    )
    ranks = [[hit.item.key for hit in found.hits].index(second) for found in (there, away)]
    assert ranks[1] >= ranks[0]
    as_file = search_collection(
        index, SearchQuery(images=((1.0, photos / first),)), top=3, group_duplicates=False
    )
    assert [hit.item.key for hit in as_file.hits] == [hit.item.key for hit in there.hits[:3]]
    for invalid, text in (
        (SearchQuery(), "got only exclusions"),
        (SearchQuery(texts=((-1.0, "a circle"),)), "got only exclusions"),
        (SearchQuery.from_text(" "), "empty query"),
        (SearchQuery(like=((1.0, "nowhere.png"),)), "expected the key of an item"),
        (SearchQuery(like=((1.0, first), (-1.0, first))), "cancel out"),
    ):
        with pytest.raises(VisavisError, match=text):
            search_collection(index, invalid)


def test_search_index_groups_near_duplicates(run, photos, tmp_path):
    image = min(photos.rglob("*.png"))
    shutil.copy(image, photos / "copy.png")
    Image.open(image).convert("RGB").save(photos / "again.jpg", quality=100, subsampling=0)
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    query = SearchQuery(images=((1.0, image),))
    [best] = search_collection(index, query, top=1).hits
    assert {best.item.key, *best.duplicates} >= {
        "copy.png",
        "again.jpg",
        image.relative_to(photos).as_posix(),
    }
    grouped, plain = (
        search_collection(index, query, top=50),
        search_collection(index, query, top=50, group_duplicates=False),
    )
    assert len(plain.hits) == 42
    assert sum(1 + len(hit.duplicates) for hit in grouped.hits) == 42


def test_index_rejects_other_model_source_and_folder(run, photos, tmp_path, dual_encoders):
    build(run, photos, tmp_path / "index")
    other = next(path for path in dual_encoders.iterdir() if (path / "config.json").exists())
    with pytest.raises(RunError, match="fingerprint"):
        build(other, photos, tmp_path / "index")
    with pytest.raises(RunError, match="fingerprint"):
        visavis.indexes_move(tmp_path / "index", model=other)
    with pytest.raises(RunError, match="source: expected"):
        build(run, photos / "2024", tmp_path / "index")
    with pytest.raises(
        VisavisError,
        match=r"^moment_seconds: expected a number > 0, got 0\. Pass a length such as 4\.$",
    ):
        build(run, photos, tmp_path / "index", moment_seconds=0)
    with pytest.raises(RefusedOverwrite, match="expected a new folder or an index"):
        build(run, photos, photos)
    with pytest.raises(RunError, match="expected an index"):
        open_index(photos)
    with pytest.raises(DataError, match="expected images or videos"):
        (tmp_path / "empty").mkdir()
        build(run, tmp_path / "empty", tmp_path / "other")


def test_index_continues_where_its_creation_was_killed(run, photos, tmp_path):
    """A part of its database is left. A file of the user is not taken for one."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / ".index.lock").touch()
    for name in (".index.db.0a1b2c3d.part", "text-towers/.fingerprint.0a1b2c3d.part/graph"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"part")
    shutil.copytree(folder, tmp_path / "other")
    shutil.rmtree(folder / "text-towers")
    build(run, photos, folder)
    assert not list(folder.rglob("*.part"))
    (folder / "text-towers" / ".fingerprint.0a1b2c3d.part").mkdir(parents=True)
    build(run, photos, folder)
    assert not list(folder.rglob("*.part"))
    (tmp_path / "other" / "mine.part").touch()
    with pytest.raises(RefusedOverwrite, match="got other files"):
        build(run, photos, tmp_path / "other")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: restore_queries(folder, NoProgress()),
        lambda folder: visavis.indexes_calibrate(folder, "off"),
        lambda folder: visavis.indexes_correct(folder, "CSLS()"),
    ],
)
def test_wrong_folder_keeps_its_temporary_files(change, tmp_path):
    """Also files that have a name as ours: the folder is not an index."""
    (tmp_path / "mine.txt").write_text("mine")
    part = tmp_path / "sub" / ".film.mkv.0a1b2c3d.part"
    part.parent.mkdir()
    part.write_text("half of a film")
    with pytest.raises(VisavisError, match="expected an index"):
        change(tmp_path)
    assert part.read_text() == "half of a film"


def test_index_locate_rejects_links_outside_source(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    item = next(iter(index.items.values()))
    secret = tmp_path / "secret.png"
    (photos / item.path).rename(secret)
    (photos / item.path).symlink_to(secret)
    with pytest.raises(DataError, match="points outside"):
        index.locate(item).read()
    (photos / item.path).unlink()
    with pytest.raises(DataError, match=r"expected this file in .*, got none\. Update the index"):
        index.locate(item)


def test_index_with_pretrained_dual_encoder(dual_encoders, photos, tmp_path):
    model = next(
        path for path in sorted(dual_encoders.iterdir()) if (path / "config.json").exists()
    )
    assert build(model, photos, tmp_path / "index").num_items == 40
    assert search_collection(
        open_index(tmp_path / "index"), SearchQuery.from_text("a red circle")
    ).hits


def test_index_names_unlisted_files_and_unusable_captions(photos):
    images = sorted(photos.rglob("*.png"))
    first = images[0].relative_to(photos).as_posix()
    (photos / "captions.csv").write_text(f"filename,caption\n{first},a circle\n")
    collection = list_source_files(photos / "captions.csv")
    assert [file.path for file in collection.files] == [first]
    unlisted = sorted(image.relative_to(photos).as_posix() for image in images[1:])
    assert sorted(collection.skipped) == [
        f"{name!r}: expected it in the list of the data set, got no entry. Add it with a caption."
        for name in unlisted
    ]
    second = images[1].relative_to(photos).as_posix()
    rows = f"{first},a circle,train\n{second},a square,train\n{second},a square,test\n"
    (photos / "captions.csv").write_text(f"filename,caption,split\n{rows}")
    skipped = list_source_files(photos / "captions.csv").skipped
    assert not any(second in text and "got no entry" in text for text in skipped)
    assert [text for text in skipped if "got no entry" not in text] == [
        f"captions.csv:4: {second} has split test here and train in an earlier line"
    ], "no sentence that counts the others"
    (photos / "captions.csv").write_text(f"name;text\n{first};a circle\n")
    collection = list_source_files(photos)
    assert len(collection.files) == len(images) == 40
    [reason] = collection.skipped
    assert reason.startswith(
        f"The folder is indexed without its captions. {photos / 'captions.csv'}: expected a header "
        "with"
    )
    with pytest.raises(DataError) as error:
        list_source_files(photos / "nothing")
    assert "existing path" in str(error.value) and "visavis catalog formats" not in str(error.value)


@pytest.fixture
def large_photos(tmp_path):
    """Six JPEG images of 400 x 300 pixels, which are decoded at a reduced size by default."""
    folder = tmp_path / "large"
    folder.mkdir()
    for number, pixels in enumerate(
        np.random.default_rng(0).integers(0, 255, (6, 30, 40, 3), np.uint8)
    ):
        Image.fromarray(pixels).resize((400, 300)).save(folder / f"{number}.jpg")
    return folder


def test_index_keeps_full_decoding(dual_encoders, large_photos, tmp_path):
    photos, model = large_photos, dual_encoders / "clip"
    decoded = [Image.open(path).convert("RGB") for path in sorted(photos.iterdir())]
    expected = visavis.load(model).encode_images(decoded).numpy()
    differences = {}
    for full_decoding in (False, True):
        build(model, photos, tmp_path / f"{full_decoding}", full_decoding=full_decoding)
        differences[full_decoding] = np.abs(
            content(tmp_path / f"{full_decoding}")[1] - expected
        ).max()
    assert differences[True] < 1e-5 < differences[False]
    folder = tmp_path / "True"
    decoded[0].save(photos / "copy.png")
    assert build(model, photos, folder).num_encoded == 1
    [hit] = search_collection(
        open_index(folder),
        SearchQuery(images=((1.0, photos / "0.jpg"),)),
        top=1,
        group_duplicates=False,
    ).hits
    assert hit.score == pytest.approx(1, abs=1e-6)
    with pytest.raises(
        RunError,
        match=r"full_decoding: expected False, the value of this index, got True\. Make another index with --out\.$",
    ):
        build(model, photos, tmp_path / "False", full_decoding=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "clip"])
def test_index_is_equal_with_workers(
    kind, run, dual_encoders, photos, large_photos, tmp_path, monkeypatch
):
    """Workers read for a GPU, several batches and shards ahead."""
    monkeypatch.setattr(encoding, "READ_AHEAD", 4)
    monkeypatch.setattr(encoding, "SHARD_SIZE", 10)
    shutil.copytree(large_photos, photos / "large")
    (photos / "damaged.jpg").write_bytes(b"damaged")
    indexes, model = [], dual_encoders / "clip" if kind == "clip" else run
    for workers in (0, 2):
        [skipped] = build(model, photos, tmp_path / f"{workers}", workers=workers).skipped
        assert "damaged.jpg" in skipped
        indexes.append(content(tmp_path / f"{workers}"))
    assert indexes[0][0] == indexes[1][0]
    assert np.array_equal(indexes[0][1], indexes[1][1])


def test_pinned_batch_of_files_keeps_problems(run, photos, monkeypatch):
    (photos / "damaged.jpg").write_bytes(b"damaged")
    reader = encoding._FileReader.of_model(visavis.load(run))
    batch = reader._read_batch(list_source_files(photos).files)
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor + 0)
    pinned = batch.pin_memory()
    assert pinned.files is batch.files and pinned.pixels.equal(batch.pixels)
    assert [type(each) for each in pinned.files].count(encoding.UnreadableFile) == 1
    assert not isinstance(batch, (list, tuple))


def test_shard_on_ray_is_read_by_threads(run, photos, monkeypatch):
    """Each of several Ray actors encodes a shard, and would start workers of its own."""
    settings = []
    monkeypatch.setattr(
        encoding,
        "choose_readers",
        lambda setting, device, num_images: settings.append(setting) or 0,
    )
    encoder = encoding.RayEncoder(str(run), None, full_decoding=False, moment_seconds=4.0)
    number, shard = encoder.encode(3, list_source_files(photos).files[:5])
    assert (number, len(shard.items), settings) == (3, 5, [0])


def test_missing_encoder_is_not_an_unreadable_image(run, photos):
    model = visavis.load(run)
    model.processor = dataclasses.replace(
        model.processor, visual=EncoderSpec("visual", str(photos / "none"))
    )
    with pytest.raises(DataError, match=r"none: expected a folder with a config\.json"):
        encoding.encode_shard(model, list_source_files(photos).files, 4.0)


def run_index(run, photos, folder, store):
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    encoding.SHARD_SIZE = 4
    visavis.index(run, photos, out=folder, store=store)


def start_index(run, photos, folder, store):
    """Start an indexing process, and wait until it has made its folder. Before, there is nothing to
    corrupt.
    """
    process = FORKED.Process(target=run_index, args=(run, photos, folder, store))
    process.start()
    while not folder.exists() and process.is_alive():
        time.sleep(0.005)
    return process


def kill_repeatedly(start_undisturbed, start, moments, check):
    """Start and kill processes at moments from 0 to 1, the end of an undisturbed one. Check each
    with whether it was killed, and return how many were.
    """
    # Machines differ by factors, so that the time of the work is measured.
    process = start_undisturbed()
    began = time.monotonic()
    process.join()
    seconds = time.monotonic() - began
    killed = 0
    for moment in moments:
        process = start()
        process.join(moment * seconds)
        is_killed = process.is_alive()
        process.kill()
        process.join()
        killed += is_killed
        check(is_killed)
    return killed


def kill_indexing(run, photos, folder, moments, store):
    """Kill indexing processes repeatedly. Return how many were killed."""
    location = (store and folder.parent / store) or None

    def remove_complete(is_killed):
        # A complete index leaves nothing to interrupt. The next one starts from the beginning.
        if not is_killed:
            shutil.rmtree(folder)
            for path in [location] if location and location.exists() else []:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    timed_location = location and location.with_name(f"timed-{location.name}")
    return kill_repeatedly(
        partial(start_index, run, photos, folder.parent / "timed", timed_location),
        partial(start_index, run, photos, folder, location),
        moments,
        remove_complete,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "store"),
    [
        (3, "items"),
        pytest.param(20, "", marks=pytest.mark.long),
        pytest.param(20, "items.db", marks=pytest.mark.long),
    ],
)
def test_index_is_complete_after_repeated_kills(run, photos, tmp_path, times, store):
    moments = random.Random(times)
    assert kill_indexing(
        run, photos, tmp_path / "index", [moments.uniform(0.0, 0.9) for _ in range(times)], store
    )
    location = tmp_path / store if store else None
    build(run, photos, tmp_path / "index", store=location)
    build(run, photos, tmp_path / "undisturbed")
    assert equal(content(tmp_path / "index", location), content(tmp_path / "undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.long)])
def test_kills_lose_no_indexed_file(run, photos, scenes, tmp_path, times):
    """An update is killed at a random moment, after files were added, moved, changed and removed."""
    random_moments = random.Random(times)
    folder = tmp_path / "index"
    build(run, photos, folder)
    spare = sorted((scenes / "images").iterdir())[40:]
    killed = 0
    for number in range(times):
        indexed = {item.content for item in open_index(folder).items.values()}
        files = sorted(photos.rglob("*.png"))
        moved, removed, changed = random_moments.sample(files, 3)
        moved.rename(photos / f"moved-{number}.png")
        removed.unlink()
        changed.write_bytes(random_moments.choice(spare).read_bytes() + bytes([number]))
        shutil.copy(random_moments.choice(spare), photos / f"new-{number}.png")
        kept = indexed & set(map(hash_of, photos.rglob("*.png")))
        process = FORKED.Process(target=run_index, args=(run, photos, folder, None))
        process.start()
        process.join(random_moments.uniform(0.0, 1.0))
        killed += process.is_alive()
        process.kill()
        process.join()
        opened = open_index(folder)
        # No manual step: the index opens, and has all files that it had and that still exist.
        assert kept <= {item.content for item in opened.items.values()}, number
        assert search_collection(opened, SearchQuery.from_text("a red circle"), 5).hits
        opened.store.close()
        if random_moments.random() < 0.5:
            build(run, photos, folder)
    assert killed >= times // 4
    # Otherwise the items of a folder that became empty stay, as if its drive were not mounted.
    build(run, photos, folder, remove_missing=True)
    build(run, photos, tmp_path / "undisturbed")
    assert equal(content(folder), content(tmp_path / "undisturbed"))


def hash_of(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_index_on_ray_equals_local_index(run, photos, tmp_path):
    build(run, photos, tmp_path / "ray", engine="ray", workers=2)
    build(run, photos, tmp_path / "local")
    assert equal(content(tmp_path / "ray"), content(tmp_path / "local"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_index_on_ray_keeps_full_decoding(dual_encoders, large_photos, tmp_path):
    for name, settings in {
        "ray": {"engine": "ray", "workers": 2, "full_decoding": True},
        "full": {"full_decoding": True},
        "reduced": {},
    }.items():
        build(dual_encoders / "clip", large_photos, tmp_path / name, **settings)
    assert equal(content(tmp_path / "ray"), content(tmp_path / "full"))
    assert not equal(content(tmp_path / "ray"), content(tmp_path / "reduced"))


def test_index_skips_links_outside_source(run, photos, tmp_path):
    """Links inside the source are followed."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    images = sorted(photos.rglob("*.png"))
    for image in images[:3]:
        shutil.copy(image, outside / "deep")
    (photos / "trip").symlink_to(outside)
    (photos / "one.png").symlink_to(outside / "deep" / images[0].name)
    (photos / "again.png").symlink_to(images[1])
    built = build(run, photos, tmp_path / "index")
    assert built.num_items == 41
    assert sorted(
        message.split(": it is a link to a location outside ")[0] for message in built.skipped
    ) == ["'one.png'", "'trip'"]
    index = open_index(tmp_path / "index")
    assert all(index.locate(item).path.is_file() for item in index.items.values())
    (tmp_path / "link").symlink_to(photos)
    assert build(run, tmp_path / "link", tmp_path / "other").num_items == 41


def test_index_clamps_modification_times(run, photos, tmp_path):
    late, early = sorted(photos.rglob("*.png"))[:2]
    os.utime(late, ns=(0, 2**63 + 10**12))
    if late.stat().st_mtime_ns < 2**63:
        pytest.skip("this file system has no such times")
    os.utime(early, ns=(0, -(10**9)))
    build(run, photos, tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert index.items[late.relative_to(photos).as_posix()].modified_ns == 2**63 - 1
    assert index.items[early.relative_to(photos).as_posix()].modified_ns == -(10**9)
    assert build(run, photos, tmp_path / "index").num_unchanged == 40


def test_index_resolves_relative_store_path(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(run, photos, "index", store="vectors")
    assert visavis.search("index", "a red circle", store="vectors").hits
    assert (tmp_path / "vectors" / "index.db").is_file()
    assert not (tmp_path / "index" / "vectors").exists()
    monkeypatch.chdir(photos)
    assert build(run, photos, tmp_path / "index", store="../vectors/../vectors").num_unchanged == 40
    assert len(content(tmp_path / "index", tmp_path / "vectors")[0]) == 40


@pytest.mark.parametrize("store", ["vectors", "deep/vectors", "."])
def test_moved_index_keeps_explicit_store_inside(store, run, photos, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "index")
    build(run, photos, tmp_path / "index", store=tmp_path / "link" / store)
    assert read_manifest(tmp_path / "index").store == store
    moved = (tmp_path / "index").rename(tmp_path / "moved")
    assert visavis.search(moved, "a red circle").hits
    assert (
        build(run, photos, moved, store=moved / store).num_unchanged
        == build(run, photos, moved).num_unchanged
        == 40
    )


@pytest.mark.slow
def test_search_opens_outside_store_only_if_confirmed(run, photos, tmp_path):
    """An index from elsewhere may name any location. Opening it neither creates nor changes
    anything there.
    """
    build(run, photos, tmp_path / "index")
    manifest, other = read_manifest(tmp_path / "index"), tmp_path / "other"
    other.mkdir()
    (tmp_path / "index" / "link").symlink_to(other)
    for store in (
        str(other),
        "../other",
        str(other / "new"),
        str(other / "new.db"),
        "s3://bucket/x",
        "http://127.0.0.1:9",
        "link",
    ):
        write_manifest(tmp_path / "index", dataclasses.replace(manifest, store=store))
        for confirmed in (None, tmp_path / "index"):
            with pytest.raises(
                RunError, match="If you trust the index, confirm its store with --store "
            ):
                visavis.search(tmp_path / "index", "a red circle", store=confirmed)
            with pytest.raises(
                RunError, match="If you trust the index, confirm its store with --store "
            ):
                build(run, photos, tmp_path / "index")
    for location in (other, other / "new", other / "new.db"):
        write_manifest(tmp_path / "index", dataclasses.replace(manifest, store=str(location)))
        with pytest.raises(RunError, match=r"the store of the index cannot be used: .*expected a"):
            visavis.search(tmp_path / "index", "a red circle", store=location)
    assert not list(other.iterdir())
    shutil.copytree(tmp_path / "index", other / "copy", symlinks=True)
    write_manifest(tmp_path / "index", dataclasses.replace(manifest, store=str(other / "copy")))
    assert visavis.search(tmp_path / "index", "a red circle", store=other / "copy").hits


def test_search_reports_unknown_words_of_index(recorder, run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    visavis.search(
        tmp_path / "index",
        "a red circle on a zeppelin",
        without="xylophone circle",
        progress=recorder,
    )
    unknown = "The model does not know: "
    assert recorder.messages == [f"{unknown}zeppelin", f"{unknown}xylophone"]
    visavis.search(
        tmp_path / "index", like=next(iter(open_index(tmp_path / "index").items)), progress=recorder
    )
    assert len(recorder.messages) == 2


def test_search_rerank_puts_missing_images_last(recorder, run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    whole = visavis.search(
        tmp_path / "index", "a red circle", rerank=run, top=6, filter={"duplicates": "show"}
    )
    (photos / whole[0].name).unlink()
    found = visavis.search(
        tmp_path / "index",
        "a red circle",
        rerank=run,
        top=40,
        filter={"duplicates": "show"},
        progress=recorder,
    )
    assert [hit.name for hit in found][:5] == [hit.name for hit in whole][1:]
    assert found[-1].name == whole[0].name
    [message] = recorder.messages
    assert whole[0].name in message
    assert "Update the index" in message


def test_index_search_and_classify_commands(run, photos, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    report = json.loads(invoke("index", run, photos, "--out", tmp_path / "index", "--json").stdout)
    assert report["num_items"] == 40
    found = json.loads(
        invoke("search", tmp_path / "index", "a red circle", "--top", 3, "--json").stdout
    )
    assert len(found["hits"]) == 3
    image = next(photos.rglob("*.png"))
    alike = json.loads(invoke("search", tmp_path / "index", "--image", image, "--json").stdout)
    assert alike["hits"][0]["name"] == image.relative_to(photos).as_posix()
    (tmp_path / "labels.txt").write_text("a red circle\na blue square\n")
    labels = json.loads(
        invoke("classify", tmp_path / "index", image, tmp_path / "labels.txt", "--json").stdout
    )
    assert len(labels["texts"]) == 2
    rejected = invoke("search", run, "--image", image)
    assert "expected an index" in str(rejected.exception)
