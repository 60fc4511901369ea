"""Items found by file name or caption: words, phrases, beginnings of words, updates, filters."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import visavis
from visavis.cli.search_printer import print_results
from visavis.core.errors import StorageError, VisavisError
from visavis.retrieval.items import (
    CHECKSUM,
    ITEM_FIELDS,
    NO_FILTER,
    IndexItem,
    ItemFilter,
    caption_metadata,
    item_captions,
)
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, content_text, search_collection
from visavis.retrieval.stores import item_table
from visavis.retrieval.stores.index_database import IndexDatabase
from visavis.retrieval.stores.item_table import ItemTable
from visavis.retrieval.stores.name_table import MAX_QUERY_WORDS
from visavis.retrieval.stores.sqlite_store import SqliteStore

FILES = {
    "2041/IMG_2041.jpg": [],
    "IMG_20410.JPG": [],
    "beach_sunset-2.png": ["A red kite over the sea.", "Two children play"],
    "Café déjà-vu.heic": ["the kite is red"],
    "cafe\u0301.webp": [],
    "夜の東京タワー.jpg": ["東京の夜"],
    "IMG2041b.mov": [],
    "plain name 1.5": [],
    "iPhone15.jpg": ["an iPhone15 on a table"],
}


def item(path, captions=(), kind="image", key=None):
    metadata = caption_metadata(list(captions))
    return IndexItem(key or path, path, kind, path, 1, 1, metadata=metadata)


def row(item):
    return item.to_row() | {CHECKSUM: 0}


def table(files=FILES):
    return ItemTable.in_memory([row(item(*file)) for file in files.items()])


def found(items, text, count=20, item_filter=NO_FILTER):
    return {item.path: column for item, column in items.named(text, count, item_filter)}


NAMES = {
    "IMG_2041": {"2041/IMG_2041.jpg", "IMG2041b.mov", "IMG_20410.JPG"},
    "img 2041": {"2041/IMG_2041.jpg", "IMG2041b.mov", "IMG_20410.JPG"},
    "2041": {"2041/IMG_2041.jpg", "IMG2041b.mov", "IMG_20410.JPG"},
    "2041 img": {"2041/IMG_2041.jpg", "IMG2041b.mov"},
    '"2041 img"': set(),
    "IMG_2041.jpg": {"2041/IMG_2041.jpg", "IMG2041b.mov", "IMG_20410.JPG"},
    '"IMG_2041"': {"2041/IMG_2041.jpg", "IMG2041b.mov"},
    "beach sunset": {"beach_sunset-2.png"},
    "sunset beach": {"beach_sunset-2.png"},
    "beach sun": {"beach_sunset-2.png"},
    "beach su": set(),
    "BEACH": {"beach_sunset-2.png"},
    "cafe": {"Café déjà-vu.heic", "cafe\u0301.webp"},
    "CAFÉ": {"Café déjà-vu.heic", "cafe\u0301.webp"},
    "dejavu": set(),
    "東京": {"夜の東京タワー.jpg"},
    "タワー": {"夜の東京タワー.jpg"},
    "1.5": {"plain name 1.5"},
    "iphone": {"iPhone15.jpg"},
    "iphone15": {"iPhone15.jpg"},
    "jpg": set(),
    "": set(),
    '"': set(),
    "- _ … *": set(),
    "img OR beach": set(),
    "NOT beach": set(),
    "name : beach": set(),
    "\ud800": set(),
    "a\0b": set(),
}


@pytest.mark.parametrize(("text", "paths"), NAMES.items(), ids=map(ascii, NAMES))
def test_names_match_words_of_any_spelling(text, paths):
    results = found(table(), text)
    assert {path for path, column in results.items() if column == "name"} == paths


def test_captions_match_words_and_phrases():
    items = table()
    both = {"beach_sunset-2.png", "Café déjà-vu.heic"}
    assert found(items, '"red" "kite"') == dict.fromkeys(both, "captions")
    assert found(items, "red kite") == {}, "words without quotes describe content"
    assert found(items, '"red kite"') == {"beach_sunset-2.png": "captions"}
    assert found(items, '"iphone15 on"') == {"iPhone15.jpg": "captions"}
    assert found(items, '"sea two"') == {}, "a phrase does not continue in the next caption"
    assert found(items, 'sea "children"') == {"beach_sunset-2.png": "captions"}


def test_named_items_pass_the_filter_and_have_a_limit():
    items = table({f"IMG_{number:04}.jpg": [] for number in range(300)})
    assert list(found(items, "img", 3)) == [f"IMG_{number:04}.jpg" for number in range(3)]
    assert list(found(items, "img", 3, ItemFilter(path="*29?.jpg"))) == [
        f"IMG_029{number}.jpg" for number in range(3)
    ]
    assert found(items, "img", 3, ItemFilter(kind="video")) == {}


def test_long_text_names_no_file():
    assert found(table(), "beach " * MAX_QUERY_WORDS) == {"beach_sunset-2.png": "name"}
    assert found(table(), "beach " * (MAX_QUERY_WORDS + 1)) == {}
    assert found(table(), "beach " * 99_999) == {}


def test_moments_of_a_video_have_no_names():
    video = item("clip_7.mp4", kind="video")
    moments = [item("clip_7.mp4", kind="moment", key=f"clip_7.mp4#t={n},{n + 1}") for n in range(9)]
    items = ItemTable.in_memory(map(row, [video, *moments]))
    assert [found.key for found, _ in items.named("clip", 20, NO_FILTER)] == ["clip_7.mp4"]
    items.delete(list(range(10)))
    assert items.named("clip", 20, NO_FILTER) == []


@given(st.lists(st.text(min_size=1).filter(lambda text: "\n" not in text), max_size=4))
def test_caption_metadata_keeps_all_captions(captions):
    stored = item_captions(caption_metadata(captions))
    assert stored[:1] == tuple(captions[:1])
    words = [" ".join(caption.split()) for caption in captions[1:]]
    assert list(stored[1:]) == ("\n".join(words).split("\n") if any(words) else [])


def test_names_follow_all_changes_of_a_store(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.standard_normal((40, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    items = [item(f"IMG_{number}.jpg", [f"word{number} one", "two"]) for number in range(40)]
    with closing(SqliteStore(tmp_path, 4)) as store:
        store.add(items, vectors)
        store.add([item("IMG_3.jpg", ["other words"])], vectors[:1])
        store.delete(["IMG_4.jpg"])
        with store.database.change():
            store.rewrite()
        store.add([item("new_5.jpg")], vectors[:1])
        store.delete([f"IMG_{number}.jpg" for number in range(10, 40)])
        expected = {"IMG_3.jpg": "captions"}
        assert found(store.table(), '"other words"') == expected
        assert found(store.table(), '"word3"') == {}
        assert found(store.table(), '"word4"') == found(store.table(), '"word12"') == {}
        assert found(store.table(), '"word5" two') == {"IMG_5.jpg": "captions"}
        assert set(found(store.table(), "5")) == {"IMG_5.jpg", "new_5.jpg"}
        store.verify()
        assert len(found(store.table(), "img", 99)) == 9
    with closing(sqlite3.connect(tmp_path / "index.db")) as database:
        database.execute("INSERT INTO names (names) VALUES ('integrity-check')")


@pytest.mark.parametrize("count", [100, 101, 5000])
def test_filter_may_have_any_number_of_conditions(count):
    metadata = {f"name {number}": f"value {number}" for number in range(count)}
    items = ItemTable.in_memory(
        [
            row(IndexItem("a", "a", "image", "", 1, 1, metadata=metadata)),
            row(IndexItem("b", "b", "image", "", 1, 1, metadata={**metadata, "name 7": "other"})),
        ]
    )
    assert items.count(ItemFilter(metadata=metadata)) == 1
    assert items.count(ItemFilter(metadata={**metadata, "name 7": "other"})) == 1
    assert items.count(ItemFilter(metadata={**metadata, "more": ""})) == 0


@pytest.mark.parametrize("tags", ["", "{", "3", "[3]", None])
def test_damaged_tags_of_an_item_are_one_error(tags):
    values = ["k.jpg", *[None] * (len(ITEM_FIELDS) - 2), tags, 0]
    with pytest.raises(StorageError, match=r"the item 'k.jpg' is damaged .* run visavis index"):
        item_table._item(values)


def test_sqlite_without_full_text_search_is_one_error(tmp_path, monkeypatch):
    class Connection(sqlite3.Connection):
        def execute(self, statement, *values):
            if "fts5" in statement:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(statement, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda *values, **options: connect(*values, factory=Connection, **options),
    )
    with pytest.raises(StorageError, match=r"full-text search \(FTS5\)"):
        IndexDatabase(tmp_path / "index", create={})
    assert not (tmp_path / "index" / "index.db").exists()


@pytest.fixture(scope="module")
def named_index(tiny_run, few_scenes, tmp_path_factory):
    """An index of a data set, without a read-only folder."""
    root = tmp_path_factory.mktemp("named")
    shutil.copytree(few_scenes, root / "scenes")
    visavis.index(tiny_run, root / "scenes", out=root / "index")
    return root / "index"


def test_search_returns_named_items_as_a_group(named_index):
    with closing(open_index(named_index)) as index:
        first = index.store.table().items()[0]
        name = first.path.rpartition("/")[2]
        results = search_collection(index, SearchQuery.from_text(name), 3)
        assert len(first.captions) > 1
        assert [(each.item, each.found_by, each.text) for each in results.named] == [
            (first, "name", name)
        ]
        for caption in first.captions:
            results = search_collection(index, SearchQuery.from_text(f'"{caption}"'), 99)
            texts = {each.item.key: each.text for each in results.named}
            assert texts[first.key] == caption
            assert {each.found_by for each in results.named} == {"caption"}
            assert len(results.hits) > 3
        assert search_collection(index, SearchQuery(like=((1.0, first.key),)), 3).named == ()


QUOTED = {
    '"red star"': "red star",
    'a "red star" in snow': "a red star in snow",
    'a"red star"in snow': "a red star in snow",
    '"a red" "star"': "a red star",
    'a 15" wall': 'a 15" wall',
    "a  red\tstar": "a  red\tstar",
}


@pytest.mark.parametrize(("text", "content"), QUOTED.items())
def test_encoder_gets_texts_without_quotes(text, content, named_index):
    assert content_text(text) == content
    encoded = []
    with closing(open_index(named_index)) as index:

        def encode(texts):
            encoded.extend(texts)
            return index.model.encode_texts(texts)

        results = search_collection(index, SearchQuery.from_text(text), 9, encode_texts=encode)
        plain = search_collection(index, SearchQuery.from_text(content), 9)
    assert encoded == [content]
    assert results.hits == plain.hits


@pytest.mark.parametrize("text", ["", '""', ' " " '])
def test_quotes_without_words_are_an_empty_query(text, named_index):
    with pytest.raises(VisavisError, match="expected text, got an empty query"):
        visavis.search(named_index, text)


def test_name_does_not_hide_an_invalid_part(named_index):
    with closing(open_index(named_index)) as index:
        name = index.store.table().keys()[3].rpartition("/")[2]
        with pytest.raises(VisavisError, match="got an empty query"):
            search_collection(index, SearchQuery(texts=((1.0, name), (-0.5, " "))))


def test_unknown_words_find_a_name(named_index, capsys):
    """A model with a vocabulary cannot encode the name of a file."""
    with closing(open_index(named_index)) as index:
        keys = index.store.table().keys()
    results = visavis.search(named_index, keys[3].rpartition("/")[2].rpartition(".")[0])
    [named] = results.named
    assert (named.item.key, named.found_by, results.hits) == (keys[3], "name", ())
    assert named.image is not None
    sentence = f"No results by content, because the model knows no word of: {named.text[:-4]}"
    assert results.message == sentence
    assert [each["key"] for each in results.to_json()["named"]] == [keys[3]]
    assert [table.title for table in results.tables()] == ["Found by name or caption", ""]
    print_results(results)
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == ["Found by name or caption:", keys[3], sentence]
    quoted = visavis.search(named_index, f'"{named.text[:-4]}"')
    assert (quoted.named, quoted.message) == (results.named, sentence)
    with pytest.raises(VisavisError, match="'zzzzz': expected at least one of the"):
        visavis.search(named_index, "zzzzz")
