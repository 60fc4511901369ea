"""Features of frozen encoders on disk: computed once, memory-mapped, read by rows.

A store is a folder: ``features.json`` (what the features are), ``keys.json`` (the image names or caption texts, one
a row), ``progress.json`` (how much is written, and its checksum) and float16 arrays: ``vectors.npy`` ``[N, D]``, ``[N, R, D]`` for
grids, with a crop axis after ``N`` where there are several crops; for words and frames ``words.npy`` or ``frames.npy``
``[total, D]`` and ``offsets.npy`` ``[N + 1]``. Equal captions share a row. Writing an unfinished store continues where it was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.description import Description
from visavis.data.ragged import read_ragged
from visavis.data.store_files import StoreFiles, Written, create_files, discard_store, read_description, vectors_name
from visavis.errors import DataError, RefusedOverwrite, StorageError
from visavis.types import Encoded


class FeatureStore:
    """A finished store; reads any rows as float32.

    >>> store = FeatureStore.open(folder)                           # doctest: +SKIP
    >>> store.read(store.rows(["a.jpg", "b.jpg"])).vectors.shape    # doctest: +SKIP
    torch.Size([2, 1280])
    """

    def __init__(self, files: StoreFiles, description: Description):
        self.folder, self.keys, self.description = files.folder, files.keys, description
        self._offsets, self._vectors = files.offsets, files.vectors
        self._row = {key: row for row, key in enumerate(self.keys)}

    @classmethod
    def open(cls, folder: str | Path) -> FeatureStore:
        """The store in a folder. Raises DataError if there is none or if it is unfinished, storage.Damaged if it is not as it was written."""
        folder = Path(folder)
        description = read_description(folder)
        files = StoreFiles.open(folder, description)
        if not description.complete:
            done, count = files.written.done, description.count
            raise DataError(f"{folder} is unfinished: {done:,} of {count:,} rows are there; cache it again and it goes on.")
        files.verify()
        if files.written.sha256 and files.written.marks != files.marks():
            with suppress(StorageError):  # a store that may only be read is hashed each time
                _note(files, files.written)
        return cls(files, description)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        return self.description.width

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name or caption text. Raises DataError naming the first unknown one."""
        return look_up(self._row, keys, self.folder)

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Rows, in the given order, as float32; words and frames are padded ``[n, L, D]`` with a mask."""
        rows = np.asarray(rows)
        if self._offsets is None:
            return Encoded(torch.from_numpy(self._vectors[rows]).float())
        return Encoded(*read_ragged(self._vectors, self._offsets, rows))


class FeatureWriter:
    """Writes a store from its first row to its last; saved rows survive if the process is killed."""

    def __init__(self, folder: Path, description: Description):
        self.files, self.description = StoreFiles.open(folder, description), description
        self.done = self.files.written.done
        self._checksum = self.files.checksum(self.done)
        if self.files.written.sha256 not in ("", self._checksum.hexdigest()):
            raise storage.Damaged(f"the first {self.done:,} rows do not have their checksum")
        self._offsets = np.arange(description.count + 1) if self.files.offsets is None else self.files.offsets

    @classmethod
    def open(cls, folder: str | Path, description: Description, keys: Sequence[str], lengths: np.ndarray | None = None) -> FeatureWriter:
        """Start a store, or continue an unfinished one of the same description and keys; a damaged one is begun anew.

        lengths ``[N]``: the number of words or frames of each key, for these views. Raises RefusedOverwrite if the folder holds anything else.
        """
        folder = Path(folder)
        if not (folder / "features.json").exists():
            create_files(folder, description, keys, lengths)
            return cls(folder, description)
        found = read_description(folder)
        if difference := found.difference(description):
            raise RefusedOverwrite(f"{folder} holds other features: its {difference}; remove it or name another folder.")
        try:
            writer = cls(folder, found)
        except storage.Damaged as reason:
            discard_store(folder, reason)
            create_files(folder, description, keys, lengths)
            return cls(folder, description)
        if writer.files.keys != list(keys):
            raise RefusedOverwrite(f"{folder} holds features of other images or captions; remove it or name another folder.")
        return writer

    def append(self, items: Encoded) -> None:
        """Write the next rows. Raises DataError for values that float16 cannot hold, StorageError for a full disk."""
        assert isinstance(items.vectors, Tensor)
        values = items.vectors.float()
        if self.description.ragged:
            values = values[items.mask]  # type: ignore[index]
        if not values.abs().max() < torch.finfo(torch.float16).max:
            raise DataError(
                f"{self.description.tower} gives features that float16 cannot hold, near row {self.done} of {self.files.folder}."
            )
        path, array = self.files.folder / vectors_name(self.description), self.files.vectors
        start, end = self._offsets[self.done], self._offsets[self.done + len(items)]
        content = values.cpu().numpy().astype(np.float16).reshape(end - start, *array.shape[1:]).tobytes()
        # written, not mapped: on a full disk a map ends the process
        with storage.storing(path), open(path, "r+b") as file:
            file.seek(path.stat().st_size - array.nbytes + start * array[:1].nbytes)
            file.write(content)
        self._checksum.update(content)
        self.done += len(items)

    def save(self) -> None:
        """Flush all rows to disk, then record their number."""
        path = self.files.folder / vectors_name(self.description)
        with storage.storing(path), open(path, "r+b") as file:
            os.fsync(file.fileno())
        storage.write_json(self.files.folder / "progress.json", asdict(Written(self.done, self._checksum.hexdigest())))

    def finish(self) -> FeatureStore:
        """Save, mark the store as complete and open it."""
        assert self.done == self.description.count
        self.save()
        _note(self.files, Written(self.done, self._checksum.hexdigest()))
        complete = replace(self.description, complete=True)
        storage.write_json(self.files.folder / "features.json", asdict(complete))
        return FeatureStore(StoreFiles.open(self.files.folder, complete), complete)


def look_up(row: dict[str, int], keys: Iterable[str], where: Path) -> np.ndarray:
    """The row of each key. Raises DataError naming the first unknown one."""
    try:
        return np.array([row[key] for key in keys], dtype=np.int64)
    except KeyError as missing:
        raise DataError(
            f"{where} holds no features of {missing.args[0]!r}: they were computed for other data; compute them for this data set."
        ) from None


def _note(files: StoreFiles, written: Written) -> None:
    """Record the size and time of files that have their checksum."""
    storage.write_json(files.folder / "progress.json", asdict(replace(written, marks=files.marks())))
