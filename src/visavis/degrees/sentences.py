"""Degrees from a sentence model: the cosine of two captions' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.degrees.base import Degrees, treatment_note
from visavis.degrees.cosines import CosineDegrees
from visavis.models.caching import cache_features
from visavis.models.pretrained import model_files
from visavis.models.towers import TowerSpec
from visavis.spec import check_fields


@dataclass(frozen=True, kw_only=True)
class SentenceModel(Degrees):
    """The cosine of two captions' sentence vectors, at least 0.

    model: "minilm", a folder of ``transformers`` or ``sentence-transformers``, or a hub name; words are pooled as the folder says,
    else by their mean. Vectors are computed once and kept in the cache, by the captions and the model's weights. A caption without
    a word (empty, or punctuation alone) has degree 0 with everything.
    Source: Reimers and Gurevych, Sentence-BERT (2019).
    """

    model: str = "minilm"

    def __post_init__(self) -> None:
        check_fields(self)

    def files(self, data: Dataset) -> list[Path]:
        return model_files(self.model)

    def of(self, captions: Sequence[str]) -> CosineDegrees:
        different = tuple(sorted(set(captions)))
        store = cache_features(Dataset("captions", (), different, np.zeros(len(different), np.int64)), TowerSpec("text", self.model))
        wordless = torch.tensor([not tokenize(caption) for caption in captions])
        vectors = store.read(store.rows(captions)).vectors.masked_fill(wordless[:, None], 0.0)  # type: ignore[union-attr]
        return CosineDegrees.of(vectors, treatment_note(captions, wordless, "without a word: degree 0 with everything"))
