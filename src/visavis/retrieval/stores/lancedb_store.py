"""LanceDB store: a table in a folder or in object storage, and a memory-mapped snapshot of its
newest version for exact search.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core import storage
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import DataError, ShapeError, requires_extra
from visavis.core.memory_budget import MemoryLimit
from visavis.retrieval.items import ITEM_FIELDS, IndexItem
from visavis.retrieval.stores.arrow_tables import (
    NUM_VECTORS,
    arrow_schema,
    arrow_table,
    flat_values,
)
from visavis.retrieval.stores.base import (
    CHECKSUM,
    ItemVectors,
    StoreDigest,
    VectorSets,
    store_errors,
    validated_items,
    verify_rows,
)
from visavis.retrieval.stores.exact_search import is_int8_faster, max_row_norm, write_int8_codes
from visavis.retrieval.stores.snapshot_store import SnapshotStore
from visavis.retrieval.stores.table_snapshot import (
    ITEMS_FILE,
    OFFSETS_FILE,
    POOLED_FILE,
    POOLED_OFFSETS_FILE,
    REMOVED_FILE,
    VECTORS_FILE,
    PartDescription,
    SnapshotPart,
    TableSnapshot,
    file_stats,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from visavis.retrieval.stores.set_codec import SetCodec

SNAPSHOT_FOLDER = "snapshot"
TABLE = "items"
BATCH_ROWS, BATCH_SETS = 2**14, 2**10
"""Rows that are read at once, with one or with several vectors each."""
MIN_PART_ROWS = 2**10
"""Smaller parts of a snapshot are merged into the next one, which takes 25 us per row."""
COMPACT_EVERY = 64
"""Changes after which small files of the table are merged."""
VERSION_RETENTION = timedelta(minutes=10)
"""How long old versions are kept for readers that have just opened them."""


class LanceStore(SnapshotStore):
    """Items in a LanceDB table in a folder or at ``s3://BUCKET/PATH`` (credentials from ``AWS_...``
    variables).

    Exact search reads a snapshot of the newest version. Snapshots of a local table are in its
    folder, others in the cache folder. A change adds a part with the changed items, and small parts
    are merged. A missing or damaged snapshot is rebuilt. The methods of ``VectorStore`` are
    documented there.

    Args:
        uri: Folder or ``s3://BUCKET/PATH``.
        embedding_dim: Dimension of the vectors of a new table. None: the table must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex. A table that is opened for an index and must exist keeps
            its version.
        late_interaction: Which means of MaxSim a score contains, for items with several vectors.
            None: one vector per item.
        verify_files: Whether to verify the snapshot by checksums, instead of by the sizes and times
            of its files.
        digest: Summary of the items, if it is known. A local snapshot of them is opened instead of
            the table, until a change needs the table: importing LanceDB takes longer than a search.
        codec: Codec that compresses the vectors of the table.

    Raises:
        DataError: If the table is missing and ``embedding_dim`` is None.
        ShapeError: If the table has vectors of another dimension, or another number of vectors per
            item.
        StorageError: If the table cannot be read or written.
        MissingExtra: If LanceDB is not installed.
    """

    def __init__(
        self,
        uri: str | Path,
        embedding_dim: int | None = None,
        memory: MemoryLimit = None,
        *,
        index_id: str = "",
        late_interaction: MaxSimDirection | None = None,
        verify_files: bool = False,
        digest: StoreDigest | None = None,
        codec: SetCodec | None = None,
    ):
        if os.path.exists(uri) and not os.path.isdir(uri):
            raise DataError(
                f"{uri}: expected the folder of a store, got a file. Pass a folder, or a file name "
                "ending in .db for Milvus."
            )
        self.uri = str(uri)
        self.memory = memory
        self.index_id = index_id
        self.late_interaction = late_interaction
        self._verify_files = verify_files
        self.codec = codec
        # A search reads one version throughout, also if an update ends meanwhile.
        self._keeps_version = embedding_dim is None and bool(index_id)
        self._storage_errors = partial(
            store_errors, self.uri, index_id, "the table cannot be read or written", _reason
        )
        self.remote = "://" in self.uri
        self._database: Any = None
        self._table: Any = None
        several = late_interaction is not None
        self._item_columns = [*ITEM_FIELDS, CHECKSUM, *([NUM_VECTORS] if several else [])]
        self._batch_rows = BATCH_SETS if several else BATCH_ROWS
        self._snapshot = None if digest is None else self._open_snapshot_of(digest)
        if self._snapshot is None:
            self._open_table(embedding_dim)
        else:
            vectors = self._snapshot[1].parts[-1].vectors
            self.embedding_dim = (
                vectors.dim if isinstance(vectors, VectorSets) else vectors.shape[1]
            )

    def _open_table(self, embedding_dim: int | None) -> None:
        """Open the table, or create it if a dimension is given."""
        os.environ.setdefault("LANCE_LOG", "error")
        with requires_extra("search", "an index"):
            import lancedb
        several = self.late_interaction is not None
        with self._storage_errors():
            # Connecting would create the folder.
            is_missing = not self.remote and not os.path.isdir(Path(self.uri) / f"{TABLE}.lance")
            if not is_missing or embedding_dim is not None:
                self._database = lancedb.connect(self.uri, read_consistency_interval=timedelta(0))
                try:
                    self._table = self._database.open_table(TABLE)
                except ValueError as error:
                    is_missing = "was not found" in str(error)
                    if not is_missing:
                        raise
            if is_missing:
                if embedding_dim is None:
                    raise DataError(
                        f"{self.uri}: expected a table of items, got none. Run visavis index to "
                        "create it."
                    )
                compressed = self.codec is not None
                schema = arrow_schema(
                    self._width(embedding_dim), several=several, compressed=compressed
                )
                self._table = self._database.create_table(TABLE, schema=schema, exist_ok=True)
        column = self._table.schema.field("vector").type
        stores_several = not hasattr(column, "list_size")
        column = column.value_type if stores_several else column
        self.embedding_dim = column.list_size if self.codec is None else self.codec.dim
        problem = ""
        if stores_several != several:
            kinds = ("one vector", "several vectors")
            problem = f"{kinds[several]} per item, got {kinds[stores_several]}"
        elif column.list_size != self._width(self.embedding_dim) or (
            str(column.value_type) == "uint8"
        ) != (self.codec is not None):
            value_type = "float32" if self.codec is None else "uint8"
            problem = (
                f"rows of {self._width(self.embedding_dim)} values of {value_type}, got "
                f"{column.list_size} of {column.value_type}"
            )
        elif embedding_dim not in (None, self.embedding_dim):
            problem = f"vectors of dimension {embedding_dim}, got {self.embedding_dim}"
        if problem:
            raise ShapeError(f"{self.uri}: expected {problem}. Pass another folder.")

    def _width(self, embedding_dim: int) -> int:
        """Numbers or bytes of a row of vectors."""
        return embedding_dim if self.codec is None else self.codec.encoding.vector_bytes

    def _open_snapshot_of(self, digest: StoreDigest) -> tuple[str, TableSnapshot] | None:
        """The version and the snapshot of a local table with exactly these items. None if there is
        none, or an update may have been killed.
        """
        folder = self._snapshot_folder()
        versions = Path(self.uri) / f"{TABLE}.lance" / "_versions"
        if not os.path.isdir(versions) or not os.path.isdir(folder):
            return None
        with storage.folder_lock(folder, wait=True):
            if any(folder.glob(".*.part")):
                return None
            # An older version would hide that the table has changed since.
            for name in _newest_first(folder)[:1]:
                with suppress(DataError):
                    if PartDescription.read(folder / name, self.index_id).digest == digest:
                        opened = self._open_snapshot(folder / name, self._verify_files)
                        return None if opened is None else (name, opened)
        return None

    def _snapshot_folder(self) -> Path:
        """Next to the table if that is writable, else in the cache."""
        if not self.remote and os.access(self.uri, os.W_OK):
            return Path(self.uri) / SNAPSHOT_FOLDER
        name = self.uri if self.remote else os.path.realpath(self.uri)
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return storage.cache_folder() / SNAPSHOT_FOLDER / digest

    def add(self, items: Sequence[IndexItem], vectors: ItemVectors) -> None:
        """Add or replace items, see ``VectorStore.add``."""
        items, vectors = validated_items(items, vectors, self.embedding_dim)
        if self.codec is not None and isinstance(vectors, VectorSets) and vectors.codec is None:
            vectors = self.codec.encode(vectors)
        if items:
            with self._change():
                merge = (
                    self._table.merge_insert("key")
                    .when_matched_update_all()
                    .when_not_matched_insert_all()
                )
                merge.execute(arrow_table(self.index_id, items, vectors))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items, see ``VectorStore.delete``."""
        if keys:
            quoted = ", ".join("'" + key.replace("'", "''") + "'" for key in keys)
            with self._change():
                self._table.delete(f"key IN ({quoted})")

    def verify(self) -> None:
        """Verify the table and the snapshot, see ``VectorStore.verify``. A damaged snapshot is
        rebuilt.
        """
        with self._storage_errors():
            table, row_ids, _ = self._read_checksums()
            for _, batch in self._read_rows(
                table, np.sort(row_ids), [*self._item_columns, "vector"]
            ):
                rows = flat_values(batch["vector"]).reshape(-1, self._width(self.embedding_dim))
                vectors: ItemVectors = rows
                if self.late_interaction is not None:
                    ends = np.cumsum(batch[NUM_VECTORS].to_numpy())
                    vectors = VectorSets(rows, np.concatenate([[0], ends]))
                self._verify(batch.drop_columns("vector"), vectors)
        self._snapshot = None
        self._verify_files = True
        self.snapshot()

    def optimize(self, retention: timedelta = VERSION_RETENTION) -> None:
        """Merge small files and remove old versions.

        Args:
            retention: Age from which versions are removed.
        """
        self._require_table()
        with self._storage_errors():
            self._table.optimize(cleanup_older_than=retention)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Compact the table after this change if it is due. The versions count the changes, because
        most processes make a single one.
        """
        self._require_table()
        with self._storage_errors():
            before = self._table.version
            yield
            if self._table.version // COMPACT_EVERY > before // COMPACT_EVERY:
                self.optimize()

    def _require_table(self) -> None:
        if self._table is None:
            self._open_table(self.embedding_dim)

    def close(self) -> None:
        """Close the table and the snapshot."""
        self._snapshot = self._table = self._database = None

    def snapshot(self) -> TableSnapshot:
        """Open the snapshot of the newest version, and build it if it is missing or damaged.

        Returns:
            The snapshot.

        Raises:
            StorageError: If the snapshot cannot be written, or the table is damaged.
        """
        if self._snapshot is not None and (
            self._keeps_version or self._table is None or self._snapshot[0] == self._version()
        ):
            return self._snapshot[1]
        folder = self._snapshot_folder()
        with storage.folder_lock(folder, wait=True):
            version = self._version()
            # A killed process leaves partial files.
            # Its other files may be damaged without a change of size and time.
            was_killed = any(folder.glob(".*.part"))
            in_full = self._verify_files or was_killed
            opened = self._open_snapshot(folder / version, in_full)
            if opened is None:
                self._write_snapshot(folder / version, in_full)
                opened = self._open_snapshot(folder / version, in_full=False)
                assert opened is not None
                # Also closes the older one: Windows keeps folders whose files are mapped.
                self._snapshot = version, opened
                storage.remove_partial_files(folder)
                names = {part.name for part in opened.parts}
                for stale in folder.iterdir():
                    if os.path.isdir(stale) and stale.name not in names:
                        storage.remove_folder(stale)
            if was_killed:
                storage.remove_partial_files(folder)
            self._snapshot = version, opened
        return opened

    def _open_snapshot(self, folder: Path, in_full: bool) -> TableSnapshot | None:
        """The snapshot that was written with a part. None if it does not exist, or is damaged, and
        then its part is removed.
        """
        if not os.path.exists(folder):
            return None
        damaged = folder
        try:
            description = PartDescription.read(folder, self.index_id)
            description.verify(folder, in_full=in_full)
            for damaged in (folder.parent / name for name in description.parts):
                PartDescription.read(damaged, self.index_id).verify(damaged, in_full=in_full)
            return TableSnapshot.open(
                folder, description, self.memory, self.late_interaction, self.codec
            )
        except (OSError, DataError) as error:
            storage.remove_damaged(damaged, [], str(error))
        # After the error is handled: it refers to mapped files, which Windows does not remove.
        for part in {damaged, folder}:
            storage.remove_folder(part)
        return None

    def _write_snapshot(self, folder: Path, in_full: bool) -> None:
        """Write a part with the items that the kept parts of the newest intact snapshot of an older
        version do not have.
        """
        names = _newest_first(folder.parent) if os.path.isdir(folder.parent) else []
        opened = (self._open_snapshot(folder.parent / name, in_full) for name in names)
        older = next((snapshot for snapshot in opened if snapshot is not None), None)
        with self._storage_errors(), storage.atomic_folder(folder) as part:
            table, row_ids, checksums = self._read_checksums()
            kept, is_new = _kept_parts([] if older is None else older.parts, checksums)
            # A removed row counts through all kept parts.
            removed = np.flatnonzero(
                ~np.concatenate([np.empty(0, bool), *(live for _, live in kept)])
            )
            if len(removed):
                storage.write_array(part / REMOVED_FILE, removed)
            max_norm = self._write_part(part, table, row_ids[is_new])
            hashes = {path.name: storage.content_hash(path) for path in part.iterdir()}
            PartDescription(
                self.index_id,
                folder.name,
                hashes,
                file_stats(part, hashes),
                tuple(old.name for old, _ in kept),
                StoreDigest.from_checksums(checksums),
                max_norm,
            ).write(part)

    def _read_checksums(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """The newest version of the table, and the id and checksum of each of its rows."""
        self._require_table()
        table = self._database.open_table(TABLE)
        # Another process may add a version while this one is read.
        table.checkout(self._table.version)
        rows = table.search().select([CHECKSUM]).with_row_id(True).to_arrow()
        return table, rows["_rowid"].to_numpy(), rows[CHECKSUM].to_numpy()

    def _read_rows(
        self, table: Any, row_ids: np.ndarray, columns: Sequence[str]
    ) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Batches of rows and their ids."""
        for start in range(0, max(len(row_ids), 1), self._batch_rows):
            ids = row_ids[start : start + self._batch_rows].tolist()
            batch = table.take_row_ids(ids).select(list(columns)).with_row_id().to_arrow()
            yield batch["_rowid"].to_numpy(), batch.drop_columns("_rowid")

    def _write_part(self, part: Path, table: Any, row_ids: np.ndarray) -> float | None:
        """Write items in the order of keys, their vectors, and codes or pooled vectors if these are
        faster. Return the maximum norm.
        """
        import pyarrow as pa

        # In the order of the files of the table.
        row_ids = np.sort(row_ids)
        batch_rows = self._batch_rows
        several = self.late_interaction is not None
        batches = [batch for _, batch in self._read_rows(table, row_ids, self._item_columns)]
        items = (
            pa.concat_tables(batches)
            .append_column("_row", pa.array(np.arange(len(row_ids))))
            .sort_by("key")
            .combine_chunks()
        )
        # Row of the part by position in the order of the files of the table.
        row_of = np.argsort(items["_row"].to_numpy())
        items = items.drop_columns("_row")
        with (
            pa.OSFile(str(part / ITEMS_FILE), "wb") as file,
            pa.ipc.new_file(file, items.schema) as writer,
        ):
            writer.write_table(items)
        counts = items[NUM_VECTORS].to_numpy() if several else np.ones(len(items), np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        width = self._width(self.embedding_dim)
        dtype = "float32" if self.codec is None else "uint8"
        storage.create_array(part / VECTORS_FILE, shape=(int(offsets[-1]), width), dtype=dtype)
        # Mapped, so that a table larger than the memory is written batch by batch.
        vectors = np.lib.format.open_memmap(part / VECTORS_FILE, mode="r+")
        sets = VectorSets(vectors, offsets, self.codec)
        for ids, batch in self._read_rows(table, row_ids, ["vector"]):
            vectors[sets.rows_of(row_of[np.searchsorted(row_ids, ids)])] = flat_values(
                batch["vector"]
            ).reshape(-1, width)
        item_vectors: ItemVectors = sets if several else vectors
        for start in range(0, len(items), batch_rows):
            self._verify(items.slice(start, batch_rows), item_vectors[start : start + batch_rows])
        vectors.flush()
        if several:
            from visavis.retrieval.stores.maxsim_search import (
                MIN_ITEMS,
                POOLED_VECTORS,
                pool_vectors,
            )

            storage.write_array(part / OFFSETS_FILE, offsets)
            if self.codec is None and len(sets) >= MIN_ITEMS:
                pooled = pool_vectors(sets, POOLED_VECTORS)
                storage.write_array(part / POOLED_FILE, pooled.rows)
                storage.write_array(part / POOLED_OFFSETS_FILE, pooled.offsets)
            return None
        if is_int8_faster(*vectors.shape):
            write_int8_codes(part, vectors)
        return max_row_norm(vectors)

    def _verify(self, items: pa.Table, vectors: ItemVectors) -> None:
        verify_rows(self.uri, self.index_id, items.to_pylist(), vectors)

    def _version(self) -> str:
        """Number and time of the newest version. The time distinguishes it from that of a deleted
        table, which also started at 1.
        """
        self._require_table()
        with self._storage_errors():
            newest = max(self._table.list_versions(), key=lambda version: version["version"])
        return f"{newest['version']}-{int(newest['timestamp'].timestamp() * 1e6)}"


def _newest_first(folder: Path) -> list[str]:
    """Versions of the snapshots in a folder."""
    versions = [path.name for path in folder.iterdir() if re.fullmatch(r"\d+-\d+", path.name)]
    return sorted(versions, key=lambda name: [-int(part) for part in name.split("-")])


def _kept_parts(
    parts: Sequence[SnapshotPart], checksums: np.ndarray
) -> tuple[list[tuple[SnapshotPart, np.ndarray]], np.ndarray]:
    """Parts that the next snapshot keeps, with which of their rows it still contains, and which
    rows of the table a new part needs.

    A part is merged into the new one if it is small, has at most twice as many rows, or half of its
    rows are removed. So the number of parts grows with the logarithm of the number of items, and so
    does the number of times that a row is written.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kept = list[tuple[SnapshotPart, np.ndarray]]()
    is_new = np.ones(len(checksums), bool)
    stored = [part.table[CHECKSUM].to_numpy() for part in parts]
    # Row of the table with the checksum of each row of the parts, which is a hash of the whole row.
    # -1: it was removed.
    found = (
        pc.index_in(
            pa.array(np.concatenate([*stored, np.empty(0, np.int64)])),
            value_set=pa.array(checksums),
        )
        .fill_null(-1)
        .to_numpy()
    )
    rows = np.split(found, np.cumsum([len(own) for own in stored])[:-1]) if parts else []
    rows = [
        own if part.live is None else np.where(part.live, own, -1)
        for part, own in zip(parts, rows, strict=True)
    ]
    num_new = len(checksums) - sum(int((own >= 0).sum()) for own in rows)
    for part, own in sorted(zip(parts, rows, strict=True), key=lambda pair: (pair[1] >= 0).sum()):
        live = own >= 0
        if live.sum() <= max(2 * num_new, len(live) // 2, MIN_PART_ROWS):
            num_new += int(live.sum())
        else:
            kept.append((part, live))
            is_new[own[live]] = False
    return kept, is_new


def _reason(error: BaseException) -> str:
    """The essential part of an error message of LanceDB."""
    text = str(error).strip() or type(error).__name__
    message = re.search(r"<Message>(.*?)</Message>", text)
    return (message[1] if message else text.splitlines()[0].split(", location:")[0]).rstrip(".")[
        :200
    ]
