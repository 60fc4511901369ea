"""One version of the items of a store, and exact search in their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from visavis.core.errors import StorageError
from visavis.core.fields import validate_int
from visavis.retrieval.items import NO_FILTER, REMEDY, IndexItem, ItemFilter
from visavis.retrieval.stores.base import (
    ItemVectors,
    Neighbor,
    Queries,
    row_checksum,
)
from visavis.retrieval.stores.exact_search import ExactSearch
from visavis.retrieval.stores.item_table import ItemTable

if TYPE_CHECKING:
    from visavis.retrieval.stores.maxsim_search import MaxSimSearch

MAX_MASKS = 8
"""Recent filters whose rows are kept, 1 byte per item. Pages of results and further queries usually
have the same filter.
"""
TIE_MARGIN = 16
"""Results beyond the top that are found first, to see where equal scores end."""


class SearchedRows(NamedTuple):
    """Search in a range of rows.

    Attributes:
        first: First row.
        search: Search in the vectors from there.
    """

    first: int
    search: ExactSearch | MaxSimSearch


@dataclass(eq=False)
class ItemSnapshot:
    """Items of a store and their vectors.

    Attributes:
        uri: Location of the store, for messages.
        index_id: Id of the index in hex.
        table: The items.
        vectors: Vectors by row, also of removed items.
        searches: Searches in all rows, in ranges.
        live: Whether each row belongs to an item, bool, shape ``[N]``. None: all are.
    """

    uri: str
    index_id: str
    table: ItemTable
    vectors: ItemVectors
    searches: Sequence[SearchedRows]
    live: np.ndarray | None = None
    _masks: dict[ItemFilter, np.ndarray] = field(default_factory=dict, repr=False)

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest scores, equal scores in the order of keys."""
        validate_int(top, "top", 1)
        mask = self._mask(item_filter)
        fetched = top + TIE_MARGIN
        while True:
            scores, rows = self._search_rows(queries, fetched, mask)
            # Equal scores may continue beyond the fetched results, in the order of rows.
            is_cut = rows.shape[1] == fetched and (scores[:, -1] == scores[:, top - 1]).any()
            if not is_cut:
                break
            fetched *= 4
        keys = self.table.keys_of(np.unique(rows).tolist())
        if len(missing := set(rows.ravel().tolist()) - keys.keys()):
            raise self._damaged(f"the item of row {min(missing)}")
        return [
            sorted(
                (Neighbor(keys[row], score) for row, score in zip(own_rows, own, strict=True)),
                key=lambda neighbor: (-neighbor.score, neighbor.key),
            )[:top]
            for own_rows, own in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def _search_rows(
        self, queries: Queries, count: int, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows, best first, both ``[Q, K]``."""
        found = []
        for first, search in self.searches:
            num_rows = len(search)
            own = None if mask is None else mask[first : first + num_rows]
            scores, rows = search.search(queries, count, own)  # type: ignore[arg-type]
            found.append((scores, rows + first))
        if len(found) == 1:
            return found[0]
        scores, rows = (np.concatenate(parts, 1) for parts in zip(*found, strict=True))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _mask(self, item_filter: ItemFilter) -> np.ndarray | None:
        """The rows of the items that pass a filter. None: all rows."""
        if not item_filter:
            return self.live
        mask = self._masks.get(item_filter)
        if mask is None:
            mask = np.zeros(len(self.vectors), bool)
            mask[self.table.matching_rows(item_filter)] = True
            # A new dictionary, because other threads may read the old one. The oldest go first.
            kept = list(self._masks.items())[1 - MAX_MASKS :]
            self._masks = {**dict(kept), item_filter: mask}
        return mask

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items."""
        rows = self.table.rows_of(keys)
        items = {item.key: item for item in self._verified(list(rows), rows)}
        return {key: items[key] for key in keys if key in items}

    def _verified(self, keys: Sequence[str], rows: dict[str, int]) -> list[IndexItem]:
        """Read items and compare them with their checksums."""
        items = list[IndexItem]()
        for item, checksum in self.table.checked_items(keys):
            [vector] = self.vectors[rows[item.key] : rows[item.key] + 1]
            if row_checksum(self.index_id, item.to_row(), vector) != checksum:
                raise self._damaged(f"the item {item.key[:80]!r}")
            items.append(item)
        return items

    def verify(self) -> None:
        """Compare all items and vectors with their checksums."""
        keys = self.table.keys()
        rows = self.table.rows_of(keys)
        for start in range(0, len(keys), 2**12):
            self._verified(keys[start : start + 2**12], rows)

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self.uri}: {what} is damaged or belongs to another index. {REMEDY}")

    def vectors_of(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items."""
        rows = self.table.rows_of(keys)
        # Indexing with a list copies from the map.
        return self.vectors[[rows[key] for key in keys]]

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items in the order of keys."""
        rows = self.table.rows()
        # Files are indexed in the order of their paths, so that most indexes are in order.
        if len(rows) == len(self.vectors) and (np.diff(rows) == 1).all():
            return self.vectors
        return self.vectors[rows]
