"""How a matcher reads words: through learned vectors and a GRU, or as the states of a text backbone that is trained with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from visavis.models.base import MatcherConfig, vectors
from visavis.models.layers import linear
from visavis.models.text import RecurrentWords
from visavis.models.text_backbone import TextBackbone, WordNoise
from visavis.spec import Count, Share, require
from visavis.types import Encoded


@dataclass(frozen=True, kw_only=True)
class WordsConfig(MatcherConfig):
    """Of a matcher that reads words.

    word_width: of a learned word. text_backbone: a pretrained text encoder that is trained as the part "text_backbone", of whose
    states one linear map is taken, by its folder or hub name; "": words are learned. masked_words, replaced_words,
    omitted_words: the shares of words that ``WordNoise`` masks, replaces and leaves out in its training.
    """

    word_width: Count = 300
    text_backbone: str = ""
    masked_words: Share = 0.0
    replaced_words: Share = 0.0
    omitted_words: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.noise.total <= 1, self, "masked_words", "at most 1 together with replaced_words and omitted_words")

    @property
    def noise(self) -> WordNoise:
        return WordNoise(self.masked_words, self.replaced_words, self.omitted_words)


class LinearWords(nn.Linear):
    """One linear map of every word's vector: ``[N, L, inputs] -> [N, L, outputs]``."""

    def forward(self, items: Encoded) -> Tensor:  # type: ignore[override]
        return super().forward(vectors(items))


def read_words(config: WordsConfig, width: int, *, bidirectional: bool, dropout: float) -> tuple[nn.Module, nn.Module]:
    """The text backbone, which gives items as they are where there is none, and what makes of its items words ``[N, L, width]``."""
    if not config.text_backbone:
        return nn.Identity(), RecurrentWords(config.text_width, config.word_width, width, bidirectional=bidirectional, dropout=dropout)
    backbone = TextBackbone(config.text_backbone, config.noise)
    return backbone, linear(backbone.width, width, LinearWords)
