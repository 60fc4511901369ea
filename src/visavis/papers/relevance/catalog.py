"""Catalog of relevance estimators, the combination of a fast and an accurate one, and known
relevance: a matrix on the disk, a function, or the ground truth of synthetic scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError, ShapeError
from visavis.core.fields import require_field
from visavis.core.own_code import named_by_user
from visavis.core.spec import parse
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.synthetic import SceneGraphs
from visavis.papers.relevance.base import (
    CaptionAggregation,
    CaptionRelevance,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.papers.relevance.caption_estimators import CBoW, CrossEncoder, SentenceModel


@dataclass(frozen=True, kw_only=True)
class MatrixRelevance(RelevanceEstimator):
    """A relevance matrix in a ``.npy`` file, read block by block.

    The matrix has shape ``[captions, captions]`` or ``[images, captions]``, in the order of the
    whole data set with all splits. A square matrix is one of captions. For a list of captions
    without images, the matrix must have its size.

    Attributes:
        path: Path of the file, or its name under ``VISAVIS_DATA``. Values are in [0, 1].
    """

    path: str

    def files(self, data: Dataset) -> list[Path]:
        """List the matrix file. See `RelevanceEstimator.files`."""
        return [resolve_path(self.path)]

    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Open the matrix for a list of captions.

        Args:
            captions: The captions, as many as the matrix has rows and columns.

        Returns:
            Blocks of the matrix.

        Raises:
            ShapeError: If the matrix has another shape.
        """
        matrix = self._matrix()
        expected = (len(captions),) * 2
        if matrix.shape != expected:
            raise ShapeError(
                f"{self.path}: expected shape {expected}, a row and a column for each caption, got "
                f"{matrix.shape}."
            )
        return _MatrixCaptionRelevance(
            self.path, matrix, np.arange(len(captions)), np.arange(len(captions))
        )

    def for_dataset(
        self, data: Dataset, caption_aggregation: CaptionAggregation = "paired"
    ) -> ImageRelevance:
        """Open the matrix for a data set or one of its splits.

        Args:
            data: The data set.
            caption_aggregation: How the captions of an image are combined. Not used for a matrix of
                images.

        Returns:
            Blocks of the matrix.

        Raises:
            ShapeError: If the matrix does not have a row and a column for each item.
        """
        matrix = self._matrix()
        images = data.image_rows
        captions = data.caption_rows
        # A square matrix is of captions, another one of images and captions.
        is_square = matrix.shape[0] == matrix.shape[1]
        rows = captions if is_square else images
        expected = (int(rows.max()) + 1, int(captions.max()) + 1)
        # A split knows only its own rows of the whole data set.
        is_split = data.image_origin is not None
        if not (
            matrix.shape[0] >= expected[0] and matrix.shape[1] >= expected[1]
            if is_split
            else matrix.shape == expected
        ):
            raise ShapeError(
                f"{self.path}: expected shape {'at least ' if is_split else ''}{expected}, the "
                f"{'captions' if is_square else 'images'} and the "
                f"captions of {data.name} in its order, got {matrix.shape}."
            )
        relevance = _MatrixCaptionRelevance(self.path, matrix, rows, captions)
        if is_square:
            return ImageRelevance.from_captions(relevance, data, caption_aggregation)
        return ImageRelevance(lambda images, captions, _: relevance(images, captions))

    def _matrix(self) -> np.ndarray:
        path = resolve_path(self.path)
        matrix = storage.read_array(path, kinds="fiub", memory_map=True)
        if matrix.ndim != 2:
            raise ShapeError(
                f"{path}: expected a matrix [captions, captions] or [images, captions], got "
                f"{matrix.dtype} of shape {matrix.shape}."
            )
        return matrix


@dataclass(frozen=True, eq=False)
class _MatrixCaptionRelevance(CaptionRelevance):
    """Relevance read from a matrix. ``rows`` and ``columns`` map each index to a row and a column."""

    name: str
    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix_rows = self.rows[rows.numpy()]
        matrix_columns = self.columns[columns.numpy()]
        return _checked(
            self.matrix[np.ix_(matrix_rows, matrix_columns)],
            self.name,
            matrix_rows[:, None],
            matrix_columns,
        )

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        matrix_rows = self.rows[first.numpy()]
        matrix_columns = self.columns[second.numpy()]
        return _checked(
            self.matrix[matrix_rows, matrix_columns], self.name, matrix_rows, matrix_columns
        )


@dataclass(frozen=True)
class FunctionRelevance(RelevanceEstimator):
    """Relevance from a function, which is called for each block.

    Attributes:
        function: Takes two lists of captions and returns their relevance in [0, 1], shape ``[A,
            B]``.

    Example:
        >>> same_length = FunctionRelevance(lambda a, b: np.array([[float(len(x) == len(y)) for y in b] for x in a]))
        >>> same_length(["a dog"], ["a cat", "two dogs"])
        tensor([[1., 0.]])
    """

    function: Callable[[list[str], list[str]], np.ndarray | Tensor]

    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Prepare calls of the function. See `RelevanceEstimator.for_captions`."""
        return _FunctionCaptionRelevance(self.function, tuple(captions))


@dataclass(frozen=True, eq=False)
class _FunctionCaptionRelevance(CaptionRelevance):
    function: Callable[[list[str], list[str]], np.ndarray | Tensor]
    captions: tuple[str, ...]

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        first, second = (
            [self.captions[i] for i in indices.tolist()] for indices in (rows, columns)
        )
        block = np.asarray(self.function(first, second))
        name = getattr(self.function, "__name__", "the function")
        expected = (len(first), len(second))
        if block.shape != expected:
            raise ShapeError(
                f"{name}: expected relevance of shape {expected}, one row per caption of the first "
                f"list, got {block.shape}."
            )
        return _checked(block, name, rows.numpy()[:, None], columns.numpy())

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        # The function computes blocks, so each pair is a block of one.
        return torch.cat(
            [
                self(row, column)[:, 0]
                for row, column in zip(first.split(1), second.split(1), strict=True)
            ]
        )


def _checked(relevance: np.ndarray, name: str, rows: np.ndarray, columns: np.ndarray) -> Tensor:
    """The values as float32. Raises DataError with the first pair whose value is not in [0, 1]."""
    invalid = ~((relevance >= 0) & (relevance <= 1))  # NaN is invalid, too
    if invalid.any():
        position = tuple(np.argwhere(invalid)[0])
        row, column = (np.broadcast_to(axis, invalid.shape)[position] for axis in (rows, columns))
        raise DataError(
            f"{name}: row {row}, column {column}: expected a relevance from 0 to 1, got "
            f"{relevance[position]}."
        )
    return torch.from_numpy(np.asarray(relevance, np.float32))


@dataclass(frozen=True, kw_only=True)
class SceneRelevance(RelevanceEstimator):
    """How true a caption is of a synthetic scene: the weighted share of its statements that hold.

    Works for data sets written by ``visavis data scenes``.
    """

    def files(self, data: Dataset) -> list[Path]:
        """List the file of scene descriptions. See `RelevanceEstimator.files`."""
        return [_folder(data) / "scenes.jsonl"]

    def for_captions(self, captions: Sequence[str]) -> NoReturn:
        """Refuse captions without images.

        Args:
            captions: The captions.

        Raises:
            DataError: Always, because the ground truth is about images.
        """
        raise DataError(
            "SceneRelevance: expected images with captions, got captions only. Use CBoW or "
            "SentenceModel."
        )

    def for_dataset(
        self, data: Dataset, caption_aggregation: CaptionAggregation = "paired"
    ) -> ImageRelevance:
        """Read the scene descriptions of a data set.

        Args:
            data: A data set of synthetic scenes.
            caption_aggregation: Not used: the relevance follows from the scene.

        Returns:
            The ground-truth relevance.

        Raises:
            DataError: If the folder describes too few scenes or captions.
        """
        graphs = SceneGraphs.open(_folder(data))
        needed = int(data.image_rows.max()) + 1, int(data.caption_rows.max()) + 1
        if len(graphs.scenes) < needed[0] or len(graphs.facts) < needed[1]:
            raise DataError(
                f"{_folder(data) / 'scenes.jsonl'}: expected at least {needed[0]:,} images and "
                f"{needed[1]:,} captions for {data.name}, "
                f"got {len(graphs.scenes):,} and {len(graphs.facts):,}. Write the data set again."
            )
        return ImageRelevance(
            lambda images, captions, _: torch.from_numpy(
                graphs.relevance(
                    data.image_rows[images.numpy()], data.caption_rows[captions.numpy()]
                )
            )
        )


def _folder(data: Dataset) -> Path:
    location = data.images[0].location
    if location is None:
        raise DataError(
            f"SceneRelevance: expected the image files of the synthetic scenes {data.name}, got "
            "none. Pass the original folder."
        )
    # Images have a folder in the folder of the data set.
    return location.path.parent.parent


CAPTION_ESTIMATORS: tuple[type[RelevanceEstimator], ...] = (CBoW, SentenceModel, CrossEncoder)
"""Estimators that compare captions without another estimator."""


@dataclass(frozen=True, kw_only=True)
class CoarseToFine(RelevanceEstimator):
    """Relevance from a fast estimator, refined by an accurate one for pairs above a threshold.

    Equal captions have the fine relevance, too.

    Attributes:
        coarse: Spec of the fast estimator: CBoW, SentenceModel or CrossEncoder.
        fine: Spec of the accurate estimator.
        threshold: Pairs with a coarse relevance above this value are refined.
        semantics: "paper" keeps the coarse relevance of the other pairs. "reference" sets it to 0,
            as the released code.

    Source:
        Zhou et al., Ladder loss (2020), Experiments, Relevance Degree, with CBoW, BERT fine-tuned
        on STS-B, and threshold 0.8. Differs from the hybrid matrix of the released code
        (``semantics="reference"``), which is 0 below the threshold and 1 for a caption with itself.
    """

    coarse: str = "CBoW()"
    fine: str = "SentenceModel()"
    threshold: float = 0.8
    semantics: Literal["paper", "reference"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(0 <= self.threshold <= 1, self, "threshold", "a number from 0 to 1")
        # Raises SpecError if a spec is invalid.
        self._estimators()

    def _estimators(self) -> tuple[RelevanceEstimator, RelevanceEstimator]:
        return parse(self.coarse, CAPTION_ESTIMATORS), parse(self.fine, CAPTION_ESTIMATORS)

    def files(self, data: Dataset) -> list[Path]:
        """List the files that both estimators read. See `RelevanceEstimator.files`."""
        return [file for estimator in self._estimators() for file in estimator.files(data)]

    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Prepare both estimators. See `RelevanceEstimator.for_captions`."""
        coarse, fine = (estimator.for_captions(captions) for estimator in self._estimators())
        # Equal captions get one number.
        number = {caption: i for i, caption in enumerate(captions)}
        text_ids = torch.tensor([number[caption] for caption in captions])
        return _RefinedRelevance(
            coarse, fine, self, text_ids, tuple(dict.fromkeys((*coarse.notes, *fine.notes)))
        )


@dataclass(frozen=True, eq=False)
class _RefinedRelevance(CaptionRelevance):
    """Relevance of CoarseToFine. Equal captions have equal ``text_ids``."""

    coarse: CaptionRelevance
    fine: CaptionRelevance
    config: CoarseToFine
    text_ids: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        coarse = self.coarse(rows, columns)
        refined = coarse > self.config.threshold
        equal = self.text_ids[rows, None] == self.text_ids[columns]
        return self._combine(coarse, refined, self.fine.masked(refined, rows, columns), equal)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        coarse = self.coarse.pairs(first, second)
        refined = coarse > self.config.threshold
        return self._combine(
            coarse,
            refined,
            self.fine.pairs(first[refined], second[refined]),
            self.text_ids[first] == self.text_ids[second],
        )

    def _combine(self, coarse: Tensor, refined: Tensor, fine: Tensor, equal: Tensor) -> Tensor:
        if self.config.semantics == "paper":
            return coarse.masked_scatter(refined, fine)
        # As the released hybrid matrix.
        return torch.zeros_like(coarse).masked_scatter(refined, fine).masked_fill(equal, 1.0)


CATALOG: tuple[type[RelevanceEstimator], ...] = (
    *CAPTION_ESTIMATORS,
    CoarseToFine,
    SceneRelevance,
    MatrixRelevance,
)
"""All relevance estimators that a spec can name."""


def parse_estimator(text: str) -> RelevanceEstimator:
    """Parse a relevance estimator, such as "CBoW()" or one in a file of the user that they named."""
    return parse(text, CATALOG, RelevanceEstimator, "estimators")


def named_estimator(text: str) -> RelevanceEstimator:
    """Parse a relevance estimator that the user names now, so that its code may run."""
    with named_by_user(text):
        return parse_estimator(text)
