"""Indexes of real folders by a real model: what they hold, how they follow their folder, and that no death leaves a wrong one."""

import dataclasses
import json
import os
import random
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from tests.processes import FORKED
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.errors import DataError, RefusedOverwrite, RunError, VisavisError
from visavis.progress import Silent
from visavis.retrieval import engines
from visavis.retrieval.building import build_index
from visavis.retrieval.index import Index
from visavis.retrieval.item import Where
from visavis.retrieval.searching import Query, search
from visavis.retrieval.sources import open_source

ODD = {
    "gray.png": Image.new("L", (40, 30), 90),
    "deep.png": Image.fromarray(np.full((20, 20), 30_000, np.uint16)),
    "palette.gif": Image.new("P", (20, 20), 3),
    "print.jpg": Image.new("CMYK", (20, 20), (0, 90, 10, 0)),
    "see-through.png": Image.new("RGBA", (20, 20), (9, 9, 200, 40)),
}


@pytest.fixture
def photos(scenes, tmp_path):
    """Forty pictures in two folders."""
    folder = tmp_path / "photos"
    pictures = sorted((scenes / "images").iterdir())[:40]
    for number, picture in enumerate(pictures):
        place = folder / ("2024" if number % 2 else "2025/spring")
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, place / picture.name)
    return folder


def build(run, source, out, **options):
    return build_index(run, source, out, progress=Silent(), **options)


def content(folder):
    """What an index holds: its items, and their vectors."""
    index = Index.open(folder)
    items = index.store.items()
    vectors = index.store.vectors([item.key for item in items])
    index.store.close()
    return items, vectors


def same(first, second):
    """Equal items, and vectors but for the rounding of products in batches of other sizes."""
    return first[0] == second[0] and np.abs(first[1] - second[1]).max() < 1e-5


def test_every_picture_has_its_vector_and_finds_itself(run, photos, tmp_path):
    built = build(run, photos, tmp_path / "index")
    items, vectors = content(tmp_path / "index")
    assert built.items == built.encoded == len(items) == 40
    assert [item.key for item in items] == sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    expected = visavis.load(run).encode_images([photos / item.path for item in items]).numpy()
    assert np.abs(vectors - expected).max() < 1e-5
    index = Index.open(tmp_path / "index")
    for item in items[:5]:
        [hit] = search(index, Query(like=((1.0, item.key),)), top=1).hits
        assert hit.item == item
        assert hit.score == pytest.approx(1, abs=1e-5)


def test_odd_pictures_are_read_and_bad_files_are_named_and_passed_over(run, photos, tmp_path):
    for name, picture in ODD.items():
        picture.save(photos / name)
    frames = [Image.new("RGB", (20, 20), (value, 0, 0)) for value in (10, 200)]
    frames[0].save(photos / "moving.gif", save_all=True, append_images=frames[1:])
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "text.png").write_text("no picture")
    (photos / "notes.txt").write_text("is not looked at")
    (photos / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    built = build(run, photos, tmp_path / "index")
    assert built.items == 40 + len(ODD) + 1
    told = " ".join(built.skipped)
    assert len(built.skipped) == 3
    assert all(name in told for name in ("empty.jpg", "text.png", "gone.jpg"))
    again = build(run, photos, tmp_path / "index")
    assert (again.encoded, again.kept, len(again.skipped)) == (0, built.items, 3)


def test_an_index_follows_its_folder_and_equals_one_made_anew(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    pictures = sorted(photos.rglob("*.png"))
    shutil.move(pictures[0], photos / "elsewhere.png")
    pictures[1].unlink()
    shutil.copy(pictures[2], photos / "copy.png")
    Image.new("RGB", (48, 48), (200, 30, 30)).save(pictures[3])
    os.utime(pictures[4])
    first, second = pictures[5].read_bytes(), pictures[6].read_bytes()
    pictures[5].write_bytes(second)
    pictures[6].write_bytes(first)
    Image.new("RGB", (48, 48), (30, 30, 200)).save(photos / "new.png")
    built = build(run, photos, tmp_path / "index")
    assert (built.encoded, built.moved, built.removed, built.kept) == (2, 5, 2, 34)
    build(run, photos, tmp_path / "anew")
    assert same(content(tmp_path / "index"), content(tmp_path / "anew"))
    assert build(run, photos, tmp_path / "index").kept == 41


def test_what_a_death_left_of_an_earlier_content_goes_with_the_next_call(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    whole = content(tmp_path / "index")
    index = Index.open(tmp_path / "index")
    item = whole[0][0]
    stale = dataclasses.replace(item, key=f"{item.path}#t=4,8", kind="moment", content="old", modified_ns=1, start=4.0, end=8.0)
    index.store.add([stale], whole[1][:1])
    index.store.close()
    build(run, photos, tmp_path / "index")
    assert same(content(tmp_path / "index"), whole)


def test_a_data_set_brings_splits_and_captions(run, scenes, tmp_path):
    built = build(run, scenes, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    assert built.items == 70
    assert index.store.count(Where(metadata={"split": "test"})) == 10
    caption = next(item.metadata["caption"] for item in index.items.values() if item.metadata["split"] == "train")
    best = search(index, Query.of(caption), top=1, where=Where(metadata={"split": "train"})).hits[0]
    assert best.item.metadata["caption"] == caption
    assert index.locate(best.item).read()


def test_filters_leave_only_what_they_allow(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    old = photos / "2024" / min(os.listdir(photos / "2024"))
    os.utime(old, (1e9, 1e9))
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    query = Query(like=((1.0, next(iter(index.items))),))
    assert all(hit.item.path.startswith("2025") for hit in search(index, query, 40, Where(path="2025*")).hits)
    assert [hit.item.path for hit in search(index, query, 40, Where(before=int(1.1e18))).hits] == [f"2024/{old.name}"]
    assert not search(index, query, 40, Where(kind="moment")).hits


def test_a_query_adds_and_takes_away(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    first, second = list(index.items)[:2]
    both = search(index, Query(like=((1.0, first), (1.0, second))), top=2, fold=False)
    assert {hit.item.key for hit in both.hits} == {first, second}
    away = search(index, Query(like=((1.0, first), (-0.9, second))), top=40, fold=False)
    there = search(index, Query(like=((1.0, first),)), top=40, fold=False)
    place = [[hit.item.key for hit in found.hits].index(second) for found in (there, away)]
    assert place[1] >= place[0]
    as_file = search(index, Query(images=((1.0, photos / first),)), top=3, fold=False)
    assert [hit.item.key for hit in as_file.hits] == [hit.item.key for hit in there.hits[:3]]
    for bad, sentence in (
        (Query(), "only what not"),
        (Query(texts=((-1.0, "a circle"),)), "only what not"),
        (Query.of(" "), "empty"),
        (Query(like=((1.0, "nowhere.png"),)), "no item"),
        (Query(like=((1.0, first), (-1.0, first))), "cancel"),
    ):
        with pytest.raises(VisavisError, match=sentence):
            search(index, bad)


def test_copies_and_their_recompressed_sisters_are_one_result(run, photos, tmp_path):
    picture = min(photos.rglob("*.png"))
    shutil.copy(picture, photos / "copy.png")
    Image.open(picture).convert("RGB").save(photos / "again.jpg", quality=90)
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    query = Query(images=((1.0, picture),))
    [best] = search(index, query, top=1).hits
    assert {best.item.key, *best.duplicates} >= {"copy.png", "again.jpg", picture.relative_to(photos).as_posix()}
    folded, plain = search(index, query, top=50), search(index, query, top=50, fold=False)
    assert len(plain.hits) == 42
    assert sum(1 + len(hit.duplicates) for hit in folded.hits) == 42


def test_another_model_another_source_and_what_is_no_index_are_refused_in_a_sentence(run, photos, tmp_path, dual_encoders):
    build(run, photos, tmp_path / "index")
    other = next(path for path in dual_encoders.iterdir() if (path / "config.json").exists())
    with pytest.raises(RunError, match="fingerprint"):
        build(other, photos, tmp_path / "index")
    with pytest.raises(RunError, match="fingerprint"):
        Index.open(tmp_path / "index", model=other)
    with pytest.raises(RunError, match="source of the index"):
        build(run, photos / "2024", tmp_path / "index")
    with pytest.raises(VisavisError, match=r"^moments is 0, expected the seconds of a moment of a clip, a number above 0, such as 4\.$"):
        build(run, photos, tmp_path / "index", moments_s=0)
    with pytest.raises(RefusedOverwrite, match="no index"):
        build(run, photos, photos)
    with pytest.raises(RunError, match="is no index"):
        Index.open(photos)
    with pytest.raises(DataError, match="no pictures"):
        (tmp_path / "empty").mkdir()
        build(run, tmp_path / "empty", tmp_path / "other")


def test_a_link_that_leads_out_of_the_folder_is_not_followed(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    item = next(iter(index.items.values()))
    secret = tmp_path / "secret.png"
    (photos / item.path).rename(secret)
    (photos / item.path).symlink_to(secret)
    with pytest.raises(DataError, match="leads out"):
        index.locate(item)
    (photos / item.path).unlink()
    with pytest.raises(DataError, match="no longer"):
        index.locate(item)


def test_a_dual_encoder_needs_no_training(dual_encoders, photos, tmp_path):
    model = next(path for path in sorted(dual_encoders.iterdir()) if (path / "config.json").exists())
    assert build(model, photos, tmp_path / "index").items == 40
    assert search(Index.open(tmp_path / "index"), Query.of("a red circle")).hits


def begin(run, photos, folder, store):
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    engines.SHARD = 4
    visavis.index(run, photos, out=folder, store=store)


def deaths(run, photos, folder, moments, store):
    """Kill an indexing process after so many seconds each time, starting anew."""
    killed = 0
    for moment in moments:
        process = FORKED.Process(target=begin, args=(run, photos, folder, (store and folder.parent / store) or None))
        process.start()
        while not folder.exists() and process.is_alive():  # only what happens once the folder is begun is worth a death
            time.sleep(0.05)
        process.join(moment)
        killed += process.is_alive()
        process.kill()
        process.join()
    return killed


@pytest.mark.parametrize(
    ("times", "store"), [(3, "items"), pytest.param(20, "", marks=pytest.mark.long), pytest.param(20, "items.db", marks=pytest.mark.long)]
)
def test_killed_again_and_again_it_becomes_the_same_index(run, photos, tmp_path, times, store):
    moments = random.Random(times)
    assert deaths(run, photos, tmp_path / "index", [moments.uniform(0.0, 4.0) for _ in range(times)], store)
    build(run, photos, tmp_path / "index")
    build(run, photos, tmp_path / "undisturbed")
    assert same(content(tmp_path / "index"), content(tmp_path / "undisturbed"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_makes_the_same_index(run, photos, tmp_path):
    build(run, photos, tmp_path / "ray", engine="ray", workers=2)
    build(run, photos, tmp_path / "local")
    assert same(content(tmp_path / "ray"), content(tmp_path / "local"))


def test_what_lies_outside_behind_a_link_is_not_indexed_and_told_by_its_link(run, photos, tmp_path):
    """Only what can be shown is found; a link to a place inside is no harm."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    pictures = sorted(photos.rglob("*.png"))
    for picture in pictures[:3]:
        shutil.copy(picture, outside / "deep")
    (photos / "trip").symlink_to(outside)
    (photos / "one.png").symlink_to(outside / "deep" / pictures[0].name)
    (photos / "again.png").symlink_to(pictures[1])
    built = build(run, photos, tmp_path / "index")
    assert built.items == 41
    assert sorted(sentence.split(" is a link")[0] for sentence in built.skipped) == ["'one.png'", "'trip'"]
    assert "'trip' is a link that leads out of " in built.skipped[-1]
    assert "its pictures and videos (3) are left out" in "".join(built.skipped)
    index = Index.open(tmp_path / "index")
    assert all(index.locate(item).path.is_file() for item in index.items.values())
    (tmp_path / "link").symlink_to(photos)
    assert build(run, tmp_path / "link", tmp_path / "other").items == 41


def test_a_time_beyond_what_stores_hold_is_the_latest(run, photos, tmp_path):
    late, early = sorted(photos.rglob("*.png"))[:2]
    os.utime(late, ns=(0, 2**63 + 10**12))
    if late.stat().st_mtime_ns < 2**63:
        pytest.skip("this file system has no such times")
    os.utime(early, ns=(0, -(10**9)))
    build(run, photos, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    assert index.items[late.relative_to(photos).as_posix()].modified_ns == 2**63 - 1
    assert index.items[early.relative_to(photos).as_posix()].modified_ns == -(10**9)
    assert build(run, photos, tmp_path / "index").kept == 40


def test_a_store_by_a_relative_path_lies_where_one_stands(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(run, photos, "index", store="vectors")
    assert (tmp_path / "vectors" / "items.lance").is_dir()
    assert not (tmp_path / "index" / "vectors").exists()
    monkeypatch.chdir(photos)
    assert build(run, photos, tmp_path / "index", store="../vectors/../vectors").kept == 40
    assert len(content(tmp_path / "index")[0]) == 40


def test_words_that_the_model_never_learned_are_said_of_an_index_too(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    said = []
    listener = type("Listener", (Silent,), {"say": lambda self, sentence: said.append(sentence)})()
    visavis.search(tmp_path / "index", "a red circle on a zeppelin", without="xylophone circle", progress=listener)
    assert said == ["words that this model has not learned: zeppelin", "words that this model has not learned: xylophone"]
    visavis.search(tmp_path / "index", like=next(iter(Index.open(tmp_path / "index").items)), progress=listener)
    assert len(said) == 2


def test_pictures_that_vanished_are_ranked_behind_those_that_another_model_has_seen(run, photos, tmp_path):
    build(run, photos, tmp_path / "index")
    whole = visavis.search(tmp_path / "index", "a red circle", rerank=run, top=6, fold=False)
    (photos / whole[0].name).unlink()
    said = []
    listener = type("Listener", (Silent,), {"say": lambda self, sentence: said.append(sentence)})()
    found = visavis.search(tmp_path / "index", "a red circle", rerank=run, top=40, fold=False, progress=listener)
    assert [hit.name for hit in found][:5] == [hit.name for hit in whole][1:]
    assert found[-1].name == whole[0].name
    assert said == [f"no longer in {photos}, so bring the index up to date with visavis index: {whole[0].name}"]


def test_the_command_line_indexes_and_searches(run, photos, tmp_path):
    def said(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    made = json.loads(said("index", run, photos, "--out", tmp_path / "index", "--json").stdout)
    assert made["items"] == 40
    found = json.loads(said("search", tmp_path / "index", "a red circle", "--top", 3, "--json").stdout)
    assert len(found["hits"]) == 3
    picture = next(photos.rglob("*.png"))
    alike = json.loads(said("search", tmp_path / "index", "--image", picture, "--json").stdout)
    assert alike["hits"][0]["name"] == picture.relative_to(photos).as_posix()
    (tmp_path / "labels.txt").write_text("a red circle\na blue square\n")
    labels = json.loads(said("label", tmp_path / "index", picture, tmp_path / "labels.txt", "--json").stdout)
    assert len(labels["texts"]) == 2
    refused = said("search", run, "--image", picture)
    assert "is no index" in str(refused.exception)


def test_sources_are_listed_in_the_order_of_paths(photos):
    files = open_source(photos).files
    assert [file.path for file in files] == sorted(file.path for file in files)
