"""Rows of feature arrays, and features that you computed: a ``.npy`` array with one row per image
or caption, or a data set of the VSE++ family.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, require


def look_up_rows(row_of: dict[str, int], keys: Iterable[str], folder: Path) -> np.ndarray:
    """Look up the row number of each key. ``folder`` is named in the error about an unknown one."""
    try:
        return np.array([row_of[key] for key in keys], dtype=np.int64)
    except KeyError as missing:
        raise DataError(
            f"{folder} has no features of {missing.args[0]!r}. Compute features for this data set."
        ) from None


# Size from which rows are read without the memory map. Linux maps up to 900 kB around a random row
# (measured), so that an epoch would keep the whole array in the resident memory. A read of 1,024
# rows takes 6 ms instead of 2 ms.
MAX_MAPPED_BYTES = 2**28


class ArrayFeatures:
    """Arrays with one row (a vector or a grid of regions) per image or caption.

    Args:
        path: The file or folder.
        files: Files that are read.
        arrays: The arrays, memory-mapped, by what they are for errors. Rows are counted through all
            arrays.
        names: Name of the image of each row, or a data set whose items have their number in the
            whole data set as their row.
    """

    def __init__(
        self,
        path: Path,
        files: list[Path],
        arrays: dict[str, np.ndarray],
        names: Sequence[str] | Dataset,
    ):
        self.path = path
        self.files = files
        self._arrays = arrays
        self._names = names
        self._first_row = dict(
            zip(arrays, np.cumsum([0, *map(len, arrays.values())]).tolist(), strict=False)
        )
        # Equal in all arrays, which their readers check.
        self.shape = next(iter(arrays.values())).shape[1:]

    @classmethod
    def open(
        cls, path: str | Path, dataset: Dataset, items: Literal["image", "caption"] = "image"
    ) -> ArrayFeatures:
        """Open a ``.npy`` array in the order of a whole data set, of which ``dataset`` may be a part."""
        path = Path(path)
        vectors = storage.read_array(path, kinds="fiu", memory_map=True)
        # Rows of these items in the whole data set. A part of it may leave out rows.
        rows, origin = (
            (dataset.image_rows, dataset.image_origin)
            if items == "image"
            else (dataset.caption_rows, dataset.caption_origin)
        )
        has_all_rows = (
            len(vectors) == len(rows) if origin is None else rows.max(initial=-1) < len(vectors)
        )
        if vectors.ndim < 2 or 0 in vectors.shape or not has_all_rows:
            expected = f"{len(rows)} rows" if origin is None else f"at least {rows.max() + 1} rows"
            raise DataError(
                f"{path}: expected {expected} of features, one for each {items} of {dataset.name} "
                f"in its order, got shape {vectors.shape}. "
                "Compute the features of all of them."
            )
        return cls(path, [path], {str(path): vectors}, dataset)

    @classmethod
    def open_precomp(cls, path: str | Path) -> ArrayFeatures:
        """Open the stored features of a whole data set of the VSE++ family. Image ``SPLIT-i`` has
        row i of its split.
        """
        from visavis.data.formats.published_lists import (
            PRECOMP,
            find_precomp_files,
            load_precomp_features,
        )

        files = find_precomp_files(path)
        require(
            files,
            f'{path}: features = "precomp" expects {PRECOMP.description}. Add these files or name '
            "other features.",
        )
        arrays = load_precomp_features(path)
        names = [
            f"{split}-{index}" for split, array in arrays.items() for index in range(len(array))
        ]
        parts = {f"split {split} in {path}": array for split, array in arrays.items()}
        return cls(Path(path), files, parts, names)

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that hold the rows, one after the other."""
        return tuple(self._arrays.values())

    @property
    def embedding_dim(self) -> int:
        """Size of the last dimension."""
        return self.shape[-1]

    @property
    def has_rows_of_dataset(self) -> bool:
        """Whether the row of an item is its number in the whole data set, so that no name is looked
        up.
        """
        return isinstance(self._names, Dataset)

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images by name."""
        return look_up_rows(self._row_of, keys, self.path)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        if isinstance(self._names, Dataset):
            return {
                image.name: row
                for image, row in zip(
                    self._names.images, self._names.image_rows.tolist(), strict=True
                )
            }
        return {name: row for row, name in enumerate(self._names)}

    def describe_row(self, row: int) -> str:
        """Describe a row, for errors."""
        *_, (location, first) = (item for item in self._first_row.items() if item[1] <= row)
        return f"row {row - first} of {location}"

    def read(self, rows: Sequence[int] | np.ndarray | Tensor) -> Encoded:
        """Read rows as float32, in which values that are too large become infinite."""
        rows = np.asarray(rows)
        if len(self.arrays) == 1:
            return Encoded(_float32(_read_rows(self.arrays[0], rows)))
        values = torch.empty(len(rows), *self.shape)
        for location, array in self._arrays.items():
            # Rows are counted through all arrays, and a batch may have rows of several.
            positions = rows - self._first_row[location]
            inside = (positions >= 0) & (positions < len(array))
            values[torch.from_numpy(inside)] = _float32(_read_rows(array, positions[inside]))
        return Encoded(values)


def _float32(block: np.ndarray) -> Tensor:
    # torch converts float16 several times as fast as numpy.
    if block.dtype == np.float16:
        return torch.from_numpy(block).float()
    with np.errstate(over="ignore"):
        return torch.from_numpy(block.astype(np.float32, copy=False))


# Rows that a scan has in memory at once, or more if they are small.
ROWS_PER_READ = 1024
SCAN_BYTES = 2**24


@dataclass(frozen=True)
class _ScanResult:
    first_nonfinite_row: int | None


def first_nonfinite_row(features: ArrayFeatures) -> int | None:
    """Find the first row with NaN or infinity. The result is cached until a file changes."""
    record = storage.cache_folder() / "checks" / f"finite-{storage.stat_hash(features.files)}.json"
    result = storage.read_checksummed_json(record, _ScanResult)
    if result is None:
        result = _ScanResult(_scan(features))
        storage.write_checksummed_json(record, asdict(result))
    return result.first_nonfinite_row


def _scan(features: ArrayFeatures) -> int | None:
    rows_per_read = max(ROWS_PER_READ, SCAN_BYTES // (4 * math.prod(features.shape)))
    first = 0
    for array in features.arrays:
        for start in range(0, len(array), rows_per_read):
            rows = np.arange(start, min(start + rows_per_read, len(array)))
            block = torch.from_numpy(_read_rows(array, rows))
            # NaN is both the smallest and the largest value. This is much faster than a comparison
            # of each value.
            if not all(bound.float().isfinite() for bound in block.aminmax()):
                (row,) = (~block.float().flatten(1).isfinite().all(1)).nonzero()[:1, 0].tolist()
                return first + start + row
        first += len(array)
    return None


def _read_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Read rows of a memory-mapped array, of a large one without its map."""
    base: Any = array.base
    if (
        array.nbytes <= MAX_MAPPED_BYTES
        or not isinstance(array, np.memmap)
        or not isinstance(base, mmap.mmap)
    ):
        return array[rows]
    row_bytes = array.nbytes // len(array)
    with storage.open_file(Path(str(array.filename))) as file:
        # One read for consecutive rows, as a scan reads them.
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
            content = storage.read_at(
                file, len(rows) * row_bytes, array.offset + int(rows[0]) * row_bytes
            )
        else:
            content = b"".join(
                storage.read_at(file, row_bytes, array.offset + row * row_bytes)
                for row in rows.tolist()
            )
    require(
        len(content) == len(rows) * row_bytes,
        f"{array.filename}: expected {len(array):,} rows, got fewer. The file was changed "
        "while it was read. Start again.",
    )
    # A bytearray, because torch warns about arrays that cannot be written.
    return np.frombuffer(bytearray(content), array.dtype).reshape(len(rows), *array.shape[1:])
