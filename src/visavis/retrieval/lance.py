"""The store of a folder, or of object storage by its URI: a LanceDB table, and beside it a mirror of its newest version to search in."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis import storage
from visavis.errors import DataError, MissingExtra, ShapeError, StorageError, VisavisError
from visavis.memory import Memory
from visavis.retrieval.ann import TOP, WANTED, Ann, fewest, perturbed, recall, sample
from visavis.retrieval.exact import ranked
from visavis.retrieval.filters import quoted, sql
from visavis.retrieval.item import EVERYTHING, Item, Where
from visavis.retrieval.mirror import Mirror, remove_others, write_mirror
from visavis.retrieval.store import Near, check_queries, checked

if TYPE_CHECKING:
    import pyarrow as pa

TABLE, ANN = "items", "ann"
COLUMNS = ("key", "path", "kind", "content", "size", "modified_ns", "start", "end", "look", "metadata")
AT_ONCE = 2**14
"""Rows that are read, or keys that are named, at once."""
TIDIED = 64
"""Changes after which small files are joined."""
ONE_BIT_FROM = 128
"""The width from which on one bit of each number is enough to choose what is scored again."""
REFINED = 4
"""Candidates for each result of the approximate index that are scored again."""
KEPT = timedelta(minutes=10)
"""How long versions are kept that nobody needs but who has just begun to read them."""


class LanceStore:
    """Items in a LanceDB table in a folder or at ``s3://BUCKET/PATH`` (with the options of the environment: ``AWS_...``).

    width: of the vectors; None for a table that is there. Searching is exact, over a mirror of the table in files: beside a local
    table, else in the cache folder; it is derived from the newest version, and made anew where there is none. Raises DataError where
    no table is and no width given, ShapeError for another width than the table's, MissingExtra, StorageError.
    """

    def __init__(self, uri: str | Path, width: int | None = None, memory: Memory = None):
        os.environ.setdefault("LANCE_LOG", "error")
        try:
            import lancedb
        except ImportError:
            raise MissingExtra("lancedb", "search", "an index") from None
        self.uri, self.memory = str(uri), memory
        self.remote = "://" in self.uri
        with self._telling():
            if width is None and not self.remote and not (Path(self.uri) / f"{TABLE}.lance").is_dir():
                raise DataError(f"{self.uri} holds no table of items: build an index there first.")
            self._database: Any = lancedb.connect(self.uri, read_consistency_interval=timedelta(0))
            self._table = self._open(width)
        self.width: int = self._table.schema.field("vector").type.list_size
        if width not in (None, self.width):
            raise ShapeError(f"{self.uri} holds vectors of width {self.width}, expected {width}: name another folder for these.")
        self._mirror: tuple[str, Mirror] | None = None
        self._ann: Ann | None = None
        self._changes = 0

    def _open(self, width: int | None) -> Any:
        try:
            return self._database.open_table(TABLE)
        except ValueError as error:
            if "was not found" not in str(error):
                raise
            if width is None:
                raise DataError(f"{self.uri} holds no table of items: build an index there first.") from None
            return self._database.create_table(TABLE, schema=schema(width), exist_ok=True)

    def add(self, items: Sequence[Item], vectors: np.ndarray) -> None:
        items, vectors = checked(items, vectors, self.width)
        if items:
            with self._telling():
                merge = self._table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(rows_of(items, vectors))
            self._changed()

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            with self._telling():
                self._table.delete(f"key IN ({', '.join(map(quoted, keys))})")
            self._changed()

    def search(self, queries: np.ndarray, top: int, where: Where = EVERYTHING, *, ann: bool = False) -> list[list[Near]]:
        """As every store; ann: by the approximate index, which needs no mirror. Raises DataError where there is none."""
        check_queries(queries, top, self.width)
        return self._nearly(queries, top, where, self._built()) if ann else self.mirror().search(queries, top, where)

    def _nearly(self, queries: np.ndarray, top: int, where: Where, ann: Ann) -> list[list[Near]]:
        found = []
        for query in np.ascontiguousarray(queries, np.float32):
            asked = self._table.search(query, vector_column_name="vector").distance_type("dot").limit(top)
            asked = asked.nprobes(ann.probes).refine_factor(ann.refined).select(["key", "vector", "_distance"])
            with self._telling():
                rows = (asked.where(sql(where), prefilter=True) if where else asked).to_arrow()
            vectors = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, self.width)
            found.append(ranked(query, rows["key"].to_pylist(), vectors, self.memory))
        return found

    def build_ann(self, queries: np.ndarray | None = None, wanted: float = WANTED) -> Ann:
        """Build the approximate index anew, measure against exact search what it finds of the true top 10, and keep that with the table.

        queries: ``[Q, D]`` to measure with; None: stored vectors with noise. wanted: the recall for which partitions are probed, if all must be.
        """
        from lancedb.index import IvfRq, IvfSq

        mirror = self.mirror()
        if not len(mirror.keys):
            raise DataError(f"{self.uri} holds no items to index: add some first.")
        asked = perturbed(self.vectors(sample(mirror.keys.to_pylist()))) if queries is None else queries
        partitions = max(1, round(len(mirror.keys) ** 0.5 / 2))
        kind, of_kind = ("IVF_RQ", IvfRq) if self.width >= ONE_BIT_FROM and self.width % 8 == 0 else ("IVF_SQ", IvfSq)
        with self._telling():
            self._table.create_index("vector", config=of_kind(distance_type="dot", num_partitions=partitions), replace=True)
        true = mirror.search(asked, TOP, EVERYTHING)
        made = Ann(kind=kind, rows=len(mirror.keys), partitions=partitions, probes=0, refined=REFINED, recall=0.0, queries=len(asked))

        def measure(probes: int) -> float:
            return recall(self._nearly(asked, TOP, EVERYTHING, made.model_copy(update={"probes": probes})), true)

        probes, reached = fewest(measure, partitions, wanted)
        made = made.model_copy(update={"probes": probes, "recall": reached})
        with self._telling():
            mode = "overwrite" if ANN in self._database.list_tables().tables else "create"
            self._database.create_table(ANN, [{"json": made.model_dump_json()}], mode=mode)
        self._ann = made
        return made

    def ann(self) -> Ann | None:
        """What ``build_ann`` measured last; None where nothing was built."""
        with self._telling():
            if ANN not in self._database.list_tables().tables:
                return None
            return Ann.model_validate_json(self._database.open_table(ANN).to_arrow()["json"][0].as_py())

    def _built(self) -> Ann:
        if self._ann is None:
            self._ann = self.ann()
        if self._ann is None:
            raise DataError(f"{self.uri} has no approximate index: build it first, or search exactly.")
        return self._ann

    def items(self) -> list[Item]:
        return self.mirror().items()

    def vectors(self, keys: Sequence[str]) -> np.ndarray:
        mirror = self.mirror()
        return np.array(mirror.vectors[mirror.rows(keys)])

    def rows(self) -> np.ndarray:
        return self.mirror().vectors

    def count(self, where: Where = EVERYTHING) -> int:
        if where:
            return self.mirror().count(where)
        with self._telling():
            return int(self._table.count_rows())

    def optimize(self, kept: timedelta = KEPT) -> None:
        """Join small files, and remove versions that are older than ``kept``, so that the folder does not grow without end."""
        with self._telling():
            self._table.optimize(cleanup_older_than=kept)

    def _changed(self) -> None:
        self._changes += 1
        if self._changes % TIDIED == 0:
            self.optimize()

    def close(self) -> None:
        self._mirror = None
        self._table = self._database = None

    def mirror(self) -> Mirror:
        """The mirror of the newest version, made where there is none. Raises StorageError."""
        name = self._version()
        if self._mirror is None or self._mirror[0] != name:
            place = self._place()
            with storage.alone(place, wait=True):
                name = self._version()
                if not (place / name).is_dir():
                    self._make(place / name)
                    remove_others(place, name)
            self._mirror = name, Mirror(place / name, self.memory)
        return self._mirror[1]

    def _make(self, folder: Path) -> None:
        with self._telling():
            version = self._table.version
            table = self._database.open_table(TABLE)
            table.checkout(version)
            write_mirror(folder, table.search().select(list(COLUMNS)).to_arrow(), self._vectors_of(table), self.width)

    def _vectors_of(self, table: Any) -> Iterator[tuple[pa.Array, np.ndarray]]:
        for batch in table.search().select(["key", "vector"]).to_batches(AT_ONCE):
            yield batch["key"], batch["vector"].flatten().to_numpy().reshape(-1, self.width)

    def _version(self) -> str:
        """The name of the newest version: its number, and when it was written, as a table that was made anew begins with 1 again."""
        with self._telling():
            newest = max(self._table.list_versions(), key=lambda version: version["version"])
        return f"{newest['version']}-{int(newest['timestamp'].timestamp() * 1e6)}"

    def _place(self) -> Path:
        """The folder of mirrors: beside the table where that can be written to, else in the cache."""
        if not self.remote and os.access(self.uri, os.W_OK):
            return Path(self.uri) / "mirror"
        name = self.uri if self.remote else str(Path(self.uri).resolve())
        return storage.cache_folder() / "search" / hashlib.sha256(name.encode()).hexdigest()[:16]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What the store cannot do is one sentence."""
        try:
            yield
        except VisavisError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"{self.uri} cannot be read or written as a table: {_reason(error)}.") from None


def schema(width: int) -> pa.Schema:
    """The columns of a table of items with vectors of a width."""
    import pyarrow as pa

    texts = [pa.field(name, pa.string(), nullable=False) for name in ("key", "path", "kind", "content", "look")]
    numbers = [pa.field(name, pa.int64(), nullable=False) for name in ("size", "modified_ns")]
    times = [pa.field(name, pa.float64()) for name in ("start", "end")]
    return pa.schema([*texts, *numbers, *times, ("metadata", pa.list_(pa.string())), ("vector", pa.list_(pa.float32(), width))])


def rows_of(items: Sequence[Item], vectors: np.ndarray) -> pa.Table:
    """Items and vectors as rows of a table."""
    import pyarrow as pa

    width = vectors.shape[1]
    columns: dict[str, Any] = {name: [getattr(item, name) for item in items] for name in COLUMNS if name != "metadata"}
    columns["metadata"] = [item.tags() for item in items]
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width)
    return pa.table(columns, schema=schema(width))


def _reason(error: Exception) -> str:
    """The heart of what a library says, as the end of a sentence."""
    text = str(error).strip() or type(error).__name__
    said = re.search(r"<Message>(.*?)</Message>", text)
    return (said[1] if said else text.splitlines()[0].split(", location:")[0]).rstrip(".")[:200]
