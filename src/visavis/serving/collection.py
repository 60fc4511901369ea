"""An index as the service uses it: items by key, searches, the bytes of an item, and what one can filter by."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from visavis.data.dataset import Bytes
from visavis.data.judgements import Asked
from visavis.errors import VisavisError
from visavis.retrieval.index import Index
from visavis.retrieval.item import EVERYTHING, Item, Where
from visavis.retrieval.searching import Query, Result, Results, search
from visavis.serving.wording import parts_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FOLDERS, VALUES = 50, 30


@dataclass(frozen=True)
class Facets:
    """What an index can be filtered by, with how many items each: kinds, folders, years, and values of metadata that have few."""

    kinds: dict[str, int]
    folders: dict[str, int]
    years: dict[str, int]
    metadata: dict[str, dict[str, int]]


class Collection:
    """An index that is served. name: how it is called where there are two."""

    def __init__(self, index: Index, name: str | None = None):
        self.index = index
        self.about = index.describe()
        self.name = name or str(self.about["name"])

    @cached_property
    def items(self) -> Mapping[str, Item]:
        """All items by key."""
        return self.index.items

    def item(self, key: str) -> Item:
        """The item of a key. Raises KeyError."""
        return self.items[key]

    def place(self, item: Item) -> Bytes:
        """Where the bytes of an item lie. Raises DataError where they are gone, or outside of what was indexed."""
        return self.index.locate(item)

    def search(self, asked: Asked, picture: Picture | None, top: int, where: Where) -> Results:
        """The items that fit best; for a query that says nothing the newest ones. picture: that of the query."""
        if not asked:
            newest = heapq.nlargest(top, (item for item in self.items.values() if where.allows(item)), key=_newest)
            return Results(tuple(Result(item, 0.0) for item in newest))
        texts = parts_of(asked.text)
        query = Query(
            texts=texts,
            images=() if picture is None else ((1.0, picture),),
            like=((1.0, asked.like),) if asked.like else (),
        )
        if not any(weight > 0 for weight, _ in (*texts, *query.images, *query.like)):
            raise VisavisError("the query says only what must not be there: add what to look for, such as 'beach -people'.")
        return search(self.index, query, top, where)

    def warm_up(self) -> None:
        """Do once what only the first search takes long for."""
        for asked in [Asked(like=key) for key in list(self.items)[:1]] + [Asked("a picture")]:
            with suppress(VisavisError):  # a model may know neither word
                self.search(asked, None, 1, EVERYTHING)

    @cached_property
    def facets(self) -> Facets:
        """What one can filter by."""
        kinds, folders, years = Counter[str](), Counter[str](), Counter[str]()
        metadata: dict[str, Counter[str]] = {}
        for item in self.items.values():
            kinds[item.kind] += 1
            years[str(changed(item).year)] += 1
            if folder := item.path.rpartition("/")[0]:
                folders[folder] += 1
            for name, value in item.metadata.items():
                values = metadata.setdefault(name, Counter())
                if len(values) <= VALUES or value in values:
                    values[value] += 1
        few = {name: dict(sorted(values.items())) for name, values in sorted(metadata.items()) if 1 < len(values) <= VALUES}
        return Facets(dict(kinds), dict(folders.most_common(FOLDERS)), dict(sorted(years.items())), few)


def changed(item: Item) -> datetime:
    """When the file of an item was changed last; the limits of dates where it is beyond them."""
    seconds = min(max(item.modified_ns / 1e9, 0.0), 253402300799.0)
    return datetime.fromtimestamp(seconds, UTC)


def _newest(item: Item) -> tuple[int, str]:
    return item.modified_ns, item.key
