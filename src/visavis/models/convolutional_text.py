"""A text tower that learns from the captions at hand, without recurrence, which a CPU is slow at."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from visavis.models.pooling import max_pool
from visavis.types import Encoded


class ConvolutionalText(nn.Module):
    """Learned word vectors, filters over one, two and three words, and the largest value of each filter.

    Formula: ``t_f = max_l ReLU(b_f + sum_i w_fi e_(l+i))``. Embedding (normal, deviation 0.1), dropout, ``filters`` for each size.
    Shapes: token ids ``[N, L]`` -> ``[N, width]``, width = 3 filters.
    Source: Kim, Convolutional Neural Networks for Sentence Classification (2014), section 2.
    Differs from: it, where a filter sees whole windows of three to five words; here also those that begin before a text or end after it.
    """

    sizes = (1, 2, 3)

    def __init__(self, num_words: int, word_width: int, filters: int, *, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(num_words, word_width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.dropout = nn.Dropout(dropout)
        self.convolutions = nn.ModuleList(nn.Conv1d(word_width, filters, size) for size in self.sizes)
        self.width = filters * len(self.sizes)

    def forward(self, items: Encoded) -> Tensor:
        assert isinstance(items.vectors, Tensor) and not isinstance(items.mask, dict)
        words = self.dropout(self.embedding(items.vectors))
        words = (words if items.mask is None else words * items.mask[..., None]).transpose(1, 2)
        windows = [pad(words, ((size - 1) // 2, size // 2)) for size in self.sizes]
        seen = torch.cat([convolution(window) for convolution, window in zip(self.convolutions, windows, strict=True)], 1)
        return max_pool(seen.transpose(1, 2), items.mask).relu()
