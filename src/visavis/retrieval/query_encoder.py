"""Model of the queries of an index. Its text tower encodes texts without torch. The whole model is
loaded when an image is encoded, or a text without a text tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from visavis.core.encoded import Direction, Encoded
    from visavis.models.retriever import ImageInput, Retriever
    from visavis.models.text_tower import TextTower


class QueryEncoder:
    """Encodes the texts and images of queries for the vectors of an index.

    Args:
        fingerprint: Fingerprint of the model of the texts.
        load_texts: Loads the model of the texts.
        load_images: Loads the model of the images, if it is another one, whose vectors the model of
            the texts was trained on.
        tower: Text tower of the model of the texts. None: the model encodes them.
    """

    def __init__(
        self,
        fingerprint: str,
        load_texts: Callable[[], Retriever],
        load_images: Callable[[], Retriever] | None = None,
        tower: TextTower | None = None,
    ):
        self.fingerprint = fingerprint
        self.tower = tower
        self._load_texts = load_texts
        self._load_images = load_images

    @classmethod
    def of(cls, model: Retriever) -> Self:
        """Make the query model of a loaded model."""
        return cls(model.fingerprint, lambda: model)

    @cached_property
    def whole(self) -> Retriever:
        """The model of the texts, loaded at the first access."""
        return self._load_texts()

    @cached_property
    def image_model(self) -> Retriever:
        """The model of the images, loaded at the first access."""
        return self.whole if self._load_images is None else self._load_images()

    @property
    def shorter_dims(self) -> tuple[int, ...]:
        """Smaller numbers of dimensions for which the model was trained, if its vectors have all.
        This loads the model.
        """
        return () if self.whole.embedding_dim else self.whole.matcher.matryoshka_dims[:-1]

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts as unit vectors, ``[D]`` each, or ``[n, D]`` for late interaction."""
        if self.tower is not None:
            return self.tower.encode_texts(texts)
        return _to_arrays(self.whole, self.whole.encode_text(texts))

    def encode_images(self, images: Sequence[ImageInput]) -> list[np.ndarray]:
        """Encode images as ``encode_texts`` encodes texts."""
        return _to_arrays(self.image_model, self.image_model.encode_visual(images))

    def score(
        self, images: Sequence[ImageInput], texts: Sequence[str], direction: Direction
    ) -> np.ndarray:
        """Score every image with every text, ``[V, T]``, see ``Retriever.score``."""
        if self._load_images is None:
            return self.whole.score(images, texts, direction=direction).numpy()
        return np.stack(self.encode_images(images)) @ np.stack(self.encode_texts(texts)).T

    def unknown_words(self, text: str) -> list[str]:
        """Find the words of a text that the model does not know, see ``Processor.unknown_words``."""
        return (self.tower or self.whole).unknown_words(text)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens that the model reads of each text, see ``Processor.count_tokens``."""
        return (self.tower or self.whole).count_tokens(texts)


def _to_arrays(model: Retriever, encoded: Encoded) -> list[np.ndarray]:
    """Vectors of encoded items for an index."""
    return [vectors.numpy() for vectors in model.item_vectors(encoded)]
