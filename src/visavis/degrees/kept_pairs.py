"""A cache on disk of the degrees of single pairs, by the texts of their captions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from visavis import storage

Pair = tuple[str, str]


class KeptPairs:
    """A cache of degrees of pairs of captions; several processes may read and add at the same time."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """The cached degrees among those of ``pairs``."""
        by_key = {_key(pair): pair for pair in pairs}
        keys, degrees = list(by_key), {}
        with storage.database(self.path) as database:
            database.execute(_TABLE)
            for start in range(0, len(keys), _AT_ONCE):
                part = keys[start : start + _AT_ONCE]
                rows = database.execute(f"SELECT * FROM degrees WHERE pair IN ({', '.join('?' * len(part))})", part)
                degrees.update({by_key[key]: degree for key, degree in rows})
        return degrees

    def add(self, degrees: Mapping[Pair, float]) -> None:
        with storage.database(self.path) as database:
            database.executemany("INSERT OR REPLACE INTO degrees VALUES (?, ?)", ((_key(pair), degree) for pair, degree in degrees.items()))


_TABLE = "CREATE TABLE IF NOT EXISTS degrees (pair BLOB PRIMARY KEY, degree REAL) WITHOUT ROWID"
_AT_ONCE = 900  # parameters of a query: every SQLite takes 999


def _key(pair: Pair) -> bytes:
    return hashlib.blake2b("\x1f".join(pair).encode(), digest_size=16).digest()
