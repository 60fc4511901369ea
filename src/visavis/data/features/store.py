"""Features of frozen encoders on disk: computed once, memory-mapped, read by rows.

A store is a folder:

- ``features.json``: what the features are and how they were computed.
- ``keys.json``: image names or caption texts, one per row. Equal captions share a row.
- ``progress.json``: number of written rows and their checksum. An unfinished store is continued.
- ``vectors.npy``: float16 ``[N, D]``, or ``[N, R, D]`` for regions, with a crop axis after ``N`` if there are several crops.
- For words and frames instead ``words.npy`` or ``frames.npy`` ``[total, D]``, and ``offsets.npy`` ``[N + 1]``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.errors import DataError, RefusedOverwrite, StorageError
from visavis.types import Encoded

Modality = Literal["visual", "text"]
Granularity = Literal["pooled", "regions", "words", "frames"]
# Granularities with a different number of vectors per item, and the file of their vectors.
VARIABLE_LENGTH_FILES = {"words": "words.npy", "frames": "frames.npy"}


@dataclass(frozen=True)
class StoreDescription:
    """What a store contains and how it was computed.

    Attributes:
        modality: Images or captions.
        granularity: What one vector describes.
        encoder: Name of the encoder.
        weights_checksum: Checksum of the encoder's parameters.
        shape: Shape of one item: ``(D,)``, ``(R, D)``, or ``(D,)`` per word or frame. With several crops their number comes first.
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
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return self.shape[-1]

    def difference(self, other: StoreDescription) -> str | None:
        """Find the first field in which two stores differ, except versions.

        Args:
            other: Another description.

        Returns:
            A text such as ``encoder is "a", not "b"``. None if they agree.
        """
        for name in asdict(self):
            own_value, other_value = (json.dumps(getattr(description, name)) for description in (self, other))
            if own_value != other_value and name not in ("versions", "complete"):
                return f"{name} is {own_value}, not {other_value}"
        return None


# All files that a store may have.
STORE_FILE_NAMES = ("features.json", "keys.json", "progress.json", "offsets.npy", *VARIABLE_LENGTH_FILES.values(), "vectors.npy")
# A smaller store is hashed each time it is opened, a larger one only if the size or time of a file has changed.
MAX_BYTES_HASHED_AT_OPEN = 64 * 2**20
# Bytes that are hashed at once.
_HASH_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class WriteProgress:
    """State of writing a store.

    Attributes:
        rows_written: Number of written rows.
        sha256: Checksum of keys, offsets and these rows. Empty before the first row.
        file_stats: Sizes and times of the files of a finished store when the checksum was last verified.
    """

    rows_written: int
    sha256: str
    file_stats: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StoreFiles:
    """The files of a store.

    Attributes:
        folder: The folder.
        keys: Image names or caption texts.
        offsets: Start of each item's vectors, for words and frames.
        vectors: The vectors, memory-mapped.
        progress: State of writing.
    """

    folder: Path
    keys: list[str]
    offsets: np.ndarray | None
    vectors: np.ndarray
    progress: WriteProgress

    @classmethod
    def open(cls, folder: Path, description: StoreDescription) -> StoreFiles:
        """Open the files of a store.

        Args:
            folder: The folder.
            description: Content of ``features.json``.

        Returns:
            The files.

        Raises:
            DamagedCacheError: If a file is missing or does not match the description.
        """
        with raise_as_damaged():
            keys = storage.read_json(folder / "keys.json", list[str])
            written = storage.read_json(folder / "progress.json", WriteProgress)
            offsets = storage.read_array(folder / "offsets.npy", dimensions=1, kinds="i") if description.has_variable_length else None
            vectors = storage.read_array(folder / vectors_file_name(description), memory_map=True)
        rows = len(keys) if offsets is None else int(offsets[-1]) if len(offsets) else 0
        is_valid = {
            "keys.json": len(set(keys)) == len(keys) == description.num_items,
            "progress.json": 0 <= written.rows_written <= description.num_items
            and (written.rows_written == description.num_items or not description.complete),
            "offsets.npy": offsets is None or (len(offsets) == len(keys) + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())),
            vectors_file_name(description): vectors.shape == (rows, *description.shape)
            and vectors.dtype == np.float16
            and vectors.flags.c_contiguous,
        }
        if wrong := next((name for name, fit in is_valid.items() if not fit), None):
            raise storage.DamagedCacheError(f"{folder / wrong} does not match features.json")
        return cls(folder, keys, offsets, vectors, written)

    def checksum(self, rows: int) -> Any:
        """Hash keys, offsets and the first rows.

        Args:
            rows: Number of rows.

        Returns:
            A SHA-256 object that can be updated with more rows.
        """
        digest = hashlib.sha256(json.dumps(self.keys).encode())
        if self.offsets is not None:
            digest.update(self.offsets.astype(np.int64).tobytes())
        end = rows if self.offsets is None else int(self.offsets[rows])
        step = max(1, _HASH_BLOCK_BYTES // max(1, self.vectors[:1].nbytes))
        for start in range(0, end, step):
            digest.update(self.vectors[start : min(start + step, end)].tobytes())
        return digest

    def verify(self) -> None:
        """Verify the checksum, if the store is small or a file has changed.

        Raises:
            DamagedCacheError: If the checksum differs.
        """
        if self.is_unchanged and self.vectors.nbytes > MAX_BYTES_HASHED_AT_OPEN:
            return
        if self.checksum(self.progress.rows_written).hexdigest() != self.progress.sha256:
            raise storage.DamagedCacheError(f"checksum mismatch of the features in {self.folder}")

    @property
    def is_unchanged(self) -> bool:
        """Whether sizes and times of the files are those of the last verification."""
        return self.file_stats() == self.progress.file_stats

    def file_stats(self) -> tuple[tuple[int, int], ...]:
        """Return the sizes and times of the files with keys and features.

        Returns:
            Size in bytes and time of change in ns of each file.
        """
        names = [name for name in STORE_FILE_NAMES if name not in ("features.json", "progress.json") and (self.folder / name).exists()]
        return tuple((status.st_size, status.st_mtime_ns) for name in names for status in [(self.folder / name).stat()])


@contextmanager
def raise_as_damaged() -> Iterator[None]:
    """Convert errors of unreadable content to DamagedCacheError. Temporary errors stay a DataError.

    Yields:
        Nothing.

    Raises:
        DamagedCacheError: If the content is unreadable.
    """
    try:
        yield
    except DataError as error:
        if storage.is_transient_error(error) and not isinstance(error.__context__, FileNotFoundError):
            raise
        raise storage.DamagedCacheError(str(error)) from None


def read_description(folder: Path) -> StoreDescription:
    """Read the description of a store.

    Args:
        folder: The folder.

    Returns:
        The description.

    Raises:
        DataError: If the folder is not a store.
        DamagedCacheError: If the description is not of this version.
    """
    if not (folder / "features.json").exists():
        raise DataError(f"{folder} is not a feature store: expected a file features.json. Create one with visavis features.")
    try:
        with raise_as_damaged():
            return storage.read_json(folder / "features.json", StoreDescription)
    except storage.DamagedCacheError as reason:
        raise storage.DamagedCacheError(
            f"{folder / 'features.json'} does not describe a feature store of this version ({str(reason).removesuffix('.')}). "
            "Create the store again with visavis features."
        ) from None


def create_store(folder: Path, description: StoreDescription, keys: Sequence[str], lengths: np.ndarray | None) -> None:
    """Create all files of an empty store in one step, so that a killed process leaves none or all of them.

    Args:
        folder: The folder.
        description: What the store will contain.
        keys: Image names or caption texts.
        lengths: Number of words or frames of each key, for these granularities.
    """
    if folder.exists():
        storage.prepare_empty_folder(folder, will_be_replaced=True)
    with storage.atomic_folder(folder) as part:
        storage.write_json(part / "features.json", asdict(description))
        storage.write_json(part / "keys.json", list(keys))
        storage.write_json(part / "progress.json", asdict(WriteProgress(0, "")))
        rows = description.num_items
        if description.has_variable_length:
            assert lengths is not None
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            storage.write_array(part / "offsets.npy", offsets)
            rows = int(offsets[-1])
        storage.create_array(part / vectors_file_name(description), shape=(rows, *description.shape), dtype="float16")


def discard_store(folder: Path, reason: storage.DamagedCacheError) -> None:
    """Remove the files of a damaged store, and no other files.

    Args:
        folder: The folder.
        reason: The damage, for the log.
    """
    storage.remove_partial_files(folder)
    storage.remove_damaged(folder, [folder / name for name in STORE_FILE_NAMES], str(reason))


def vectors_file_name(description: StoreDescription) -> str:
    """Return the name of the file of vectors.

    Args:
        description: The description of the store.

    Returns:
        The file name.
    """
    return VARIABLE_LENGTH_FILES.get(description.granularity, "vectors.npy")


def read_padded(
    vectors: np.ndarray, offsets: np.ndarray, rows: np.ndarray, *, max_length: int = 0, min_length: int = 0
) -> tuple[Tensor, Tensor]:
    """Read sequences of different lengths as one padded tensor.

    Args:
        vectors: All vectors, shape ``[total, D]``. Sequence i is ``vectors[offsets[i] : offsets[i + 1]]``.
        offsets: Start of each sequence, shape ``[N + 1]``.
        rows: The sequences to read, shape ``[n]``.
        max_length: Number of vectors that are read of a longer sequence, evenly spaced from its first one. 0: all.
        min_length: Smallest padded length.

    Returns:
        Float32 vectors ``[n, L, D]``, padded with zeros, and their mask ``[n, L]``.

    Example:
        >>> vectors, mask = read_padded(np.arange(5.0)[:, None], np.array([0, 4, 5]), np.array([1, 0]), max_length=2)
        >>> vectors[..., 0].tolist(), mask.tolist()
        ([[4.0, 0.0], [0.0, 2.0]], [[True, False], [True, True]])
    """
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    read_lengths = np.minimum(lengths, max_length) if max_length else lengths
    positions = np.arange(read_lengths.max(initial=min_length))
    mask = positions < read_lengths[:, None]
    spaced = positions * lengths[:, None] // np.maximum(read_lengths, 1)[:, None]
    padded = torch.zeros(*mask.shape, vectors.shape[-1])
    padded[torch.from_numpy(mask)] = torch.from_numpy(vectors[(starts[:, None] + spaced)[mask]]).float()
    return padded, torch.from_numpy(mask)


class FeatureStore:
    """A finished store.

    Args:
        files: Its files.
        description: Its description.

    Example:
        >>> store = FeatureStore.open(folder)                           # doctest: +SKIP
        >>> store.read(store.rows(["a.jpg", "b.jpg"])).vectors.shape    # doctest: +SKIP
        torch.Size([2, 1280])
    """

    def __init__(self, files: StoreFiles, description: StoreDescription):
        self.folder, self.keys, self.description = files.folder, files.keys, description
        self._offsets, self._vectors = files.offsets, files.vectors
        self._row = {key: row for row, key in enumerate(self.keys)}

    @classmethod
    def open(cls, folder: str | Path) -> FeatureStore:
        """Open a finished store.

        Args:
            folder: The folder.

        Returns:
            The store.

        Raises:
            DataError: If the folder is not a store, or the store is unfinished.
            DamagedCacheError: If its content has changed.
        """
        folder = Path(folder)
        description = read_description(folder)
        files = StoreFiles.open(folder, description)
        if not description.complete:
            done, count = files.progress.rows_written, description.num_items
            raise DataError(f"{folder} is unfinished: expected {count:,} rows, got {done:,}. Run visavis features again to continue.")
        files.verify()
        if not files.is_unchanged:
            with suppress(StorageError):  # a read-only store is hashed each time
                _record_file_stats(files, files.progress)
        return cls(files, description)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return self.description.embedding_dim

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of keys.

        Args:
            keys: Image names or caption texts.

        Returns:
            Row numbers.
        """
        return look_up_rows(self._row, keys, self.folder)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Read rows.

        Args:
            rows: Row numbers.

        Returns:
            Float32 features in the given order. Words and frames are padded to ``[n, L, D]`` with a mask.
        """
        rows = np.asarray(rows)
        if self._offsets is None:
            return Encoded(torch.from_numpy(self._vectors[rows]).float())
        return Encoded(*read_padded(self._vectors, self._offsets, rows))


class FeatureWriter:
    """Writes a store from its first to its last row. Saved rows survive if the process is killed.

    Args:
        folder: Folder of an unfinished store.
        description: Its description.
    """

    def __init__(self, folder: Path, description: StoreDescription):
        self.files, self.description = StoreFiles.open(folder, description), description
        self.rows_written = self.files.progress.rows_written
        self._checksum = self.files.checksum(self.rows_written)
        if self.files.progress.sha256 not in ("", self._checksum.hexdigest()):
            raise storage.DamagedCacheError(f"checksum mismatch of the first {self.rows_written:,} rows")
        self._offsets = np.arange(description.num_items + 1) if self.files.offsets is None else self.files.offsets

    @classmethod
    def open(
        cls, folder: str | Path, description: StoreDescription, keys: Sequence[str], lengths: np.ndarray | None = None
    ) -> FeatureWriter:
        """Create a store, or continue an unfinished one with the same description and keys. A damaged one is replaced.

        Args:
            folder: The folder.
            description: What the store will contain.
            keys: Image names or caption texts.
            lengths: Number of words or frames of each key ``[N]``, for these granularities.

        Returns:
            The writer.

        Raises:
            RefusedOverwrite: If the folder has other content.
        """
        folder = Path(folder)
        if not (folder / "features.json").exists():
            create_store(folder, description, keys, lengths)
            return cls(folder, description)
        found = read_description(folder)
        if difference := found.difference(description):
            raise RefusedOverwrite(f"{folder} contains other features: its {difference}. Remove it or name another folder.")
        try:
            writer = cls(folder, found)
        except storage.DamagedCacheError as reason:
            discard_store(folder, reason)
            create_store(folder, description, keys, lengths)
            return cls(folder, description)
        if writer.files.keys != list(keys):
            raise RefusedOverwrite(f"{folder} contains features of other images or captions. Remove it or name another folder.")
        return writer

    def append(self, items: Encoded) -> None:
        """Write the next rows.

        Args:
            items: Their features.

        Raises:
            DataError: If float16 cannot represent a value.
        """
        assert isinstance(items.vectors, Tensor)
        values = items.vectors.float()
        if self.description.has_variable_length:
            values = values[items.mask]  # type: ignore[index]
        if not values.abs().max() < torch.finfo(torch.float16).max:
            raise DataError(
                f"{self.description.encoder}: features near row {self.rows_written} of {self.files.folder} are not finite in float16."
            )
        path, array = self.files.folder / vectors_file_name(self.description), self.files.vectors
        start, end = self._offsets[self.rows_written], self._offsets[self.rows_written + len(items)]
        content = values.cpu().numpy().astype(np.float16).reshape(end - start, *array.shape[1:]).tobytes()
        # Write instead of using a memory map, because a map kills the process if the disk is full.
        with storage.storage_errors(path), open(path, "r+b") as file:
            file.seek(path.stat().st_size - array.nbytes + start * array[:1].nbytes)
            file.write(content)
        self._checksum.update(content)
        self.rows_written += len(items)

    def save(self) -> None:
        """Flush all rows to disk, then record their number."""
        path = self.files.folder / vectors_file_name(self.description)
        with storage.storage_errors(path), open(path, "r+b") as file:
            os.fsync(file.fileno())
        storage.write_json(self.files.folder / "progress.json", asdict(WriteProgress(self.rows_written, self._checksum.hexdigest())))

    def finish(self) -> FeatureStore:
        """Save, mark the store as complete and open it.

        Returns:
            The finished store.
        """
        assert self.rows_written == self.description.num_items
        self.save()
        _record_file_stats(self.files, WriteProgress(self.rows_written, self._checksum.hexdigest()))
        complete = replace(self.description, complete=True)
        storage.write_json(self.files.folder / "features.json", asdict(complete))
        return FeatureStore(StoreFiles.open(self.files.folder, complete), complete)


def look_up_rows(row_of: dict[str, int], keys: Iterable[str], folder: Path) -> np.ndarray:
    """Look up the rows of keys.

    Args:
        row_of: Row of each key.
        keys: The keys.
        folder: The store, for errors.

    Returns:
        Row numbers.

    Raises:
        DataError: If a key is unknown.
    """
    try:
        return np.array([row_of[key] for key in keys], dtype=np.int64)
    except KeyError as missing:
        raise DataError(f"{folder} has no features of {missing.args[0]!r}. Compute features for this data set.") from None


def _record_file_stats(files: StoreFiles, written: WriteProgress) -> None:
    """Record the sizes and times of files whose checksum was verified."""
    storage.write_json(files.folder / "progress.json", asdict(replace(written, file_stats=files.file_stats())))
