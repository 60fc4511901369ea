"""A cache on disk of the degrees of single pairs, by the texts of their captions."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from visavis import storage

Pair = tuple[str, str]
T = TypeVar("T")


class KeptPairs:
    """A cache of degrees of pairs of captions; several processes may read and add at the same time.

    Every degree has its checksum: a database with one that is damaged, or that SQLite cannot read, is made anew.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """The cached degrees among those of ``pairs``."""
        by_key = {_key(pair): pair for pair in pairs}
        keys = list(by_key)

        def select(database: sqlite3.Connection) -> dict[Pair, float]:
            degrees = {}
            for start in range(0, len(keys), _AT_ONCE):
                part = keys[start : start + _AT_ONCE]
                rows = database.execute(f"SELECT * FROM sealed WHERE pair IN ({', '.join('?' * len(part))})", part)
                degrees.update({by_key[key]: _degree(key, value) for key, value in rows})
            return degrees

        return self._work(select)

    def add(self, degrees: Mapping[Pair, float]) -> None:
        rows = [(key, _sealed(key, degree)) for key, degree in ((_key(pair), degree) for pair, degree in degrees.items())]
        self._work(lambda database: database.executemany("INSERT OR REPLACE INTO sealed VALUES (?, ?)", rows))

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return self._once(work)
        except sqlite3.DatabaseError as damage:
            storage.discard(self.path, [self.path, self.path.with_name(f"{self.path.name}-journal")], str(damage))
            return self._once(work)

    def _once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with storage.database(self.path) as database:
            database.execute(_TABLE)
            return work(database)


_TABLE = "CREATE TABLE IF NOT EXISTS sealed (pair BLOB PRIMARY KEY, degree BLOB) WITHOUT ROWID"
_AT_ONCE = 900  # parameters of a query: every SQLite takes 999


def _key(pair: Pair) -> bytes:
    return hashlib.blake2b("\x1f".join(pair).encode(), digest_size=16).digest()


def _sealed(key: bytes, degree: float) -> bytes:
    """A degree as 8 bytes, and the checksum of its pair and itself as 4."""
    number = struct.pack("<d", degree)
    return number + struct.pack("<I", zlib.crc32(key + number))


def _degree(key: bytes, value: object) -> float:
    """The degree that was sealed. Raises sqlite3.DatabaseError if the value is damaged."""
    degree = float(struct.unpack("<d", value[:8])[0]) if isinstance(value, bytes) and len(value) == 12 else None
    if degree is None or _sealed(key, degree) != value:
        raise sqlite3.DatabaseError("a degree does not have its checksum")
    return degree
