"""Features that you computed: a ``.npy`` array with one row per image, or a whole data set of the VSE++ family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.data.features.store import look_up_rows
from visavis.data.formats.precomp import PRECOMP, find_precomp_files, load_all_precomp_features
from visavis.errors import DataError
from visavis.types import Encoded


class ArrayFeatures:
    """A ``.npy`` array with one row (a vector or a grid of regions) per image, in the order of the whole data set.

    Args:
        path: The file.
        vectors: The array, memory-mapped.
        row: Row of each image name.
    """

    def __init__(self, path: Path, vectors: np.ndarray, row: dict[str, int]):
        self.path, self._vectors, self._row = path, vectors, row

    @classmethod
    def open(cls, path: str | Path, dataset: Dataset) -> ArrayFeatures:
        """Open the array of a data set, or of a part of it.

        Args:
            path: The file.
            dataset: The data set.

        Returns:
            The features.

        Raises:
            DataError: If the number of rows does not match the data set.
        """
        path = Path(path)
        vectors, rows = storage.read_array(path, kinds="fiu", memory_map=True), dataset.image_rows
        is_whole = dataset.image_origin is None
        has_all_rows = len(vectors) == len(rows) if is_whole else rows.max(initial=-1) < len(vectors)
        if vectors.ndim < 2 or 0 in vectors.shape or not has_all_rows:
            expected = f"{len(rows)} rows" if is_whole else f"at least {rows.max() + 1} rows"
            raise DataError(
                f"{path}: expected {expected} of features, one for each image of {dataset.name} in its order, got shape {vectors.shape}."
            )
        return cls(path, vectors, {image.name: int(row) for image, row in zip(dataset.images, rows, strict=True)})

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def files(self) -> list[Path]:
        """Files that are read."""
        return [self.path]

    @property
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return self._vectors.shape[-1]

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images.

        Args:
            keys: Image names.

        Returns:
            Row numbers.
        """
        return look_up_rows(self._row, keys, self.path)

    def describe_row(self, row: int) -> str:
        """Describe a row, for errors.

        Args:
            row: Row number.

        Returns:
            A text.
        """
        return f"row {row} of {self.path}"

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Read rows.

        Args:
            rows: Row numbers.

        Returns:
            Float32 features in the given order.
        """
        return Encoded(_to_float32(self._vectors[np.asarray(rows)]))


class PrecompFeatures:
    """Stored features of a whole data set of the VSE++ family.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        if not self.files:
            raise DataError(f'{path}: features = "precomp" expects {PRECOMP.description}. Add these files or name other features.')
        self._arrays = load_all_precomp_features(path)
        self._first = dict(zip(self._arrays, np.cumsum([0, *map(len, self._arrays.values())]), strict=False))

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    @property
    def files(self) -> list[Path]:
        """Files that are read."""
        return find_precomp_files(self.folder)

    @property
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return int(next(iter(self._arrays.values())).shape[-1])

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images.

        Args:
            keys: Image names ``<split>-<i>``.

        Returns:
            Row numbers.
        """
        parts = (key.rsplit("-", 1) for key in keys)
        return np.array([self._first[split] + int(index) for split, index in parts], dtype=np.int64)

    def describe_row(self, row: int) -> str:
        """Describe a row, for errors.

        Args:
            row: Row number.

        Returns:
            A text.
        """
        *_, (split, first) = (item for item in self._first.items() if item[1] <= row)
        return f"image {row - first} of split {split} in {self.folder}"

    def read(self, rows: np.ndarray) -> Encoded:
        """Read rows.

        Args:
            rows: Row numbers.

        Returns:
            Float32 features in the given order.
        """
        values = torch.empty(len(rows), *next(iter(self._arrays.values())).shape[1:])
        for split, array in self._arrays.items():
            in_split = (rows >= self._first[split]) & (rows < self._first[split] + len(array))
            values[torch.from_numpy(in_split)] = _to_float32(array[rows[in_split] - self._first[split]])
        return Encoded(values)


def _to_float32(values: np.ndarray) -> Tensor:
    """Convert to float32. Values that are too large become infinite."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32, copy=False))


# Rows that are in memory at once.
ROWS_PER_READ = 1024


@dataclass(frozen=True)
class _ScanResult:
    first_nonfinite_row: int | None


def first_nonfinite_row(features: ArrayFeatures | PrecompFeatures) -> int | None:
    """Find the first row with NaN or infinity. The result is cached until a file changes.

    Args:
        features: The features.

    Returns:
        The row number. None if all rows are finite.
    """
    record = storage.cache_folder() / "checks" / f"finite-{storage.stat_hash(features.files)}.json"
    result = storage.read_checksummed_json(record, _ScanResult)
    if result is None:
        result = _ScanResult(_scan(features))
        storage.write_checksummed_json(record, asdict(result))
    return result.first_nonfinite_row


def _scan(features: ArrayFeatures | PrecompFeatures) -> int | None:
    for start in range(0, len(features), ROWS_PER_READ):
        vectors = features.read(np.arange(start, min(start + ROWS_PER_READ, len(features)))).vectors
        assert isinstance(vectors, Tensor)
        for row in (~vectors.flatten(1).isfinite().all(1)).nonzero()[:1, 0].tolist():
            return start + row
    return None
