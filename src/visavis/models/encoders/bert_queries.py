"""Queries of a frozen BERT, such as MiniLM, without transformers, whose import takes several times
longer than a search.

Only the usual files are read here: weights in float32, a ``tokenizer.json``, and a config of the
original architecture. ``BertQueryEncoder.open`` returns None for all others, and transformers reads
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.models.encoders.checkpoint_files import check_finite_weights
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.pretrained_files import model_folder
from visavis.models.encoders.sentence_encoders import SentencePooling, needs_sentence_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMALIZATION = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
"""Settings of a ``tokenizer_config.json``, and their names in the ``tokenizer.json``."""


@dataclass
class BertQueryEncoder:
    """Encodes texts as ``TextEncoder`` does, up to the last digits.

    Attributes:
        spec: Specification of the encoder.
        weights: Weights by their names in BERT.
        config: Content of the ``config.json``.
        tokenizer: Cuts and pads texts.
        pooling: Pooling of words.
    """

    spec: EncoderSpec
    weights: dict[str, Tensor]
    config: dict[str, Any]
    tokenizer: Tokenizer
    pooling: SentencePooling

    @classmethod
    def open(cls, spec: EncoderSpec) -> Self | None:
        """Open the encoder.

        Args:
            spec: Specification of a frozen text encoder.

        Returns:
            The encoder. None if transformers has to read its files.

        Raises:
            DataError: If the folder does not exist, or its weights are damaged.
        """
        folder = model_folder(spec.name)
        files = [folder / name for name in ("model.safetensors", "tokenizer.json", "config.json")]
        if not all(map(os.path.isfile, files)) or needs_sentence_transformers(folder):
            return None
        config = storage.read_json(folder / "config.json", dict[str, Any])
        if not _is_original_bert(config) or not _is_tokenizer_complete(folder):
            return None
        weights = storage.read_tensors(folder / "model.safetensors")
        if _missing_names(weights, config) or any(
            part.is_floating_point() and part.dtype != torch.float32 for part in weights.values()
        ):
            return None
        check_finite_weights(weights.items(), folder)
        from tokenizers import Tokenizer

        pooling = SentencePooling.read(folder, _max_length(folder, config))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(pooling.max_length)
        tokenizer.enable_padding(pad_id=config.get("pad_token_id", 0))
        return cls(spec, weights, config, tokenizer, pooling)

    def to(self, device: torch.device | str) -> Self:
        """Move the weights.

        Args:
            device: The device.

        Returns:
            The encoder.
        """
        self.weights = {name: part.to(device) for name, part in self.weights.items()}
        return self

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts without a gradient.

        Args:
            texts: The texts.

        Returns:
            One vector per text ``[N, D]``, or one per word piece ``[N, L, D]`` with a mask.
        """
        device = next(iter(self.weights.values())).device
        encodings = self.tokenizer.encode_batch(list(texts))
        ids = torch.tensor([encoding.ids for encoding in encodings], device=device)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=device) > 0
        words = self._word_states(ids, mask)
        if self.spec.granularity == "words":
            return Encoded(words * mask[..., None], mask)
        return Encoded(self.pooling(words, mask))

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Count the word pieces of each text, see ``TextEncoder.count_tokens``."""
        encodings = self.tokenizer.encode_batch(list(texts))
        return np.array([sum(encoding.attention_mask) for encoding in encodings], np.int64)

    def _word_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States of the last layer, ``[N, L, D]``, and 0 in the place of padding."""
        weights = self.weights
        config = self.config
        heads = config["num_attention_heads"]
        eps = config["layer_norm_eps"]

        def project(name: str, states: Tensor) -> Tensor:
            return linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])

        def normalize(name: str, states: Tensor) -> Tensor:
            name = f"{name}.LayerNorm"
            shape = states.shape[-1:]
            return layer_norm(
                states, shape, weights[f"{name}.weight"], weights[f"{name}.bias"], eps
            )

        # Only attention reads padded texts. Of texts of several requests, a quarter would be
        # padding. A single text has none.
        is_full = bool(mask.all())

        def pad(states: Tensor) -> Tensor:
            if is_full:
                return states.unflatten(0, ids.shape)
            padded = states.new_zeros(*ids.shape, states.shape[1])
            padded[mask] = states
            return padded

        # The order of the sum is that of transformers, for equal digits. All texts are segment 0.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[mask]
        states = (
            weights["embeddings.word_embeddings.weight"][ids[mask]]
            + weights["embeddings.token_type_embeddings.weight"][0]
            + weights["embeddings.position_embeddings.weight"][positions]
        )
        states = normalize("embeddings", states)
        for number in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{number}"
            query, key, value = (
                pad(project(f"{layer}.attention.self.{name}", states))
                .unflatten(-1, (heads, -1))
                .transpose(1, 2)  # [N, heads, L, D / heads]
                for name in ("query", "key", "value")
            )
            attended = scaled_dot_product_attention(query, key, value, mask[:, None, None])
            attended = attended.transpose(1, 2).flatten(2)
            attended = attended.flatten(0, 1) if is_full else attended[mask]
            output = project(f"{layer}.attention.output.dense", attended)
            states = normalize(f"{layer}.attention.output", output + states)
            inner = gelu(project(f"{layer}.intermediate.dense", states))
            output = project(f"{layer}.output.dense", inner)
            states = normalize(f"{layer}.output", output + states)
        return pad(states)


def _is_original_bert(config: dict[str, Any]) -> bool:
    """Whether the config has only settings that are implemented here."""
    return (
        config.get("model_type") == "bert"
        and config.get("hidden_act") == "gelu"
        and config.get("position_embedding_type", "absolute") == "absolute"
        and not config.get("is_decoder")
        and all(
            isinstance(config.get(name), int | float)
            for name in ("num_attention_heads", "num_hidden_layers", "layer_norm_eps")
        )
    )


def _is_tokenizer_complete(folder: Path) -> bool:
    """Whether the ``tokenizer.json`` agrees with the ``tokenizer_config.json``, whose settings
    transformers prefers.
    """
    file = folder / "tokenizer_config.json"
    if not os.path.isfile(file):
        return False
    settings = storage.read_json(file, dict[str, Any])
    content = json.loads(storage.read_text(folder / "tokenizer.json"))
    normalizer = content.get("normalizer") or {}
    return normalizer.get("type") == "BertNormalizer" and all(
        settings[name] == normalizer.get(key)
        for name, key in NORMALIZATION.items()
        if name in settings
    )


def _missing_names(weights: dict[str, Tensor], config: dict[str, Any]) -> set[str]:
    """Names of the layers without weights, such as those of a model saved with a head."""
    layers = [
        f"encoder.layer.{number}.{part}"
        for number in range(config["num_hidden_layers"])
        for part in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "attention.output.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        )
    ]
    names = [f"embeddings.{kind}_embeddings" for kind in ("word", "token_type", "position")]
    expected = {f"{name}.weight" for name in (*names, *layers, "embeddings.LayerNorm")}
    expected |= {f"{name}.bias" for name in (*layers, "embeddings.LayerNorm")}
    return expected - weights.keys()


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    """Number of word pieces after which the model cuts a text."""
    settings = storage.read_json(folder / "tokenizer_config.json", dict[str, Any])
    limits = (config.get("max_position_embeddings"), settings.get("model_max_length"))
    return min(int(limit) for limit in limits if limit is not None)
