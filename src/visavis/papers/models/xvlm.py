"""X-VLM: a dual encoder with a cross-modal encoder that re-ranks the first candidates of a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from visavis.core import storage
from visavis.core.encoded import AttentionWeights, Encoded
from visavis.core.errors import DataError
from visavis.core.fields import LayerCount, NonNegativeInt, PositiveFloat, PositiveInt
from visavis.losses.logits import LearnedScale
from visavis.losses.targets import Targets
from visavis.models.base import (
    INITIAL_BIAS,
    GlobalMatcher,
    MatcherConfig,
    encode_unit_rows,
    get_mask,
    get_part,
    get_vectors,
    valid_mask,
)
from visavis.models.encoders.frozen_encoders import open_visual_encoder
from visavis.models.encoders.pretrained_files import TEXT_BACKBONE_FOLDER, saved_part_folder
from visavis.models.encoders.text_backbone import TextBackbone
from visavis.models.layers import EPSILON

INIT_STD = 0.02
"""Standard deviation of BERT's initial weights."""


class FusionEncoder(nn.Module):
    """Cross-modal encoder: BERT layers in which words attend to each other, then to the states of
    an image.

    Parameter names are those of BERT layers with cross-attention, so that such layers can be
    loaded.

    Args:
        bert_config: Config of a BERT, with dimensions, heads and dropout.
        image_dim: Dimensions of an image state.
        num_layers: Number of layers.

    Source:
        Zeng et al., X-VLM (2022), section 3.1. ALBEF (Li et al., 2021).
    """

    def __init__(self, bert_config: Any, image_dim: int, num_layers: int):
        super().__init__()
        self.layer = nn.ModuleList(
            [_FusionLayer(bert_config, image_dim) for _ in range(num_layers)]
        )

    def forward(
        self, words: Tensor, mask: Tensor, image: Tensor, attention_maps: list[Tensor] | None = None
    ) -> Tensor:
        """Encode words ``[N, W, D]`` with the states of an image ``[N, R, E]``. Each layer appends
        its attention over the image ``[N, heads, W, R]``, if there is a list.
        """
        broadcast_mask = mask[:, None, None, :]
        for layer in self.layer:
            words = layer(words, broadcast_mask, image, attention_maps)
        return words

    def load_bert_layers(self, layers: nn.ModuleList) -> None:
        """Load the weights of as many BERT layers. Cross-attention keeps its initial weights."""
        for layer, source in zip(self.layer, layers, strict=True):
            layer.load_state_dict(
                source.state_dict()
                | {key: part for key, part in layer.state_dict().items() if "crossattention" in key}
            )


class _FusionLayer(nn.Module):
    def __init__(self, bert: Any, image_dim: int):
        super().__init__()
        dim = bert.hidden_size
        epsilon = bert.layer_norm_eps
        self.attention = _Attention(bert, dim)
        self.crossattention = _Attention(bert, image_dim)
        self.intermediate = nn.ModuleDict({"dense": _linear(dim, bert.intermediate_size)})
        self.output = _ResidualLayer(bert.intermediate_size, dim, bert.hidden_dropout_prob, epsilon)

    def forward(
        self, words: Tensor, mask: Tensor, image: Tensor, attention_maps: list[Tensor] | None
    ) -> Tensor:
        words = self.attention(words, words, mask)
        words = self.crossattention(words, image, None, attention_maps)
        return self.output(gelu(self.intermediate["dense"](words)), words)


class _Attention(nn.Module):
    """Attention of BERT, of states over themselves or over states of other dimensions."""

    def __init__(self, bert: Any, other_dim: int):
        super().__init__()
        dim = bert.hidden_size
        self.heads = bert.num_attention_heads
        self.dropout = bert.attention_probs_dropout_prob
        self.self = nn.ModuleDict(
            {
                "query": _linear(dim, dim),
                "key": _linear(other_dim, dim),
                "value": _linear(other_dim, dim),
            }
        )
        self.output = _ResidualLayer(dim, dim, bert.hidden_dropout_prob, bert.layer_norm_eps)

    def forward(
        self,
        states: Tensor,
        others: Tensor,
        mask: Tensor | None,
        attention_maps: list[Tensor] | None = None,
    ) -> Tensor:
        # [N, heads, L, D / heads] each.
        query, key, value = (
            self.self[name](rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, rows in (("query", states), ("key", others), ("value", others))
        )
        if attention_maps is None:
            # scaled_dot_product_attention applies dropout in evaluation mode, too.
            dropout = self.dropout if self.training else 0.0
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout
            )
        else:
            # scaled_dot_product_attention does not return its weights.
            attention_maps.append(
                (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
            )
            attended = attention_maps[-1] @ value
        return self.output(attended.transpose(1, 2).flatten(2), states)


class _ResidualLayer(nn.Module):
    """``norm(states + dropout(linear(update)))``."""

    def __init__(self, inputs: int, dim: int, dropout: float, epsilon: float):
        super().__init__()
        self.dense = _linear(inputs, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=epsilon)
        self.dropout = nn.Dropout(dropout)

    def forward(self, update: Tensor, states: Tensor) -> Tensor:
        return self.LayerNorm(states + self.dropout(self.dense(update)))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=INIT_STD)
    nn.init.zeros_(layer.bias)
    return layer


MIN_SAMPLING_PROBABILITY = 1e-5
"""Added to the softmax of the scores when a negative pair is sampled."""
PRETRAINED_PREFIXES = ("visual.", "text.", "match.")
"""Prefixes of the weights of a converted checkpoint, besides cross-attention."""
SCALE_BOUNDS = (2.0, 1000.0)
"""Minimum and maximum of the learned scale, temperatures of 0.5 to 0.001. ``temperature`` widens
them if it is outside.
"""


class XVLM(GlobalMatcher):
    """X-VLM: an image encoder and the lower layers of a BERT, projected to unit vectors, and a
    cross-modal encoder for re-ranking.

    The score is the cosine of the unit vectors. The upper layers of the BERT attend to all states
    of the image and decide whether a pair matches. ``second_stage_scores`` is the log-odds of a
    match and re-ranks the first ``rerank_top_k`` candidates of a query. These layers learn with the
    auxiliary loss ITM: the cross-entropy of each positive pair, of each image with a negative text,
    and of each text with a negative image. Negatives are sampled by $softmax(cosine /
    temperature)$ over the batch, or by the learned scale.

    Parts: "backbone" and "text_backbone", "visual" and "text" (the projections), "fusion", "scale".

    Args:
        config: The architecture.

    Raises:
        DataError: If the text encoder is not a BERT, or has too few layers.

    Source:
        Zeng et al., Multi-Grained Vision Language Pre-Training (2022), sections 3.1 and 3.3. GOAL's
        table of the state of the art.

    Differs from:
        The released code ranks by the logit of a match alone, not by its odds, and leaves later
        candidates tied. It samples negatives by the learned temperature also if an objective with a
        fixed scale replaces ITC. Its pretraining (regions with boxes, masked words) is not included
        here.
    """

    name = "XVLM"
    listed_after = "EmbeddingModel"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        """Architecture of ``XVLM``.

        Attributes:
            visual_granularity: Always "pixels".
            text_granularity: Always "tokens".
            backbone: Folder or hub name of an image encoder of transformers (ViT, Swin).
            text_backbone: Folder or hub name of a BERT.
            fusion_layers: Number of upper BERT layers that become the cross-modal encoder.
            embedding_dim: Dimensions of the unit vectors.
            rerank_top_k: Number of candidates to re-rank. 0: none.
            temperature: Temperature of the sampling of negatives, and initial value of a learned
                scale.
            pretrained: File with cross-attention, projections and ITM head, as ``visavis papers convert``
                writes it. Empty: random weights.
            scale: "learned" multiplies the cosines in training instead of the temperature of
                NTXent, InfoNCE or Sigmoid.
            logit_bias: "learned" adds a number after the learned scale, instead of the bias of
                Sigmoid. It starts at -10. Set automatically by the objective.
        """

        visual_granularity: Literal["pixels"] = "pixels"
        text_granularity: Literal["tokens"] = "tokens"
        backbone: str
        text_backbone: str
        fusion_layers: LayerCount = 6
        embedding_dim: PositiveInt = 256
        rerank_top_k: NonNegativeInt = 128
        temperature: PositiveFloat = 0.07
        pretrained: str = ""
        scale: Literal["fixed", "learned"] = "fixed"
        logit_bias: Literal["fixed", "learned"] = "fixed"

    visual_granularities = ("pixels",)
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.backbone = open_visual_encoder(config.backbone, "regions")
        self.text_backbone = TextBackbone(config.text_backbone)
        bert = self.text_backbone.model.config
        if bert.model_type != "bert":
            raise DataError(
                f"{config.text_backbone}: expected a model of kind bert, whose upper layers become "
                "the cross-modal encoder, "
                f"got {bert.model_type}. Set another text encoder."
            )
        layers = self.text_backbone.model.encoder.layer
        text_only_layers = len(layers) - config.fusion_layers
        if text_only_layers < 1:
            raise DataError(
                f"{config.text_backbone}: expected more layers than model.fusion_layers = "
                f"{config.fusion_layers}, got {len(layers)}. "
                "Set fewer fusion layers."
            )
        self.fusion = FusionEncoder(bert, config.visual_input_dim, config.fusion_layers)
        self.fusion.load_bert_layers(layers[text_only_layers:])
        # The upper layers are in the cross-modal encoder now.
        self.text_backbone.model.encoder.layer = layers[:text_only_layers]
        hidden_dim = bert.hidden_size
        self.visual = nn.Linear(config.visual_input_dim, config.embedding_dim)
        self.text = nn.Linear(hidden_dim, config.embedding_dim)
        self.match = nn.Sequential(
            nn.Linear(hidden_dim, 2 * hidden_dim),
            nn.LayerNorm(2 * hidden_dim),
            nn.GELU(),
            # No match, and a match.
            nn.Linear(2 * hidden_dim, 2),
        )
        # A saved model has all weights in its own file.
        if config.pretrained and saved_part_folder(TEXT_BACKBONE_FOLDER) is None:
            expected = {
                name: part
                for name, part in self.state_dict().items()
                if name.startswith(PRETRAINED_PREFIXES) or ".crossattention." in name
            }
            self.load_state_dict(storage.read_tensors(config.pretrained, expected), strict=False)
        self.learned_scale = (
            LearnedScale.containing(1 / config.temperature, SCALE_BOUNDS)
            if config.scale == "learned"
            else None
        )
        self.learned_bias = (
            nn.Parameter(torch.tensor(INITIAL_BIAS)) if config.logit_bias == "learned" else None
        )

    @property
    def rerank_top_k(self) -> int:
        return self.config.rerank_top_k

    def parts(self) -> dict[str, list[nn.Module | nn.Parameter]]:
        parts: dict[str, list[nn.Module | nn.Parameter]] = {
            "backbone": [self.backbone],
            "text_backbone": [self.text_backbone],
            "visual": [self.visual],
            "text": [self.text],
            "fusion": [self.fusion, self.match],
        }
        return parts | self.scale_part()

    def encode_visual(self, items: Encoded) -> Encoded:
        """Encode pixels as "embedding" ``[N, D]`` and "states" ``[N, 1 + R, E]`` of the whole image
        and of its regions.
        """
        pixels = get_vectors(items)
        states = self.backbone.model(pixel_values=pixels).last_hidden_state.float()
        regions = self.backbone.regions(states, pixels)
        # A ViT has a class token before its patches. A Swin has none, and its mean is the image.
        # The regions have no class token.
        has_class_token = states.dim() == 3 and states.shape[1] > regions.shape[1]
        image_state = states[:, :1] if has_class_token else regions.mean(1, keepdim=True)
        embedding = get_vectors(encode_unit_rows(self.visual(image_state[:, 0])))
        return Encoded({"embedding": embedding, "states": torch.cat([image_state, regions], 1)})

    def encode_text(self, items: Encoded) -> Encoded:
        """Encode tokens as "embedding" ``[N, D]`` and "states" of the words ``[N, W, E]`` with
        their mask.
        """
        words = self.text_backbone(items)
        states = get_vectors(words).float()
        # The first token, [CLS], is the whole text.
        return Encoded(
            {"embedding": get_vectors(encode_unit_rows(self.text(states[:, 0]))), "states": states},
            {"states": valid_mask(words)},
        )

    def second_stage_scores(self, visual: Encoded, text: Encoded) -> Tensor:
        """Compute the log-odds that image i and text i match, ``[N]``."""
        logits = self._logits(visual, text)
        return logits[:, 1] - logits[:, 0]

    def auxiliary_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor:
        """Compute ITM: each text with its image and with a negative image, and this image with a
        negative text, if there are negatives.
        """
        image_of_text = targets.positive.long().argmax(0)
        # Negatives are sampled from torch's generator, which the trainer seeds in each step.
        with torch.no_grad():
            scale = (
                1 / self.config.temperature if self.learned_scale is None else self.learned_scale()
            )
            scores = scale * self.score(visual, text).float()
            negative = targets.negative
            texts_with_negative, negative_images = _sample_negatives(scores.T, negative.T)
            rows_with_negative, negative_texts = _sample_negatives(
                scores[image_of_text], negative[image_of_text]
            )
        num_positive = len(image_of_text)
        device = image_of_text.device
        images = torch.cat([image_of_text, negative_images, image_of_text[rows_with_negative]])
        captions = torch.cat(
            [torch.arange(num_positive, device=device), texts_with_negative, negative_texts]
        )
        # Positive pairs come first, then both kinds of negatives.
        labels = (torch.arange(len(captions), device=device) < num_positive).long()
        return cross_entropy(self._logits(visual[images], text[captions]).float(), labels)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def attention(self, visual: Encoded, text: Encoded) -> AttentionWeights | None:
        """Compute Grad-CAM: cross-attention of the middle layer times the gradient of the log-odds,
        summed over heads.
        """
        # A single stage has no attention.
        if not self.rerank_top_k:
            return None
        attention_maps = list[Tensor]()
        # Tensors of inference mode have no gradient, their clones do.
        visual = self.encode_visual(visual.map(torch.clone))
        text = self.encode_text(text.map(torch.clone))
        logits = self._logits(
            visual.map(_differentiable), text.map(_differentiable), attention_maps
        )
        # Layer 3 of 6, as in the figures of ALBEF (Li et al., 2021).
        weights = attention_maps[(len(attention_maps) - 1) // 2]
        [gradient] = torch.autograd.grad(logits[0, 1] - logits[0, 0], weights)
        contributions = (weights * gradient)[0].sum(0).detach()
        # The score of a word is the first-order share of the log-odds that depends on its attention
        # in this layer. The first state is the one of the whole image.
        positive = contributions[:, 1:].clamp(min=0)
        return AttentionWeights(
            positive / positive.sum(1, keepdim=True).clamp(min=EPSILON), contributions.sum(1)
        )

    def _logits(
        self, visual: Encoded, text: Encoded, attention_maps: list[Tensor] | None = None
    ) -> Tensor:
        words = get_part(text, "states")
        image = get_vectors(visual.named_part("states"))
        fused = self.fusion(get_vectors(words), get_mask(words), image, attention_maps)
        # [N, 2], from the state of the first token.
        logits: Tensor = self.match(fused[:, 0])
        return logits


def _differentiable(part: Tensor) -> Tensor:
    """Return the same values as a leaf of a graph."""
    return part.detach().requires_grad_(part.is_floating_point())


def _sample_negatives(scores: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of scores that have a negative candidate, and a sampled negative of each row."""
    # A row without negatives has nothing to sample from, which multinomial refuses.
    rows = negative.any(1).nonzero()[:, 0]
    # The constant keeps weights above 0 where the softmax underflows.
    weights = (scores[rows].softmax(1) + MIN_SAMPLING_PROBABILITY) * negative[rows]
    return rows, torch.multinomial(weights, 1)[:, 0]
