"""Votes of the clients of a server, in the databases of the served indexes.

Several servers and processes may write at once. A database is opened for each vote, so that a
server never holds the file of an index that was deleted or made again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from starlette.exceptions import HTTPException

from visavis.core import storage
from visavis.core.errors import StorageError
from visavis.data.feedback.records import Judgment, Preference, QueryKey
from visavis.data.feedback.vote_table import VoteTable
from visavis.retrieval.items import IndexItem
from visavis.retrieval.server.limits import ServerMetrics
from visavis.retrieval.stores.index_database import IndexDatabase


@contextmanager
def open_votes(folder: Path) -> Iterator[VoteTable]:
    """Open the votes in an index."""
    with closing(IndexDatabase(folder)) as database:
        yield VoteTable(database.connection, database.reading, database.change)


def check_votes_writable(folder: Path) -> None:
    """Check that votes can be saved in an index, without saving one."""
    try:
        with closing(IndexDatabase(folder)) as database, database.change():
            votes = VoteTable(database.connection)
            database.connection.execute("SAVEPOINT check_votes")
            votes.prefer(Preference("", QueryKey(), "", "", None))
            database.connection.execute("ROLLBACK TO check_votes")
    except StorageError as error:
        raise StorageError(
            f"{folder}: expected an index that can be written, because it keeps the votes: {error} "
            "To serve it without votes, leave out --votes."
        ) from None


def new_vote(index: str, key: QueryKey, item: IndexItem, relevant: bool | None) -> Judgment:
    """Create a vote with a new name. One of None withdraws an earlier vote."""
    return Judgment(_now(), index, key, item.key, item.content, relevant, vote=secrets.token_hex(8))


class VoteStore:
    """Votes and preferences of clients. Votes on two compared indexes are saved in both, because
    they are about the items, which both indexes have.

    Args:
        folders: Folders of the served indexes. Empty: votes are not saved.
        metrics: Metrics of the server.
    """

    def __init__(self, folders: Sequence[Path], metrics: ServerMetrics):
        self.folders = list(folders)
        self.metrics = metrics

    def of_query(self, number: int, key: QueryKey) -> Mapping[str, bool | None]:
        """Read the last vote on each item of a query in one of the indexes, by the key of the item.
        Votes of other servers are among them.
        """
        if not self.folders:
            return {}
        with open_votes(self.folders[number]) as votes:
            return votes.of_query(key)

    def record_vote(
        self, index: str, key: QueryKey, item: IndexItem, relevant: bool | None
    ) -> Judgment:
        """Save a vote. One of None withdraws an earlier vote."""
        judgment = new_vote(index, key, item, relevant)
        for folder in self._writable():
            with open_votes(folder) as votes:
                votes.add(judgment)
        self.metrics.votes.labels("relevant").inc()
        return judgment

    def undo(self, vote: str) -> bool | None:
        """Undo one vote. Earlier and later votes of others on the same item remain. Return the
        judgment that applies without it. None: no vote.
        """
        remaining = list[bool | None]()
        for folder in self._writable():
            with open_votes(folder) as votes:
                if (undone := votes.undo(vote, _now())) is not None:
                    remaining.append(votes.of_query(undone.query).get(undone.item))
        if not remaining:
            raise HTTPException(
                404,
                f"vote: expected the name of a vote that was not undone, got {vote[:80]!r}. Reload "
                "the page.",
            )
        self.metrics.votes.labels("relevant").inc()
        return remaining[0]

    def record_preference(
        self, key: QueryKey, left: str, right: str, preferred: str | None
    ) -> bool:
        """Save which of two indexes gave the better results, if votes are saved."""
        preference = Preference(_now(), key, left, right, preferred)
        for folder in self.folders:
            with open_votes(folder) as votes:
                votes.prefer(preference)
        if self.folders:
            self.metrics.votes.labels("preference").inc()
        return bool(self.folders)

    def _writable(self) -> Sequence[Path]:
        """Folders in which votes are saved."""
        if not self.folders:
            raise HTTPException(409, "Votes are not saved. Start the server with --votes.")
        return self.folders


def _now() -> str:
    now = storage.current_disk().time_ns() / 1e9
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
