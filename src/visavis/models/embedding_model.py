"""Models of sentence-transformers that read images and texts, such as embedders made from
vision-language models, pretrained or fine-tuned, also with low-rank adapters (LoRA) of ``peft``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.encoded import Encoded, Modality
from visavis.core.errors import DataError, RecipeError
from visavis.core.fields import DropoutRate, NonNegativeInt, PositiveFloat
from visavis.models.base import GlobalMatcher, MatcherConfig, encode_unit_rows
from visavis.models.clip.model import add_adapters, merge_adapters
from visavis.models.encoders.embedding_inputs import (
    ConvertedImages,
    EmbeddingInputs,
    EmbeddingTokenizer,
    check_inputs,
    load_embedding_model,
)
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.pretrained_files import (
    CONFIG_FILE_PATTERNS,
    VISUAL_BACKBONE_FOLDER,
    model_folder,
    quiet_transformers,
    saved_part_folder,
    weights_checksum,
)
from visavis.models.encoders.sentence_encoders import (
    load_sentence_transformers_model,
    without_videos,
)
from visavis.models.processor import Processor

if TYPE_CHECKING:
    from PIL.Image import Image

    from visavis.data.image_file import Image as ListedImage
    from visavis.data.item_sources import CropReader

LORA_LAYERS = ("q_proj", "k_proj", "v_proj")
"""Default endings of the names of linear layers with an adapter."""


class EmbeddingModel(GlobalMatcher):
    """A model of sentence-transformers with one vector per image or text. The score is the cosine.

    Args:
        config: The architecture.

    Raises:
        DataError: If the model does not read images and texts.
        MissingExtra: If sentence-transformers or peft is not installed.

    Source:
        Reimers and Gurevych, Sentence-BERT (2019). Jiang et al., VLM2Vec (2024). Zhang et al., GME
        (2024). Hu et al., LoRA (2022).
    """

    name = "EmbeddingModel"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        """Architecture of ``EmbeddingModel``.

        Attributes:
            visual_granularity: Always "pixels".
            text_granularity: Always "tokens".
            backbone: Folder or hub name of the model.
            query_instruction: Text in front of each text, or in its system message. None: the
                prompt "query" of the model. Empty: no instruction.
            item_instruction: The same for each image. None: the prompt "document" of the model.
            lora_rank: Above 0, only low-rank adapters are trained and saved.
            lora_alpha: Updates have the factor ``lora_alpha / lora_rank``.
            lora_dropout: Dropout of the adapters.
            lora_layers: Endings of the names of linear layers with an adapter.
            base_weights_checksum: Hash of the pretrained weights that adapters belong to. Set
                automatically.
        """

        visual_granularity: Literal["pixels"] = "pixels"
        text_granularity: Literal["tokens"] = "tokens"
        backbone: str
        query_instruction: str | None = None
        item_instruction: str | None = None
        lora_rank: NonNegativeInt = 0
        lora_alpha: PositiveFloat = 16.0
        lora_dropout: DropoutRate = 0.0
        lora_layers: tuple[str, ...] = LORA_LAYERS
        base_weights_checksum: str = ""

        @property
        def backbone_granularity(self) -> Literal["pooled", "regions"]:
            return "pooled"

    visual_granularities = ("pixels",)
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        saved = saved_part_folder(VISUAL_BACKBONE_FOLDER, required=False)
        self.folder = saved or model_folder(config.backbone)
        self.model = load_embedding_model(self.folder)
        self.inputs = {
            "text": EmbeddingInputs(self.model, "text", config.query_instruction),
            "visual": EmbeddingInputs(self.model, "visual", config.item_instruction),
        }
        # The prompts of the model may change, the vectors of a saved model must not.
        self.config = replace(
            config,
            query_instruction=self.inputs["text"].instruction,
            item_instruction=self.inputs["visual"].instruction,
        )
        if config.lora_rank:
            # Before the adapters are added, which change the names of the weights.
            checksum = weights_checksum(self.model)
            if config.base_weights_checksum not in ("", checksum):
                raise DataError(
                    f"{config.backbone}: expected weights {config.base_weights_checksum}, which "
                    f"these adapters belong to, got {checksum}. Restore the model that they were "
                    "trained on."
                )
            self.config = replace(self.config, base_weights_checksum=checksum)
            # peft expects it of a model that contains models of transformers.
            self.model.base_model_prefix = ""
            add_adapters(
                self.model,
                config.lora_rank,
                config.lora_alpha,
                config.lora_dropout,
                config.lora_layers,
            )
            # Adapters make all other weights buffers. transformers reads the dtype and device of a
            # part from its parameters alone, so that parts without parameters get both from here.
            from transformers import PreTrainedModel

            first_buffer = {
                "dtype": property(lambda part: next(part.buffers()).dtype),
                "device": property(lambda part: next(part.buffers()).device),
            }
            for module in self.model.modules():
                if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
                    kind = type(module)
                    module.__class__ = type(kind.__name__, (kind,), first_buffer)

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"model": [self.model]}

    @classmethod
    def adapt_processor(
        cls, processor: Processor, architecture: Mapping[str, Any], trained: Processor | None
    ) -> EmbeddingProcessor:
        # A trained model keeps its instructions, also if the prompts of its backbone change.
        source = vars(trained) if isinstance(trained, EmbeddingProcessor) else architecture
        return EmbeddingProcessor(
            **{field.name: getattr(processor, field.name) for field in fields(Processor)},
            query_instruction=source.get("query_instruction"),
            item_instruction=source.get("item_instruction"),
        )

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the adapters. Other weights are in the folder of the model."""
        return self.state_dict() if self.config.lora_rank else {}

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Write the model folder. If all weights are trained, it contains a folder of
        sentence-transformers.
        """
        if not self.config.lora_rank:
            write_sentence_transformers_files(self, Path(folder) / VISUAL_BACKBONE_FOLDER)
        super().save_pretrained(folder, **extra)

    def encode_visual(self, items: Encoded) -> Encoded:
        return self._encode("visual", items)

    def encode_text(self, items: Encoded) -> Encoded:
        return self._encode("text", items)

    def _encode(self, side: Modality, items: Encoded) -> Encoded:
        return encode_unit_rows(self.inputs[side].encode(items))


@dataclass(frozen=True)
class EmbeddingProcessor(Processor):
    """Converts images and texts with the processor of the model. It also has the attributes of
    ``Processor``.

    Attributes:
        query_instruction: Instruction of texts. None: the prompt of the model.
        item_instruction: Instruction of images. None: the prompt of the model.
    """

    query_instruction: str | None = None
    item_instruction: str | None = None

    @cached_property
    def _inputs(self) -> dict[Modality, EmbeddingInputs]:
        """Conversion of both sides."""
        folder = self.visual_encoder_folder or model_folder(self.visual_spec.name)
        # Without weights, which a conversion does not need.
        model = load_sentence_transformers_model(folder, device_map="meta").to("meta")
        return {
            "text": EmbeddingInputs(model, "text", self.query_instruction),
            "visual": EmbeddingInputs(model, "visual", self.item_instruction),
        }

    @cached_property
    def pretrained_tokenizer(self) -> EmbeddingTokenizer:  # type: ignore[override]
        """Conversion of texts."""
        return EmbeddingTokenizer(self._inputs["text"])

    @property
    def converts_single_images(self) -> bool:
        """Always False: the processor of the model converts images of any size."""
        return False

    def open_images(  # type: ignore[override]
        self, images: Sequence[ListedImage], read_crops: CropReader | None = None
    ) -> ConvertedImages:
        """Open listed images, see ``Processor.open_images``."""
        if read_crops is not None:
            raise RecipeError(
                f"visual.augment: expected false for {EmbeddingModel.name}, whose processor reads "
                "whole images, got true. Remove it."
            )
        return ConvertedImages(images, self._inputs["visual"])

    def process_images(
        self,
        images: Sequence[Image | Sequence[Image]],
        granularity: str,
        device: torch.device | str = "cpu",
    ) -> Encoded:
        """Convert images, see ``Processor.process_images``."""
        return self._inputs["visual"].convert(images)


def write_sentence_transformers_files(matcher: EmbeddingModel, folder: Path) -> None:
    """Write a model with merged adapters as a folder of sentence-transformers, whose prompts
    "query" and "document" are the instructions.
    """
    model = matcher.model
    if matcher.config.lora_rank:
        model = load_embedding_model(matcher.folder)
        merge_adapters(matcher.model, model)
    model.prompts |= {
        "query": matcher.config.query_instruction,
        "document": matcher.config.item_instruction,
    }
    with quiet_transformers(), without_videos():
        model.save(str(folder), create_model_card=False)
    # Settings of videos, which are not read here.
    for file in {file for pattern in CONFIG_FILE_PATTERNS for file in matcher.folder.glob(pattern)}:
        is_index = file.name.endswith(".index.json")
        if not is_index and not os.path.exists(folder / file.name):
            storage.write_bytes(folder / file.name, storage.read_bytes(file))


def open_embedding_model(name: str) -> tuple[EmbeddingModel, EmbeddingProcessor]:
    """Open a pretrained model."""
    spec = EncoderSpec("visual", name, "regions")
    processor = EmbeddingProcessor(spec, None, None, name)
    matcher = EmbeddingModel(
        EmbeddingModel.Config(
            backbone=name, visual_input_dim=1, text_input_dim=len(processor.pretrained_tokenizer)
        )
    ).eval()
    for inputs in matcher.inputs.values():
        check_inputs(inputs, model_folder(name))
    return matcher, processor
