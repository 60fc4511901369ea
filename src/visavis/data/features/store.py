"""Features of frozen encoders on disk: computed once, memory-mapped, read by rows.

A store is a folder:

- ``features.json``: description of the features and of their computation.
- ``keys.json``: image names or caption texts, one per row. Equal captions share a row.
- ``progress.json``: number of written rows and their checksum. An unfinished store is continued.
- ``vectors.npy``: float16 ``[N, D]``, or ``[N, R, D]`` for regions, with a crop axis after ``N`` if
  there are several crops.
- For words and frames instead ``words.npy`` or ``frames.npy`` ``[total, D]``, and ``offsets.npy``
  ``[N + 1]``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded, Granularity, Modality
from visavis.core.errors import DataError, RefusedOverwrite, StorageError
from visavis.core.ragged import RaggedRows, are_offsets, offsets_from_counts
from visavis.data.dataset import require
from visavis.data.features.arrays import look_up_rows

# Granularities with a different number of vectors per item, and the file of their vectors.
VARIABLE_LENGTH_FILES = {"words": "words.npy", "frames": "frames.npy"}


@dataclass(frozen=True)
class StoreDescription:
    """Content of a store and how it was computed.

    Attributes:
        modality: Images or captions.
        granularity: Part of an item that one vector describes.
        encoder: Name of the encoder.
        weights_checksum: Checksum of the encoder's parameters.
        shape: Shape of one item: ``(D,)``, ``(R, D)``, or ``(D,)`` per word or frame. With several
            crops their number comes first.
        num_items: Number of rows.
        fingerprint: Fingerprint of the data set.
        crops: Number of crops per image.
        precision: Precision in which the encoder ran.
        preprocessing: Settings of the preprocessing.
        versions: Versions of packages. They are not compared.
        complete: Whether all rows are written.
    """

    modality: Modality
    granularity: Granularity
    encoder: str
    weights_checksum: str
    shape: tuple[int, ...]
    num_items: int
    fingerprint: str
    crops: int = 1
    precision: str = "float32"
    preprocessing: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def has_variable_length(self) -> bool:
        """Whether items have different numbers of vectors."""
        return self.granularity in VARIABLE_LENGTH_FILES

    @property
    def vectors_file(self) -> str:
        """Name of the file of vectors."""
        return VARIABLE_LENGTH_FILES.get(self.granularity, "vectors.npy")

    def difference(self, other: StoreDescription) -> str | None:
        """Describe the first field in which two stores differ, except versions. None: they agree."""
        for name in asdict(self):
            own_value, other_value = (
                json.dumps(getattr(description, name)) for description in (self, other)
            )
            if own_value != other_value and name not in ("versions", "complete"):
                return f"{name} is {own_value}, not {other_value}"
        return None


# Files whose sizes and times are recorded, and all files that a store may have.
_CONTENT_FILES = ("keys.json", "offsets.npy", *VARIABLE_LENGTH_FILES.values(), "vectors.npy")
_STORE_FILES = ("features.json", "progress.json", *_CONTENT_FILES)
# Bytes that are hashed at once.
_HASH_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class WriteProgress:
    """State of writing a store.

    Attributes:
        rows_written: Number of written rows.
        sha256: Checksum of keys, offsets and these rows. Empty before the first row.
        file_stats: Sizes and times of the files of a finished store when the checksum was last
            verified.
    """

    rows_written: int
    sha256: str
    file_stats: tuple[tuple[int, int], ...] = ()


@contextmanager
def raise_as_damaged() -> Iterator[None]:
    """Convert errors of unreadable content to DamagedCacheError. Temporary errors stay a DataError."""
    try:
        yield
    except DataError as error:
        if storage.is_transient_error(error) and not isinstance(
            error.__context__, FileNotFoundError
        ):
            raise
        raise storage.DamagedCacheError(str(error)) from None


def read_description(folder: Path) -> StoreDescription:
    """Read the description of a store."""
    require(
        os.path.exists(folder / "features.json"),
        f"{folder} is not a feature store: expected a file features.json. Create one with "
        "visavis features.",
    )
    try:
        with raise_as_damaged():
            return storage.read_json(folder / "features.json", StoreDescription)
    except storage.DamagedCacheError as reason:
        raise storage.DamagedCacheError(
            f"{folder / 'features.json'} does not describe a feature store of this version "
            f"({str(reason).removesuffix('.')}). "
            "Create the store again with visavis features."
        ) from None


def create_store(
    folder: Path, description: StoreDescription, keys: Sequence[str], lengths: np.ndarray | None
) -> None:
    """Create all files of an empty store in one step, so that a killed process leaves none or all
    of them.
    """
    if os.path.exists(folder):
        storage.prepare_empty_folder(folder, will_be_replaced=True)
    with storage.atomic_folder(folder) as part:
        storage.write_json(part / "features.json", asdict(description))
        storage.write_json(part / "keys.json", list(keys))
        storage.write_json(part / "progress.json", asdict(WriteProgress(0, "")))
        rows = description.num_items
        if description.has_variable_length:
            assert lengths is not None
            offsets = offsets_from_counts(lengths)
            storage.write_array(part / "offsets.npy", offsets)
            rows = int(offsets[-1])
        storage.create_array(
            part / description.vectors_file, shape=(rows, *description.shape), dtype="float16"
        )


def discard_store(folder: Path, reason: str) -> None:
    """Remove the files of a damaged store, and no other files. Call it after the error is handled:
    the error refers to the mapped file, which Windows does not remove.
    """
    storage.remove_partial_files(folder)
    storage.remove_damaged(folder, [folder / name for name in _STORE_FILES], reason)


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """A store of features.

    Attributes:
        folder: The folder.
        description: Content of ``features.json``.
        keys: Image names or caption texts.
        items: Vectors of each item, memory-mapped: its words or frames, or else one row.
        progress: State of writing.

    Example:
        >>> store = FeatureStore.open(folder)                           # doctest: +SKIP
        >>> store.read(store.rows(["a.jpg", "b.jpg"])).vectors.shape    # doctest: +SKIP
        torch.Size([2, 1280])
    """

    folder: Path
    description: StoreDescription
    keys: list[str]
    items: RaggedRows[np.ndarray]
    progress: WriteProgress

    @classmethod
    def open(cls, folder: str | Path) -> FeatureStore:
        """Open a finished store. Its checksum is verified if the store is small or a file has
        changed.
        """
        folder = Path(folder)
        description = read_description(folder)
        store = cls._open_files(folder, description)
        if not description.complete:
            done = store.progress.rows_written
            count = description.num_items
            raise DataError(
                f"{folder} is unfinished: expected {count:,} rows, got {done:,}. Run visavis "
                "features again to continue."
            )
        # The size and time of each file are those of the last verification.
        is_unchanged = store._file_stats() == store.progress.file_stats
        if is_unchanged and store.items.rows.nbytes > storage.MAX_BYTES_HASHED_AT_OPEN:
            return store
        if store.checksum(store.progress.rows_written).hexdigest() != store.progress.sha256:
            raise storage.DamagedCacheError(
                f"{folder}: checksum mismatch of the features.{storage.RESTORE_COPY}"
            )
        if not is_unchanged:
            with suppress(StorageError):  # a read-only store is hashed each time
                store._record_file_stats(store.progress)
        return store

    @classmethod
    def _open_files(cls, folder: Path, description: StoreDescription) -> FeatureStore:
        """Open the files of a store, which may be unfinished, and check that they match the
        description.
        """
        with raise_as_damaged():
            keys = storage.read_json(folder / "keys.json", list[str])
            written = storage.read_json(folder / "progress.json", WriteProgress)
            offsets = (
                storage.read_array(folder / "offsets.npy", dimensions=1, kinds="i")
                if description.has_variable_length
                else np.arange(len(keys) + 1)
            )
            vectors = storage.read_array(folder / description.vectors_file, memory_map=True)
        is_valid = {
            "keys.json": len(set(keys)) == len(keys) == description.num_items,
            "progress.json": 0 <= written.rows_written <= description.num_items
            and (written.rows_written == description.num_items or not description.complete),
            "offsets.npy": are_offsets(offsets, len(keys)),
            description.vectors_file: vectors.shape == (*offsets[-1:], *description.shape)
            and vectors.dtype == np.float16
            and vectors.flags.c_contiguous,
        }
        if invalid_file := next((name for name, valid in is_valid.items() if not valid), None):
            raise storage.DamagedCacheError(
                f"{folder / invalid_file} does not match features.json.{storage.RESTORE_COPY}"
            )
        return cls(folder, description, keys, RaggedRows(vectors, offsets), written)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder instead of the vectors, for worker processes."""
        return FeatureStore._open_files, (self.folder.absolute(), self.description)

    def checksum(self, rows: int) -> Any:
        """Hash keys, offsets and the first rows, as a SHA-256 that more rows can update."""
        digest = hashlib.sha256(json.dumps(self.keys).encode())
        vectors = self.items.rows
        if self.description.has_variable_length:
            digest.update(self.items.offsets.astype(np.int64).tobytes())
        # For words and frames, a row of the store is an item of several vectors.
        end = int(self.items.offsets[rows])
        step = max(1, _HASH_BLOCK_BYTES // max(1, vectors[:1].nbytes))
        for start in range(0, end, step):
            digest.update(vectors[start : min(start + step, end)].tobytes())
        return digest

    def _file_stats(self) -> tuple[tuple[int, int], ...]:
        """Return the size in bytes and the time of change in ns of each file with keys or features."""
        paths = [
            self.folder / name for name in _CONTENT_FILES if os.path.exists(self.folder / name)
        ]
        return tuple(
            (status.st_size, status.st_mtime_ns) for path in paths for status in [path.stat()]
        )

    def _record_file_stats(self, written: WriteProgress) -> None:
        """Record the sizes and times of files whose checksum was verified."""
        storage.write_json(
            self.folder / "progress.json", asdict(replace(written, file_stats=self._file_stats()))
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return self.description.shape[-1]

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.keys)}

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of keys."""
        return look_up_rows(self._row_of, keys, self.folder)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Read rows as float32. Words and frames are padded to ``[n, L, D]``, with a mask."""
        rows = np.asarray(rows)
        if not self.description.has_variable_length:
            return Encoded(torch.from_numpy(self.items.rows[rows]).float())
        vectors, mask = self.items.padded(rows)
        return Encoded(vectors.float(), mask)


class FeatureWriter:
    """Writes a store from its first to its last row. Saved rows survive if the process is killed.

    Args:
        folder: Folder of an unfinished store.
        description: Its description.
    """

    def __init__(self, folder: Path, description: StoreDescription):
        self.store = FeatureStore._open_files(folder, description)
        self.description = description
        self.rows_written = self.rows_saved = self.store.progress.rows_written
        self._checksum = self.store.checksum(self.rows_written)
        if self.store.progress.sha256 not in ("", self._checksum.hexdigest()):
            raise storage.DamagedCacheError(
                f"checksum mismatch of the first {self.rows_written:,} rows"
            )
        self._vectors_path = folder / description.vectors_file

    @classmethod
    def open(
        cls,
        folder: str | Path,
        description: StoreDescription,
        keys: Sequence[str],
        lengths: np.ndarray | None = None,
    ) -> FeatureWriter:
        """Create a store, or continue an unfinished one with the same description and keys. A
        damaged one is replaced.
        """
        folder = Path(folder)
        if not os.path.exists(folder / "features.json"):
            create_store(folder, description, keys, lengths)
            return cls(folder, description)
        stored_description = read_description(folder)
        if difference := stored_description.difference(description):
            raise RefusedOverwrite(
                f"{folder} contains other features: its {difference}. Remove it or name another "
                "folder."
            )
        try:
            writer = cls(folder, stored_description)
            damage = None
        except storage.DamagedCacheError as reason:
            writer = None
            damage = str(reason)
        if writer is None:
            discard_store(folder, str(damage))
            create_store(folder, description, keys, lengths)
            return cls(folder, description)
        if writer.store.keys != list(keys):
            raise RefusedOverwrite(
                f"{folder} contains features of other images or captions. Remove it or name "
                "another folder."
            )
        return writer

    def append(self, items: Encoded) -> None:
        """Write the next rows as float16."""
        assert isinstance(items.vectors, Tensor)
        values = items.vectors.float()
        if self.description.has_variable_length:
            values = values[items.mask]  # type: ignore[index]
        # Also false for NaN.
        require(
            values.abs().max() < torch.finfo(torch.float16).max,
            f"{self.description.encoder}: features near row {self.rows_written} of "
            f"{self.store.folder} are not finite in float16. "
            "Check the item of this row and the encoder.",
        )
        path = self._vectors_path
        array = self.store.items.rows
        offsets = self.store.items.offsets
        start = offsets[self.rows_written]
        end = offsets[self.rows_written + len(items)]
        content = (
            values.cpu().numpy().astype(np.float16).reshape(end - start, *array.shape[1:]).tobytes()
        )
        # Write instead of using a memory map, because a map kills the process if the disk is full.
        with storage.storage_errors(path), storage.current_disk().open(path, "r+b") as file:
            # The array begins after the header of the .npy, whose size is that of the file without
            # the array.
            file.seek(path.stat().st_size - array.nbytes + start * array[:1].nbytes)
            file.write(content)
        self._checksum.update(content)
        self.rows_written += len(items)

    def save(self) -> None:
        """Flush all rows to disk, then record their number."""
        with storage.storage_errors(self._vectors_path):
            storage.current_disk().sync_path(self._vectors_path)
        storage.write_json(self.store.folder / "progress.json", asdict(self._progress))
        self.rows_saved = self.rows_written

    @property
    def _progress(self) -> WriteProgress:
        return WriteProgress(self.rows_written, self._checksum.hexdigest())

    def finish(self) -> FeatureStore:
        """Save, mark the store as complete and open it."""
        assert self.rows_written == self.description.num_items
        self.save()
        # Before the store is marked as complete, so that a complete store always has the sizes and
        # times.
        self.store._record_file_stats(self._progress)
        complete = replace(self.description, complete=True)
        storage.write_json(self.store.folder / "features.json", asdict(complete))
        return FeatureStore._open_files(self.store.folder, complete)
