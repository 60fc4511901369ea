"""Degrees that the user brings: a matrix on disk, or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.data.reading import find_file
from visavis.degrees.base import CaptionDegrees, Degrees, ImageBy, ImageDegrees, OfCaptions
from visavis.errors import DataError, ShapeError
from visavis.spec import check_fields


@dataclass(frozen=True, kw_only=True)
class GivenDegrees(Degrees):
    """A matrix of the user's: a ``.npy`` of numbers in [0, 1], read block by block from the disk.

    path: of a matrix ``[captions, captions]`` or ``[images, captions]``, in the order of the whole data set with all its splits; also
    its name under ``VISAVIS_DATA``. A square matrix is one of captions. For a bare list of captions the matrix must have its size.
    """

    path: str

    def __post_init__(self) -> None:
        check_fields(self)

    def files(self, data: Dataset) -> list[Path]:
        return [find_file(self.path)]

    def of(self, captions: Sequence[str]) -> CaptionDegrees:
        matrix = self._matrix()
        if matrix.shape != (len(captions),) * 2:
            raise ShapeError(
                f"{self.path} is of shape {matrix.shape}, expected {(len(captions),) * 2}: a row and a column for each caption."
            )
        return _Matrix(self.path, matrix, np.arange(len(captions)), np.arange(len(captions)))

    def between(self, data: Dataset, image: ImageBy = "own") -> ImageDegrees:
        matrix, images, captions = self._matrix(), data.image_rows, data.caption_rows
        rows = captions if matrix.shape[0] == matrix.shape[1] else images
        needed = (int(rows.max()) + 1, int(captions.max()) + 1)
        if not (matrix.shape == needed if data.origin is None else matrix.shape[0] >= needed[0] and matrix.shape[1] >= needed[1]):
            raise ShapeError(
                f"{self.path} is of shape {matrix.shape}, expected {'' if data.origin is None else 'at least '}{needed}: the "
                f"{'captions' if rows is captions else 'images'} and the captions of {data.name}, in its order."
            )
        degrees = _Matrix(self.path, matrix, rows, captions)
        return OfCaptions(degrees, data, image) if rows is captions else _OfImages(degrees)

    def _matrix(self) -> np.ndarray:
        path = find_file(self.path)
        matrix = storage.read_array(path, kinds="fiub", mapped=True)
        if matrix.ndim != 2:
            raise ShapeError(
                f"{path} holds {matrix.dtype} of shape {matrix.shape}, expected a matrix of numbers, [captions, captions] or [images, captions]."
            )
        return matrix


@dataclass(frozen=True, eq=False)
class _Matrix(CaptionDegrees):
    """Degrees read from a matrix. rows, columns: its row and its column for each index."""

    name: str
    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        above, beside = self.rows[rows.numpy()], self.columns[columns.numpy()]
        return checked(self.matrix[np.ix_(above, beside)], self.name, above[:, None], beside)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        above, beside = self.rows[first.numpy()], self.columns[second.numpy()]
        return checked(self.matrix[above, beside], self.name, above, beside)


@dataclass(frozen=True, eq=False)
class _OfImages:
    """Degrees from a matrix of images and captions; which caption stands for an image does not matter."""

    degrees: _Matrix
    notes: tuple[str, ...] = ()

    def __call__(self, images: Tensor, captions: Tensor, own: Tensor | None = None) -> Tensor:
        return self.degrees(images, captions)


@dataclass(frozen=True)
class FunctionDegrees(Degrees):
    """Degrees from a function of the user's: two lists of captions in, ``[A, B]`` numbers in [0, 1] out; called for each block."""

    function: Callable[[list[str], list[str]], np.ndarray | Tensor]

    def of(self, captions: Sequence[str]) -> CaptionDegrees:
        return _Called(self.function, tuple(captions))


@dataclass(frozen=True, eq=False)
class _Called(CaptionDegrees):
    function: Callable[[list[str], list[str]], np.ndarray | Tensor]
    captions: tuple[str, ...]

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        first, second = ([self.captions[i] for i in indices.tolist()] for indices in (rows, columns))
        block, name = np.asarray(self.function(first, second)), getattr(self.function, "__name__", "the function")
        if block.shape != (len(first), len(second)):
            raise ShapeError(
                f"{name} gives degrees of shape {block.shape} for {len(first)} and {len(second)} captions, expected {(len(first), len(second))}."
            )
        return checked(block, name, rows.numpy()[:, None], columns.numpy())

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([self(row, column)[:, 0] for row, column in zip(first.split(1), second.split(1), strict=True)])


def checked(degrees: np.ndarray, name: str, rows: np.ndarray, columns: np.ndarray) -> Tensor:
    """Degrees as float32. Raises DataError naming the first pair whose degree is not a number in [0, 1]."""
    wrong = ~((degrees >= 0) & (degrees <= 1))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        row, column = (np.broadcast_to(axis, wrong.shape)[place] for axis in (rows, columns))
        raise DataError(f"{name}: the degree of row {row} with column {column} is {degrees[place]}, expected a number from 0 to 1.")
    return torch.from_numpy(np.asarray(degrees, np.float32))
