"""Ground-truth relevance for data sets of synthetic scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.errors import DataError
from visavis.graded.estimators.base import CaptionAggregation, ImageRelevance, RelevanceEstimator
from visavis.spec import validate_fields
from visavis.synthetic import SceneGraphs


@dataclass(frozen=True, kw_only=True)
class SceneRelevance(RelevanceEstimator):
    """How true a caption is of a synthetic scene: the weighted share of its statements that hold.

    Works for data sets written by ``visavis data scenes``.
    """

    def __post_init__(self) -> None:
        validate_fields(self)

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
        raise DataError("SceneRelevance: expected images with captions, got captions only. Use CBoW or SentenceModel.")

    def for_dataset(self, data: Dataset, caption_aggregation: CaptionAggregation = "paired") -> ImageRelevance:
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
                f"{_folder(data) / 'scenes.jsonl'}: expected at least {needed[0]:,} images and {needed[1]:,} captions for {data.name}, "
                f"got {len(graphs.scenes):,} and {len(graphs.facts):,}. Write the data set again."
            )
        return _SceneImageRelevance(graphs, data)


def _folder(data: Dataset) -> Path:
    location = data.images[0].location
    if location is None:
        raise DataError(
            f"SceneRelevance: expected the image files of the synthetic scenes {data.name}, got none. Pass the original folder."
        )
    return location.path.parent.parent


@dataclass(frozen=True, eq=False)
class _SceneImageRelevance:
    graphs: SceneGraphs
    data: Dataset
    notes: tuple[str, ...] = ()

    def __call__(self, images: Tensor, captions: Tensor, paired_captions: Tensor | None = None) -> Tensor:
        return torch.from_numpy(self.graphs.relevance(self.data.image_rows[images.numpy()], self.data.caption_rows[captions.numpy()]))
