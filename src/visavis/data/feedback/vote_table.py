"""Votes and preferences of people as tables in the database of an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from visavis.data.feedback.records import FeedbackRecord, Judgment, Preference, QueryKey

_QUERY = "text, similar_to, image_hash"
_VOTE = f"timestamp, index_name, {_QUERY}, item, content_hash, relevant, vote"
_OF_QUERY = "text = ? AND similar_to = ? AND image_hash = ? AND undone IS NULL"


class VoteTable:
    """Votes and preferences in the database of an index.

    Args:
        connection: Connection to a database with these tables.
        reading: Makes the context in which rows are read.
        change: Makes the context in which rows are written: the change is on the disk at its end.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
        change: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.connection = connection
        self._reading = reading
        self._change = change

    def add(self, judgment: Judgment) -> None:
        """Save a vote."""
        with self._change():
            self.connection.execute(
                f"INSERT INTO votes ({_VOTE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    judgment.timestamp,
                    judgment.index,
                    *_query_values(judgment.query),
                    judgment.item,
                    judgment.content_hash,
                    judgment.relevant,
                    judgment.vote,
                ),
            )

    def undo(self, vote: str, timestamp: str) -> Judgment | None:
        """Undo a vote by its name, and return it. None: no such vote, or it was undone before."""
        with self._change():
            found = self.connection.execute(
                f"SELECT {_VOTE} FROM votes WHERE vote = ? AND undone IS NULL", (vote,)
            ).fetchone()
            if found is None:
                return None
            self.connection.execute("UPDATE votes SET undone = ? WHERE vote = ?", (timestamp, vote))
        return _judgment(found)

    def of_query(self, query: QueryKey) -> dict[str, bool | None]:
        """Read the last vote on each item of a query, by the key of the item."""
        with self._reading():
            found = self.connection.execute(
                f"SELECT item, relevant FROM votes WHERE {_OF_QUERY} ORDER BY number",
                _query_values(query),
            ).fetchall()
        return {item: _truth(relevant) for item, relevant in found}

    def prefer(self, preference: Preference) -> None:
        """Save a preference."""
        with self._change():
            self.connection.execute(
                f"INSERT INTO preferences (timestamp, {_QUERY}, left_index, right_index, preferred) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    preference.timestamp,
                    *_query_values(preference.query),
                    preference.left,
                    preference.right,
                    preference.preferred,
                ),
            )

    def records(self) -> list[FeedbackRecord]:
        """Read all votes that were not undone, oldest first, and then all preferences."""
        with self._reading():
            votes = self.connection.execute(
                f"SELECT {_VOTE} FROM votes WHERE undone IS NULL ORDER BY number"
            ).fetchall()
            preferences = self.connection.execute(
                f"SELECT timestamp, {_QUERY}, left_index, right_index, preferred FROM preferences "
                "ORDER BY number"
            ).fetchall()
        return [
            *map(_judgment, votes),
            *(
                Preference(timestamp, QueryKey(*query), left, right, preferred)
                for timestamp, *query, left, right, preferred in preferences
            ),
        ]


def _query_values(query: QueryKey) -> tuple[str, str, str]:
    return query.text, query.similar_to, query.image_hash


def _judgment(row: tuple[str, ...]) -> Judgment:
    timestamp, index, text, similar_to, image_hash, item, content_hash, relevant, vote = row
    query = QueryKey(text, similar_to, image_hash)
    return Judgment(timestamp, index, query, item, content_hash, _truth(relevant), vote=vote)


def _truth(relevant: str | int | None) -> bool | None:
    return None if relevant is None else bool(relevant)
