"""Database of an index: items, votes on them, and named values such as the manifest, in one file of
SQLite.

A change is one transaction. SQLite keeps its rollback journal instead of a write-ahead log: it
works on network drives and in read-only folders, a copy of the folder is complete, and readers wait
for a commit only, because no reader holds a transaction longer than a search.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock

from visavis.core import storage
from visavis.core.errors import DataError, StorageError
from visavis.data.feedback.vote_schema import VOTE_SCHEMA
from visavis.retrieval.items import DATABASE, REMEDY
from visavis.retrieval.stores.item_table import SCHEMA

APPLICATION_ID = 0x76697361
"""Number of our databases in the header of SQLite: "visa" in ASCII."""
FORMAT = 3
"""Version of the tables, in the header of SQLite."""
_STATEMENTS = (
    *SCHEMA,
    (
        "CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL, sha256 TEXT NOT NULL) "
        "WITHOUT ROWID"
    ),
    "CREATE TABLE removed_rows (row INTEGER PRIMARY KEY)",
    (
        "CREATE TABLE blocks (file TEXT, first INTEGER, stop INTEGER NOT NULL, sha256 TEXT NOT NULL, "
        "PRIMARY KEY (file, first)) WITHOUT ROWID"
    ),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
)
_SET_VALUE = "INSERT OR REPLACE INTO state VALUES (?, ?, ?)"


class OtherFormatError(DataError):
    """A database is of another version, or another file."""


class IndexDatabase:
    """Database of an index, for the threads of a process.

    Args:
        folder: Folder of the index.
        create: Named texts of a new database, if it is missing. None: it must exist.
    """

    def __init__(self, folder: Path, *, create: Mapping[str, str] | None = None):
        self.path = folder / DATABASE
        self._lock = RLock()
        exists = os.path.exists(self.path)
        if not exists and create is None:
            raise DataError(
                f"{folder}: expected an index ({DATABASE}), got none. Run visavis index to create "
                "it."
            )
        with storage.storage_errors(self.path):
            storage.create_folder(folder, flush=not exists)
        if not exists:
            _create(self.path, create or {})
        with self._errors():
            self.connection = storage.current_disk().connect(
                self.path,
                timeout=storage.SQLITE_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        # Closed in case of an error.
        with ExitStack() as stack, self._errors():
            stack.callback(self.close)
            # Pages that are written before the commit would keep readers waiting from there on.
            self.connection.execute("PRAGMA cache_spill = OFF")
            # The journal is gone for good before files of the former version are removed.
            self.connection.execute("PRAGMA synchronous = EXTRA")
            version = self._version()
            if version != FORMAT:
                raise OtherFormatError(
                    f"{self.path}: expected an index of format {FORMAT}, got "
                    f"{f'format {version}' if version else 'another file'}. Another version of "
                    "visavis made it."
                )
            stack.pop_all()

    def _version(self) -> int:
        """Format of the tables. 0: the file is another one."""
        with self.reading():
            [application] = self.connection.execute("PRAGMA application_id").fetchone()
            [version] = self.connection.execute("PRAGMA user_version").fetchone()
        return int(version) if application == APPLICATION_ID else 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one version of the database in this block."""
        with self._transaction("BEGIN"):
            yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change the database in this block, completely or not at all."""
        with self._transaction("BEGIN IMMEDIATE"):
            yield

    @contextmanager
    def change_at_once(self) -> Iterator[None]:
        """Change the database in this block, or raise a StorageError if another process does."""
        with self._lock:
            self.connection.execute("PRAGMA busy_timeout = 0")
            try:
                with self.change():
                    yield
            finally:
                self.connection.execute(f"PRAGMA busy_timeout = {1000 * storage.SQLITE_SECONDS}")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._lock, self._errors():
            # A block inside another one is a part of its transaction.
            if self.connection.in_transaction:
                yield
                return
            try:
                # Inside, because Ctrl-C may interrupt it after it has begun.
                self.connection.execute(begin)
                yield
                self.connection.execute("COMMIT")
            finally:
                self._undo()

    def _undo(self) -> None:
        """Undo the changes of a block with an error."""
        # A full disk may have ended the transaction already.
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with storage.sqlite_errors(self.path):
                yield
        except sqlite3.Error as error:
            if "no such module: fts5" in str(error):
                raise _no_full_text(self.path) from None
            raise StorageError(
                f"{self.path}: the index cannot be read or written: {error}. {REMEDY}"
            ) from None

    def value(self, name: str) -> str | None:
        """Read a named text. None: there is none."""
        found = self._read(name)
        return None if found is None else str(found)

    def content(self, name: str) -> bytes | None:
        """Read a named array. None: there is none."""
        found = self._read(name)
        assert found is None or isinstance(found, bytes), name
        return found

    def _read(self, name: str) -> str | bytes | None:
        with self.reading():
            found = self.connection.execute(
                "SELECT value, sha256 FROM state WHERE name = ?", (name,)
            ).fetchone()
        if found is None:
            return None
        if _checksum(found[0]) != found[1]:
            raise StorageError(f"{self.path}: {name}: checksum mismatch. {REMEDY}")
        value: str | bytes = found[0]
        return value

    def set_value(self, name: str, value: str | bytes) -> None:
        """Write a named text, or the bytes of an array."""
        with self.change():
            self.connection.execute(_SET_VALUE, (name, value, _checksum(value)))

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self.connection.close()


def _create(path: Path, values: Mapping[str, str]) -> None:
    """Create a database without items, as a whole."""
    # A process that is killed meanwhile leaves no file that other processes would open.
    with storage.atomic_file(path) as part, storage.sqlite_errors(path):
        connection = storage.current_disk().connect(part, isolation_level=None)
        try:
            # The file is flushed before it gets its name. A journal would stay after a kill.
            connection.execute("PRAGMA journal_mode = MEMORY")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            for statement in (*_STATEMENTS, *VOTE_SCHEMA):
                connection.execute(statement)
            for name, value in values.items():
                connection.execute(_SET_VALUE, (name, value, _checksum(value)))
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "no such module: fts5" in str(error):
                raise _no_full_text(path) from None
            raise
        finally:
            connection.close()


def _no_full_text(path: Path) -> StorageError:
    return StorageError(
        f"{path}: expected SQLite with full-text search (FTS5), got version "
        f"{sqlite3.sqlite_version} without it. Install another build of Python, such as the one of "
        "python.org."
    )


def _checksum(value: str | bytes) -> str:
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.sha256(content).hexdigest()
