"""Word encoders: learned embeddings with a GRU or with convolutions, or a text backbone that is
trained with the matcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from visavis.core.encoded import Encoded
from visavis.core.fields import PositiveInt, UnitFloat, require_field
from visavis.models.base import MatcherConfig, get_mask, get_vectors, valid_mask
from visavis.models.layers import is_traced, max_pool, mean_pool, xavier_linear

if TYPE_CHECKING:
    from visavis.models.encoders.text_backbone import WordNoise

GRU_BATCH_SIZE = 128
"""Number of texts of similar length in one call of the GRU, padded to the longest of them."""


class GRUWordEncoder(nn.Module):
    """Learned word embeddings and a GRU over them.

    Embeddings start uniform in +-0.1. Dropout and one GRU layer follow. Two directions are
    averaged.

    Args:
        vocabulary_size: Number of words.
        word_dim: Dimensions of a word embedding.
        hidden_dim: Units of the GRU.
        bidirectional: Whether to average two directions.
        dropout: Dropout of word embeddings.

    Source:
        VSE++ (Faghri et al., 2018). SCAN for two directions.
    """

    def __init__(
        self,
        vocabulary_size: int,
        word_dim: int,
        hidden_dim: int,
        *,
        bidirectional: bool,
        dropout: float,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(dropout)
        self.forward_gru = nn.GRU(word_dim, hidden_dim, batch_first=True)
        self.backward_gru = (
            nn.GRU(word_dim, hidden_dim, batch_first=True) if bidirectional else None
        )

    def forward(self, items: Encoded) -> Tensor:
        """Encode token ids.

        Args:
            items: Token ids, shape ``[N, L]``.

        Returns:
            States, shape ``[N, L, hidden_dim]``. They are meaningless beyond the end of a text.
        """
        words = self.dropout(self.embedding(get_vectors(items)))
        lengths = valid_mask(items).sum(1)
        if is_traced():
            # An exported graph has no groups, whose number and lengths depend on the texts.
            return self._states(words, lengths)
        # Groups of similar length have little padding. The states do not depend on the group.
        by_length = lengths.argsort(stable=True)
        states = [
            self._states(words[group, : max(int(lengths[group].max()), 1)], lengths[group])
            for group in by_length.split(GRU_BATCH_SIZE)
        ]
        # All groups at the length of the longest text.
        padded = torch.cat(
            [pad(part, (0, 0, 0, words.shape[1] - part.shape[1])) for part in states]
        )
        # The inverse permutation restores the order of the texts.
        return padded[by_length.argsort()]

    def _states(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the states ``[N, L, hidden_dim]`` of embeddings ``[N, L, word_dim]``."""
        # Without packing, whose backward pass on a CPU takes L times as long.
        forward: Tensor = self.forward_gru(words)[0]
        if is_traced():
            # Attaches the shape, because an exported graph does not know how many states a GRU
            # returns.
            position = torch.arange(words.shape[1], device=words.device)[None, :, None]
            forward = forward.gather(1, position.expand(words.shape[0], -1, forward.shape[2]))
        if self.backward_gru is None:
            return forward
        # The second GRU reads the reversed texts, with their padding in place.
        position = torch.arange(words.shape[1], device=words.device)
        last = lengths[:, None] - 1
        mirrored = torch.where(position <= last, last - position, position)[..., None]
        backward = self.backward_gru(words.gather(1, mirrored.expand(-1, -1, words.shape[2])))[0]
        return (forward + backward.gather(1, mirrored.expand(-1, -1, backward.shape[2]))) / 2


def pool_words(words: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool word states ``[N, L, D]`` to ``[N, D]``: "first", "last" (valid), "max" or "mean"."""
    if pooling == "first":
        return words[:, 0]
    if pooling == "last":
        if mask is None:
            return words[:, -1]
        return words.gather(
            1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, words.shape[-1])
        ).squeeze(1)
    return max_pool(words, mask) if pooling == "max" else mean_pool(words, mask)


class TextCNN(nn.Module):
    """Learned word embeddings, filters over one, two and three words, and the maximum of each
    filter.

    Embeddings start normal with standard deviation 0.1. Dropout follows.

    Args:
        vocabulary_size: Number of words.
        word_dim: Dimensions of a word embedding.
        num_filters: Filters per size.
        dropout: Dropout of word embeddings.

    Formula:
        $t_f = max_l ReLU(b_f + sum_i w_fi e_{l + i})$.

    Source:
        Kim, Convolutional Neural Networks for Sentence Classification (2014), section 2.

    Differs from:
        The paper, where a filter covers complete windows of three to five words. Here also windows
        that start before a text or end after it.
    """

    kernel_sizes = (1, 2, 3)

    def __init__(self, vocabulary_size: int, word_dim: int, num_filters: int, *, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.dropout = nn.Dropout(dropout)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(word_dim, num_filters, size) for size in self.kernel_sizes
        )
        self.output_dim = num_filters * len(self.kernel_sizes)

    def forward(self, items: Encoded) -> Tensor:
        """Encode token ids ``[N, L]`` to vectors ``[N, 3 num_filters]``."""
        mask = get_mask(items)
        words = self.dropout(self.embedding(get_vectors(items)))
        words = (words if mask is None else words * mask[..., None]).transpose(1, 2)
        # Windows of size words also start before the text or end after it, so that each output has
        # L positions.
        windows = [pad(words, ((size - 1) // 2, size // 2)) for size in self.kernel_sizes]
        outputs = torch.cat(
            [
                convolution(window)
                for convolution, window in zip(self.convolutions, windows, strict=True)
            ],
            1,
        )
        # ReLU after the maximum is the maximum of ReLU, on L times fewer values.
        return max_pool(outputs.transpose(1, 2), mask).relu()


@dataclass(frozen=True, kw_only=True)
class WordMatcherConfig(MatcherConfig):
    """Architecture of a matcher that reads words.

    Attributes:
        word_dim: Dimensions of a learned word embedding.
        text_backbone: Folder or hub name of a pretrained text encoder that is trained as the part
            "text_backbone". A linear layer projects its states. Empty: word embeddings are learned.
        word_mask_rate: Probability of masking a word in training (see ``WordNoise``).
        word_replace_rate: Probability of replacing a word in training.
        word_drop_rate: Probability of dropping a word in training.
    """

    word_dim: PositiveInt = 300
    text_backbone: str = ""
    word_mask_rate: UnitFloat = 0.0
    word_replace_rate: UnitFloat = 0.0
    word_drop_rate: UnitFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(
            self.word_mask_rate + self.word_replace_rate + self.word_drop_rate <= 1,
            self,
            "word_mask_rate",
            "at most 1 together with word_replace_rate and word_drop_rate",
        )

    @property
    def word_noise(self) -> WordNoise:
        """Noise of words in training."""
        from visavis.models.encoders.text_backbone import WordNoise

        return WordNoise(self.word_mask_rate, self.word_replace_rate, self.word_drop_rate)


class LinearWordEncoder(nn.Linear):
    """One linear layer on every word vector."""

    def forward(self, items: Encoded) -> Tensor:  # type: ignore[override]
        """Project word vectors ``[N, L, in_features]`` to ``[N, L, out_features]``."""
        return super().forward(get_vectors(items))


def build_word_encoder(
    config: WordMatcherConfig, output_dim: int, *, bidirectional: bool, dropout: float
) -> tuple[nn.Module, nn.Module]:
    """Build the text backbone, an identity if there is none, and the module that maps its output to
    words ``[N, L, output_dim]``.
    """
    if config.text_granularity == "words":
        return nn.Identity(), xavier_linear(config.text_input_dim, output_dim, LinearWordEncoder)
    if config.text_backbone:
        from visavis.models.encoders.text_backbone import TextBackbone

        backbone = TextBackbone(config.text_backbone, config.word_noise)
        return backbone, xavier_linear(backbone.hidden_dim, output_dim, LinearWordEncoder)
    sizes = config.text_input_dim, config.word_dim, output_dim
    return nn.Identity(), GRUWordEncoder(*sizes, bidirectional=bidirectional, dropout=dropout)
