"""Relevance judgments of people: votes on results, and choices between two indexes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias


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
        vote: Name of the vote, by which it can be undone.
    """

    timestamp: str
    index: str
    query: QueryKey
    item: str
    content_hash: str
    relevant: bool | None
    kind: Literal["judgment"] = "judgment"
    vote: str = ""


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
"""A vote on a result, or a choice between two indexes. One line of a file."""


def latest_judgments(records: Iterable[FeedbackRecord]) -> dict[tuple[QueryKey, str], Judgment]:
    """Select the judgments that are in force: the last one of each query and item key, unless it was
    withdrawn. The records are given oldest first.
    """
    last = {
        (record.query, record.item): record for record in records if isinstance(record, Judgment)
    }
    return {pair: judgment for pair, judgment in last.items() if judgment.relevant is not None}
