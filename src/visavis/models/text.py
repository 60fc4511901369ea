"""Text towers that learn from the captions at hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visavis.models.pooling import max_pool, mean_pool
from visavis.types import Encoded

TEXTS_AT_ONCE = 128
"""Texts of similar length that run through a recurrent layer together, padded to the longest of them."""


class RecurrentWords(nn.Module):
    """Learned word vectors and a GRU over them.

    Embedding (uniform in +-0.1), dropout, one GRU layer; two directions are averaged. Token ids ``[N, L]`` -> ``[N, L, D]``,
    meaningless beyond a text's end. Source: VSE++ (Faghri et al., 2018), SCAN for the two directions.
    """

    def __init__(self, num_words: int, word_width: int, width: int, *, bidirectional: bool, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(num_words, word_width)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(dropout)
        self.forth = nn.GRU(word_width, width, batch_first=True)
        self.back = nn.GRU(word_width, width, batch_first=True) if bidirectional else None

    def forward(self, items: Encoded) -> Tensor:
        assert isinstance(items.vectors, Tensor) and not isinstance(items.mask, dict)
        words = self.dropout(self.embedding(items.vectors))
        lengths = torch.full((len(words),), words.shape[1], device=words.device) if items.mask is None else items.mask.sum(1)
        shortest_first = lengths.argsort(stable=True)
        states = [self._states(words[some], lengths[some]) for some in shortest_first.split(TEXTS_AT_ONCE)]
        padded = torch.cat([nn.functional.pad(part, (0, 0, 0, words.shape[1] - part.shape[1])) for part in states])
        return padded[shortest_first.argsort()]

    def _states(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The states of texts, as far as the longest goes. Without packing, whose backward pass on a CPU costs L times as much."""
        words = words[:, : max(int(lengths.max()), 1)]
        forth: Tensor = self.forth(words)[0]
        if self.back is None:
            return forth
        position = torch.arange(words.shape[1], device=words.device)
        mirrored = torch.where(position < lengths[:, None], lengths[:, None] - 1 - position, position)[..., None]
        back = self.back(words.gather(1, mirrored.expand_as(words)))[0]
        return (forth + back.gather(1, mirrored.expand_as(back))) / 2


def pool_words(words: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Word states as one vector a text: its first, its last valid state, the largest value of each dimension, or the mean."""
    if how == "first":
        return words[:, 0]
    if how == "last":
        if mask is None:
            return words[:, -1]
        return words.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, words.shape[-1])).squeeze(1)
    return max_pool(words, mask) if how == "max" else mean_pool(words, mask)
