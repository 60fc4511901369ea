"""VSRN: graph convolutions among regions, and an optional decoder that generates captions from
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from visavis.core.encoded import Encoded, unit_rows
from visavis.core.fields import (
    DropoutRate,
    NonNegativeFloat,
    OptionalLayerCount,
    PositiveInt,
)
from visavis.losses.targets import Targets
from visavis.models.base import (
    GlobalMatcher,
    encode_unit_rows,
    get_mask,
    get_part,
    get_vectors,
    valid_mask,
)
from visavis.models.layers import xavier_linear
from visavis.models.word_encoders import WordMatcherConfig, build_word_encoder, pool_words


class CaptionDecoder(nn.Module):
    """Caption generation loss: the negative log-likelihood of a caption, summed over its words and
    averaged over captions.

    A GRU reads the regions, projected to ``hidden_dim``. A second GRU starts with its last state.
    It reads each word next to $sum_r a_r h_r$ with $a = softmax_r(v tanh(W [h_r, s] + b))$ of
    the first GRU's states $h_r$ and its own state ``s``. Its new state predicts the next word.
    Training uses teacher forcing. The end of a caption is a word.

    Args:
        region_dim: Dimensions of a region.
        vocabulary_size: Number of words.
        word_dim: Dimensions of a word embedding.
        hidden_dim: Dimensions of both GRUs.
        dropout: Dropout of the inputs of both GRUs.

    Source:
        Li et al., Visual Semantic Reasoning for Image-Text Matching (2019), section 3.4, and its
        code.

    Differs from:
        The released code also predicts one padding word after the end, and cuts captions at 60
        words (Flickr30K: 40).
    """

    def __init__(
        self,
        region_dim: int,
        vocabulary_size: int,
        word_dim: int,
        hidden_dim: int,
        dropout: float = 0.2,
    ):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_projection = nn.Linear(region_dim, hidden_dim)
        self.region_gru = nn.GRU(hidden_dim, hidden_dim, batch_first=True)
        self.region_attention = nn.Linear(hidden_dim, hidden_dim)
        self.state_attention = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.energy = nn.Linear(hidden_dim, 1, bias=False)
        self.embedding = nn.Embedding(vocabulary_size, word_dim)
        self.word_gru = nn.GRUCell(word_dim + hidden_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, vocabulary_size)
        nn.init.xavier_normal_(self.output.weight)

    def forward(self, regions: Encoded, captions: Encoded) -> Tensor:
        """Compute the loss of captions (token ids) given the regions of their images, a scalar."""
        valid = valid_mask(regions)
        words = get_vectors(captions)
        region_states = self.region_gru(self.dropout(self.input_projection(get_vectors(regions))))[
            0
        ]
        # The same for all words.
        keys = self.region_attention(region_states)
        # The words start with the last state of the regions.
        state = pool_words(region_states, valid, "last")
        word_states = []
        # Teacher forcing: position i reads word i and predicts word i + 1.
        for word in self.embedding(words[:, :-1]).unbind(1):
            # Shape [N, regions, 1].
            energy = self.energy(torch.tanh(keys + self.state_attention(state)[:, None]))
            weights = energy.masked_fill(~valid[..., None], float("-inf")).softmax(1)
            context = (weights * region_states).sum(1)
            state = self.word_gru(self.dropout(torch.cat([word, context], 1)), state)
            word_states.append(state)
        next_valid = valid_mask(captions)[:, 1:]
        # Only valid positions: the output layer has the size of the vocabulary.
        logits = self.output(torch.stack(word_states, 1)[next_valid])
        return cross_entropy(logits.float(), words[:, 1:][next_valid], reduction="sum") / len(words)


# Name of the decoder's part of the matcher, and of the decoder's input in encoded items.
DECODER_PART = "decoder"


class VSRN(GlobalMatcher):
    """VSRN: visual semantic reasoning. Graph convolutions among regions, then a GRU over them whose
    last state is the image.

    Regions go through a linear layer, graph convolutions, a normalization, and a GRU in the order
    of the regions. Texts are the last state of a GRU.

    Args:
        config: The architecture.

    Source:
        Li et al., Visual Semantic Reasoning for Image-Text Matching (2019), section 3.
    """

    name = "VSRN"
    listed_after = "VSEInfinity"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordMatcherConfig):
        """Architecture of ``VSRN``.

        Attributes:
            visual_granularity: Always "regions".
            text_granularity: Always "tokens".
            embedding_dim: Dimensions of the embeddings.
            reasoning_steps: Number of graph convolutions.
            normalize_over: Axis along which vectors are normalized: "regions" as in the released
                code, "features" as in the paper.
            normalize_projected: Also normalize projected regions before the graph convolutions,
                over the regions. The released code does so for all data except Flickr30K.
            batch_norm: Batch norm of the image vector, as in the released code for Flickr30K.
            dropout: Dropout of word embeddings.
            caption_loss_weight: Weight of the loss of a ``CaptionDecoder``, 1 in the paper. 0: no
                decoder. It is used in training only, as the part "decoder".
            decoder_dim: Dimensions of the decoder's GRUs.
        """

        visual_granularity: Literal["regions"] = "regions"
        text_granularity: Literal["tokens"] = "tokens"
        embedding_dim: PositiveInt = 2048
        reasoning_steps: OptionalLayerCount = 4
        normalize_over: Literal["regions", "features"] = "regions"
        normalize_projected: bool = False
        batch_norm: bool = False
        dropout: DropoutRate = 0.0
        caption_loss_weight: NonNegativeFloat = 0.0
        decoder_dim: PositiveInt = 512

    visual_granularities = ("regions",)
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = xavier_linear(config.visual_input_dim, config.embedding_dim)
        self.reasoning = nn.ModuleList(
            GraphConvolution(config.embedding_dim) for _ in range(config.reasoning_steps)
        )
        self.region_gru = nn.GRU(config.embedding_dim, config.embedding_dim, batch_first=True)
        self.norm: nn.Module = (
            nn.BatchNorm1d(config.embedding_dim) if config.batch_norm else nn.Identity()
        )
        self.text_backbone, self.text = build_word_encoder(
            config, config.embedding_dim, bidirectional=False, dropout=config.dropout
        )
        sizes = config.embedding_dim, config.text_input_dim, config.word_dim, config.decoder_dim
        self.decoder = CaptionDecoder(*sizes) if config.caption_loss_weight else None

    def parts(self) -> dict[str, list[nn.Module]]:
        visual = [self.visual, self.reasoning, self.region_gru, self.norm]
        parts = {"visual": visual, "text": [self.text], "text_backbone": [self.text_backbone]}
        return parts if self.decoder is None else parts | {DECODER_PART: [self.decoder]}

    def encode_visual(self, items: Encoded) -> Encoded:
        regions = self.visual(get_vectors(items))
        if self.config.normalize_over == "features":
            regions = unit_rows(regions)
        elif self.config.normalize_projected:
            # Padding must not enter a norm over the regions.
            regions = unit_rows(regions * valid_mask(items)[..., None], dim=1)
        for convolution in self.reasoning:
            regions = convolution(regions, get_mask(items))
        if self.config.normalize_over == "regions":
            regions = unit_rows(regions, dim=1)
        states = self.region_gru(regions)[0]
        image = encode_unit_rows(self.norm(pool_words(states, get_mask(items), "last")))
        return self._add_decoder_input(image, Encoded(regions, items.mask))

    def encode_text(self, items: Encoded) -> Encoded:
        # The decoder predicts the token ids themselves.
        words = self.text_backbone(items)
        return self._add_decoder_input(
            encode_unit_rows(pool_words(self.text(words), get_mask(words), "last")), items
        )

    def auxiliary_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor | None:
        """Compute the weighted loss of the decoder. A text is generated from the first image that
        it belongs to.
        """
        if self.decoder is None:
            return None
        # The first of the images with a positive pair.
        image_of_text = targets.positive.long().argmax(0)
        loss: Tensor = self.decoder(
            get_part(visual[image_of_text], DECODER_PART), get_part(text, DECODER_PART)
        )
        return self.config.caption_loss_weight * loss

    def _add_decoder_input(self, embedding: Encoded, decoded: Encoded) -> Encoded:
        """Add the input of the decoder to the embedding, in training."""
        if self.decoder is None or not self.training:
            return embedding
        return Encoded(
            {"embedding": get_vectors(embedding), DECODER_PART: get_vectors(decoded)},
            {DECODER_PART: valid_mask(decoded)},
        )


class GraphConvolution(nn.Module):
    """One reasoning step: every region receives a sum over all regions, weighted by affinity.

    Batch norm starts at 0, so that the step initially changes nothing.

    Args:
        dim: Dimensions of a region.

    Formula:
        $V + BN(W R g(V))$ with $R = theta(V) phi(V)^T / N$, without further normalization.

    Source:
        VSRN (Li et al., 2019), equations 2 to 4, and its code.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.theta, self.phi, self.g, self.W = (nn.Linear(dim, dim) for _ in range(4))
        self.norm = nn.BatchNorm1d(dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the step to regions ``[N, R, D]``. Masked ones contribute nothing and are 0."""
        valid = valid_mask(Encoded(regions, mask))
        present = valid[..., None].to(regions.dtype)
        # Padding must not enter the affinity.
        regions = regions * present
        affinity = (
            self.theta(regions) @ self.phi(regions).transpose(1, 2) / present.sum(1, keepdim=True)
        )
        # Batch norm reads valid regions only. Padding stays 0.
        update = torch.zeros_like(regions)
        update[valid] = self.norm(self.W(affinity @ (self.g(regions) * present))[valid])
        return regions + update
