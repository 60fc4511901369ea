"""Disk cache of the relevance of single pairs, by the texts of their captions."""

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
"""Two captions."""
ResultT = TypeVar("ResultT")


class PairCache:
    """Disk cache of the relevance of caption pairs. Several processes can read and write at the same time.

    Every value has a checksum. A database with a damaged value, or one that SQLite cannot read, is removed and created again.

    Attributes:
        path: Path of the SQLite database.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Look up pairs.

        Args:
            pairs: Pairs of captions.

        Returns:
            Relevance of the pairs that are in the cache.
        """
        by_key = {_key(pair): pair for pair in pairs}
        keys = list(by_key)

        def select(database: sqlite3.Connection) -> dict[Pair, float]:
            relevance = {}
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                chunk = keys[start : start + _KEYS_PER_QUERY]
                rows = database.execute(f"SELECT * FROM checked WHERE pair IN ({', '.join('?' * len(chunk))})", chunk)
                relevance.update({by_key[key]: _unpack(key, value) for key, value in rows})
            return relevance

        return self._run(select)

    def add(self, relevance: Mapping[Pair, float]) -> None:
        """Store pairs.

        Args:
            relevance: Relevance of each pair.
        """
        rows = [(key, _pack(key, value)) for key, value in ((_key(pair), value) for pair, value in relevance.items())]
        self._run(lambda database: database.executemany("INSERT OR REPLACE INTO checked VALUES (?, ?)", rows))

    def _run(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run an operation, if necessary a second time with an empty database."""
        try:
            return self._run_once(operation)
        except sqlite3.DatabaseError as damage:
            storage.remove_damaged(self.path, [self.path, self.path.with_name(f"{self.path.name}-journal")], str(damage))
            return self._run_once(operation)

    def _run_once(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        with storage.sqlite_database(self.path) as database:
            database.execute(_TABLE)
            return operation(database)


_TABLE = "CREATE TABLE IF NOT EXISTS checked (pair BLOB PRIMARY KEY, relevance BLOB) WITHOUT ROWID"

# Every build of SQLite takes 999 parameters per query.
_KEYS_PER_QUERY = 900


def _key(pair: Pair) -> bytes:
    return hashlib.blake2b("\x1f".join(pair).encode(), digest_size=16).digest()


def _pack(key: bytes, relevance: float) -> bytes:
    """A value as 8 bytes, and the checksum of key and value as 4 bytes."""
    number = struct.pack("<d", relevance)
    return number + struct.pack("<I", zlib.crc32(key + number))


def _unpack(key: bytes, value: object) -> float:
    """The value that was packed. Raises sqlite3.DatabaseError if it is damaged."""
    relevance = float(struct.unpack("<d", value[:8])[0]) if isinstance(value, bytes) and len(value) == 12 else None
    if relevance is None or _pack(key, relevance) != value:
        raise sqlite3.DatabaseError("checksum mismatch of a relevance value")
    return relevance
