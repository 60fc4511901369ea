"""Features of regions as people keep them: ``.tsv`` of bottom-up-attention, or a folder with one ``.npy`` or ``.npz`` an image."""

from __future__ import annotations

import base64
import binascii
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from visavis import storage
from visavis.errors import DataError

OnProgress = Callable[[int, int], None]
"""Called with what is read and what there is in all: megabytes of ``.tsv``, files of a folder."""

NUMBER = 4
"""Bytes of a number in a ``.tsv``."""
LONGEST_LINE = 2**27
MEGABYTE = 2**20
NAMES = ("features", "feat", "x")
"""Under one of which an ``.npz`` holds its features."""


def region_files(path: Path) -> list[Path]:
    """A ``.tsv``, those in a folder, or else its ``.npy`` and ``.npz``. Raises DataError if there are none."""
    if path.is_file():
        return [path]
    for endings in (("*.tsv", "*.tsv.[0-9]*"), ("*.npy", "*.npz")):
        if files := sorted(file for ending in endings for file in path.glob(ending)):
            return files
    raise DataError(f"{path} holds no features of regions: expected .tsv of bottom-up-attention, or ID.npy or ID.npz for each image.")


def read_regions(files: list[Path], on_progress: OnProgress) -> Iterator[tuple[str, str, np.ndarray]]:
    """For each image its id, where it stands, and its features ``[R, D]``, R of its own. Raises DataError naming the place of the first wrong one."""
    width = 0
    for item, where, features in _of_lines(files, on_progress) if ".tsv" in files[0].name else _of_files(files, on_progress):
        width = width or features.shape[-1]
        if features.ndim != 2 or features.shape[1] != width or not len(features) or features.dtype.kind not in "fiu":
            shape = list(features.shape)
            raise DataError(f"{where}: the features are {features.dtype} of shape {shape}, expected numbers of shape [regions, {width}].")
        with np.errstate(over="ignore"):
            single = features.astype(np.float32, copy=False)
        if not np.isfinite(single).all():
            raise DataError(f"{where}: the features hold values that are not finite: compute them again.")
        yield item, where, single


def _of_lines(files: list[Path], on_progress: OnProgress) -> Iterator[tuple[str, str, np.ndarray]]:
    total, done = sum(file.stat().st_size for file in files), 0
    for path in files:
        with storage.regular_file(path), open(path, "rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE):
                number, done = number + 1, done + len(line)
                yield _of_line(line, f"{path}, line {number}")
                on_progress(done // MEGABYTE, total // MEGABYTE)


def _of_line(line: bytes, where: str) -> tuple[str, str, np.ndarray]:
    """The columns of bottom-up-attention: the id first, last the number of boxes, the boxes and the features, the latter in base64."""
    columns = line.rstrip(b"\r\n").split(b"\t")
    if len(columns) < 6:
        raise DataError(
            f"{where} has {len(columns)} columns, expected the id, width, height, number of boxes, boxes and features, with tabs between."
        )
    item, boxes, encoded = columns[0].decode(errors="replace"), columns[-3], columns[-1]
    try:
        numbers = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise DataError(f"{where}: the last column is not base64, expected the features of image {item}: the line may be cut.") from None
    regions = int(boxes) if boxes.isdigit() else 0
    if not regions or not numbers or len(numbers) % (NUMBER * regions):
        raise DataError(
            f"{where}: {len(numbers):,} bytes of features are not those of {boxes.decode(errors='replace')!r} boxes: the line may be cut."
        )
    return item, where, np.frombuffer(numbers, "<f4").reshape(regions, -1)


def _of_files(files: list[Path], on_progress: OnProgress) -> Iterator[tuple[str, str, np.ndarray]]:
    for number, path in enumerate(files, 1):
        yield path.stem, str(path), storage.read_array(path, kinds="fiu") if path.suffix == ".npy" else _of_archive(path)
        on_progress(number, len(files))


def _of_archive(path: Path) -> np.ndarray:
    with storage.regular_file(path):
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in NAMES if name in archive}
        except (ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} is no readable .npz of numbers: {str(error).splitlines()[0] if str(error) else 'it is damaged'}."
            ) from None
    if not arrays:
        raise DataError(f"{path} holds no features: expected an array named {' or '.join(NAMES)}.")
    array: np.ndarray = next(iter(arrays.values()))
    return array
