"""A decoder that tells the caption of an image word by word: a second task from which the regions of an image learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from visavis.models.attention import mask_of
from visavis.models.base import vectors
from visavis.models.text import pool_words
from visavis.types import Encoded


class CaptionDecoder(nn.Module):
    """The loss of telling captions by their images: the sum over a caption's words of ``-log p(word | words before it, regions)``, its mean.

    A GRU reads the regions, mapped to ``width``. Another begins with its last state; it reads each word beside ``sum_r a_r h_r``,
    ``a = softmax_r(v tanh(W [h_r, s] + b))``, of the first one's states ``h_r`` and its own ``s``, and its new state guesses the next
    word, after which it is told the right one. The end of a caption is a word. dropout: of what both GRUs read.
    Shapes: regions ``[N, R, D]`` and token ids ``[N, W]``, of which the first is never guessed, to a number.
    Source: Li et al., Visual Semantic Reasoning for Image-Text Matching (2019), section 3.4, and its code.
    Differs from: that code, which also guesses one word of padding after the end, and cuts captions at 60 words (Flickr30K: 40).
    """

    def __init__(self, inputs: int, num_words: int, word_width: int, width: int, dropout: float = 0.2):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.narrow, self.read = nn.Linear(inputs, width), nn.GRU(width, width, batch_first=True)
        self.of_region, self.of_state = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)
        self.embedding, self.tell = nn.Embedding(num_words, word_width), nn.GRUCell(word_width + width, width)
        self.guess = nn.Linear(width, num_words)
        nn.init.xavier_normal_(self.guess.weight)

    def forward(self, regions: Encoded, captions: Encoded) -> Tensor:
        there, words = mask_of(regions), vectors(captions)
        states = self.read(self.dropout(self.narrow(vectors(regions))))[0]
        keys, state, told = self.of_region(states), pool_words(states, there, "last"), []
        for word in self.embedding(words[:, :-1]).unbind(1):
            energy = self.energy(torch.tanh(keys + self.of_state(state)[:, None]))
            weights = energy.masked_fill(~there[..., None], float("-inf")).softmax(1)
            state = self.tell(self.dropout(torch.cat([word, (weights * states).sum(1)], 1)), state)
            told.append(state)
        follows = mask_of(captions)[:, 1:]
        guesses = self.guess(torch.stack(told, 1)[follows])
        return cross_entropy(guesses.float(), words[:, 1:][follows], reduction="sum") / len(words)
