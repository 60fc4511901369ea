"""Inputs of models of sentence-transformers that read images and texts: one item at a time, padded
to batches that can be sliced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded, Modality, concatenate, unit_rows
from visavis.core.errors import DataError
from visavis.data.parallel import map_in_order
from visavis.data.sequences import read_items
from visavis.models.encoders.checkpoint_files import check_finite_weights
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.encoders.pretrained_files import SENTENCE_CONFIG
from visavis.models.encoders.pretrained_loading import check_encoding, check_weight_files
from visavis.models.encoders.sentence_encoders import load_sentence_transformers_model

if TYPE_CHECKING:
    from visavis.data.image_file import Image as ListedImage

IDS, MASK = "input_ids", "attention_mask"
PROMPT_NAMES = {"text": ("query",), "visual": ("document", "passage", "corpus")}
"""Names of the prompts of each side, as ``encode_query`` and ``encode_document`` select them."""
TASKS = {"text": "query", "visual": "document"}
"""Task of each side, as ``encode_query`` and ``encode_document`` pass it."""


class EmbeddingInputs:
    """Converts the items of one side to the input of a model, and runs the model.

    Args:
        model: A ``SentenceTransformer``. Without its weights it only converts.
        side: Images are documents, and texts are queries.
        instruction: Text in front of each item, or in its system message. None: the prompt of the
            model.
    """

    def __init__(self, model: Any, side: Modality, instruction: str | None = None):
        self.model = model
        self.side = side
        if instruction is None:
            names = (*PROMPT_NAMES[side], model.default_prompt_name)
            instruction = next((model.prompts[name] for name in names if name in model.prompts), "")
        self.instruction = instruction

    def _features(self, items: Sequence[Any]) -> dict[str, Any]:
        features = self.model.preprocess(
            list(items), prompt=self.instruction, task=TASKS[self.side]
        )
        return dict(features)

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """Features that are not tensors, and are equal for all items of a side."""
        features = self._features(["a"] if self.side == "text" else [blank_image()])
        return {name: value for name, value in features.items() if not isinstance(value, Tensor)}

    def convert(self, items: Sequence[Any]) -> Encoded:
        """Convert images or texts to named parts: tokens ``[N, L]``, padded at their end, and other
        inputs ``[N, L, ...]``, such as patches, with their length in a part of its own.
        """
        converted = []
        # One by one, because a processor packs the patches of all images of a batch along the first
        # axis. `concatenate` pads the items.
        for item in items:
            features = self._features([item])
            parts = dict[str, Tensor]()
            for name, value in features.items():
                if not isinstance(value, Tensor):
                    continue
                is_token = name.endswith(_TOKENS) and IDS in features
                if is_token and value.shape == features[IDS].shape:
                    parts[name] = value
                else:
                    parts[name] = value[None]
                    parts[_length(name)] = torch.tensor([len(value)])
            if IDS in parts:
                parts.setdefault(MASK, torch.ones_like(parts[IDS]))
            converted.append(Encoded(parts))
        return concatenate(converted)

    def encode(self, items: Encoded) -> Tensor:
        """Encode items of ``convert`` on the device of the model to vectors ``[N, D]``."""
        parts = items.vectors
        assert isinstance(parts, dict)
        features: dict[str, Any] = dict(self._constants)
        for name, value in parts.items():
            if (lengths := parts.get(_length(name))) is not None:
                # Without padding, packed along the first axis, as the model reads them.
                is_valid = torch.arange(value.shape[1], device=value.device) < lengths[:, None]
                features[name] = value[is_valid]
            elif name.endswith(_TOKENS):
                features[name] = value
        if IDS in features:
            padding = getattr(self.model.tokenizer, "pad_token_id", None) or 0
            features[IDS] = features[IDS].masked_fill(features[MASK] == 0, padding)
        vectors: Tensor = self.model(features, task=TASKS[self.side])["sentence_embedding"]
        return vectors[:, : self.model.truncate_dim]


_TOKENS = ("_ids", "_mask")
"""Endings of the names of inputs with a value for each token."""


def _length(name: str) -> str:
    return f"{name}:length"


class EmbeddingTokenizer:
    """Converts texts with the interface of ``PretrainedTokenizer``.

    Args:
        inputs: Conversion of texts.
    """

    fixed_length = False

    def __init__(self, inputs: EmbeddingInputs):
        self.inputs = inputs
        self.prompt = inputs.instruction
        self.tokenizer = inputs.model.tokenizer
        self.max_length = inputs.model.max_seq_length or self.tokenizer.model_max_length

    def __len__(self) -> int:
        return len(self.tokenizer)

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Count the tokens ``[N]`` of texts that are not cut, without the instruction."""
        ids = self.tokenizer(list(texts), verbose=False)[IDS]
        return np.array([len(row) for row in ids], dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Convert texts to named parts, see ``EmbeddingInputs.convert``."""
        return self.inputs.convert(texts)


class ConvertedImages:
    """Images of a split, converted when they are read.

    Args:
        images: The images.
        inputs: Conversion of images.
    """

    def __init__(self, images: Sequence[ListedImage], inputs: EmbeddingInputs):
        self.images = images
        self.inputs = inputs

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read and convert some images. ``seeds`` is not used."""
        # Each image once, also if it occurs several times.
        numbers, image_of = np.unique(index, return_inverse=True)
        opened = map_in_order(lambda image: image.open(), read_items(self.images, numbers))
        # In one thread, because tokenizers are not thread-safe.
        return self.inputs.convert(list(opened))[torch.from_numpy(image_of)]


def load_embedding_model(folder: Path, **options: Any) -> Any:
    """Load a model that reads images and texts, in float32. All weights must be in the folder and
    finite.
    """
    model = load_sentence_transformers_model(folder, **({"dtype": torch.float32} | options))
    if not {"image", "text"} <= set(model.modalities):
        read = ", ".join(map(str, model.modalities))
        raise DataError(
            f"{folder}: expected a model that reads images and texts, got one that reads {read}. "
            "Use another model."
        )
    parts = [file.parent for file in sorted(folder.rglob(SENTENCE_CONFIG))]
    for part in parts or [folder]:
        check_weight_files(part)
    check_finite_weights(model.named_parameters(), folder)
    return model


@torch.no_grad()
def check_inputs(inputs: EmbeddingInputs, folder: Path) -> None:
    """Check that vectors are finite and do not depend on the other items of a batch."""
    # Two items of different sizes, so that a batch of both can have padding.
    image = blank_image()
    items: tuple[Any, Any] = (image.resize((64, 64)), image.resize((96, 64)))
    if inputs.side == "text":
        items = ("a dog", "two dogs on a wide beach")

    def encode() -> Tensor:
        batches = [inputs.convert(batch) for batch in (items, items[:1], items[1:])]
        return torch.cat([unit_rows(inputs.encode(batch)) for batch in batches])

    name = "a text" if inputs.side == "text" else "an image"
    together, alone = check_encoding(encode, folder, name).chunk(2)
    if not together.allclose(alone, atol=1e-3):
        raise DataError(
            f"{folder}: expected equal vectors of {name} in every batch, got vectors that depend "
            "on the other items, by "
            f"{(together - alone).abs().max():.2g}. Use another model."
        )
