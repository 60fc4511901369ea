"""One unit vector for each picture and each caption, by the encoders of a recipe where they give one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.loader import Rows
from visavis.errors import VisavisError
from visavis.models.encoding import batches_of_at_most
from visavis.training.data_module import DataModule
from visavis.types import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

AT_ONCE, WIDTH = 256, 512


@dataclass(frozen=True)
class PictureVectors:
    """features ``[N, D]``: unit vectors of a data set's images. encode: of new pictures; None where the encoder itself is not there."""

    features: Tensor
    encode: Callable[[Sequence[Picture]], Tensor] | None


def picture_vectors(data_module: DataModule, data: Dataset) -> PictureVectors | None:
    """By the recipe's features of images, around their mean; None for a recipe that reads pixels or experts."""
    source = data_module.sources(data)[0]
    if not isinstance(source, Rows):
        return None
    first = source.read(np.arange(1))
    if not isinstance(first.vectors, Tensor):
        return None
    rows = torch.cat([_pooled(source.read(batch)) for batch in batches_of_at_most(len(data.images), AT_ONCE)])
    mean = rows.mean(0)

    def encode(pictures: Sequence[Picture]) -> Tensor:
        parts = [pictures[start : start + AT_ONCE // 16] for start in range(0, len(pictures), AT_ONCE // 16)]
        view = data_module.recipe.visual.view
        return normalize(torch.cat([_pooled(data_module.processor.images(part, view)) for part in parts]) - mean, dim=1)

    return PictureVectors(normalize(rows - mean, dim=1), encode if _opens(data_module, mean) else None)


def caption_vectors(data_module: DataModule | None, data: Dataset) -> tuple[Tensor, str]:
    """Unit vectors ``[C, D]`` of all captions, and by what: the recipe's sentence model, else the words, weighted by how rare they are."""
    if data_module is not None and data_module.text is not None and data_module.recipe.text.view == "pooled":
        source = data_module.sources(data)[1]
        rows = torch.cat([_pooled(source.read(batch)) for batch in batches_of_at_most(len(data.captions), AT_ONCE)])
        return normalize(rows - rows.mean(0), dim=1), data_module.recipe.text.tower or data_module.recipe.text.features
    return word_vectors(data.captions), "words"


def word_vectors(captions: Sequence[str]) -> Tensor:
    """Unit vectors of captions by their words, tf-idf, in a random projection to 512 numbers, which keeps cosines to about 0.04."""
    split = [tokenize(caption) for caption in captions]
    in_captions = Counter(word for caption in split for word in set(caption))
    projection, random = dict[str, np.ndarray](), np.random.default_rng(0)
    for word, count in sorted(in_captions.items()):
        projection[word] = np.log(len(captions) / count) * random.standard_normal(WIDTH).astype(np.float32) / WIDTH**0.5
    rows = [np.sum([projection[word] for word in caption] or [np.zeros(WIDTH, np.float32)], axis=0) for caption in split]
    return normalize(torch.from_numpy(np.stack(rows)), dim=1)


def _pooled(items: Encoded) -> Tensor:
    """One vector an item: itself, or the mean of its regions, frames or words."""
    vectors, mask = items.vectors, items.mask
    assert isinstance(vectors, Tensor)
    if vectors.dim() == 2:
        return vectors
    if mask is None:
        return vectors.mean(1)
    assert isinstance(mask, Tensor)
    return (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _opens(data_module: DataModule, mean: Tensor) -> bool:
    """Whether the encoder is there, and gives vectors like those that are stored."""
    from visavis.models.towers import blank

    if not data_module.recipe.visual.tower or data_module.recipe.visual.view == "frames":
        return False
    try:
        return _pooled(data_module.processor.images([blank()], data_module.recipe.visual.view)).shape[1] == len(mean)
    except VisavisError:
        return False
