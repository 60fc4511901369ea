"""Milvus store: a collection on a Milvus server, or in a file of Milvus Lite."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.core.memory_budget import MemoryLimit, chunk_slices
from visavis.retrieval.items import (
    CHECKSUM,
    ITEM_FIELDS,
    NO_FILTER,
    IndexItem,
    ItemFilter,
    metadata_tag,
)
from visavis.retrieval.stores.base import (
    ItemVectors,
    Neighbor,
    Queries,
    StoreDigest,
    store_errors,
    validate_queries,
)
from visavis.retrieval.stores.exact_search import exact_scores
from visavis.retrieval.stores.item_table import ItemTable
from visavis.retrieval.stores.row_store import RowStore

COLLECTION = "items"
BATCH_ITEMS, MAX_RESULTS = 1000, 16384
"""Items of one request. Maximum number of results of a Milvus search."""
FIELDS = (*ITEM_FIELDS, CHECKSUM)
TIE_MARGIN = 16
"""Results beyond the top that are fetched first, to see where equal scores end."""
# Scores of Milvus differ from exact ones by at most this share of the product of the two norms.
SCORE_TOLERANCE = 1e-4
# Texts that need no escaping in Milvus filters.
_PLAIN = re.compile(r"[\w ./:=+-]*", re.ASCII)
# Open stores per Milvus Lite file in this process. The last one releases the file.
_open_stores = Counter[str]()


class MilvusStore(RowStore):
    """Items in a collection of Milvus at ``http(s)://HOST:PORT`` (token from ``MILVUS_TOKEN``) or
    in ``FILE.db`` of Milvus Lite.

    A file that is opened for an index is read and verified as a whole, and searched in memory. On a
    server, each result is verified and scored again in float64. The index FLAT makes a search
    exact. Conditions that Milvus cannot express are checked here. A change of more than
    ``BATCH_ITEMS`` items is atomic per request of that size. The methods of ``VectorStore`` are
    documented there.

    Args:
        uri: Address of a server, followed by ``/`` and the name of the collection if it is not
            ``items``, or a file.
        embedding_dim: Dimension of the vectors of a new collection. None: the collection must
            exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex.
        late_interaction: Must be None: an item has one vector.

    Raises:
        DataError: If the collection is missing and ``embedding_dim`` is None, or the collection has
            other fields.
        ShapeError: If the collection has vectors of another dimension.
        StorageError: If Milvus cannot be reached or fails.
        MissingExtra: If pymilvus is not installed.
    """

    def __init__(
        self,
        uri: str | Path,
        embedding_dim: int | None = None,
        memory: MemoryLimit = None,
        *,
        index_id: str = "",
        late_interaction: None = None,
    ):
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are reported as StorageError
        with requires_extra("milvus", "an index in Milvus"):
            from pymilvus import MilvusClient
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        server = re.fullmatch(r"(https?://[^/?#]+)(?:/(\w*))?", str(uri))
        self.uri = server[1] if server else str(uri)
        self.collection = (server and server[2]) or COLLECTION
        self._storage_errors = partial(
            store_errors, self.uri, index_id, "the Milvus store cannot be used", _reason
        )
        is_file = "://" not in self.uri
        self._is_in_memory = is_file and bool(index_id)
        missing = DataError(
            f"{self.uri}: expected a collection {self.collection!r}, got none. Run visavis index to "
            "create it."
        )
        if is_file and embedding_dim is None and not os.path.exists(self.uri):
            raise missing
        with self._storage_errors():
            # Milvus Lite does not create the folder of its file.
            if is_file:
                storage.create_folder(Path(self.uri).absolute().parent)
                _open_stores[os.path.abspath(self.uri)] += 1
            try:
                self._client: Any = MilvusClient(self.uri, token=os.environ.get("MILVUS_TOKEN", ""))
                stored_dim = self._open_collection(embedding_dim, missing)
                super().__init__(self.uri, stored_dim, embedding_dim, memory, index_id)
            except BaseException:
                self.close()
                raise

    def _open_collection(self, embedding_dim: int | None, missing: DataError) -> int:
        """Load the collection, or create it if ``embedding_dim`` is given. Return its dimension."""
        if not self._client.has_collection(self.collection):
            if embedding_dim is None:
                raise missing
            self._create_collection(embedding_dim)
        self._client.load_collection(self.collection)
        fields = {
            field["name"]: field
            for field in self._client.describe_collection(self.collection)["fields"]
        }
        if not {"id", "vector", *FIELDS} <= fields.keys():
            raise DataError(
                f"{self.uri}: expected a collection made by visavis, got {self.collection!r} with "
                "other fields. Pass another name."
            )
        return int(fields["vector"]["params"]["dim"])

    def _create_collection(self, embedding_dim: int) -> None:
        """Create the collection with one vector per item and the index FLAT."""
        from pymilvus import DataType

        # 65,535 bytes of a text and 4,096 values of an array are the most that Milvus allows.
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, max_length=64, is_primary=True)
        for name in ("key", "path", "kind", "content", "dhash"):
            schema.add_field(name, DataType.VARCHAR, max_length=65535)
        for name in ("size", "modified_ns", CHECKSUM):
            schema.add_field(name, DataType.INT64)
        for name in ("start", "end"):
            schema.add_field(name, DataType.DOUBLE, nullable=True)
        schema.add_field(
            "metadata",
            DataType.ARRAY,
            element_type=DataType.VARCHAR,
            max_capacity=4096,
            max_length=65535,
        )
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=embedding_dim)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        self._client.create_collection(
            self.collection, schema=schema, index_params=index, consistency_level="Strong"
        )

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Read all rows, see ``RowStore.read_rows``."""
        return self._iterate(NO_FILTER, ["vector"])

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add or replace rows, see ``RowStore.write_rows``."""
        with self._storage_errors():
            for chunk in chunk_slices(len(rows), BATCH_ITEMS):
                self._client.upsert(
                    self.collection, [{**row, "id": _id(row["key"])} for row in rows[chunk]]
                )

    def delete_rows(self, keys: Sequence[str]) -> None:
        """Delete rows, see ``RowStore.delete_rows``."""
        ids = sorted(set(map(_id, keys)))
        with self._storage_errors():
            for chunk in chunk_slices(len(ids), BATCH_ITEMS):
                self._client.delete(self.collection, ids=ids[chunk])

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, see ``VectorStore.search``."""
        assert isinstance(queries, np.ndarray)
        validate_queries(queries, top, self.embedding_dim)
        if self._is_in_memory:
            return super().search(queries, top, item_filter)
        return [
            self._search_one(query, top, item_filter)
            for query in np.ascontiguousarray(queries, np.float32)
        ]

    def _search_one(self, query: np.ndarray, top: int, item_filter: ItemFilter) -> list[Neighbor]:
        # Milvus rounds scores and orders equal ones arbitrarily. Fetch more results until the last
        # fetched score is clearly below the k-th exact one. Beyond the limit of Milvus, rank all
        # items that its filter returns.
        limit = top + TIE_MARGIN
        while limit <= MAX_RESULTS:
            with self._storage_errors():
                [hits] = self._client.search(
                    self.collection,
                    data=[query],
                    limit=limit,
                    filter=milvus_filter(item_filter),
                    output_fields=[*FIELDS, "vector"],
                    search_params={"metric_type": "IP"},
                    consistency_level="Strong",
                )
            rows = [hit["entity"] for hit in hits]
            ranked = self._rank(query, rows, item_filter)
            max_norm = max((float(np.linalg.norm(row["vector"])) for row in rows), default=0.0)
            score_error = SCORE_TOLERANCE * max_norm * float(np.linalg.norm(query))
            if len(rows) < limit or (
                len(ranked) >= top and hits[-1]["distance"] < ranked[top - 1].score - score_error
            ):
                return ranked[:top]
            # Few queries have many equal scores, so that the first attempt is usually the last.
            limit *= 4
        return self._rank(query, list(self._iterate(item_filter, ["vector"])), item_filter)[:top]

    def _rank(
        self, query: np.ndarray, rows: Sequence[dict[str, Any]], item_filter: ItemFilter
    ) -> list[Neighbor]:
        """The rows that match the filter, by exact score, equal scores in the order of keys."""
        rows = [row for row in rows if item_filter.matches(IndexItem.from_row(row))]
        vectors = self.verified_vectors(rows)
        neighbors = map(
            Neighbor, (row["key"] for row in rows), exact_scores(vectors, query).tolist()
        )
        return sorted(neighbors, key=lambda neighbor: (-neighbor.score, neighbor.key))

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, see ``VectorStore.get``."""
        if self._is_in_memory:
            return super().get(keys)
        items = {
            row["key"]: IndexItem.from_row(row) for rows in self._fetch(keys, []) for row in rows
        }
        return {key: items[key] for key in keys if key in items}

    def table(self) -> ItemTable:
        """Return the items, see ``VectorStore.table``."""
        if self._is_in_memory:
            return super().table()
        return ItemTable.in_memory(self._iterate(NO_FILTER, []))

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        if self._is_in_memory:
            return super().vectors(keys)
        by_key = dict[str, np.ndarray]()
        for rows in self._fetch(keys, ["vector"]):
            by_key |= zip((row["key"] for row in rows), self.verified_vectors(rows), strict=True)
        return np.array([by_key[key] for key in keys], np.float32).reshape(
            len(keys), self.embedding_dim
        )

    def _fetch(
        self, keys: Sequence[str], extra_fields: list[str]
    ) -> Iterator[list[dict[str, Any]]]:
        """Rows of the keys, in batches."""
        ids = sorted(set(map(_id, keys)))
        for chunk in chunk_slices(len(ids), BATCH_ITEMS):
            with self._storage_errors():
                rows: list[dict[str, Any]] = self._client.get(
                    self.collection, ids[chunk], output_fields=[*FIELDS, *extra_fields]
                )
            yield rows

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        return super().all_vectors() if self._is_in_memory else self.vectors(self.table().keys())

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        if self._is_in_memory:
            return super().count(item_filter)
        if item_filter:
            return sum(
                item_filter.matches(IndexItem.from_row(row))
                for row in self._iterate(item_filter, [])
            )
        with self._storage_errors():
            return int(
                self._client.query(
                    self.collection, output_fields=["count(*)"], consistency_level="Strong"
                )[0]["count(*)"]
            )

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors, see ``VectorStore.digest``."""
        if self._is_in_memory:
            return super().digest()
        return StoreDigest.from_checksums([row[CHECKSUM] for row in self._iterate(NO_FILTER, [])])

    def verify(self) -> None:
        """Verify all rows, see ``VectorStore.verify``."""
        for row in self._iterate(NO_FILTER, ["vector"]):
            self.verified_vectors([row])

    def verified_vectors(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Check the checksums of rows, see ``RowStore.verified_vectors``."""
        with self._storage_errors():
            return super().verified_vectors(rows)

    def _iterate(
        self, item_filter: ItemFilter, extra_fields: list[str]
    ) -> Iterator[dict[str, Any]]:
        """All items that the filter of Milvus matches, which may be more than ``item_filter``
        matches.
        """
        with self._storage_errors():
            pages = self._client.query_iterator(
                self.collection,
                batch_size=BATCH_ITEMS,
                filter=milvus_filter(item_filter),
                output_fields=[*FIELDS, *extra_fields],
                consistency_level="Strong",
            )
            while page := pages.next():
                yield from page
            pages.close()

    def close(self) -> None:
        """Close the connection, and the file if no other store of this process uses it."""
        # Called without a client if the connection failed.
        if hasattr(self, "_client"):
            self._client.close()
        if "://" not in self.uri:
            from milvus_lite.server_manager import server_manager_instance

            name = os.path.abspath(self.uri)
            _open_stores[name] -= 1
            if not _open_stores[name]:
                server_manager_instance.release_server(name)


def milvus_filter(item_filter: ItemFilter) -> str:
    """Write the conditions that Milvus can express. All matching items satisfy the result, and
    possibly others.

    Args:
        item_filter: Conditions on the items.

    Returns:
        Filter expression of Milvus.

    Example:
        >>> milvus_filter(ItemFilter(path="a/*.jpg", kind="video", metadata={"camera": "X"}))
        'kind == "video" and array_contains(metadata, "camera=X")'
    """
    # Patterns of paths ignore case, which those of Milvus do not.
    conditions = []
    if item_filter.kind is not None:
        conditions.append(f'kind == "{item_filter.kind}"')
    tags = [metadata_tag(name, value) for name, value in item_filter.metadata.items()]
    conditions += [f'array_contains(metadata, "{tag}")' for tag in tags if _PLAIN.fullmatch(tag)]
    return " and ".join(conditions)


def _id(key: str) -> str:
    """Primary key of an item. Filters of Milvus do not accept every text."""
    return hashlib.sha256(key.encode()).hexdigest()


def _reason(error: BaseException) -> str:
    """The first line of an error message of Milvus."""
    return str(getattr(error, "message", error)).strip().split("\n")[0].rstrip(".")[:200]
