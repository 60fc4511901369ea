"""Commands on an index that ``visavis`` does not have: votes, and an early compaction.

Arguments: ``vote ITEM INDEX ...``, ``undo VOTE ... -- INDEX ...``, ``compact ARGUMENTS`` or ``unsynced ARGUMENTS``, with a planted fault.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from visavis.cli import main
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.limits import ServerMetrics
from visavis.retrieval.server.vote_store import VoteStore
from visavis.retrieval.stores import sqlite_store

QUERY = QueryKey("a red circle")


def _answer(text: str) -> None:
    """Answer a client."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class _UnsyncedDisk(storage.Disk):
    """A planted fault: content that is written to open files is not synced."""

    def sync_file(self, file: BinaryIO) -> None:
        file.flush()


def vote(folders: list[Path]) -> None:
    """Vote on four items, one after the other."""
    votes = VoteStore(folders, ServerMetrics())
    index = open_index(folders[0])
    for number, item in enumerate(list(index.items.values())[:4]):
        judgment = votes.record_vote("index", QUERY, item, relevant=bool(number % 2))
        _answer(judgment.vote)


def undo(names: list[str], folders: list[Path]) -> None:
    """Undo votes, one after the other."""
    votes = VoteStore(folders, ServerMetrics())
    for name in names:
        votes.undo(name)
        _answer(name)


def run(words: list[str]) -> None:
    """Run a command."""
    match words:
        case ["vote", *folders]:
            vote(list(map(Path, folders)))
        case ["undo", *rest]:
            end = rest.index("--")
            undo(rest[:end], list(map(Path, rest[end + 1 :])))
        case ["compact", *arguments]:
            # Thousands of removed items take too long here.
            sqlite_store.MIN_REMOVED_ROWS = 0
            sys.argv = arguments
            main()
        case ["unsynced", *arguments]:
            sys.argv = arguments
            with storage.replaced_disk(_UnsyncedDisk()):
                main()


if __name__ == "__main__":
    try:
        run(sys.argv[1:])
    except VisavisError as error:
        # A server answers with this message.
        sys.exit(f"visavis: {error}")
