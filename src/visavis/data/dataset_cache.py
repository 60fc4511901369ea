"""The usable images and captions of a data set that was opened before, from the cache folder.

An entry is used while no file of the folders that were searched has been added, removed or changed,
by path, size and modification time. A data set is not cached if it has missing images, which may
appear in places that are not searched, links to other places or files that cannot be read, or with
``VISAVIS_IMAGE_ROOTS``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import StorageError
from visavis.data.dataset import Dataset, without_captions
from visavis.data.formats.image_files import scan_folder
from visavis.data.image_file import ByteRange, Image

SAFE_AGE_S = 2.0
"""A file that changed later than this before it was read may change again at the same modification
time, whose resolution is two seconds on some file systems.
"""


@dataclass(frozen=True)
class _StoredDataset:
    """A data set as columns. Files are unique pairs of path and root, and a location is the index
    of its file, its first byte and its size. Unpaired images follow the others.
    """

    folders: list[str]
    signature: str
    name: str
    image_names: list[str]
    image_splits: list[str]
    files: list[tuple[str, str | None]]
    locations: list[tuple[int, int, int | None] | None]
    captions: list[str]
    image_of: list[int]
    image_origin: list[int] | None
    caption_origin: list[int] | None
    unpaired_origin: list[int]
    skipped: list[str]
    unlisted_files: list[str]
    other_files: str | None

    @classmethod
    def from_dataset(cls, data: Dataset, folders: list[str], signature: str) -> _StoredDataset:
        index_of: dict[tuple[str, str | None], int] = {}

        def stored(location: ByteRange | None) -> tuple[int, int, int | None] | None:
            if location is None:
                return None
            file = str(location.path), None if location.root is None else str(location.root)
            return index_of.setdefault(file, len(index_of)), location.offset, location.size

        images = [*data.images, *data.unpaired_images]
        locations = [stored(image.location) for image in images]
        return cls(
            folders,
            signature,
            data.name,
            [image.name for image in images],
            [image.split for image in images],
            list(index_of),
            locations,
            list(data.captions),
            data.image_of.tolist(),
            None if data.image_origin is None else data.image_origin.tolist(),
            None if data.caption_origin is None else data.caption_origin.tolist(),
            [row for part in data.unpaired for row in part.image_rows.tolist()],
            list(data.skipped),
            list(data.unlisted_files),
            data.other_files,
        )

    def dataset(self) -> Dataset:
        files = [(Path(path), Path(root) if root else None) for path, root in self.files]

        def location(stored: tuple[int, int, int | None] | None) -> ByteRange | None:
            if stored is None:
                return None
            path, root = files[stored[0]]
            return ByteRange(path, stored[1], stored[2], root)

        columns = zip(self.image_names, self.image_splits, self.locations, strict=True)
        images = tuple(Image(name, split, location(stored)) for name, split, stored in columns)
        num_paired = len(images) - len(self.unpaired_origin)
        unpaired: tuple[Dataset, ...] = ()
        if self.unpaired_origin:
            rows = np.array(self.unpaired_origin, np.int64)
            unpaired = (without_captions(self.name, images[num_paired:], rows),)
        return Dataset(
            self.name,
            images[:num_paired],
            tuple(self.captions),
            np.array(self.image_of, np.int64),
            None if self.image_origin is None else np.array(self.image_origin, np.int64),
            None if self.caption_origin is None else np.array(self.caption_origin, np.int64),
            tuple(self.skipped),
            tuple(self.unlisted_files),
            other_files=self.other_files,
            unpaired=unpaired,
        )


@dataclass(frozen=True)
class DatasetCache:
    """Cache entry of one source, opened with certain options.

    Attributes:
        file: File of the entry.
        started: Time before the source is read, in seconds since the epoch.
    """

    file: Path
    started: float

    @classmethod
    def of(cls, source: Path, *options: Any) -> DatasetCache | None:
        """Find the entry of a source. None if the data set cannot be cached."""
        with suppress(StorageError):  # a user without a home folder
            code = Path(__file__).parent.rglob("*.py")
            # Paths of images are stored as the source is given: relative to the current folder.
            names = str(source), str(source.absolute())
            key = storage.stat_hash(code, *names, repr(options))
            return cls(storage.cache_folder() / "datasets" / f"{key}.json", time.time())
        return None

    def read(self) -> Dataset | None:
        """Read the data set. None if it is not stored, or if a file has changed."""
        if storage.image_roots() or not os.path.exists(self.file):
            return None
        stored = _read(self.file, written_ns=os.stat(self.file).st_mtime_ns)
        if stored is None:
            return None
        # Infinite: a folder or file of the data set cannot be read now.
        signature, latest, _ = _signature(stored[0].folders)
        if signature != stored[0].signature or latest == math.inf:
            return None
        return stored[1]

    def write(self, data: Dataset, folders: Sequence[Path]) -> None:
        """Store a data set that was just read, unless one of its files changed a moment ago."""
        names = [str(folder.absolute()) for folder in dict.fromkeys(folders)]
        signature, changed, files = _signature(names)
        images = [*data.images, *data.unpaired_images]
        locations = (image.location for image in images)
        # Images behind links, as in the cache of the Hub, or in excluded folders are not covered.
        is_covered = all(
            where is None or str(where.path.absolute()) in files for where in locations
        )
        if storage.image_roots() or changed > self.started - SAFE_AGE_S or not is_covered:
            return
        with suppress(StorageError):  # a full disk
            stored = _StoredDataset.from_dataset(data, names, signature)
            storage.write_checksummed_json(self.file, asdict(stored))


@lru_cache(maxsize=1)  # a comparison opens its data set for each run
def _read(file: Path, *, written_ns: int) -> tuple[_StoredDataset, Dataset] | None:  # noqa: ARG001 - part of the key
    stored: _StoredDataset | None = storage.read_checksummed_json(file, _StoredDataset)
    return None if stored is None else (stored, stored.dataset())


def _signature(folders: Sequence[str]) -> tuple[str, float, set[str]]:
    """Hash the paths, sizes and modification times of all files in folders. Return the hash, the
    time of the latest change in seconds since the epoch, which is infinite if something cannot be
    read, and the paths.
    """
    digest = hashlib.sha256()
    latest = 0.0
    paths = set[str]()
    for folder in folders:
        scan = scan_folder(Path(folder))
        for file in scan.files:
            path = str(scan.place(file))
            try:
                status = os.stat(path)
            except OSError:  # removed since the scan
                latest = math.inf
                continue
            paths.add(path)
            latest = max(latest, status.st_mtime, status.st_ctime)
            digest.update(json.dumps([file, status.st_size, status.st_mtime_ns]).encode())
        digest.update(json.dumps([scan.excluded, scan.empty]).encode())
        latest = math.inf if scan.problems else latest
    return digest.hexdigest(), latest, paths
