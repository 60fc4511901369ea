"""Items of an index as a table of SQLite: filters, times and counts are SQL.

Each item has the row of its vector. Tables of items in memory hold the rows of other databases, so
that all stores filter alike.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from visavis.core.errors import StorageError
from visavis.core.memory_budget import chunk_slices
from visavis.data.capture_time import READ_TIME, TAKEN, UNREADABLE_TIME, parse_time, time_us
from visavis.data.file_names import fold_case, is_valid_unicode
from visavis.retrieval.items import (
    CHECKSUM,
    DATABASE,
    ITEM_FIELDS,
    OTHER_CAPTIONS,
    REMEDY,
    IndexItem,
    ItemFilter,
    item_captions,
    item_time,
    metadata_tag,
    metadata_tags,
    tags_to_metadata,
)
from visavis.retrieval.stores.name_table import (
    MAX_FILTERED,
    NameTable,
    match_expressions,
    searched_columns,
)
from visavis.retrieval.stores.name_table import SCHEMA as NAMES

# Items that are the only one of their file, and have no metadata from tables.
_IS_PLAIN = "start IS NULL AND given_tags = '[]'"
SCHEMA = (
    *NAMES,
    """CREATE TABLE items (
    row INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL,
    size INTEGER NOT NULL,
    modified_ns INTEGER NOT NULL,
    start REAL,
    "end" REAL,
    dhash TEXT NOT NULL,
    tags TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    folded_path TEXT NOT NULL,
    clock_us INTEGER NOT NULL,
    instant_us INTEGER NOT NULL,
    given_tags TEXT NOT NULL,
    undated TEXT
)""",
    # With the columns by which files are compared, so that this reads no items.
    "CREATE INDEX items_by_path ON items (path, size, modified_ns, start, given_tags)",
    f"CREATE INDEX items_by_detail ON items (path) WHERE NOT ({_IS_PLAIN})",
    "CREATE INDEX items_by_folded_path ON items (folded_path)",
    "CREATE INDEX items_by_kind ON items (kind)",
    "CREATE INDEX items_by_size ON items (size)",
    "CREATE INDEX items_by_content ON items (content)",
    "CREATE INDEX items_by_clock ON items (clock_us, key)",
    "CREATE INDEX items_by_instant ON items (instant_us)",
    "CREATE INDEX items_by_undated ON items (path) WHERE undated IS NOT NULL",
    (
        "CREATE TABLE tags (tag TEXT NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (tag, row)) "
        "WITHOUT ROWID"
    ),
)
"""Statements that make the tables: an item by the row of its vector, its tags and names."""
# The columns of an item, in the order of the fields of IndexItem, and its checksum.
_ITEM = 'key, path, kind, content, size, modified_ns, start, "end", dhash, tags, checksum'
_NUM_COLUMNS = 17
MAX_PARAMETERS = 500
"""Values of one statement. Old versions of SQLite accept 999."""
MAX_CONDITIONS = 100
"""Conditions on metadata that are separate conditions in SQL."""
MAX_INTEGER = 2**63 - 1
"""Largest number of SQLite."""
_NOT_FILTERED = metadata_tag(OTHER_CAPTIONS, "")
# The times that were read from files, among the tags of an item.
_READ_TAG = re.compile(f"{TAKEN}=(?:{READ_TIME})|{UNREADABLE_TIME}=.*", re.DOTALL)


class Facets(NamedTuple):
    """Values that items can be filtered by, and how many items have each.

    Attributes:
        kinds: By kind.
        folders: By folder.
        years: By year of the time.
        metadata: By name and value, for names with few values.
    """

    kinds: dict[str, int]
    folders: dict[str, int]
    years: dict[int, int]
    metadata: dict[str, dict[str, int]]


StoredFile: TypeAlias = tuple[str, int, int, str, str]
"""Path, size, modification time in ns and metadata of an item, as ``tags_json`` writes it: with and
without times that were read from the file.
"""
_FILES = "SELECT path, size, modified_ns, tags, given_tags FROM items"


class FileStates(NamedTuple):
    """States of files in the order of paths. Equal states have equal texts.

    Attributes:
        paths: Their paths.
        sizes: Their sizes.
        times: Their modification times in ns.
    """

    paths: str
    sizes: str
    times: str

    @classmethod
    def of(cls, paths: Sequence[str], sizes: list[int], times: list[int]) -> FileStates:
        """Write the values of files. No path of an item contains NUL."""
        # The text of a list takes two thirds of the time of joined numbers.
        return cls("\0".join(paths), str(sizes)[1:-1], str(times)[1:-1])


def tags_json(metadata: Mapping[str, str]) -> str:
    """Write metadata as it is stored and compared."""
    return json.dumps(metadata_tags(metadata)) if metadata else "[]"


class ItemTable:
    """Table of items.

    Args:
        connection: Connection to a database with this schema.
        reading: Makes the context in which rows are read: it holds one version, and converts errors
            of the database.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.connection = connection
        self._reading = reading

    def _read(self, query: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Read rows. The version of the first one holds until the last one."""
        with self._reading():
            yield from self.connection.execute(query, values)

    @classmethod
    def in_memory(cls, rows: Iterable[Mapping[str, Any]]) -> ItemTable:
        """Hold rows of a store, see ``IndexItem.to_row``, numbered in the order of keys."""
        # Searches run on other threads than the one that opened the table. sqlite3 is serialized.
        table = cls(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        for statement in SCHEMA:
            table.connection.execute(statement)
        rows = sorted(rows, key=lambda row: row["key"])
        table.insert(range(len(rows)), rows)
        return table

    def __len__(self) -> int:
        [(count,)] = self._read("SELECT count(*) FROM items")
        return int(count)

    def insert(self, numbers: Iterable[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows of a store, with the number of each. Their keys must be new."""
        numbers = list(numbers)
        places = ",".join("?" * _NUM_COLUMNS)
        self.connection.executemany(
            f"INSERT INTO items VALUES ({places})", map(_values, numbers, rows)
        )
        self.connection.executemany(
            "INSERT INTO tags VALUES (?, ?)",
            (
                (tag, number)
                for number, row in zip(numbers, rows, strict=True)
                for tag in row["metadata"] or ()
                if not tag.startswith(_NOT_FILTERED)
            ),
        )
        NameTable(self.connection).insert(
            (number, row["path"], _captions(row["metadata"] or ()))
            for number, row in zip(numbers, rows, strict=True)
            if row["kind"] != "moment"
        )

    def delete(self, rows: Sequence[int]) -> None:
        """Delete items by row."""
        for chunk in _chunks(rows):
            places = ",".join("?" * len(chunk))
            query = f"SELECT row, path, kind, tags FROM items WHERE row IN ({places})"
            stored = [
                (row, path, kind, json.loads(tags))
                for row, path, kind, tags in self._read(query, chunk)
            ]
            self.connection.executemany(
                "DELETE FROM tags WHERE tag = ? AND row = ?",
                ((tag, row) for row, _, _, tags in stored for tag in tags),
            )
            NameTable(self.connection).delete(
                (row, path, _captions(tags)) for row, path, kind, tags in stored if kind != "moment"
            )
            self.connection.execute(f"DELETE FROM items WHERE row IN ({places})", chunk)

    def rows_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Find the rows of keys. Unknown keys are left out."""
        return self._by("key", "key, row", keys)

    def keys_of(self, rows: Sequence[int]) -> dict[int, str]:
        """Find the keys of rows. Unknown rows are left out."""
        return self._by("row", "row, key", rows)

    def _by(self, column: str, selected: str, values: Sequence[Any]) -> dict[Any, Any]:
        found = dict[Any, Any]()
        # SQLite cannot compare other texts, which no item has.
        values = [value for value in values if not isinstance(value, str) or _is_text(value)]
        for chunk in _chunks(values):
            places = ",".join("?" * len(chunk))
            found.update(
                self._read(f"SELECT {selected} FROM items WHERE {column} IN ({places})", chunk)
            )
        return found

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """Read the checksums of rows, in any order."""
        return list(self._by("row", "row, checksum", rows).values())

    def all_checksums(self) -> np.ndarray:
        """Read the checksums of all items, int64, shape ``[N]``."""
        return _integers(self._read("SELECT checksum FROM items"))

    def first_key(self) -> str | None:
        """Read any key. None without items."""
        found = [key for (key,) in self._read("SELECT key FROM items LIMIT 1")]
        return found[0] if found else None

    def keys(self) -> list[str]:
        """Read all keys, ascending."""
        return [key for (key,) in self._read("SELECT key FROM items ORDER BY key")]

    def rows(self) -> np.ndarray:
        """Read the rows of all items in the order of keys, int64, shape ``[N]``."""
        return _integers(self._read("SELECT row FROM items ORDER BY key"))

    def items(self) -> list[IndexItem]:
        """Read all items in the order of keys."""
        return [item for item, _ in self.checked_items()]

    def checked_items(self, keys: Sequence[str] | None = None) -> Iterator[tuple[IndexItem, int]]:
        """Read items and their checksums: some, or all in the order of keys."""
        if keys is None:
            for values in self._read(f"SELECT {_ITEM} FROM items ORDER BY key"):
                yield _item(values), values[-1]
            return
        for chunk in _chunks(keys):
            places = ",".join("?" * len(chunk))
            for values in self._read(f"SELECT {_ITEM} FROM items WHERE key IN ({places})", chunk):
                yield _item(values), values[-1]

    def matching_rows(self, item_filter: ItemFilter) -> np.ndarray:
        """Find the rows of the items that pass a filter, int64, ascending."""
        condition, values = _condition(item_filter)
        return np.sort(_integers(self._read(f"SELECT row FROM items WHERE {condition}", values)))

    def count(self, item_filter: ItemFilter) -> int:
        """Count the items that pass a filter."""
        condition, values = _condition(item_filter)
        [(count,)] = self._read(f"SELECT count(*) FROM items WHERE {condition}", values)
        return int(count)

    def newest(self, count: int, item_filter: ItemFilter) -> list[IndexItem]:
        """Read the items with the latest times, the latest first."""
        condition, values = _condition(item_filter)
        return [
            _item(found)
            for found in self._read(
                f"SELECT {_ITEM} FROM items WHERE {condition} "
                "ORDER BY clock_us DESC, key DESC LIMIT ?",
                (*values, min(count, MAX_INTEGER)),
            )
        ]

    def named(
        self, text: str, count: int, item_filter: ItemFilter
    ) -> list[tuple[IndexItem, Literal["name", "captions"]]]:
        """Find files whose name, or else whose captions, have all words of a text, in the order of
        rows. Only quoted words are searched in captions. ``match_expressions`` describes the words. Moments of videos are not among them.
        """
        expressions = match_expressions(text) if _is_text(text) else []
        condition, values = _condition(item_filter)
        found = dict[str, tuple[IndexItem, Literal["name", "captions"]]]()
        for column, expression in product(searched_columns(text), expressions):
            # Beginnings of words take longer, and are needed only if there are too few results.
            if len(found) >= count:
                break
            rows = self._read(
                f"SELECT {_ITEM} FROM (SELECT rowid AS named FROM names WHERE names MATCH ? "
                f"LIMIT {MAX_FILTERED}) CROSS JOIN items ON items.row = named "
                f"WHERE {condition} LIMIT ?",
                (f"{column} : ({expression})", *values, count),
            )
            for row in rows:
                item = _item(row)
                found.setdefault(item.key, (item, column))
        return list(found.values())[:count]

    def clear(self) -> None:
        """Delete all items."""
        self.connection.execute("DELETE FROM items")
        self.connection.execute("DELETE FROM tags")
        NameTable(self.connection).clear()

    def find_content(self, content: str) -> IndexItem | None:
        """Find an item by the hash of its file."""
        query = f"SELECT {_ITEM} FROM items WHERE content = ? ORDER BY key LIMIT 1"
        found = [_item(values) for values in self._read(query, (content,))]
        return found[0] if found else None

    def contents(self) -> dict[str, str]:
        """Read the hash of the file of each item by key."""
        return dict(self._read("SELECT key, content FROM items ORDER BY key"))

    def plain_states(self, first: str, end: str | None) -> FileStates:
        """Read the states of plain items from a path up to another one, or to the last one."""
        columns = (
            "group_concat(path, char(0)), group_concat(size, ', '), group_concat(modified_ns, ', ')"
        )
        query = f"SELECT {columns} FROM items WHERE path >= ? AND path < ? AND {_IS_PLAIN}"
        [found] = self._read(query, (first, _after_all(end)))
        return FileStates(*(text or "" for text in found))

    def plain_files(self, first: str, end: str | None) -> Iterator[StoredFile]:
        """Read the files of the items whose states ``plain_states`` reads."""
        where = f"path >= ? AND path < ? AND {_IS_PLAIN}"
        yield from self._read(f"{_FILES} WHERE {where}", (first, _after_all(end)))

    def detailed_files(self) -> Iterator[StoredFile]:
        """Read the files of all other items."""
        yield from self._read(f"{_FILES} WHERE NOT ({_IS_PLAIN})")

    def items_of_paths(self, paths: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        """Read path, key and content of the items of some files, in the order of paths and keys."""
        for chunk in _chunks(paths):
            places = ",".join("?" * len(chunk))
            yield from self._read(
                f"SELECT path, key, content FROM items WHERE path IN ({places}) ORDER BY key",
                chunk,
            )

    def has_size(self, size: int) -> bool:
        """Check whether the file of an item has a size."""
        return any(True for _ in self._read("SELECT 1 FROM items WHERE size = ? LIMIT 1", (size,)))

    def items_of_content(self, content: str, *, is_video: bool) -> list[IndexItem]:
        """Read the items of the first file with a content, images or videos, in the order of keys."""
        kinds = "kind != 'image'" if is_video else "kind = 'image'"
        items = [
            _item(values)
            for values in self._read(
                f"SELECT {_ITEM} FROM items WHERE content = ? AND {kinds} ORDER BY key", (content,)
            )
        ]
        return [item for item in items if item.path == items[0].path]

    def undated(self) -> dict[str, str]:
        """Read the text in place of a capture time of the files that have one."""
        return dict(
            self._read("SELECT path, undated FROM items WHERE undated IS NOT NULL ORDER BY path")
        )

    def metadata_names(self) -> set[str]:
        """Read the names of the metadata of all items."""
        names = self._read("SELECT DISTINCT substr(tag, 1, instr(tag, '=')) FROM tags")
        return set(tags_to_metadata(name for (name,) in names))

    def facets(self, *, max_folders: int, max_values: int, hidden: Sequence[str]) -> Facets:
        """Count the values that items can be filtered by."""
        run = self._read
        # SQLite rounds a quotient toward zero, and years before 1970 need the floor.
        year = (
            "CAST(strftime('%Y', (clock_us - (clock_us % 1000000 + 1000000) % 1000000) / 1000000, "
            "'unixepoch') AS INTEGER)"
        )
        # rtrim removes all characters of a path but its slashes, which are the end of its folder.
        folder = "rtrim(rtrim(path, replace(path, '/', '')), '/')"
        named = "SELECT substr(tag, 1, instr(tag, '=')) AS name, count(DISTINCT tag) FROM tags"
        metadata = dict[str, dict[str, int]]()
        for prefix, count in run(f"{named} GROUP BY name"):
            [name] = tags_to_metadata([prefix])
            if not 1 < count <= max_values or name in hidden:
                continue
            found = run(
                "SELECT tag, count(*) FROM tags WHERE substr(tag, 1, ?) = ? GROUP BY tag",
                (len(prefix), prefix),
            )
            metadata[name] = {
                value: count for tag, count in found for value in tags_to_metadata([tag]).values()
            }
        return Facets(
            dict(run("SELECT kind, count(*) FROM items GROUP BY kind")),
            dict(
                run(
                    f"SELECT {folder} AS folder, count(*) AS num FROM items "
                    "WHERE instr(path, '/') GROUP BY folder HAVING folder != '' "
                    "ORDER BY num DESC, min(key) LIMIT ?",
                    (max_folders,),
                )
            ),
            dict(run(f"SELECT {year} AS year, count(*) FROM items GROUP BY year ORDER BY year")),
            {name: dict(sorted(values.items())) for name, values in sorted(metadata.items())},
        )


def _chunks(values: Sequence[Any]) -> Iterator[list[Any]]:
    for chunk in chunk_slices(len(values), MAX_PARAMETERS):
        yield list(values[chunk])


def _after_all(end: str | None) -> str | bytes:
    """A bound of paths. SQLite sorts bytes after all texts."""
    return b"" if end is None else end


def _integers(rows: Iterable[tuple[int]]) -> np.ndarray:
    return np.fromiter((value for (value,) in rows), np.int64)


def _values(number: int, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The columns of an item."""
    # Databases may return null for an empty list.
    tags = list(row["metadata"] or ())
    given = [tag for tag in tags if not _READ_TAG.fullmatch(tag)]
    metadata = tags_to_metadata(tags)
    taken = metadata.get(TAKEN)
    unreadable = metadata.get(UNREADABLE_TIME)
    time = item_time(metadata, row["modified_ns"])
    return (
        number,
        *(row[name] for name in ITEM_FIELDS if name != "metadata"),
        json.dumps(tags),
        row[CHECKSUM],
        fold_case(row["path"]),
        time_us(time, clock=True),
        time_us(time, clock=False),
        json.dumps(given),
        taken if taken is not None and parse_time(taken) is None else unreadable,
    )


# Types of the columns of an item. SQLite keeps a text in a column of numbers.
_ITEM_TYPES = {
    (str, str, str, str, int, int, type(start), type(end), str)
    for start in (None, 0.0)
    for end in (None, 0.0)
}


def _check_types(fields: Sequence[Any]) -> None:
    if tuple(map(type, fields)) not in _ITEM_TYPES:
        raise TypeError("a value of another type")


def _item(values: Sequence[Any]) -> IndexItem:
    *fields, tags, _ = values
    try:
        _check_types(fields)
        metadata = tags_to_metadata(json.loads(tags))
    # Damage of the file that SQLite does not detect. Damage that can be read has another checksum.
    except (ValueError, TypeError, AttributeError) as error:
        key = str(fields[0])[:80]
        raise StorageError(f"{DATABASE}: the item {key!r} is damaged ({error}). {REMEDY}") from None
    return IndexItem(**dict(zip(ITEM_FIELDS, (*fields, metadata), strict=True)))


def _captions(tags: Iterable[str]) -> tuple[str, ...]:
    return item_captions(tags_to_metadata(tags))


def _is_text(text: str) -> bool:
    """Whether an item can have this text: without NUL and without lone surrogates."""
    return "\0" not in text and is_valid_unicode(text)


def _condition(item_filter: ItemFilter) -> tuple[str, list[Any]]:
    """A filter in SQL, and its values."""
    texts = [item_filter.path, *item_filter.metadata, *item_filter.metadata.values()]
    if not all(map(_is_text, texts)):
        return "FALSE", []
    conditions = ["TRUE"]
    values = list[Any]()
    if item_filter.path:
        # Brackets begin a class of characters in SQLite, and are text in our patterns.
        conditions.append("folded_path GLOB ?")
        values.append(fold_case(item_filter.path).replace("[", "[[]"))
    if item_filter.kind is not None:
        conditions.append("kind = ?")
        values.append(item_filter.kind)
    for bound, operator in ((item_filter.after, ">="), (item_filter.before, "<")):
        if bound is not None:
            # Without a time zone, the clock at the place of the item is compared.
            clock = bound.tzinfo is None
            conditions.append(f"{'clock_us' if clock else 'instant_us'} {operator} ?")
            values.append(time_us(bound, clock=clock))
    tags = [metadata_tag(name, value) for name, value in item_filter.metadata.items()]
    if len(tags) > MAX_CONDITIONS:
        # As one condition, because SQLite limits the depth of an expression to 1,000.
        conditions.append(
            "row IN (SELECT row FROM tags WHERE tag IN (SELECT value FROM json_each(?)) "
            "GROUP BY row HAVING count(*) = ?)"
        )
        values += [json.dumps(tags), len(tags)]
        tags = []
    for tag in tags:
        conditions.append("row IN (SELECT row FROM tags WHERE tag = ?)")
        values.append(tag)
    return " AND ".join(conditions), values
