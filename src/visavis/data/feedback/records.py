"""Relevance judgments of people, in a JSON Lines file that only grows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from visavis.core import storage
from visavis.core.errors import DataError


@dataclass(frozen=True)
class QueryKey:
    """A query as a user entered it. Parts that the query does not have are empty.

    Attributes:
        text: The text as typed. ``-word`` and ``-"several words"`` exclude words.
        similar_to: Key of an item, for "more like this".
        image_hash: SHA-256 of the content of an uploaded image.
    """

    text: str = ""
    similar_to: str = ""
    image_hash: str = ""

    def __bool__(self) -> bool:
        return self != QueryKey()

    @property
    def plain_text(self) -> str:
        """The words of a query that consists of plain words only. Empty for a query with an image,
        an item or excluded words.
        """
        words = self.text.split()
        return (
            ""
            if self.similar_to or self.image_hash or any(word.startswith("-") for word in words)
            else " ".join(words)
        )


@dataclass(frozen=True)
class Judgment:
    """Whether an item is relevant to a query.

    Attributes:
        timestamp: Time of the judgment in UTC, in ISO format.
        index: Name of the index that was searched.
        query: The query.
        item: Key of the item in the index.
        content_hash: Hash of the item's file. Identifies an item that was moved.
        relevant: Whether the item is relevant. None withdraws an earlier judgment.
        kind: Kind of the record.
        vote: Name of the vote. Empty in files of earlier versions.
        undoes: Name of the vote that this record undoes. ``relevant`` is then the judgment that
            applied without that vote.
    """

    timestamp: str
    index: str
    query: QueryKey
    item: str
    content_hash: str
    relevant: bool | None
    kind: Literal["judgment"] = "judgment"
    vote: str = ""
    undoes: str = ""


@dataclass(frozen=True)
class Preference:
    """Which of two indexes gave the better results for a query, in a blind comparison.

    Attributes:
        timestamp: Time of the choice in UTC, in ISO format.
        query: The query.
        left: Name of the index on the left.
        right: Name of the index on the right.
        preferred: Name of the preferred index. None if neither is better.
        kind: Kind of the record.
    """

    timestamp: str
    query: QueryKey
    left: str
    right: str
    preferred: str | None
    kind: Literal["preference"] = "preference"


FeedbackRecord: TypeAlias = Judgment | Preference
"""One line of a feedback file."""

# Every record begins with these bytes, because `timestamp` is its first field. A last line that a
# crash cut short is a prefix of a record, so a tail that does not begin like this shows that the
# file is of another kind.
_RECORD_PREFIX = b'{"timestamp": "'


@dataclass(frozen=True)
class FeedbackFile:
    """A feedback file that is open for writing. Created by `open_feedback`.

    Attributes:
        path: Path of the file.
        records: The records that the file held when it was opened.
    """

    path: Path
    records: list[FeedbackRecord]

    def append(self, record: FeedbackRecord) -> None:
        """Append a record. It is on the disk when this method returns.

        Args:
            record: The judgment or preference.

        Raises:
            StorageError: If the file cannot be written.
        """
        storage.append_json_line(self.path, asdict(record), fsync=True)


@contextmanager
def open_feedback(path: str | Path) -> Iterator[FeedbackFile]:
    """Open a new or an existing feedback file for writing. Only one process at a time can open it.

    A last line that a crash cut short is removed with a warning.

    Args:
        path: Path of the file.

    Yields:
        The open file.

    Raises:
        DataError: If the file is not a feedback file. It is not changed.
        RunError: If another process has opened the file.
        StorageError: If the file cannot be written.
    """
    path = Path(path)
    with storage.folder_lock(path, wait=False):
        if os.path.exists(path):
            records = read_feedback(path)
            if num_bytes := storage.remove_incomplete_line(path):
                logging.getLogger(__name__).warning(
                    "%s: an incomplete last line of %s bytes was removed. Its record was never "
                    "confirmed.",
                    path,
                    f"{num_bytes:,}",
                )
        else:
            records = []
            storage.write_bytes(path, b"")
        yield FeedbackFile(path, records)
    storage.remove_lock(path)


def read_feedback(path: str | Path) -> list[FeedbackRecord]:
    """Read all records of a feedback file, oldest first. A last line that a crash cut short is
    skipped.

    Args:
        path: Path of the file.

    Returns:
        Judgments and preferences.

    Raises:
        DataError: If the file is not a feedback file.
    """
    records: list[FeedbackRecord] = storage.read_json_lines(path, FeedbackRecord)
    tail = storage.read_bytes(path).rpartition(b"\n")[2]
    if not tail.startswith(_RECORD_PREFIX[: len(tail)]):
        raise DataError(
            f"{path}: expected a feedback file of visavis serve, got a last line {tail[:40]!r}. "
            "Pass another file."
        )
    return records


def latest_judgments(records: Iterable[FeedbackRecord]) -> dict[tuple[QueryKey, str], Judgment]:
    """Select the judgments that are in force.

    Args:
        records: Records of a feedback file, oldest first.

    Returns:
        The last judgment of each query and item key, without the withdrawn ones.
    """
    last = {
        (record.query, record.item): record for record in records if isinstance(record, Judgment)
    }
    return {pair: judgment for pair, judgment in last.items() if judgment.relevant is not None}


def votes_not_undone(
    records: Iterable[FeedbackRecord],
) -> dict[tuple[QueryKey, str], list[Judgment]]:
    """Select the votes that were not undone. The last one of a pair applies.

    Args:
        records: Records of a feedback file, oldest first.

    Returns:
        The votes on each query and item key, oldest first.
    """
    judgments = [record for record in records if isinstance(record, Judgment)]
    undone = {judgment.undoes for judgment in judgments} - {""}
    votes: dict[tuple[QueryKey, str], list[Judgment]] = {}
    for judgment in judgments:
        if not judgment.undoes and judgment.vote not in undone:
            votes.setdefault((judgment.query, judgment.item), []).append(judgment)
    return votes
