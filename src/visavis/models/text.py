"""Text towers that learn from the captions at hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visavis.models.pooling import max_pool, mean_pool
from visavis.types import Encoded


class RecurrentWords(nn.Module):
    """Learned word vectors and a GRU over them.

    Embedding (uniform in +-0.1), dropout, one GRU layer; two directions are averaged. Token ids ``[N, L]`` -> ``[N, L, D]``.
    Source: VSE++ (Faghri et al., 2018), SCAN for the two directions.
    """

    def __init__(self, num_words: int, word_width: int, width: int, *, bidirectional: bool, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(num_words, word_width)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(word_width, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, items: Encoded) -> Tensor:
        assert isinstance(items.vectors, Tensor) and not isinstance(items.mask, dict)
        words = self.dropout(self.embedding(items.vectors))
        lengths = torch.full((len(words),), words.shape[1]) if items.mask is None else items.mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=words.shape[1])
        if not self.gru.bidirectional:
            return hidden
        forth, back = hidden.chunk(2, -1)
        return (forth + back) / 2


def pool_words(words: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Word states as one vector a text: its last valid state, the largest value of each dimension, or the mean."""
    if how == "last":
        if mask is None:
            return words[:, -1]
        return words.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, words.shape[-1])).squeeze(1)
    return max_pool(words, mask) if how == "max" else mean_pool(words, mask)
