"""Conversion of images, clips and texts to the input of a matcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import RunError, VisavisError
from visavis.core.spec import build_object
from visavis.data.features.standardization import Standardization
from visavis.data.image_file import Image as ListedImage
from visavis.data.vocabulary import Vocabulary
from visavis.data.words import tokenize
from visavis.models.base import Matcher, load_matcher, verify_config_hash
from visavis.models.encoders.encoder_spec import (
    EncoderSpec,
    open_preprocessing,
    reads_with_own_processor,
)
from visavis.models.encoders.preprocessing import ImageConverter
from visavis.models.encoders.pretrained_files import (
    DUAL_ENCODER_TYPES,
    TEXT_BACKBONE_FOLDER,
    VISUAL_BACKBONE_FOLDER,
    is_model_folder,
    model_folder,
)
from visavis.models.text_inputs import unknown_words

if TYPE_CHECKING:
    from PIL.Image import Image

    from visavis.data.item_sources import CropReader, PixelFunction, PixelSource
    from visavis.models.encoders.frozen_encoders import FrozenEncoder, TextEncoder
    from visavis.models.encoders.text_backbone import PretrainedTokenizer


@dataclass(frozen=True)
class SavedModelConfig:
    """Content of the ``config.json`` of a model folder.

    Attributes:
        kind: Name of the matcher.
        architecture: Fields of the matcher's config.
        visual: Image encoder.
        text: Text encoder.
        vocabulary: Words of a learned vocabulary.
        tokenizer: Name of a pretrained model with the tokenizer.
        standardization: Standardization of image features.
        stored_text_features: Whether the model reads stored features of captions.
        matryoshka_dims: Lengths of vector prefixes that were trained to be used alone.
        items: Fingerprint of the item vectors that a text side belongs to.
    """

    kind: str
    architecture: dict[str, Any]
    visual: EncoderSpec | None
    text: EncoderSpec | None
    vocabulary: list[str] | None
    tokenizer: str | None = None
    standardization: Standardization | None = None
    stored_text_features: bool = False
    matryoshka_dims: tuple[int, ...] = ()
    items: str | None = None


@dataclass(frozen=True)
class Processor:
    """Converts images and texts to the input of a matcher.

    Texts are read by one of ``text``, ``vocabulary`` and ``tokenizer``, or by none with
    ``stored_text_features``.

    Attributes:
        visual: Image encoder (only its preprocessing if the matcher reads pixels). None: stored
            features only.
        text: Frozen text encoder.
        vocabulary: Words learned from captions.
        tokenizer: Name of a pretrained model with the tokenizer.
        standardization: Standardization of a frozen encoder's image features. None: features are
            unchanged.
        tokenizer_folder: Folder with the tokenizer of a text encoder that was trained with the
            model. None: the pretrained model's.
        stored_text_features: The model reads stored features of captions.
        visual_encoder_folder: Folder with the preprocessing of an image encoder that was trained
            with the model. None: the pretrained encoder's.
        items: Fingerprint of the item vectors of a model that has only a text side: of the model
            that made an index, or of a file. None: the model has both sides.
    """

    visual: EncoderSpec | None
    text: EncoderSpec | None
    vocabulary: Vocabulary | None
    tokenizer: str | None = None
    standardization: Standardization | None = None
    tokenizer_folder: Path | None = None
    stored_text_features: bool = False
    visual_encoder_folder: Path | None = None
    items: str | None = None

    @classmethod
    def from_saved_config(cls, config: SavedModelConfig, folder: Path) -> Processor:
        """Build the processor of a saved model."""
        words = Vocabulary(tuple(config.vocabulary)) if config.vocabulary else None
        backbone_folder = folder / VISUAL_BACKBONE_FOLDER
        visual_folder = backbone_folder if is_model_folder(backbone_folder) else None
        tokenizer_folder = (
            folder / TEXT_BACKBONE_FOLDER
            if config.architecture.get("text_backbone")
            else visual_folder
        )
        return cls(
            visual=config.visual,
            text=config.text,
            vocabulary=words,
            tokenizer=config.tokenizer,
            standardization=config.standardization,
            tokenizer_folder=tokenizer_folder,
            stored_text_features=config.stored_text_features,
            visual_encoder_folder=visual_folder,
            items=config.items,
        )

    @property
    def visual_spec(self) -> EncoderSpec:
        """The image encoder. Raises RunError if the model reads only stored features."""
        if self.items is not None:
            raise RunError(
                "visual encoder: expected one for images or videos, got a model that encodes only "
                f"texts, for the item vectors {self.items}. Search with their index, which takes "
                "the model with: visavis indexes use-queries INDEX RUN"
            )
        if self.visual is None:
            raise RunError(
                "visual encoder: expected one for new images or videos, got a model that was "
                "trained on stored features alone. Train with images."
            )
        return self.visual

    @property
    def to_config(self) -> dict[str, Any]:
        """Entries of ``config.json``: encoders, words and standardization, without folders."""
        words = None if self.vocabulary is None else list(self.vocabulary.words)
        encoders = {
            side: None if spec is None else spec.to_config
            for side, spec in (("visual", self.visual), ("text", self.text))
        }
        optional: dict[str, Any] = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        optional |= {"stored_text_features": True} if self.stored_text_features else {}
        optional |= {} if self.items is None else {"items": self.items}
        optional |= (
            {}
            if self.standardization is None
            else {"standardization": asdict(self.standardization)}
        )
        return encoders | {"vocabulary": words} | optional

    @cached_property
    def visual_encoder(self) -> FrozenEncoder:
        """The opened image encoder."""
        from visavis.models.encoders.frozen_encoders import open_encoder

        return open_encoder(self.visual_spec)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The opened text encoder. Raises RunError if the model reads only stored features."""
        if self.text is None:
            raise RunError(
                "text encoder: expected one for new texts, got a model that was trained on stored "
                "caption features alone. Train with captions."
            )
        from visavis.models.encoders.frozen_encoders import open_encoder

        return open_encoder(self.text)  # type: ignore[return-value]

    @cached_property
    def pretrained_tokenizer(self) -> PretrainedTokenizer | None:
        """The opened tokenizer of a pretrained model."""
        if self.tokenizer is None:
            return None
        from visavis.models.encoders.text_backbone import PretrainedTokenizer

        return PretrainedTokenizer.open(self.tokenizer_folder or model_folder(self.tokenizer))

    @cached_property
    def preprocess(self) -> ImageConverter:
        """Converts images to the encoder's pixels. The encoder itself is not loaded."""
        return open_preprocessing(self.visual_spec, self.visual_encoder_folder)

    @cached_property
    def preprocess_crops(self) -> PixelFunction:
        """Converts random crops of images to the encoder's pixels, without further cropping."""
        converter = open_preprocessing(
            self.visual_spec, self.visual_encoder_folder, already_cropped=True
        )
        # Crops are resized to the crop size, so they need no padding, but all pixels of a source
        # are normalized together.
        return converter if self.preprocess.preprocessing.pads else converter.to_bytes

    def open_images(
        self, images: Sequence[ListedImage], read_crops: CropReader | None = None
    ) -> PixelSource:
        """Open listed images as pixels. ``read_crops``: reads the crops of a training."""
        from visavis.data.item_sources import PixelSource

        converter = self.preprocess
        return PixelSource(
            images, converter.to_bytes, read_crops, self.min_side, converter.normalize
        )

    @property
    def min_side(self) -> int:
        """Shorter side that the image encoder needs of a JPEG that is decoded at a reduced size. 0:
        images are decoded in full.
        """
        return self.preprocess.min_side if self.converts_single_images else 0

    def process_images(
        self,
        images: Sequence[Image | Sequence[Image]],
        granularity: str,
        device: torch.device | str = "cpu",
    ) -> Encoded:
        """Convert images, or clips as lists of frames, to the input of a matcher. Clips have frames
        in the place of regions, ``[N, F, D]`` with a mask.
        """
        if granularity == "pixels":
            return Encoded(self.preprocess(images))  # type: ignore[arg-type]
        return self._standardize(self.visual_encoder.to(device).encode(images))

    @cached_property
    def converts_single_images(self) -> bool:
        """Whether ``encode_pixels`` reads images, or frames of clips, that ``preprocess`` converted
        one by one.
        """
        # An image encoder that was trained with the model is not sentence-transformers'.
        is_trained = self.visual_encoder_folder is not None
        return is_trained or not reads_with_own_processor(self.visual_spec)

    @torch.no_grad()
    def encode_pixels(
        self, pixels: Encoded, granularity: str, device: torch.device | str = "cpu"
    ) -> Encoded:
        """Convert pixels of ``preprocess``, or padded frames of clips, as ``process_images``."""
        if granularity == "pixels":
            return pixels
        return self._standardize(self.visual_encoder.to(device)(pixels))

    def _standardize(self, features: Encoded) -> Encoded:
        """Average the crops of frozen features, then standardize them as in training."""
        # [N, crops, ...]
        features = (
            features.map(lambda part: part.mean(1)) if self.visual_spec.crops > 1 else features
        )
        return features if self.standardization is None else self.standardization(features)

    @property
    def frames_per_second(self) -> float:
        """Frames per second that the model reads of a clip. 0 for a model that reads only images."""
        return self.visual.frames_per_second if self.visual else 0.0

    def process_texts(self, texts: Sequence[str], device: torch.device | str = "cpu") -> Encoded:
        """Convert texts to token ids or features, the input of a matcher."""
        # A vocabulary of the captions, a tokenizer of a trained text encoder, or features of a
        # frozen one.
        tokenizer = self.vocabulary or self.pretrained_tokenizer
        return (
            self.text_encoder.to(device).encode(texts)
            if tokenizer is None
            else tokenizer.encode(texts)
        )

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens that the model reads of each text, including start and end. The rest of
        a long text is cut off.
        """
        if self.vocabulary is not None:
            return [len(self.vocabulary.token_ids(text)) for text in texts]
        if (tokenizer := self.pretrained_tokenizer) is not None:
            return np.minimum(tokenizer.count_tokens(texts), tokenizer.max_length).tolist()
        # Number of words, if only sentence-transformers knows the tokens.
        return self.text_encoder.count_tokens(texts).tolist()

    def unknown_words(self, text: str) -> list[str]:
        """Find the words of a text that are not in the vocabulary."""
        return unknown_words(text, self.vocabulary)

    @property
    def known_text(self) -> str:
        """A short text that the model knows."""
        # The first words of a vocabulary are markers.
        return "a" if self.vocabulary is None else self.vocabulary.words[-1]

    def split_words(self, text: str) -> list[str | None]:
        """Split a text into the words or word pieces that a matcher reads. None: start or end."""
        if self.vocabulary is not None:
            return [None, *tokenize(text), None]
        pretrained = self.pretrained_tokenizer
        tokenizer = pretrained.tokenizer if pretrained else self.text_encoder.require_tokenizer()
        max_length = pretrained.max_length if pretrained else self.text_encoder.pooling.max_length
        token_ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        special = tokenizer.get_special_tokens_mask(token_ids, already_has_special_tokens=True)
        return [
            None if is_special else word
            for word, is_special in zip(
                tokenizer.convert_ids_to_tokens(token_ids), special, strict=True
            )
        ]

    def save(self, matcher: Matcher, folder: Path) -> None:
        """Write a model folder: config and weights of the matcher, with this processor in the
        config.
        """
        matcher.save_pretrained(folder, **self.to_config)


def unsupported_content(folder: Path) -> str | None:
    """Describe a folder that holds no saved matcher. None: it holds one."""
    if os.path.exists(folder / "modules.json"):
        return "a sentence-transformers model that does not read images"
    if not os.path.exists(folder / "config.json"):
        return "none of them" if os.path.exists(folder) else "no such folder"
    config = storage.read_json(folder / "config.json", dict[str, Any], error=RunError)
    # Configs of transformers have a model_type. A saved matcher has a kind.
    if (model_type := config.get("model_type")) is None:
        return None
    has_code = " with code of its own, which is never run" if config.get("auto_map") else ""
    return f"a model of type {model_type}{has_code}"


def missing_model(run: Path) -> RunError:
    """Make the error about a run without a model."""
    return RunError(
        f"{run}: expected a model, but the training has not reached its first validation. "
        f"Resume it with --resume {run}."
    )


def load_saved_model(folder: Path) -> tuple[Matcher, Processor]:
    """Load the matcher of a model folder, with its processor."""
    from visavis.models import find_model, suggest_model

    file = folder / "config.json"
    if not os.path.exists(file) and os.path.exists(folder / "run.toml"):
        raise missing_model(folder)
    if (content := unsupported_content(folder)) is not None:
        raise RunError(
            f"{folder}: expected a run or model folder (config.json and model.safetensors in it, "
            "or in its folder model), or a CLIP, SigLIP or ColPali model of transformers, or of the "
            f"types {', '.join(DUAL_ENCODER_TYPES[2:])}, or a model of sentence-transformers that "
            f"reads images, got {content}. Pass the folder of a run, or one of these models."
        )
    config = storage.read_json(file, SavedModelConfig, error=RunError)
    if (kind := find_model(config.kind)) is None:
        raise RunError(
            f"{file}: expected a known kind of model, got {config.kind!r}: "
            f"{suggest_model(config.kind)}"
        )
    try:
        processor = Processor.from_saved_config(config, folder)
        architecture = build_object(kind.Config, config.architecture)
        if config.items is not None:
            from visavis.models.text_side import text_side

            kind = text_side(kind)
    except VisavisError as error:
        raise RunError(
            f"{file}: expected a model of this version, got another ({error}). Load it with the "
            "version that saved it."
        ) from None
    processor = kind.adapt_processor(processor, config.architecture, None)
    # After the checks that name a wrong entry, which help more than a hash.
    verify_config_hash(file)
    matcher = load_matcher(kind, architecture, folder)
    matcher.matryoshka_dims = config.matryoshka_dims
    return matcher, processor
