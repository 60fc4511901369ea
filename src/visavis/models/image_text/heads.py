"""Heads on features of encoders. Encoders are frozen, or trained in the case of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from visavis.core.encoded import Encoded
from visavis.core.spec import DropoutRate, OptionalLayerCount, PositiveInt, require_field
from visavis.models.base import (
    GlobalMatcher,
    MatcherConfig,
    encode_unit_rows,
    get_vectors,
    open_image_backbone,
)
from visavis.models.layers import Whitening, build_mlp
from visavis.models.word_encoders import TextCNN


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
                ``unit(v) . unit(W t)``.
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
