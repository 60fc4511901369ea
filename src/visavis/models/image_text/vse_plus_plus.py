"""VSE++: a linear layer on the image, and a GRU over the words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from visavis.core.encoded import Encoded
from visavis.core.spec import DropoutRate, PositiveInt, require_field
from visavis.models.base import (
    GlobalMatcher,
    encode_unit_rows,
    get_mask,
    get_vectors,
    open_image_backbone,
)
from visavis.models.layers import max_pool, mean_pool, xavier_linear
from visavis.models.word_encoders import WordMatcherConfig, build_word_encoder, pool_words


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
