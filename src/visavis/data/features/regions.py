"""Features of regions by image id, any number per image: ``.tsv`` of bottom-up-attention, or a
folder with a ``.npy`` or ``.npz`` per image.

They are converted once into a memory-mapped store in the cache.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.dataset import ProgressCallback
from visavis.data.features.expert_store import RESTORE_STORE, ExpertStore, create_expert_store

# Bytes of a float32 in a ``.tsv``.
BYTES_PER_VALUE = 4
MAX_LINE_BYTES = 2**27
MEGABYTE = 2**20
# Names of the array in an ``.npz``.
NPZ_KEYS = ("features", "feat", "x")


def find_region_files(path: Path) -> list[Path]:
    """Find files of region features.

    Args:
        path: A ``.tsv``, or a folder with ``.tsv``, ``.npy`` or ``.npz`` files.

    Returns:
        The files.

    Raises:
        DataError: If there are none.
    """
    if os.path.isfile(path):
        return [path]
    for patterns in (("*.tsv", "*.tsv.[0-9]*"), ("*.npy", "*.npz")):
        if files := sorted(file for pattern in patterns for file in path.glob(pattern)):
            return files
    raise DataError(
        f"{path} has no region features: expected .tsv of bottom-up-attention, or ID.npy or ID.npz "
        "for each image. Add these files."
    )


def read_regions(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Read the region features of all images.

    Args:
        files: Files from ``find_region_files``.
        on_progress: Called with what is read and the total, in megabytes of ``.tsv`` or files.

    Yields:
        Image id, location in the files, and features ``[R, D]``.

    Raises:
        DataError: If features are malformed. The message has their location.
    """
    embedding_dim = 0
    reader = _read_tsv if ".tsv" in files[0].name else _read_arrays
    for item, location, features in reader(files, on_progress):
        embedding_dim = embedding_dim or (features.shape[-1] if features.ndim else 0)
        if features.ndim != 2 or features.shape[1] != embedding_dim or not len(features):
            actual = f"{features.dtype} of shape {list(features.shape)}"
            raise DataError(
                f"{location}: expected numbers of shape [regions, {embedding_dim}], got {actual}. "
                "Correct the features of this image."
            )
        yield item, location, features


def _read_tsv(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Read lines of bottom-up-attention: the id is first, and the number of boxes, boxes and
    features are last, in base64.
    """
    total, done = sum(file.stat().st_size for file in files), 0
    for path in files:
        with storage.reading_regular_file(path), open(path, "rb") as file:
            # Not the iteration over the file: a line of a damaged file may have any length.
            lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
            for number, line in enumerate(lines, 1):
                location, columns = f"{path}, line {number}", line.rstrip(b"\r\n").split(b"\t")
                if len(columns) < 6:
                    raise DataError(
                        f"{location}: expected the tab-separated columns id, width, height, "
                        f"number of boxes, boxes and features, got {len(columns)} columns. Use a "
                        "file of bottom-up-attention."
                    )
                item, boxes = columns[0].decode(errors="replace"), columns[-3]
                try:
                    numbers = base64.b64decode(columns[-1], validate=True)
                except binascii.Error:
                    raise DataError(
                        f"{location}: expected the features of image {item} as base64 in the last "
                        "column. The line may be truncated."
                    ) from None
                regions = int(boxes) if boxes.isdigit() else 0
                if not regions or not numbers or len(numbers) % (BYTES_PER_VALUE * regions):
                    raise DataError(
                        f"{location}: {len(numbers):,} bytes of features do not match "
                        f"{boxes.decode(errors='replace')!r} boxes. The line may be truncated."
                    )
                yield item, location, np.frombuffer(numbers, "<f4").reshape(regions, -1)
                done += len(line)
                on_progress(done // MEGABYTE, total // MEGABYTE)


def _read_arrays(
    files: list[Path], on_progress: ProgressCallback
) -> Iterator[tuple[str, str, np.ndarray]]:
    for number, path in enumerate(files, 1):
        if path.suffix == ".npy":
            yield path.stem, str(path), storage.read_array(path, kinds="fiu")
        else:
            with storage.reading_regular_file(path):
                try:
                    with np.load(path, allow_pickle=False) as archive:
                        name = next((name for name in NPZ_KEYS if name in archive), None)
                        array = None if name is None else archive[name]
                except (
                    ValueError,
                    EOFError,
                    KeyError,
                    AttributeError,
                    zipfile.BadZipFile,
                ) as error:
                    raise DataError(
                        f"{path} is not a readable .npz of numbers: {storage.error_reason(error)}. "
                        "Save the array again with numpy.savez."
                    ) from None
            if array is None:
                raise DataError(
                    f"{path} has no features: expected an array named {' or '.join(NPZ_KEYS)}. "
                    "Rename its array."
                )
            yield path.stem, str(path), array
        on_progress(number, len(files))


REGIONS_EXPERT = "regions"
COCO_FILE_NAME = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})")


class RegionFeatures:
    """Features ``[R, D]`` of each image. They are found by its name, its name without folder and
    suffix, or its number.

    The number is that of an MS-COCO file name (``COCO_val2014_000000000042.jpg`` is 42), or a name
    that consists of digits.

    Args:
        path: The file or folder of the features.
        store: Their converted store.
    """

    def __init__(self, path: Path, store: ExpertStore):
        self.path, self.store = path, store
        # Without leading zeros. The id itself has precedence over the number.
        numbers = {str(int(item)): row for row, item in enumerate(store.items) if item.isdecimal()}
        self._row = numbers | {item: row for row, item in enumerate(store.items)}
        self.has_variable_length = len(set(store.lengths(REGIONS_EXPERT).tolist())) > 1

    @classmethod
    def open(cls, path: str | Path, on_progress: ProgressCallback) -> RegionFeatures:
        """Open the features of a file or folder. They are converted at the first call and when a
        file has changed.

        Args:
            path: The file or folder.
            on_progress: Called with what is converted and the total, in megabytes of ``.tsv`` or
                files.

        Returns:
            The features.
        """
        path = Path(path)
        files = find_region_files(path)
        folder = storage.cache_folder() / "regions" / f"{path.name}-{storage.stat_hash(files)}"
        # Several processes of a training open the features at once.
        with storage.folder_lock(folder, wait=True):
            if not os.path.exists(folder):
                _convert(files, folder, on_progress)
            try:
                return cls(path, ExpertStore.open(folder))
            except storage.DamagedCacheError as reason:
                storage.remove_damaged(
                    folder,
                    [file for file in folder.iterdir() if os.path.isfile(file)],
                    str(reason).removesuffix(RESTORE_STORE),
                )
                _convert(files, folder, on_progress)
                return cls(path, ExpertStore.open(folder))

    def __len__(self) -> int:
        return len(self.store)

    @property
    def sha256(self) -> str:
        """Checksum of all ids and features."""
        return self.store.sha256

    @property
    def embedding_dim(self) -> int:
        """Dimension of a region."""
        return self.store.embedding_dim

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images.

        Args:
            keys: Image names.

        Returns:
            Row numbers.

        Raises:
            DataError: If an image has no features.
        """
        names = list(keys)
        rows = [
            next((self._row[key] for key in _keys(name) if key in self._row), -1) for name in names
        ]
        if missing := [name for name, row in zip(names, rows, strict=True) if row < 0]:
            tried = " or ".join(dict.fromkeys(_keys(missing[0])))
            raise DataError(
                f"{self.path} has no features of {len(missing):,} of {len(names):,} images, such "
                f"as {missing[0]} (searched for {tried}). "
                f"Its ids look like {self.store.items[0]}. Add the missing features."
            )
        return np.array(rows, dtype=np.int64)

    def read(self, rows: Sequence[int] | np.ndarray) -> Encoded:
        """Read rows.

        Args:
            rows: Row numbers.

        Returns:
            Float32 features ``[n, R, D]``, with a mask if images have different numbers of regions.
        """
        stored: Any = self.store.read(rows)
        mask = stored.mask[REGIONS_EXPERT] if self.has_variable_length else None
        return Encoded(stored.vectors[REGIONS_EXPERT], mask)


def _keys(name: str) -> Iterable[str]:
    """Yield the ids under which the features of an image may be stored, the most specific first."""
    path = Path(name)
    yield from (name, path.name, path.stem)
    if (number := COCO_FILE_NAME.fullmatch(path.stem)) or path.stem.isdecimal():
        yield str(int(number[1] if number else path.stem))


def _convert(files: list[Path], folder: Path, on_progress: ProgressCallback) -> None:
    images = read_regions(files, on_progress)
    first = next(images, None)
    if first is None:
        raise DataError(
            f"{files[0]} is empty: expected region features, one image per line. Download it again."
        )
    with create_expert_store(folder, {REGIONS_EXPERT: first[2].shape[1]}) as store:
        for item, location, features in chain([first], images):
            store.append(item, {REGIONS_EXPERT: features}, location=f"{location}: image {item}")
