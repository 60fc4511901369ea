"""Matchers with one unit vector per item: Heads, VSE++ and VSE-infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.core.encoded import AttentionWeights, Encoded
from visavis.core.fields import (
    DropoutRate,
    NonNegativeInt,
    OptionalLayerCount,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
    require_field,
)
from visavis.models.base import (
    GlobalMatcher,
    MatcherConfig,
    encode_unit_rows,
    get_mask,
    get_vectors,
    open_image_backbone,
    valid_mask,
)
from visavis.models.layers import (
    EPSILON,
    GeneralizedPooling,
    ResidualMLP,
    Whitening,
    build_mlp,
    max_pool,
    mean_pool,
    xavier_linear,
)
from visavis.models.word_encoders import TextCNN, WordMatcherConfig, build_word_encoder, pool_words


class Heads(GlobalMatcher):
    """A small network per side on cached features of frozen encoders. The image encoder may be
    trained with it, from pixels.

    With ``hidden_layers`` = 0, each side is one linear layer: the fine-tuning of CLIP in the
    Unified paper (appendix B). Texts are features, or token ids of word embeddings trained from
    scratch, which go through a ``TextCNN`` and one linear layer.

    Args:
        config: The architecture.
    """

    name = "Heads"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        """Architecture of ``Heads``.

        Attributes:
            embedding_dim: Dimensions of the embeddings.
            hidden_layers: Hidden layers with ReLU and dropout before the linear output.
            hidden_dim: Dimensions of each hidden layer.
            dropout: Dropout of hidden layers.
            input_dropout: Dropout of the features.
            bilinear: Leave image features unchanged. With ``hidden_layers`` = 0 the score is
                $unit(v) . unit(W t)$.
            word_dim: Dimensions of a learned word embedding.
            num_filters: Filters of the ``TextCNN`` per size.
            word_dropout: Dropout of word embeddings and of the outputs of filters.
            backbone: Image encoder for pixels, which a recipe may train.
            whiten_text: Whether to whiten pooled text features with the mean and covariance of the
                training captions.
        """

        embedding_dim: PositiveInt = 1024
        hidden_layers: OptionalLayerCount = 1
        hidden_dim: PositiveInt = 2048
        dropout: DropoutRate = 0.5
        input_dropout: DropoutRate = 0.0
        bilinear: bool = False
        word_dim: PositiveInt = 300
        num_filters: PositiveInt = 512
        word_dropout: DropoutRate = 0.4
        backbone: str = ""
        whiten_text: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                not self.whiten_text or self.text_granularity == "pooled",
                self,
                "whiten_text",
                'False unless texts are "pooled"',
            )

        @property
        def backbone_granularity(self) -> Literal["pooled"]:
            return "pooled"

    visual_granularities = ("pooled", "pixels")
    text_granularities = ("pooled", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.backbone = open_image_backbone(config, config.backbone)
        # A bilinear score compares texts with image features as they are.
        output_dim = config.visual_input_dim if config.bilinear else config.embedding_dim
        layers = {
            key: getattr(config, key)
            for key in ("hidden_layers", "hidden_dim", "dropout", "input_dropout")
        }
        self.visual = (
            nn.Identity()
            if config.bilinear
            else build_mlp(config.visual_input_dim, output_dim, **layers)
        )
        self.whitening = Whitening(config.text_input_dim) if config.whiten_text else nn.Identity()
        if config.text_granularity == "pooled":
            self.text = build_mlp(config.text_input_dim, output_dim, **layers)
        else:
            text_cnn = TextCNN(
                config.text_input_dim,
                config.word_dim,
                config.num_filters,
                dropout=config.word_dropout,
            )
            self.text = nn.Sequential(
                text_cnn,
                nn.Dropout(config.word_dropout),
                nn.Linear(text_cnn.output_dim, output_dim),
            )

    def encode_visual(self, items: Encoded) -> Encoded:
        return encode_unit_rows(self.visual(get_vectors(self.backbone(items))))

    def encode_text(self, items: Encoded) -> Encoded:
        return encode_unit_rows(
            self.text(
                self.whitening(get_vectors(items))
                if self.config.text_granularity == "pooled"
                else items
            )
        )


class VSEPlusPlus(GlobalMatcher):
    """VSE++: one linear layer on the image, the last state of a GRU over the words.

    Images are pooled features, regions that are projected and then pooled, or pixels through a
    trainable image encoder.

    Args:
        config: The architecture.

    Source:
        Faghri et al., VSE++ (2018).

    Differs from:
        The released code, which normalizes features of a trained CNN before the linear layer. Here
        they are never normalized.
    """

    name = "VSE++"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordMatcherConfig):
        """Architecture of ``VSEPlusPlus``.

        Attributes:
            embedding_dim: Dimensions of the embeddings.
            bidirectional: Whether the GRU has two directions, which are averaged.
            word_pool: Pooling of word states.
            region_pool: Pooling of projected regions, "max" in the Unified paper's VSE++ on
                regions. "encoder": the pooled output of the image encoder (layer fc7 of VGG19, the
                class token or pooler of a ViT), for pixels only.
            dropout: Dropout of word embeddings.
            backbone: Image encoder for pixels, which a recipe may train.
        """

        embedding_dim: PositiveInt = 1024
        bidirectional: bool = False
        word_pool: Literal["last", "max", "mean"] = "last"
        region_pool: Literal["max", "mean", "encoder"] = "max"
        dropout: DropoutRate = 0.0
        backbone: str = ""

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                self.region_pool != "encoder" or self.visual_granularity == "pixels",
                self,
                "region_pool",
                'max or mean: "encoder" is for pixels',
            )

        @property
        def backbone_granularity(self) -> Literal["pooled", "regions"]:
            return "pooled" if self.region_pool == "encoder" else "regions"

    visual_granularities = ("pooled", "regions", "pixels")
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.backbone = open_image_backbone(config, config.backbone)
        self.visual = xavier_linear(config.visual_input_dim, config.embedding_dim)
        self.text_backbone, self.text = build_word_encoder(
            config, config.embedding_dim, bidirectional=config.bidirectional, dropout=config.dropout
        )

    def encode_visual(self, items: Encoded) -> Encoded:
        items = self.backbone(items)
        vectors = self.visual(get_vectors(items))
        # Regions [N, R, D]. Pooled features are [N, D] already.
        if vectors.dim() == 3:
            pool = max_pool if self.config.region_pool == "max" else mean_pool
            vectors = pool(vectors, get_mask(items))
        return encode_unit_rows(vectors)

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        return encode_unit_rows(
            pool_words(self.text(items), get_mask(items), self.config.word_pool)
        )


class VSEInfinity(GlobalMatcher):
    """VSE-infinity: generalized pooling over regions and over words.

    Images are regions through a ``ResidualMLP``, or pixels through a trainable image encoder, whose
    batch norms keep their statistics, and a linear layer on its regions. A pooling operator
    follows. Texts are token ids through a bidirectional GRU, token ids through a trained text
    backbone and a linear layer, or word vectors of a frozen encoder through a ``ResidualMLP``. They
    have a pooling operator of their own.

    Args:
        config: The architecture.

    Source:
        Chen et al. (2021). VSE-infinity with Bi-GRU as in the Unified paper's tables.

    Differs from:
        The released code has no GRU, no frozen words, no dropout except BERT's own, temperature 0.1
        and no layer after the pooling (``hidden_dim`` = 0). Here at least one region, or word of a
        GRU, is always kept.
    """

    name = "VSEInfinity"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordMatcherConfig):
        """Architecture of ``VSEInfinity``.

        Attributes:
            visual_granularity: Input of images.
            embedding_dim: Dimensions of the embeddings.
            word_mask_rate: Probability of masking a word of a text backbone in training.
            word_replace_rate: Probability of replacing a word of a text backbone in training.
            word_drop_rate: Probability of dropping a word of a text backbone in training.
            dropout: Dropout of hidden layers.
            region_dropout: Dropout of region features.
            word_dropout: Dropout of word vectors and word states.
            pooled_dropout: Dropout of pooled vectors.
            size_augmentation: Probability in training of dropping a region, or a word. The words of
                a text backbone are masked, replaced and dropped before it reads them instead.
            temperature: Temperature of the pooling operators. A larger value starts and stays
                closer to the mean.
            hidden_dim: 0 projects regions and word vectors before they are pooled. n pools them
                first, and projects the result with one hidden layer of n units. States of the GRU
                or of a text backbone are pooled in both cases.
            region_pool: "mean" is the control, which learns no pooling of regions.
            backbone: Image encoder for pixels, which a recipe may train.
        """

        visual_granularity: Literal["regions", "pixels"] = "regions"
        embedding_dim: PositiveInt = 1024
        word_mask_rate: UnitFloat = 0.1
        word_replace_rate: UnitFloat = 0.02
        word_drop_rate: UnitFloat = 0.08
        dropout: DropoutRate = 0.0
        region_dropout: DropoutRate = 0.0
        word_dropout: DropoutRate = 0.0
        pooled_dropout: DropoutRate = 0.0
        size_augmentation: UnitFloat = 0.2
        temperature: PositiveFloat = 0.1
        hidden_dim: NonNegativeInt = 0
        region_pool: Literal["generalized", "mean"] = "generalized"
        backbone: str = ""

    visual_granularities = ("regions", "pixels")
    text_granularities = ("words", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.region_dropout = nn.Dropout(config.region_dropout)
        self.word_dropout = nn.Dropout(config.word_dropout)
        self.backbone = open_image_backbone(config, config.backbone)
        self.visual: nn.Module
        if config.visual_granularity == "pixels" and not config.hidden_dim:
            self.visual = xavier_linear(config.visual_input_dim, config.embedding_dim)
        else:
            self.visual = self._projection(config.visual_input_dim)
        self.visual_pool = (
            mean_pool
            if config.region_pool == "mean"
            else GeneralizedPooling(temperature=config.temperature)
        )
        self.visual_head = self._head(config.visual_input_dim)
        if config.text_granularity == "tokens":
            self.text_backbone, self.text = build_word_encoder(
                config, config.embedding_dim, bidirectional=True, dropout=config.word_dropout
            )
        else:
            self.text_backbone, self.text = nn.Identity(), self._projection(config.text_input_dim)
        self.text_pool = GeneralizedPooling(temperature=config.temperature)
        self.text_head = (
            nn.Dropout(config.pooled_dropout)
            if config.text_granularity == "tokens"
            else self._head(config.text_input_dim)
        )

    def _projection(self, input_dim: int) -> nn.Module:
        """Build the projection of regions or word vectors before pooling."""
        return (
            nn.Identity()
            if self.config.hidden_dim
            else ResidualMLP(input_dim, self.config.embedding_dim, self.config.dropout)
        )

    def _head(self, input_dim: int) -> nn.Module:
        """Build the layers after pooling."""
        config = self.config
        if not config.hidden_dim:
            return nn.Dropout(config.pooled_dropout)
        rates = {"dropout": config.dropout, "input_dropout": config.pooled_dropout}
        return build_mlp(
            input_dim, config.embedding_dim, hidden_layers=1, hidden_dim=config.hidden_dim, **rates
        )

    def train(self, mode: bool = True) -> VSEInfinity:
        """Set the mode of the modules. The batch norms of the image encoder stay in evaluation
        mode.
        """
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def parts(self) -> dict[str, list[nn.Module]]:
        visual = [
            self.visual,
            *([self.visual_pool] if isinstance(self.visual_pool, nn.Module) else []),
            self.visual_head,
        ]
        text = [self.text, self.text_pool, self.text_head]
        return {
            "backbone": [self.backbone],
            "visual": visual,
            "text_backbone": [self.text_backbone],
            "text": text,
        }

    def attention(self, visual: Encoded, text: Encoded) -> AttentionWeights | None:
        """Compute the contribution of each pair of region and word to the score. With layers after
        the pooling, it is not a sum over pairs: None.
        """
        if self.config.hidden_dim:
            return None
        regions = self.visual(get_vectors(self.backbone(visual)))
        text = self.text_backbone(text)
        words = (
            self.text(text)
            if self.config.text_granularity == "tokens"
            else self.text(get_vectors(text))
        )
        if isinstance(self.visual_pool, GeneralizedPooling):
            region_parts = self.visual_pool.contributions(regions)
        else:
            region_parts = regions / regions.shape[1]
        word_parts = self.text_pool.contributions(words)
        # The sums of the contributions are the pooled vectors, so that contributions / norms add up
        # to the cosine.
        norms = region_parts.sum(1).norm() * word_parts.sum(1).norm()
        # Shape [words, regions].
        contributions = word_parts[0] @ region_parts[0].T / norms
        # A share of the attention cannot be negative.
        positive = contributions.clamp(min=0)
        return AttentionWeights(
            positive / positive.sum(1, keepdim=True).clamp(min=EPSILON), contributions.sum(1)
        )

    def encode_visual(self, items: Encoded) -> Encoded:
        items = self.backbone(items)
        regions = self.visual(self.region_dropout(get_vectors(items)))
        kept = self._keep_mask(items, from_image=self.config.visual_granularity == "pixels")
        return encode_unit_rows(self.visual_head(self.visual_pool(regions, kept)))

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        words = (
            self.text(items)
            if self.config.text_granularity == "tokens"
            else self.text(self.word_dropout(get_vectors(items)))
        )
        kept = items.mask if self.config.text_backbone else self._keep_mask(items)
        return encode_unit_rows(self.text_head(self.text_pool(self.word_dropout(words), kept)))

    def _keep_mask(self, items: Encoded, *, from_image: bool = False) -> Tensor | None:
        """Return the mask of positions that are kept. In training, positions are dropped at random,
        but never all of an item.
        """
        if not self.training or not self.config.size_augmentation:
            return get_mask(items)
        valid = valid_mask(items)
        # The position of an item with the largest random number is always kept.
        noise = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, 0.0)
        drop_rate: float | Tensor = self.config.size_augmentation
        if from_image:
            # Images have a drop rate of their own: uniform in [0, 1] times the rate, or 0 if the
            # number is below the rate.
            factor = torch.rand(len(valid), 1, device=valid.device)
            drop_rate = drop_rate * factor * (factor > drop_rate)
        return (noise > drop_rate) | (valid & (noise == noise.amax(1, keepdim=True)))
