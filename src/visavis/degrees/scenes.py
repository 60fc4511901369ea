"""The true degrees of drawn scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.scenes import SceneGraphs
from visavis.degrees.base import Degrees, ImageBy
from visavis.errors import DataError
from visavis.spec import check_fields


@dataclass(frozen=True, kw_only=True)
class SceneDegrees(Degrees):
    """How true a caption is of a drawn picture: the weighted share of its stated facts that hold. For folders of scenes."""

    def __post_init__(self) -> None:
        check_fields(self)

    def files(self, data: Dataset) -> list[Path]:
        return [self._folder(data) / "scenes.jsonl"]

    def of(self, captions: Sequence[str]) -> NoReturn:
        raise DataError("SceneDegrees are of pictures with captions; of captions alone nothing is known: use CBoW or SentenceModel.")

    def between(self, data: Dataset, image: ImageBy = "own") -> _Truth:
        graphs = SceneGraphs.open(self._folder(data))
        needed = int(data.image_rows.max()) + 1, int(data.caption_rows.max()) + 1
        if len(graphs.scenes) < needed[0] or len(graphs.facts) < needed[1]:
            raise DataError(
                f"{self._folder(data) / 'scenes.jsonl'} describes {len(graphs.scenes):,} pictures and {len(graphs.facts):,} captions, "
                f"expected at least {needed[0]:,} and {needed[1]:,}: those of {data.name}."
            )
        return _Truth(graphs, data)

    def _folder(self, data: Dataset) -> Path:
        place = data.images[0].bytes
        if place is None:
            raise DataError(f"SceneDegrees needs the folder of drawn scenes that {data.name} was made as; its pictures are not here.")
        return place.path.parent.parent


@dataclass(frozen=True, eq=False)
class _Truth:
    graphs: SceneGraphs
    data: Dataset
    notes: tuple[str, ...] = ()

    def __call__(self, images: Tensor, captions: Tensor, own: Tensor | None = None) -> Tensor:
        return torch.from_numpy(self.graphs.relevance(self.data.image_rows[images.numpy()], self.data.caption_rows[captions.numpy()]))
