"""Features that the user stored: a bare array with a row an image, or a whole set in the layout of the VSE++ family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.data.features import look_up
from visavis.data.precomp import PRECOMP, all_precomp_features, feature_files
from visavis.errors import DataError
from visavis.types import Encoded


class ArrayFeatures:
    """A bare ``.npy`` with one row (a vector, or a grid of regions) per image, in the order of the whole data set."""

    def __init__(self, path: Path, vectors: np.ndarray, row: dict[str, int]):
        self.path, self._vectors, self._row = path, vectors, row

    @classmethod
    def open(cls, path: str | Path, dataset: Dataset) -> ArrayFeatures:
        """The array of a data set or of a part of it. Raises DataError if the rows do not fit its images."""
        path = Path(path)
        vectors, rows = storage.read_array(path, kinds="fiu", mapped=True), dataset.image_rows
        if (
            vectors.ndim < 2
            or 0 in vectors.shape
            or (len(vectors) != len(rows) if dataset.origin is None else rows.max(initial=-1) >= len(vectors))
        ):
            expected = f"{len(rows)} rows" if dataset.origin is None else f"at least {rows.max() + 1} rows"
            raise DataError(
                f"{path} is of shape {vectors.shape}, expected {expected} of features: one for each image of {dataset.name}, in its order."
            )
        return cls(path, vectors, {image.name: int(row) for image, row in zip(dataset.images, rows, strict=True)})

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def files(self) -> list[Path]:
        """What is read."""
        return [self.path]

    @property
    def width(self) -> int:
        return self._vectors.shape[-1]

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name. Raises DataError naming the first unknown one."""
        return look_up(self._row, keys, self.path)

    def place(self, row: int) -> str:
        """Where a row stands, in words."""
        return f"row {row} of {self.path}"

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Rows, in the given order, as float32."""
        return Encoded(_single(self._vectors[np.asarray(rows)]))


class PrecompFeatures:
    """The stored features of a whole set in the layout of the VSE++ family, read by rows. Raises DataError where there are none."""

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        if not self.files:
            raise DataError(f'{path} holds no features of its own, which "precomp" stands for: expected {PRECOMP.files}.')
        self._arrays = all_precomp_features(path)
        self._first = dict(zip(self._arrays, np.cumsum([0, *map(len, self._arrays.values())]), strict=False))

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    @property
    def files(self) -> list[Path]:
        """What is read."""
        return feature_files(self.folder)

    @property
    def width(self) -> int:
        return int(next(iter(self._arrays.values())).shape[-1])

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each image name ``<split>-<i>``."""
        parts = (key.rsplit("-", 1) for key in keys)
        return np.array([self._first[split] + int(index) for split, index in parts], dtype=np.int64)

    def place(self, row: int) -> str:
        """Where a row stands, in words."""
        *_, (split, first) = (item for item in self._first.items() if item[1] <= row)
        return f"image {row - first} of split {split} in {self.folder}"

    def read(self, rows: np.ndarray) -> Encoded:
        """Rows, in the given order, as float32."""
        values = torch.empty(len(rows), *next(iter(self._arrays.values())).shape[1:])
        for split, array in self._arrays.items():
            in_split = (rows >= self._first[split]) & (rows < self._first[split] + len(array))
            values[torch.from_numpy(in_split)] = _single(array[rows[in_split] - self._first[split]])
        return Encoded(values)


def _single(values: np.ndarray) -> Tensor:
    """Numbers as float32; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32, copy=False))
