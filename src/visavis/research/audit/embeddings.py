"""Unit vectors of images and captions, from the encoders of a recipe or from tf-idf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from visavis.core.encoded import Encoded, unit_rows
from visavis.core.errors import VisavisError
from visavis.data.dataset import Dataset
from visavis.data.item_sources import ItemSource, StoredFeatures
from visavis.data.vocabulary import tokenize
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.inference import consecutive_batches
from visavis.training.recipes.data_module import DataModule

ITEMS_PER_BATCH, IMAGES_PER_BATCH, PROJECTION_DIM = 256, 16, 512


@dataclass(frozen=True)
class ImageVectors:
    """Vectors of the images of a data set.

    Attributes:
        features: Unit vectors, shape ``[N, D]``.
        encode: Encodes other images in the same way. None if the encoder itself is not available.
    """

    features: Tensor
    encode: Callable[[Sequence[PILImage]], Tensor] | None


def image_vectors(data_module: DataModule, data: Dataset) -> ImageVectors | None:
    """Return the centered, normalized image features of a recipe.

    Args:
        data_module: The recipe with its features.
        data: The data set.

    Returns:
        The vectors. None for a recipe that reads pixels or experts.
    """
    source = data_module.sources(data)[0]
    if not isinstance(source, StoredFeatures) or not isinstance(
        source.read(np.arange(1)).vectors, Tensor
    ):
        return None
    rows = _read_pooled(source, len(data.images))
    mean, granularity = rows.mean(0), data_module.recipe.visual.granularity

    def encode(images: Sequence[PILImage]) -> Tensor:
        batches = (
            images[start : start + IMAGES_PER_BATCH]
            for start in range(0, len(images), IMAGES_PER_BATCH)
        )
        return unit_rows(
            torch.cat(
                [
                    _pool(data_module.processor.process_images(batch, granularity))
                    for batch in batches
                ]
            )
            - mean
        )

    return ImageVectors(
        unit_rows(rows - mean), encode if _has_encoder(data_module, len(mean)) else None
    )


def caption_vectors(data_module: DataModule, data: Dataset) -> tuple[Tensor, str]:
    """Return unit vectors of all captions, from the recipe's sentence encoder or else from tf-idf.

    Args:
        data_module: The recipe with its features.
        data: The data set.

    Returns:
        The vectors ``[C, D]``, and the name of their encoder or "words".
    """
    if data_module.text is not None and data_module.recipe.text.granularity == "pooled":
        rows = _read_pooled(data_module.sources(data)[1], len(data.captions))
        return unit_rows(
            rows - rows.mean(0)
        ), data_module.recipe.text.encoder or data_module.recipe.text.features
    return tfidf_vectors(data.captions), "words"


def tfidf_vectors(captions: Sequence[str]) -> Tensor:
    """Return tf-idf vectors of captions, randomly projected to 512 dimensions. This keeps cosines
    to about 0.04.

    Args:
        captions: The captions.

    Returns:
        Unit vectors, shape ``[C, 512]``.
    """
    words_of = [tokenize(caption) for caption in captions]
    document_counts = Counter(word for words in words_of for word in set(words))
    projection, random = dict[str, np.ndarray](), np.random.default_rng(0)
    for word, count in sorted(document_counts.items()):
        projection[word] = (
            np.log(len(captions) / count)
            * random.standard_normal(PROJECTION_DIM).astype(np.float32)
            / PROJECTION_DIM**0.5
        )
    rows = [
        np.sum(
            [projection[word] for word in words] or [np.zeros(PROJECTION_DIM, np.float32)], axis=0
        )
        for words in words_of
    ]
    return unit_rows(torch.from_numpy(np.stack(rows)))


def _read_pooled(source: ItemSource, count: int) -> Tensor:
    return torch.cat(
        [_pool(source.read(batch)) for batch in consecutive_batches(count, ITEMS_PER_BATCH)]
    )


def _pool(items: Encoded) -> Tensor:
    """Return one vector per item: itself, or the mean of its regions, frames or words."""
    vectors, mask = items.vectors, items.mask
    assert isinstance(vectors, Tensor)
    if vectors.dim() == 2:
        return vectors
    if mask is None:
        return vectors.mean(1)
    assert isinstance(mask, Tensor)
    return (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _has_encoder(data_module: DataModule, embedding_dim: int) -> bool:
    """Return whether the image encoder is available and has the dimension of the stored features."""
    settings = data_module.recipe.visual
    if not settings.encoder or settings.granularity == "frames":
        return False
    try:
        return (
            _pool(
                data_module.processor.process_images([blank_image()], settings.granularity)
            ).shape[1]
            == embedding_dim
        )
    except VisavisError:
        return False
