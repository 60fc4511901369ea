"""Store of an index on one machine: items in SQLite, and vectors in a memory-mapped array.

``vectors/N.npy`` gets the vectors of new items at its end, and each item has the row of its vector.
Rows of removed items stay until they are a third of all, then the array is written again. Vectors
are written and synced before the transaction that names their rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RefusedOverwrite, ShapeError, StorageError, log_debug
from visavis.core.memory_budget import MemoryLimit, chunk_slices
from visavis.core.ragged import MaxSimDirection, are_offsets
from visavis.retrieval.items import CHECKSUM, NO_FILTER, REMEDY, IndexItem, ItemFilter
from visavis.retrieval.stores.base import (
    ItemVectors,
    Neighbor,
    Queries,
    StoreDigest,
    VectorSets,
    row_checksum,
    validated_items,
)
from visavis.retrieval.stores.exact_search import (
    ExactSearch,
    is_int8_faster,
    max_row_norm,
    open_int8_codes,
    write_int8_codes,
)
from visavis.retrieval.stores.index_database import IndexDatabase
from visavis.retrieval.stores.item_snapshot import ItemSnapshot, SearchedRows
from visavis.retrieval.stores.item_table import ItemTable
from visavis.retrieval.stores.vector_array import VectorArray

if TYPE_CHECKING:
    from visavis.retrieval.stores.set_codec import SetCodec

VECTORS_FOLDER = "vectors"
# Files of the store, and parts of them that a killed process left.
_OWN_FILES = re.compile(r"\d+(\.ends)?\.npy|\d+\.coarse-\d+|\.\d+\.coarse-\d+\..*part")
MAX_REMOVED_SHARE = 1 / 3
"""Share of rows of removed items above which the array is written again."""
MIN_REMOVED_ROWS = 2**10
"""Number of such rows below which the array is not written again."""
MAX_UNCODED_SHARE = 1 / 4
"""Share of rows without codes above which the codes are written again."""
REWRITTEN_ITEMS = 2**12
"""Items that are written at once when the array is written again."""


@dataclass(frozen=True)
class _StoredVectors:
    """The named value ``vectors``: counts, checksums and files of the store.

    Attributes:
        embedding_dim: Dimension of the vectors.
        several: Whether an item has several vectors.
        index_id: Id of the index in hex.
        code_bytes: Bytes of a compressed vector. None: vectors are not compressed.
        version: Number that grows with each change.
        part: Number of the files.
        num_rows: Number of items, also of removed ones.
        num_vectors: Number of vectors of all of them.
        num_items: Number of items.
        checksum: Sum of the checksums of all items modulo 2^64.
        max_norm: Upper bound of the norms of the vectors.
        stats: Size and time of change of each file when its checksums were verified last, by path
            below the folder of vectors.
        coarse: Folder of the codes or pooled vectors of the first items. Empty: there are none.
        coarse_rows: Number of these items.
        coarse_hashes: SHA-256 of the files in this folder by name.
    """

    embedding_dim: int
    several: bool
    index_id: str
    code_bytes: int | None
    version: int = 0
    part: int = 1
    num_rows: int = 0
    num_vectors: int = 0
    num_items: int = 0
    checksum: int = 0
    max_norm: float = 0.0
    stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    coarse: str = ""
    coarse_rows: int = 0
    coarse_hashes: dict[str, str] = field(default_factory=dict)


class SqliteStore:
    """Items in the database of an index, and vectors next to it. The methods of ``VectorStore`` are
    documented there.

    Args:
        uri: Folder of the index.
        embedding_dim: Dimension of the vectors of a new store. None: the store must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex.
        late_interaction: Which means of MaxSim a score contains, for items with several vectors.
            None: one vector per item.
        codec: Codec that compresses the vectors.
        repairs: Whether to remove items whose vectors are damaged, with a warning, instead of raising
            an error.

    Raises:
        DataError: If the store is missing and ``embedding_dim`` is None.
        ShapeError: If the store has vectors of another dimension, or another number of vectors per
            item.
        StorageError: If the store cannot be read or written.
    """

    def __init__(
        self,
        uri: str | Path,
        embedding_dim: int | None = None,
        memory: MemoryLimit = None,
        *,
        index_id: str = "",
        late_interaction: MaxSimDirection | None = None,
        codec: SetCodec | None = None,
        repairs: bool = False,
    ):
        self.folder = Path(uri)
        self.uri = str(uri)
        if os.path.exists(uri) and not os.path.isdir(uri):
            raise DataError(f"{uri}: expected the folder of a store, got a file. Pass a folder.")
        self.memory = memory
        self.index_id = index_id
        self.late_interaction = late_interaction
        self.codec = codec
        self.repairs = repairs
        self._verify_files = False
        self._verified = dict[str, tuple[int, int]]()
        # Rows of each file that this object has verified.
        self._intact_rows = dict[str, int]()
        self._has_coarse = False
        self._snapshot: tuple[int, ItemSnapshot] | None = None
        self.database = IndexDatabase(self.folder, create=None if embedding_dim is None else {})
        try:
            self._open(embedding_dim)
        except BaseException:
            self.close()
            raise

    def _open(self, embedding_dim: int | None) -> None:
        """Check the store, or create it if a dimension is given."""
        several = self.late_interaction is not None
        if self._stored() is None:
            if embedding_dim is None:
                raise DataError(
                    f"{self.uri}: expected a store of items, got none. Run visavis index to create "
                    "it."
                )
            vectors = self.folder / VECTORS_FOLDER
            if os.path.isdir(vectors) and os.listdir(vectors):
                raise RefusedOverwrite(
                    f"{vectors}: expected no files before the first item, got some. Pass another folder."
                )
            with self.database.change():
                if self._stored() is None:
                    self._write(
                        _StoredVectors(embedding_dim, several, self.index_id, self._code_bytes)
                    )
        stored = self._stored()
        assert stored is not None
        self.embedding_dim = stored.embedding_dim
        problem = ""
        if stored.several != several:
            kinds = ("one vector", "several vectors")
            problem = f"{kinds[several]} per item, got {kinds[stored.several]}"
        elif stored.code_bytes != self._code_bytes:
            problem = f"codes of {self._code_bytes} bytes, got {stored.code_bytes}"
        elif embedding_dim not in (None, stored.embedding_dim):
            problem = f"vectors of dimension {embedding_dim}, got {stored.embedding_dim}"
        if problem:
            raise ShapeError(f"{self.uri}: expected {problem}. Pass another folder.")
        if stored.index_id != self.index_id:
            raise StorageError(
                f"{self.uri}: the store belongs to another index. Pass another folder."
            )
        try:
            # An index with damaged files is refused before a query is encoded.
            with self._version():
                return
        except StorageError as error:
            if not self.repairs:
                raise
            problem = str(error).removesuffix(f" {REMEDY}")
        self._repair(problem)

    @property
    def _code_bytes(self) -> int | None:
        return None if self.codec is None else self.codec.encoding.vector_bytes

    def _repair(self, problem: str) -> None:
        """Remove the items whose vectors are damaged."""
        self._verified.clear()
        with self.database.change():
            stored = self._current()
            vectors = self._map(stored, self._num_readable(stored))
            table = self.table()
            items = table.items()
            rows = table.rows()
            is_intact = np.array(
                [
                    row < len(vectors)
                    and checksum
                    == row_checksum(
                        self.index_id, item.to_row(), next(iter(vectors[row : row + 1]))
                    )
                    for (item, checksum), row in zip(table.checked_items(), rows, strict=True)
                ],
                bool,
            )
            logging.getLogger(__name__).warning(
                "%s %d of %d items are damaged, and their files are encoded again.",
                problem,
                len(items) - is_intact.sum(),
                len(items),
            )
            intact = [item for item, keep in zip(items, is_intact, strict=True) if keep]
            self._rewrite(vectors, intact, rows[is_intact])
        self._remove_other_files()

    def _num_readable(self, stored: _StoredVectors) -> int:
        """Number of rows that can be read after a damage: all or none."""
        sizes = [
            (file.stat()[0] if os.path.exists(file.path) else 0, file.num_bytes(num_rows))
            for file, num_rows in self._files(stored)
        ]
        if any(size < full for size, full in sizes):
            return 0
        if stored.several:
            offsets = np.concatenate([[0], self._ends(stored.part).map(stored.num_rows)])
            if not are_offsets(offsets, stored.num_rows) or offsets[-1] != stored.num_vectors:
                return 0
        return stored.num_rows

    def _stored(self) -> _StoredVectors | None:
        value = self.database.value("vectors")
        if value is None:
            return None
        stored: _StoredVectors = storage.parse_json(
            value.encode(), _StoredVectors, f"{self.database.path}: vectors", error=StorageError
        )
        return stored

    def _current(self) -> _StoredVectors:
        stored = self._stored()
        if stored is None:
            raise StorageError(f"{self.uri}: the items of the store are lost. {REMEDY}")
        return stored

    def _write(self, stored: _StoredVectors) -> None:
        """Record a change, which readers notice by its version."""
        self._record(replace(stored, version=stored.version + 1))

    def _record(self, stored: _StoredVectors) -> None:
        self.database.set_value("vectors", json.dumps(asdict(stored)))

    def _array(self, part: int) -> VectorArray:
        """The vectors, or codes of compressed ones."""
        width = self._code_bytes or self.embedding_dim
        dtype = "float32" if self.codec is None else "uint8"
        return VectorArray(self.folder / VECTORS_FOLDER / f"{part}.npy", width, dtype)

    def _ends(self, part: int) -> VectorArray:
        """The end of the vectors of each item, for items with several vectors."""
        return VectorArray(self.folder / VECTORS_FOLDER / f"{part}.ends.npy", None, "int64")

    def add(self, items: Sequence[IndexItem], vectors: ItemVectors) -> None:
        """Add or replace items, see ``VectorStore.add``."""
        items, vectors = validated_items(items, vectors, self.embedding_dim)
        if self.codec is not None and isinstance(vectors, VectorSets) and vectors.codec is None:
            vectors = self.codec.encode(vectors)
        if not items:
            return
        with self.database.change():
            stored = self._remove([item.key for item in items])
            self._write(self._append(stored, items, vectors))
        self._shrink()

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items, see ``VectorStore.delete``."""
        if keys:
            with self.database.change():
                self._write(self._remove(keys))
            self._shrink()

    def _append(
        self, stored: _StoredVectors, items: Sequence[IndexItem], vectors: ItemVectors
    ) -> _StoredVectors:
        """Append vectors to the files, and insert their items."""
        rows = vectors.rows if isinstance(vectors, VectorSets) else vectors
        appended = {self._array(stored.part): (stored.num_vectors, rows)}
        if isinstance(vectors, VectorSets):
            ends = stored.num_vectors + vectors.offsets[1:]
            appended[self._ends(stored.part)] = (stored.num_rows, ends)
        for array, (start, values) in appended.items():
            if start:
                # Otherwise the new size and time of a damaged file would be recorded as intact.
                self._verify(array.path, stored, partial(self._is_intact, array, start))
            array.append(start, values)
            self.database.connection.execute(
                "INSERT INTO blocks VALUES (?, ?, ?, ?)",
                (
                    array.path.name,
                    start,
                    start + len(values),
                    array.content_hash(start, start + len(values)),
                ),
            )
        item_rows = [item.to_row() for item in items]
        checksums = [
            row_checksum(self.index_id, row, vector)
            for row, vector in zip(item_rows, vectors, strict=True)
        ]
        self.table().insert(
            range(stored.num_rows, stored.num_rows + len(items)),
            [
                row | {CHECKSUM: checksum}
                for row, checksum in zip(item_rows, checksums, strict=True)
            ],
        )
        norm = 0.0 if self.late_interaction is not None else max_row_norm(rows)
        return replace(
            stored,
            num_rows=stored.num_rows + len(items),
            num_vectors=stored.num_vectors + len(rows),
            num_items=stored.num_items + len(items),
            checksum=(stored.checksum + sum(checksums)) % 2**64,
            max_norm=max(stored.max_norm, norm),
            stats=stored.stats | {array.path.name: array.stat() for array in appended},
        )

    def _remove(self, keys: Sequence[str]) -> _StoredVectors:
        """Remove items from the table. Their vectors stay in the array."""
        stored = self._current()
        table = self.table()
        rows = list(table.rows_of(keys).values())
        checksums = sum(table.checksums(rows))
        table.delete(rows)
        self.database.connection.executemany(
            "INSERT INTO removed_rows VALUES (?)", ((row,) for row in rows)
        )
        return replace(
            stored,
            num_items=stored.num_items - len(rows),
            checksum=(stored.checksum - checksums) % 2**64,
        )

    def _shrink(self) -> None:
        """Write the array again if many of its rows belong to removed items."""
        stored = self._current()
        removed = stored.num_rows - stored.num_items
        if removed > max(MAX_REMOVED_SHARE * stored.num_rows, MIN_REMOVED_ROWS):
            try:
                with self.database.change():
                    self.rewrite()
                self._remove_other_files()
            except StorageError as error:
                # The change itself is stored, and the next one tries again.
                log_debug(__name__, "%s: the vectors cannot be written again: %s", self.uri, error)

    def rewrite(self, codec: SetCodec | None = None) -> None:
        """Write all vectors again, in the order of keys, and compressed if a codec is given. The
        caller holds a transaction.
        """
        table = self.table()
        with self._version() as snapshot:
            self._rewrite(snapshot.vectors, table.items(), table.rows(), codec)

    def _rewrite(
        self,
        vectors: ItemVectors,
        items: Sequence[IndexItem],
        rows: np.ndarray,
        codec: SetCodec | None = None,
    ) -> None:
        """Write some items and their vectors into a new file. The others are removed."""
        old = self._current()
        self.codec = codec or self.codec
        stored = _StoredVectors(
            old.embedding_dim,
            old.several,
            old.index_id,
            self._code_bytes,
            version=old.version,
            part=old.part + 1,
        )
        self.table().clear()
        for name in ("removed_rows", "blocks"):
            self.database.connection.execute(f"DELETE FROM {name}")
        for chunk in chunk_slices(len(items), REWRITTEN_ITEMS):
            chosen = vectors[rows[chunk]]
            if codec is not None and isinstance(chosen, VectorSets):
                chosen = codec.encode(chosen)
            stored = self._append(stored, items[chunk], chosen)
        self._write(stored)

    def _remove_other_files(self) -> None:
        """Remove files that the database does not name. Windows keeps those that are mapped."""
        self._snapshot = None
        folder = self.folder / VECTORS_FOLDER
        # No other process writes files during a change.
        with self.database.change():
            stored = self._current()
            kept = {
                self._array(stored.part).path.name,
                self._ends(stored.part).path.name,
                stored.coarse,
            }
            for path in folder.iterdir() if os.path.isdir(folder) else ():
                if path.name not in kept and _OWN_FILES.fullmatch(path.name):
                    with suppress(StorageError, OSError):
                        remove = storage.current_disk().unlink
                        (storage.remove_folder if os.path.isdir(path) else remove)(path)

    @contextmanager
    def _version(self) -> Iterator[ItemSnapshot]:
        """Read one version of the store in this block."""
        with self.database.reading():
            stored = self._current()
            if stored.code_bytes != self._code_bytes or stored.index_id != self.index_id:
                raise StorageError(f"{self.uri}: another index is here now. Open it again.")
            if self._snapshot is None or self._snapshot[0] != stored.version:
                self._snapshot = stored.version, self._open_snapshot(stored)
            yield self._snapshot[1]
        # A block inside another one could not write before its end.
        if self._verified and not self.database.connection.in_transaction:
            self._record_verified()

    def _record_verified(self) -> None:
        """Record the sizes and times of verified files, such as in a copy of the folder."""
        verified, self._verified = self._verified, {}
        version = None if self._snapshot is None else self._snapshot[0]
        # Files of an index that is read-only or being changed are hashed each time.
        with suppress(StorageError), self.database.change_at_once():
            stored = self._current()
            if stored.version == version:
                self._record(replace(stored, stats=stored.stats | verified))

    def _files(self, stored: _StoredVectors) -> list[tuple[VectorArray, int]]:
        """The files of vectors, and the number of their rows."""
        files = [(self._array(stored.part), stored.num_vectors)]
        if stored.several:
            files.append((self._ends(stored.part), stored.num_rows))
        return files

    def _map(self, stored: _StoredVectors, num_rows: int) -> ItemVectors:
        """Map the vectors of all rows, or of none."""
        if not stored.several:
            return self._array(stored.part).map(num_rows)
        ends = self._ends(stored.part).map(num_rows)
        num_vectors = stored.num_vectors if num_rows else 0
        rows = self._array(stored.part).map(num_vectors)
        return VectorSets(rows, np.concatenate([[0], ends]).astype(np.int64), self.codec)

    def _open_snapshot(self, stored: _StoredVectors) -> ItemSnapshot:
        for file, num_rows in self._files(stored):
            if num_rows:
                self._verify(file.path, stored, partial(self._is_intact, file, num_rows))
        vectors = self._map(stored, stored.num_rows)
        removed = [
            row for (row,) in self.database.connection.execute("SELECT row FROM removed_rows")
        ]
        table = self.table()
        if len(table) != stored.num_items or stored.num_items + len(removed) != stored.num_rows:
            raise StorageError(
                f"{self.uri}: expected {stored.num_items:,} items, got {len(table):,}. {REMEDY}"
            )
        live = None
        if removed:
            live = np.ones(stored.num_rows, bool)
            live[removed] = False
        searches = self._searches(stored, vectors)
        self._verify_files = False
        return ItemSnapshot(self.uri, self.index_id, table, vectors, searches, live)

    def _verify(self, path: Path, stored: _StoredVectors, is_intact: Callable[[], bool]) -> None:
        """Check a file by its size and time, or by its checksums if these have changed."""
        name = path.relative_to(self.folder / VECTORS_FOLDER).as_posix()
        problem = ""
        try:
            status = os.stat(path)
            stat = status.st_size, status.st_mtime_ns
            if stat == stored.stats.get(name) and not self._verify_files:
                return
            if not is_intact():
                problem = "checksum mismatch"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise StorageError(f"{path}: {problem}. {REMEDY}")
        self._verified[name] = stat

    def _is_intact(self, array: VectorArray, num_rows: int) -> bool:
        """Whether the first rows of an array have their checksums."""
        blocks = self.database.connection.execute(
            "SELECT first, stop, sha256 FROM blocks WHERE file = ? ORDER BY first",
            (array.path.name,),
        ).fetchall()
        starts = [first for first, _, _ in blocks]
        stops = [stop for _, stop, _ in blocks]
        name = array.path.name
        # A server follows an update: it hashes the rows that were appended since.
        known = 0 if self._verify_files else self._intact_rows.get(name, 0)
        is_intact = (
            array.stat()[0] >= array.num_bytes(num_rows)
            and [0, *stops] == [*starts, num_rows]
            and all(
                array.content_hash(first, stop) == sha
                for first, stop, sha in blocks
                if first >= known
            )
        )
        if is_intact:
            self._intact_rows[name] = num_rows
        return is_intact

    def _searches(self, stored: _StoredVectors, vectors: ItemVectors) -> list[SearchedRows]:
        """Search with codes or pooled vectors in the first rows, and without in the others."""
        folder = self.folder / VECTORS_FOLDER / stored.coarse
        coarse: Any = None
        if stored.coarse:
            try:
                coarse = self._open_coarse(folder, stored, vectors)
            except (OSError, DataError, StorageError) as error:
                logging.getLogger(__name__).warning(
                    "%s: %s Searches are slower until visavis index runs again.", folder, error
                )
        self._has_coarse = coarse is not None
        split = stored.coarse_rows if coarse is not None else 0
        log_debug(__name__, "exact search in %d items, %d with codes", stored.num_rows, split)
        ranges = [slice(0, split), slice(split, stored.num_rows)]
        ranges = [rows for rows in ranges if rows.start < rows.stop] or ranges[:1]
        found = []
        for rows in ranges:
            own = vectors[rows]
            own_coarse = coarse if rows.start < split else None
            if isinstance(own, VectorSets):
                from visavis.retrieval.stores.maxsim_search import MaxSimSearch

                assert self.late_interaction is not None
                search: Any = MaxSimSearch(
                    own, self.late_interaction, pooled=own_coarse, memory=self.memory
                )
            else:
                search = ExactSearch(
                    own, coarse=own_coarse, memory=self.memory, max_norm=stored.max_norm
                )
            found.append(SearchedRows(rows.start, search))
        return found

    def _open_coarse(
        self, folder: Path, stored: _StoredVectors, vectors: ItemVectors
    ) -> Any | None:
        """Map the codes, or the pooled vectors of items with several vectors."""
        if not isinstance(vectors, VectorSets) and not is_int8_faster(*vectors.shape):
            return None
        for name, expected in stored.coarse_hashes.items():
            path = folder / name
            self._verify(path, stored, lambda: storage.content_hash(path) == expected)  # noqa: B023 - called at once
        if not isinstance(vectors, VectorSets):
            return open_int8_codes(folder)
        pooled_rows = storage.read_array(folder / "pooled.npy", dimensions=2, memory_map=True)
        offsets = storage.read_array(folder / "offsets.npy", dimensions=1, kinds="i")
        return VectorSets(pooled_rows, offsets)

    def prepare_search(self) -> None:
        """Write codes or pooled vectors, see ``VectorStore.prepare_search``."""
        stored = self._current()
        is_covered = stored.num_rows - stored.coarse_rows <= MAX_UNCODED_SHARE * stored.coarse_rows
        with self._version() as snapshot:
            vectors = snapshot.vectors
        is_covered &= self._has_coarse or not stored.coarse
        if is_covered or not self._is_coarse_faster(vectors):
            self._remove_other_files()
            return
        # A new name: damaged files may be mapped, and Windows does not replace these.
        name = f"{stored.part}.coarse-{stored.version}"
        folder = self.folder / VECTORS_FOLDER / name
        storage.remove_folder(folder)
        with storage.atomic_folder(folder) as part:
            if isinstance(vectors, VectorSets):
                from visavis.retrieval.stores.maxsim_search import POOLED_VECTORS, pool_vectors

                pooled = pool_vectors(vectors, POOLED_VECTORS)
                storage.write_array(part / "pooled.npy", pooled.rows)
                storage.write_array(part / "offsets.npy", pooled.offsets)
            else:
                write_int8_codes(part, vectors)
        hashes = {path.name: storage.content_hash(path) for path in folder.iterdir()}
        with self.database.change():
            newest = self._current()
            if newest.part == stored.part and os.path.isdir(folder):
                self._write(
                    replace(
                        newest,
                        coarse=name,
                        coarse_rows=stored.num_rows,
                        coarse_hashes=hashes,
                    )
                )
        self._remove_other_files()

    def _is_coarse_faster(self, vectors: ItemVectors) -> bool:
        if not isinstance(vectors, VectorSets):
            return is_int8_faster(*vectors.shape)
        from visavis.retrieval.stores.maxsim_search import MIN_ITEMS

        return vectors.codec is None and len(vectors) >= MIN_ITEMS

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest scores, see ``VectorStore.search``."""
        with self._version() as snapshot:
            return snapshot.search(queries, top, item_filter)

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, see ``VectorStore.get``."""
        with self._version() as snapshot:
            return snapshot.get(keys)

    def table(self) -> ItemTable:
        """Return the items, see ``VectorStore.table``."""
        return ItemTable(self.database.connection, self.database.reading)

    def one_version(self) -> AbstractContextManager[None]:
        """Read one version, see ``VectorStore.one_version``."""
        return self.database.reading()

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        with self._version() as snapshot:
            return snapshot.vectors_of(keys)

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        with self._version() as snapshot:
            return snapshot.all_vectors()

    def all_items(self) -> tuple[list[IndexItem], ItemVectors]:
        """Read all items and their vectors, see ``VectorStore.all_items``."""
        with self._version() as snapshot:
            return snapshot.table.items(), snapshot.all_vectors()

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        with self._version() as snapshot:
            return snapshot.table.count(item_filter) if item_filter else self._current().num_items

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors, see ``VectorStore.digest``."""
        stored = self._current()
        return StoreDigest(stored.num_items, f"{stored.checksum:016x}")

    def verify(self) -> None:
        """Verify all items and vectors, see ``VectorStore.verify``."""
        self._snapshot = None
        self._verify_files = True
        with self._version() as snapshot:
            [problem] = self.database.connection.execute("PRAGMA integrity_check(1)").fetchone()
            if problem != "ok":
                raise StorageError(f"{self.database.path}: {problem}. {REMEDY}")
            snapshot.verify()

    def close(self) -> None:
        """Close the database and the vectors."""
        self._snapshot = None
        self.database.close()
