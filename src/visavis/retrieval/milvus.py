"""The store of a cluster: a collection in Milvus, or in a file of Milvus Lite for trying out."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from visavis.errors import DataError, MissingExtra, ShapeError, StorageError
from visavis.memory import Memory, spans
from visavis.retrieval.ann import TOP, WANTED, Ann, fewest, perturbed, recall, sample
from visavis.retrieval.exact import Exact, ranked
from visavis.retrieval.filters import in_64_bits
from visavis.retrieval.item import EVERYTHING, Item, Where, tag, tags_to_metadata
from visavis.retrieval.store import Near, check_queries, checked

COLLECTION = "items"
FIELDS = ("key", "path", "kind", "content", "size", "modified_ns", "start", "end", "look", "metadata")
AT_ONCE, MOST_FOUND = 1000, 16384
"""Items of a request; what a search of Milvus finds at most."""
PROBES = 64
"""Candidates of HNSW, unless measuring asks for more."""
MARGIN = 16
"""Items beyond the top that are fetched at first, to see where equal scores end."""
CLOSE = 1e-4
"""Of the product of two norms: how far Milvus' scores may be from the true ones."""
_PLAIN = re.compile(r"[\w ./:=+-]*", re.ASCII)


class MilvusStore:
    """Items in a collection of Milvus at ``http(s)://HOST:PORT`` (with the token of ``MILVUS_TOKEN``) or in ``FILE.db`` of Milvus Lite.

    width: of the vectors; None for a collection that is there. What Milvus finds is scored again in float64; with its index FLAT, the
    default, a search is exact. What its filters cannot say is sifted here. One request changes at most ``AT_ONCE`` items: a larger
    change is whole for each so many. Raises DataError where no collection is and no width given, ShapeError for another width than
    the collection's, MissingExtra, StorageError.
    """

    def __init__(self, uri: str | Path, collection: str = COLLECTION, width: int | None = None, memory: Memory = None):
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is said in a sentence
        try:
            from pymilvus import MilvusClient
        except ImportError:
            raise MissingExtra("pymilvus", "milvus", "an index in Milvus") from None
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        self.uri, self.collection, self.memory = str(uri), collection, memory
        if "://" not in self.uri and width is None and not Path(self.uri).exists():
            raise DataError(f"{self.uri} holds no collection {collection}: build an index there first.")
        with self._telling():
            if "://" not in self.uri:
                _open_file(self.uri)
            self._client: Any = MilvusClient(self.uri, token=os.environ.get("MILVUS_TOKEN", ""))
            if not self._client.has_collection(collection):
                if width is None:
                    raise DataError(f"{self.uri} holds no collection {collection}: build an index there first.")
                self._create(width)
            self._client.load_collection(collection)
            fields = {field["name"]: field for field in self._client.describe_collection(collection)["fields"]}
        if not {"id", "vector", *FIELDS} <= fields.keys():
            raise DataError(f"{self.uri}: the collection {collection} is not of visavis: name another one.")
        self._probes = PROBES
        self.width = int(fields["vector"]["params"]["dim"])
        if width not in (None, self.width):
            raise ShapeError(f"{self.uri} holds vectors of width {self.width}, expected {width}: name another place for these.")

    def _create(self, width: int) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, max_length=64, is_primary=True)
        for name in ("key", "path", "kind", "content", "look"):
            schema.add_field(name, DataType.VARCHAR, max_length=65535)
        for name in ("size", "modified_ns"):
            schema.add_field(name, DataType.INT64)
        for name in ("start", "end"):
            schema.add_field(name, DataType.DOUBLE, nullable=True)
        schema.add_field("metadata", DataType.ARRAY, element_type=DataType.VARCHAR, max_capacity=4096, max_length=65535)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=width)
        self._client.create_collection(self.collection, schema=schema, index_params=self._index("FLAT"), consistency_level="Strong")

    def _index(self, kind: str, **params: int) -> Any:
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type=kind, metric_type="IP", params=params)
        return index

    def add(self, items: Sequence[Item], vectors: np.ndarray) -> None:
        items, vectors = checked(items, vectors, self.width)
        rows = [
            {name: getattr(item, name) for name in FIELDS} | {"id": _id(item.key), "metadata": item.tags(), "vector": vector}
            for item, vector in zip(items, vectors, strict=True)
        ]
        with self._telling():
            for some in spans(len(rows), AT_ONCE):
                self._client.upsert(self.collection, rows[some])

    def delete(self, keys: Sequence[str]) -> None:
        ids = sorted(set(map(_id, keys)))
        with self._telling():
            for some in spans(len(ids), AT_ONCE):
                self._client.delete(self.collection, ids=ids[some])

    def search(self, queries: np.ndarray, top: int, where: Where = EVERYTHING) -> list[list[Near]]:
        check_queries(queries, top, self.width)
        queries = np.ascontiguousarray(queries, np.float32)
        return [self._search_one(query, top, where) for query in queries]

    def _search_one(self, query: np.ndarray, top: int, where: Where) -> list[Near]:
        fetched = top + MARGIN
        while fetched <= MOST_FOUND:
            hits, told = self._hits(query, fetched, where)
            rows = [row for row in hits if where.allows(_item(row))]
            near = self._ranked(query, rows)
            if len(hits) < fetched or (len(near) >= top and told[-1] < near[top - 1].score - self._closeness(query, hits)):
                return near[:top]
            fetched *= 4
        rows = [row for row in self._all(where, ["vector"]) if where.allows(_item(row))]
        return self._ranked(query, rows)[:top]

    def _ranked(self, query: np.ndarray, rows: list[dict[str, Any]]) -> list[Near]:
        return ranked(query, [row["key"] for row in rows], np.array([row["vector"] for row in rows], np.float32), self.memory)

    def _hits(self, query: np.ndarray, limit: int, where: Where) -> tuple[list[dict[str, Any]], list[float]]:
        """What Milvus finds, with its scores."""
        with self._telling():
            found = self._client.search(
                self.collection,
                data=[query],
                limit=limit,
                filter=expression(where),
                output_fields=[*FIELDS, "vector"],
                search_params={"metric_type": "IP", "params": {"ef": max(self._probes, 2 * limit)}},
                consistency_level="Strong",
            )[0]
        return [hit["entity"] for hit in found], [hit["distance"] for hit in found]

    def _closeness(self, query: np.ndarray, hits: list[dict[str, Any]]) -> float:
        norm = max((float(np.linalg.norm(hit["vector"])) for hit in hits), default=0.0)
        return CLOSE * norm * float(np.linalg.norm(query))

    def items(self) -> list[Item]:
        return sorted(map(_item, self._all(EVERYTHING, [])), key=lambda item: item.key)

    def vectors(self, keys: Sequence[str]) -> np.ndarray:
        ids, there = sorted(set(map(_id, keys))), dict[str, list[float]]()
        with self._telling():
            for some in spans(len(ids), AT_ONCE):
                there |= {
                    row["key"]: row["vector"] for row in self._client.get(self.collection, ids[some], output_fields=["key", "vector"])
                }
        return np.array([there[key] for key in keys], np.float32).reshape(len(keys), self.width)

    def rows(self) -> np.ndarray:
        return self.vectors([item.key for item in self.items()])

    def count(self, where: Where = EVERYTHING) -> int:
        if where:
            return sum(where.allows(_item(row)) for row in self._all(where, []))
        with self._telling():
            return int(self._client.query(self.collection, output_fields=["count(*)"], consistency_level="Strong")[0]["count(*)"])

    def _all(self, where: Where, more: list[str]) -> Iterator[dict[str, Any]]:
        """All items that Milvus' filter allows, and perhaps others."""
        with self._telling():
            pages = self._client.query_iterator(
                self.collection, batch_size=AT_ONCE, filter=expression(where), output_fields=[*FIELDS, *more], consistency_level="Strong"
            )
            while page := pages.next():
                yield from page
            pages.close()

    def build_ann(self, queries: np.ndarray | None = None, wanted: float = WANTED) -> Ann:
        """Index the vectors by HNSW, so that searches are fast and no longer exact, and measure what they find of the true top 10.

        queries: ``[Q, D]`` to measure with; None: stored vectors with noise.
        """
        with self._telling():
            self._client.flush(self.collection)  # what is not in a sealed segment is not indexed, and read slowly
        keys = [item.key for item in self.items()]
        asked = perturbed(self.vectors(sample(keys))) if queries is None else np.ascontiguousarray(queries, np.float32)
        scores, rows = Exact(self.vectors(keys), memory=self.memory).search(asked, TOP)
        both = zip(rows.tolist(), scores.tolist(), strict=True)
        true = [[Near(keys[row], score) for row, score in zip(*own, strict=True)] for own in both]
        with self._telling():
            self._client.release_collection(self.collection)
            self._client.drop_index(self.collection, "vector")
            self._client.create_index(self.collection, self._index("HNSW", M=16, efConstruction=200))
            self._client.load_collection(self.collection)

        def measure(probes: int) -> float:
            self._probes = probes
            return recall(self.search(asked, TOP), true)

        probes, reached = fewest(measure, 4096, wanted)
        return Ann(kind="HNSW", rows=len(keys), partitions=1, probes=probes, refined=1, recall=reached, queries=len(asked))

    def close(self) -> None:
        self._client.close()
        if "://" not in self.uri:
            _close_file(self.uri)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What Milvus cannot do is one sentence."""
        from pymilvus import MilvusException

        try:
            yield
        except (MilvusException, OSError) as error:
            reason = getattr(error, "message", str(error)).strip().split("\n")[0].rstrip(".")[:200]
            raise StorageError(f"{self.uri} cannot be used as a store of Milvus: {reason}.") from None


def expression(where: Where) -> str:
    """What Milvus can say of ``where`` for certain: all that is allowed fulfils it, and perhaps something else.

    >>> expression(Where(path="a/*.jpg", kind="video", metadata={"camera": "X"}))
    'path like "a/%" and path like "%.jpg" and kind == "video" and array_contains(metadata, "camera=X")'
    """
    conditions = []
    if where.path:
        first, last = re.split(r"[*?]", where.path)[0], re.split(r"[*?]", where.path)[-1]
        start, end = _PLAIN.match(first), _PLAIN.fullmatch(last)
        prefix = start[0].replace("_", "\0").split("\0")[0] if start else ""
        conditions += [f'path like "{prefix}%"'] if prefix else []
        conditions += [f'path like "%{last}"'] if end and last and "_" not in last else []
    if where.kind is not None:
        conditions.append(f'kind == "{where.kind}"')
    if where.after is not None:
        conditions.append(f"modified_ns >= {in_64_bits(where.after)}")
    if where.before is not None:
        conditions.append(f"modified_ns <= {in_64_bits(where.before)}")
    tags = [tag(name, value) for name, value in where.metadata.items()]
    conditions += [f'array_contains(metadata, "{text}")' for text in tags if _PLAIN.fullmatch(text)]
    return " and ".join(conditions)


def _open_file(path: str) -> None:
    """Count who uses a file of Milvus Lite in this process, which holds it as long as one does. Raises OSError."""
    name = os.path.abspath(path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    _users[name] += 1


def _close_file(path: str) -> None:
    from milvus_lite.server_manager import server_manager_instance

    name = os.path.abspath(path)
    _users[name] -= 1
    if not _users[name]:
        server_manager_instance.release_server(name)


_users = Counter[str]()


def _id(key: str) -> str:
    """What an item is called in Milvus, whose filters do not take every key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _item(row: dict[str, Any]) -> Item:
    values = {name: row[name] for name in FIELDS}
    return Item(**values | {"metadata": tags_to_metadata(row["metadata"])})
