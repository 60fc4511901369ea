"""An index on the server: search, items and facets."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from visavis.errors import VisavisError
from visavis.feedback.records import QueryKey
from visavis.retrieval.index_folder import Index
from visavis.retrieval.index_search import EXCLUDED_WEIGHT, SearchQuery, SearchResult, SearchResults, search_index
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


MAX_FOLDERS, MAX_METADATA_VALUES = 50, 30
"""Maximum number of folders, and of values of one metadata name, that are offered as filters."""
# 9999-12-31T23:59:59Z, the last second of datetime.
_MAX_TIMESTAMP = 253402300799.0
_EXCLUDED = re.compile(r"""(?:^|(?<=\s))-(?:"([^"]*)"|([^\s"-]\S*))""")


def parse_query(text: str) -> tuple[tuple[float, str], ...]:
    """Split a text query into what to search for and each excluded ``-word`` or ``-"several words"``.

    A dash within a word, before a space or before another dash does not exclude.

    Args:
        text: Text query.

    Returns:
        Weights and texts.

    Example:
        >>> parse_query('a beach -people -"red umbrella"')
        ((1.0, 'a beach'), (-0.5, 'people'), (-0.5, 'red umbrella'))
        >>> parse_query("black-and-white dog - running")
        ((1.0, 'black-and-white dog - running'),)
    """
    excluded = [(quoted or word).strip() for quoted, word in _EXCLUDED.findall(text)]
    included = " ".join(_EXCLUDED.sub(" ", text).split())
    return tuple(([(1.0, included)] if included else []) + [(EXCLUDED_WEIGHT, words) for words in excluded if words])


@dataclass(frozen=True)
class FacetCounts:
    """Values to filter by, with the number of items of each.

    Attributes:
        kinds: Kinds of items.
        folders: The folders with the most items.
        years: Years of the modification time.
        metadata: Metadata names with a few values.
    """

    kinds: dict[str, int]
    folders: dict[str, int]
    years: dict[str, int]
    metadata: dict[str, dict[str, int]]


class ServedIndex:
    """An index that is served.

    Args:
        index: The index.
        name: Name that is shown when two indexes are compared. Default: the name of the folder.
    """

    def __init__(self, index: Index, name: str | None = None):
        self.index = index
        self.name = name or index.folder.name

    @property
    def items(self) -> Mapping[str, IndexItem]:
        """All items by key."""
        return self.index.items

    def search(self, key: QueryKey, image: PILImage | None, top: int, item_filter: ItemFilter) -> SearchResults:
        """Find the best items, or the newest ones for an empty query.

        Args:
            key: The query.
            image: Uploaded image of the query.
            top: Maximum number of results.
            item_filter: Conditions on the items.

        Returns:
            Results, best first.

        Raises:
            VisavisError: If the query has only exclusions.
        """
        if not key:
            matching = (item for item in self.items.values() if item_filter.matches(item))
            newest = heapq.nlargest(top, matching, key=lambda item: (item.modified_ns, item.key))
            return SearchResults(tuple(SearchResult(item, 0.0) for item in newest))
        query = SearchQuery(
            texts=parse_query(key.text),
            images=() if image is None else ((1.0, image),),
            like=((1.0, key.similar_to),) if key.similar_to else (),
        )
        if not any(weight > 0 for weight, _ in (*query.texts, *query.images, *query.like)):
            raise VisavisError("The query contains only exclusions. Add what to search for, such as 'beach -people'.")
        return search_index(self.index, query, top, item_filter)

    def warm_up(self) -> None:
        """Run a first search, which is slower than later ones."""
        for key in [QueryKey(similar_to=key) for key in list(self.items)[:1]] + [QueryKey("an image")]:
            with suppress(VisavisError):  # a vocabulary may contain no word of the text
                self.search(key, None, 1, NO_FILTER)

    @cached_property
    def facets(self) -> FacetCounts:
        """Values to filter by."""
        kinds, folders, years = Counter[str](), Counter[str](), Counter[str]()
        metadata: dict[str, Counter[str]] = {}
        for item in self.items.values():
            kinds[item.kind] += 1
            years[str(modified_at(item).year)] += 1
            if folder := item.path.rpartition("/")[0]:
                folders[folder] += 1
            for name, value in item.metadata.items():
                values = metadata.setdefault(name, Counter())
                if len(values) <= MAX_METADATA_VALUES or value in values:
                    values[value] += 1
        few_values = {
            name: dict(sorted(values.items())) for name, values in sorted(metadata.items()) if 1 < len(values) <= MAX_METADATA_VALUES
        }
        return FacetCounts(dict(kinds), dict(folders.most_common(MAX_FOLDERS)), dict(sorted(years.items())), few_values)


def modified_at(item: IndexItem) -> datetime:
    """Convert the modification time of an item, clamped to 1970 to 9999.

    Args:
        item: The item.

    Returns:
        Time in UTC.
    """
    return datetime.fromtimestamp(min(max(item.modified_ns / 1e9, 0.0), _MAX_TIMESTAMP), UTC)
