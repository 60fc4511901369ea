"""Stored features of regions by the ids of images, any number an image: converted once into a memory-mapped store of the cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from visavis import storage
from visavis.data.experts import ExpertStore, new_experts
from visavis.data.finite import file_marks
from visavis.data.region_files import OnProgress, read_regions, region_files
from visavis.errors import DataError
from visavis.types import Encoded

REGIONS = "regions"
OF_COCO = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})")


class RegionFeatures:
    """Features ``[R, D]`` of each image, found by its name, its name without folder and ending, or its number.

    The number is that of a name of MS-COCO (``COCO_val2014_000000000042.jpg`` is 42), or of one of digits alone.
    """

    def __init__(self, path: Path, store: ExpertStore):
        self.path, self.store = path, store
        self._row: dict[str, int] = {}
        for row, item in enumerate(store.items):
            for key in (str(int(item)),) if item.isdecimal() else ():
                self._row[key] = row
            self._row[item] = row
        self.ragged = len(set(store.lengths(REGIONS).tolist())) > 1

    @classmethod
    def open(cls, path: str | Path, on_progress: OnProgress) -> RegionFeatures:
        """Those of a file or a folder; converted on the first call, and again when a file has changed. Raises DataError."""
        path = Path(path)
        files = region_files(path)
        marks = hashlib.sha256(json.dumps(list(file_marks(files).values())).encode()).hexdigest()[:16]
        folder = storage.cache_folder() / "regions" / f"{path.name}-{marks}"
        with storage.alone(folder, wait=True):
            if not folder.exists():
                _convert(files, folder, on_progress)
            try:
                return cls(path, ExpertStore.open(folder))
            except storage.Damaged as reason:
                storage.discard(folder, [file for file in folder.iterdir() if file.is_file()], str(reason))
                _convert(files, folder, on_progress)
                return cls(path, ExpertStore.open(folder))

    def __len__(self) -> int:
        return len(self.store)

    @property
    def sha256(self) -> str:
        """Of all ids and features."""
        return self.store.sha256

    @property
    def width(self) -> int:
        return self.store.width

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name. Raises DataError naming the first without features, and how many there are."""
        names = list(keys)
        rows = [next((self._row[key] for key in _keys(name) if key in self._row), -1) for name in names]
        if missing := [name for name, row in zip(names, rows, strict=True) if row < 0]:
            tried = " or ".join(dict.fromkeys(_keys(missing[0])))
            raise DataError(
                f"{self.path} holds no features of {len(missing):,} of {len(names):,} images, the first of which is {missing[0]} "
                f"(looked for {tried}): its ids are like {self.store.items[0]}; add the missing ones."
            )
        return np.array(rows, dtype=np.int64)

    def read(self, rows: Sequence[int] | np.ndarray) -> Encoded:
        """Rows, in the given order, as float32 ``[n, R, D]``; with a mask where images have unequal numbers of regions."""
        stored = self.store.read(rows)
        assert isinstance(stored.vectors, dict)
        assert isinstance(stored.mask, dict)
        return Encoded(stored.vectors[REGIONS], stored.mask[REGIONS] if self.ragged else None)


def _keys(name: str) -> Iterable[str]:
    """The ids under which the features of an image may stand, the surest first."""
    path = Path(name)
    yield from (name, path.name, path.stem)
    if (number := OF_COCO.fullmatch(path.stem)) or path.stem.isdecimal():
        yield str(int(number[1] if number else path.stem))


def _convert(files: list[Path], folder: Path, on_progress: OnProgress) -> None:
    images = read_regions(files, on_progress)
    first = next(images, None)
    if first is None:
        raise DataError(f"{files[0]} is empty: expected the features of regions, one image a line.")
    with new_experts(folder, {REGIONS: first[2].shape[1]}) as store:
        seen = set[str]()
        for item, where, features in chain([first], images):
            if item in seen:
                raise DataError(f"{where}: image {item} comes a second time: expected the features of each image once.")
            seen.add(item)
            store.append(item, {REGIONS: features})
