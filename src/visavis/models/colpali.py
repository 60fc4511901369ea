"""ColPali and its family, late-interaction models of ``transformers`` for images of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from visavis.core.encoded import Encoded, unit_rows
from visavis.core.errors import VisavisError
from visavis.models.base import Matcher, MatcherConfig, get_vectors
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.encoders.pretrained_files import model_folder
from visavis.models.encoders.pretrained_loading import (
    check_encoding,
    load_pretrained_model,
    load_pretrained_processor,
)
from visavis.models.image_text.cross_attention import RegionWordSimilarity, mean_best_region
from visavis.models.layers import at_least_float32
from visavis.models.processor import Processor

if TYPE_CHECKING:
    from PIL.Image import Image

ATTENTION_MASK = "attention_mask"


class ColPali(Matcher):
    """ColPali, ColQwen2 or ColModernVBert: one vector per token of a page and of a query. The score
    is the mean over query tokens.

    Formula:
        $S = mean_w max_r s_rw$ with cosines s of the tokens w of the query and the tokens r of
        the page.

    Args:
        config: The architecture.

    Source:
        Faysse et al., ColPali: Efficient Document Retrieval with Vision Language Models (2024),
        section 4.

    Differs from:
        The paper, which sums over query tokens. The mean ranks the pages in the same order, with
        scores from -1 to 1.
    """

    name = "ColPali"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        """Architecture of ``ColPali``.

        Attributes:
            visual_granularity: Always "pixels".
            text_granularity: Always "tokens".
            backbone: Folder or hub name of the model.
        """

        visual_granularity: Literal["pixels"] = "pixels"
        text_granularity: Literal["tokens"] = "tokens"
        backbone: str

    visual_granularities = ("pixels",)
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.model = load_pretrained_model(
            model_folder(config.backbone), "AutoModelForPreTraining", dtype="auto"
        )

    @property
    def late_interaction(self) -> Literal["t2i"]:
        return "t2i"

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"model": [self.model]}

    def encode_visual(self, items: Encoded) -> Encoded:
        return self._encode(items)

    def encode_text(self, items: Encoded) -> Encoded:
        return self._encode(items)

    def _encode(self, items: Encoded) -> Encoded:
        assert isinstance(items.vectors, dict)
        mask = items.vectors[ATTENTION_MASK].bool()
        vectors = unit_rows(at_least_float32(self.model(**items.vectors).embeddings))
        return Encoded(vectors.masked_fill(~mask[..., None], 0.0), mask)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return mean_best_region(RegionWordSimilarity.compute(visual, text))

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Refuse to save: the model is not trained here, so its own folder is complete."""
        raise VisavisError(
            f"{self.config.backbone}: expected a model that was trained here, got a pretrained "
            f"{self.name}. Copy its folder."
        )


class ColPaliProcessor(Processor):
    """Converts images and texts with the processor of the model, which adds its prompts. It has the
    attributes of ``Processor``.
    """

    @cached_property
    def pretrained(self) -> Any:
        """The opened processor of transformers."""
        return load_pretrained_processor(model_folder(self.visual_spec.name))

    @property
    def min_side(self) -> int:
        """Always 0: images are decoded in full."""
        return 0

    @property
    def converts_single_images(self) -> bool:
        """Always False: the processor of the model converts a batch as a whole."""
        return False

    def process_images(
        self,
        images: Sequence[Image | Sequence[Image]],
        granularity: str,
        device: torch.device | str = "cpu",
    ) -> Encoded:
        """Convert images, see ``Processor.process_images``."""
        return _named_parts(self.pretrained.process_images(images=list(images)))

    def process_texts(self, texts: Sequence[str], device: torch.device | str = "cpu") -> Encoded:
        """Convert texts to queries, see ``Processor.process_texts``."""
        return _named_parts(self.pretrained.process_queries(text=list(texts)))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of queries, see ``Processor.count_tokens``."""
        mask = self.pretrained.process_queries(text=list(texts))[ATTENTION_MASK]
        counts: list[int] = mask.sum(1).tolist()
        return counts


def _named_parts(batch: Any) -> Encoded:
    """Inputs of the model without labels, which only training reads."""
    return Encoded({name: value for name, value in batch.items() if name != "labels"})


def open_colpali(name: str) -> tuple[ColPali, ColPaliProcessor]:
    """Open a pretrained model."""
    folder = model_folder(name)
    processor = ColPaliProcessor(EncoderSpec("visual", name, "regions"), None, None, name)
    matcher = ColPali(ColPali.Config(backbone=name, visual_input_dim=1, text_input_dim=1)).eval()
    with torch.inference_mode():
        check_encoding(
            lambda: get_vectors(
                matcher.encode_visual(processor.process_images([blank_image()], "pixels"))
            ),
            folder,
            "an image",
        )
        check_encoding(
            lambda: get_vectors(matcher.encode_text(processor.process_texts(["a dog"]))),
            folder,
            "a text",
        )
    return matcher, processor
