"""Sentences in the words of a pretrained text model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.models.foreign import open_config, open_tokenizer
from visavis.types import Encoded

ONE_LENGTH = ("siglip",)
"""Models that were trained on texts padded to one length, all of which they read."""


@dataclass(frozen=True)
class PretrainedTokenizer:
    """The tokenizer of a pretrained model. longest: the number of tokens after which a text is cut.

    one_length: every text is padded to ``longest`` and has no mask, as SigLIP was trained; else to the longest of its batch.
    """

    tokenizer: Any
    longest: int
    one_length: bool

    @classmethod
    def open(cls, folder: Path) -> PretrainedTokenizer:
        """That of a model's folder. Raises DataError if it has none."""
        return cls(*open_tokenizer(folder), open_config(folder).model_type in ONE_LENGTH)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Token ids ``[N, L]`` and their mask, or None."""
        padding = "max_length" if self.one_length else "longest"
        tokens = self.tokenizer(list(texts), padding=padding, truncation=True, max_length=self.longest, return_tensors="pt")
        return Encoded(tokens["input_ids"], None if self.one_length else tokens["attention_mask"].bool())


class PretrainedTokens:
    """Captions as the tokens of a pretrained model, cut when they are read."""

    def __init__(self, captions: Sequence[str], tokenizer: PretrainedTokenizer):
        self.captions, self.tokenizer = captions, tokenizer

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        return self.tokenizer.encode([self.captions[i] for i in index])
