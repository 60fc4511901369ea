"""Module of sentence-transformers for an exported model: its graphs are the functions at the end of
this file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from graphs import encode_image, encode_text
from PIL import Image
from preprocess import Preprocessor
from safetensors.torch import load_file
from sentence_transformers.base.modules import InputModule
from torch import nn


class ImageTextEncoder(InputModule):
    """Encodes texts and images to unit vectors. A ``str`` that is the path of a file is an image,
    any other ``str`` is a text.

    Args:
        folder: Folder of the exported model.
    """

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder
        self.preprocessor = Preprocessor(folder)
        self.tokenizer = None  # type: ignore[assignment]
        self.image = nn.Module()
        self.text = nn.Module()
        for name, tensor in load_file(os.path.join(folder, "model.safetensors")).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            if tensor.is_floating_point():
                module.register_parameter(leaf, nn.Parameter(tensor))
            else:
                module.register_buffer(leaf, tensor)

    @property
    def modalities(self) -> list[Any]:
        """Kinds of inputs."""
        return ["text", "image"]

    def get_embedding_dimension(self) -> int:
        """Return the number of dimensions of a vector."""
        return int(self.preprocessor.text["embedding_dim"])

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Convert texts and images, also mixed, to tensors."""
        is_image = [not isinstance(item, str) or os.path.isfile(item) for item in inputs]
        images = [item for item, image in zip(inputs, is_image, strict=True) if image]
        texts = [
            (prompt or "") + item for item, image in zip(inputs, is_image, strict=True) if not image
        ]
        features: dict[str, Any] = {"is_image": torch.tensor(is_image)}
        if images:
            opened = [
                item if isinstance(item, Image.Image | bytes) else Path(item) for item in images
            ]
            features["pixel_values"] = torch.from_numpy(self.preprocessor.images(opened))
        if texts:
            features |= dict(
                zip(
                    ("input_ids", "attention_mask"),
                    map(torch.from_numpy, self.preprocessor.texts(texts)),
                    strict=False,
                )
            )
        return features

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Encode the tensors of ``preprocess``."""
        is_image = features["is_image"]
        parts = {}
        if "pixel_values" in features:
            parts[True] = encode_image(self.image, features["pixel_values"])
        if "input_ids" in features:
            parts[False] = encode_text(
                self.text,
                *(features[name] for name in ("input_ids", "attention_mask") if name in features),
            )
        first = next(iter(parts.values()))
        rows = first.new_zeros(len(is_image), first.shape[1])
        for kind, vectors in parts.items():
            rows = rows.index_put((torch.nonzero(is_image == kind)[:, 0],), vectors)
        return features | {"sentence_embedding": rows}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the module to a folder."""
        for name in ("preprocessing.json", "tokenizer.json", "visavis_encoder.py"):
            if os.path.isfile(source := os.path.join(self.folder, name)):
                shutil.copy(source, output_path)
        self.save_torch_weights(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> ImageTextEncoder:  # type: ignore[override]
        """Load the module from a folder, or from the hub."""
        hub_options = {
            key: options[key]
            for key in ("token", "cache_folder", "revision", "local_files_only")
            if key in options
        }
        files = ("model.safetensors", "tokenizer.json", "visavis_encoder.py", "preprocessing.json")
        paths = [cls.load_file_path(model_name_or_path, name, **hub_options) for name in files]
        return cls(os.path.dirname(str(paths[-1])))
