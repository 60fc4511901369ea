"""Sources of feedback: an index with its votes, or a file to which they were exported."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.feedback.records import FeedbackRecord
from visavis.data.feedback.vote_table import VoteTable
from visavis.data.file_names import INDEX_DATABASE


def read_feedback(path: str | Path) -> list[FeedbackRecord]:
    """Read all records of an index, or of a file of them, oldest first."""
    if os.path.isdir(path):
        return _read_votes(Path(path))
    records: list[FeedbackRecord] = storage.read_json_lines(path, FeedbackRecord)
    # Of a file that was cut, or of another kind.
    if tail := storage.read_bytes(path).rpartition(b"\n")[2]:
        raise DataError(
            f"{path}: expected a file of visavis indexes export-votes, got a last line without an "
            f"end: {tail[:40]!r}. Export the votes again, or pass another file."
        )
    return records


def _read_votes(folder: Path) -> list[FeedbackRecord]:
    """Read the records in the database of an index."""
    database = folder / INDEX_DATABASE
    # Opening it would create an empty file.
    if not os.path.exists(database):
        raise DataError(
            f"{folder}: expected an index or a file of votes, got a folder without "
            f"{INDEX_DATABASE}. Pass another one."
        )
    try:
        with storage.sqlite_database(database) as connection:
            return VoteTable(connection).records()
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{database}: expected the votes of an index of this version, got an error: {error}. "
            "Run visavis doctor INDEX to check the index."
        ) from None


def write_feedback(path: str | Path, records: Iterable[FeedbackRecord]) -> None:
    """Write records to a file, which ``read_feedback`` reads."""
    storage.write_json_lines(path, map(asdict, records))
