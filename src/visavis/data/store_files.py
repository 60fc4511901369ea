"""The files of a feature store, read as what its description says, and the checksum of what is in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.data.description import RAGGED, Description
from visavis.errors import DataError

NAMES = ("features.json", "keys.json", "progress.json", "offsets.npy", *RAGGED.values(), "vectors.npy")
"""All that a store may consist of."""
HASHED_AT_OPENING = 64 * 2**20
"""Bytes of vectors up to which a store is hashed whenever it is opened; a larger one is where a file's size or time has changed."""
_PART = 2**24  # bytes that are hashed at once


@dataclass(frozen=True)
class Written:
    """How much of a store is written. done: rows. sha256: of keys, offsets and these rows; empty where an older version wrote them.

    marks: of a finished store, the size and time of its files when they were last known to have this checksum.
    """

    done: int
    sha256: str = ""
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StoreFiles:
    """What lies in a store. offsets: of words and frames only. vectors: ``[rows, ...]`` on the disk, read on demand."""

    folder: Path
    keys: list[str]
    offsets: np.ndarray | None
    vectors: np.ndarray
    written: Written

    @classmethod
    def open(cls, folder: Path, description: Description) -> StoreFiles:
        """Raises storage.Damaged if a file is missing or not what the description says."""
        with damage():
            keys = storage.read_json(folder / "keys.json", list[str])
            written = storage.read_json(folder / "progress.json", Written)
            offsets = storage.read_array(folder / "offsets.npy", dimensions=1, kinds="i") if description.ragged else None
            vectors = storage.read_array(folder / vectors_name(description), mapped=True)
        rows = len(keys) if offsets is None else int(offsets[-1]) if len(offsets) else 0
        fits = {
            "keys.json": len(set(keys)) == len(keys) == description.count,
            "progress.json": 0 <= written.done <= description.count and (written.done == description.count or not description.complete),
            "offsets.npy": offsets is None or (len(offsets) == len(keys) + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())),
            vectors_name(description): vectors.shape == (rows, *description.shape)
            and vectors.dtype == np.float16
            and vectors.flags.c_contiguous,
        }
        if wrong := next((name for name, fit in fits.items() if not fit), None):
            raise storage.Damaged(f"{folder / wrong} does not fit features.json")
        return cls(folder, keys, offsets, vectors, written)

    def checksum(self, rows: int) -> Any:
        """The SHA-256 of keys, offsets and the first rows, to be continued."""
        digest = hashlib.sha256(json.dumps(self.keys).encode())
        if self.offsets is not None:
            digest.update(self.offsets.astype(np.int64).tobytes())
        end = rows if self.offsets is None else int(self.offsets[rows])
        step = max(1, _PART // max(1, self.vectors[:1].nbytes))
        for start in range(0, end, step):
            digest.update(self.vectors[start : min(start + step, end)].tobytes())
        return digest

    def verify(self) -> None:
        """Compare the content with its checksum if that costs little or a file has changed. Raises storage.Damaged."""
        marks = self.marks()
        if not self.written.sha256 or (marks == self.written.marks and self.vectors.nbytes > HASHED_AT_OPENING):
            return
        if self.checksum(self.written.done).hexdigest() != self.written.sha256:
            raise storage.Damaged(f"the features in {self.folder} do not have their checksum")

    def marks(self) -> tuple[tuple[int, int], ...]:
        """Size in bytes and time of last change in ns of the files of keys and features."""
        names = [name for name in NAMES if name not in ("features.json", "progress.json") and (self.folder / name).exists()]
        return tuple((status.st_size, status.st_mtime_ns) for name in names for status in [(self.folder / name).stat()])


@contextmanager
def damage() -> Iterator[None]:
    """What cannot be read as what it should be is storage.Damaged; what cannot be read at the moment stays a DataError."""
    try:
        yield
    except DataError as error:
        if storage.momentary(error) and not isinstance(error.__context__, FileNotFoundError):
            raise
        raise storage.Damaged(str(error)) from None


def read_description(folder: Path) -> Description:
    """What the store in a folder holds. Raises DataError if it is none, storage.Damaged if it is none of this version."""
    if not (folder / "features.json").exists():
        raise DataError(f"{folder} is not a feature store: it has no features.json; make one with visavis features.")
    try:
        with damage():
            return storage.read_json(folder / "features.json", Description)
    except storage.Damaged as reason:
        raise storage.Damaged(
            f"{folder / 'features.json'} does not describe a feature store of this version; make it anew with visavis features "
            f"({str(reason).removesuffix('.')})."
        ) from None


def create_files(folder: Path, description: Description, keys: Sequence[str], lengths: np.ndarray | None) -> None:
    """Create all files of an empty store in one step, so that a killed process leaves none or all of them."""
    if folder.exists():
        storage.new_folder(folder, replaced=True)
    with storage.replacing_folder(folder) as part:
        storage.write_json(part / "features.json", asdict(description))
        storage.write_json(part / "keys.json", list(keys))
        storage.write_json(part / "progress.json", asdict(Written(0)))
        rows = description.count
        if description.ragged:
            assert lengths is not None
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            storage.write_array(part / "offsets.npy", offsets)
            rows = int(offsets[-1])
        storage.create_array(part / vectors_name(description), shape=(rows, *description.shape), dtype="float16")


def discard_store(folder: Path, reason: storage.Damaged) -> None:
    """Remove the files of a damaged store, and nothing else."""
    storage.remove_parts(folder)
    storage.discard(folder, [folder / name for name in NAMES], str(reason))


def vectors_name(description: Description) -> str:
    return RAGGED.get(description.view, "vectors.npy")
