"""Conversion of open_clip checkpoints to CLIP models of ``transformers``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.fields import PositiveInt
from visavis.models.clip.model import open_dual_encoder
from visavis.models.encoders.checkpoint_files import (
    CheckpointConversion,
    WeightNames,
    check_weight_names,
    check_weight_shapes,
    rename_weights,
    weight_and_bias,
)
from visavis.models.encoders.preprocessing import IMAGE_PREPROCESSING
from visavis.models.encoders.pretrained_files import (
    can_be_extended,
    copy_config_files,
    model_folder,
)
from visavis.models.encoders.pretrained_loading import load_pretrained_model, open_text_source

OPEN_CLIP_CONFIG = "open_clip_config.json"
"""File name of the configuration that open_clip stores next to weights on the hub."""
DEFAULT_TOKENIZER = "openai/clip-vit-base-patch32"
"""Model with the tokenizer of CLIP."""
IGNORED_WEIGHTS = re.compile(r"attn_mask")
"""Buffers that are not weights."""
EMBEDDING_NAMES = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "logit_scale": "logit_scale",
}
"""Names of single weights in open_clip and in transformers."""
TRANSPOSED_WEIGHTS = ("text_projection", "visual.proj")
"""Matrices that open_clip multiplies from the right."""
NORM_NAMES = {
    "ln_final": "text_model.final_layer_norm",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
}
"""Names of layer norms in open_clip and in transformers."""
BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
"""Names of the parts of a transformer block in open_clip and in transformers."""
ENCODER_NAMES = {"": "text_model", "visual.": "vision_model"}
"""Prefixes of the text and the image encoder in open_clip, with their names in transformers."""
SUPPORTED_CONFIG_KEYS = {
    "": {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale"},
    "vision_cfg": {
        "image_size",
        "layers",
        "width",
        "head_width",
        "mlp_ratio",
        "patch_size",
        "patch_dropout",
    },
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"},
}
"""Supported options of a configuration. Other options would define another model."""


@dataclass(frozen=True)
class _VisionConfig:
    layers: PositiveInt = 12
    width: PositiveInt = 768
    head_width: PositiveInt = 64
    patch_size: PositiveInt = 16
    image_size: PositiveInt = 224


@dataclass(frozen=True)
class _TextConfig:
    layers: PositiveInt = 12
    width: PositiveInt = 512
    heads: PositiveInt = 8


@dataclass(frozen=True)
class _ModelConfig:
    """Part of open_clip's configuration that the weights do not define or must agree with, with
    open_clip's defaults.
    """

    embed_dim: PositiveInt
    vision_cfg: _VisionConfig
    text_cfg: _TextConfig
    quick_gelu: bool = False


def is_open_clip(tensors: Iterable[str]) -> bool:
    """Check whether weights belong to open_clip, by their names."""
    return any(
        name.removeprefix("text.") == "token_embedding.weight"
        or name.startswith(("visual.conv1.", "visual.trunk."))
        for name in tensors
    )


def convert_open_clip(
    tensors: Mapping[str, Tensor],
    checkpoint: Path,
    out: str | Path,
    *,
    config: str = "",
    text: str = "",
) -> CheckpointConversion:
    """Write the weights of a CLIP with transformer encoders into a new folder of ``transformers``,
    to be used like any CLIP model.
    """
    tensors = {name.removeprefix("text."): tensor for name, tensor in tensors.items()}
    model, preprocessing = _read_config(config, checkpoint)
    if (layers := model.text_cfg.layers + model.vision_cfg.layers) > len(tensors):
        raise DataError(
            f"{checkpoint}: expected weights of {layers:,} layers, got {len(tensors):,} tensors. "
            "Pass the configuration of the model."
        )
    names = dict(_weight_names(model))
    expected = "a CLIP of open_clip with the vision transformer of its configuration"
    check_weight_names(tensors, names, IGNORED_WEIGHTS, checkpoint, expected)
    text_folder, tokenizer = open_text_source(
        text or DEFAULT_TOKENIZER, checkpoint, "needs the tokenizer of CLIP"
    )
    # The weights must have the sizes that the configuration and the tokenizer define.
    vision = model.vision_cfg
    text_encoder = model.text_cfg
    shapes = {
        "visual.conv1.weight": (vision.width, 3, vision.patch_size, vision.patch_size),
        "visual.positional_embedding": (
            (vision.image_size // vision.patch_size) ** 2 + 1,
            vision.width,
        ),
        "visual.proj": (vision.width, model.embed_dim),
        "text_projection": (text_encoder.width, model.embed_dim),
        "token_embedding.weight": (len(tokenizer), text_encoder.width),
    }
    advice = "Pass the configuration and tokenizer that it was trained with."
    check_weight_shapes(tensors, shapes, checkpoint, advice)
    vision_heads = vision.width / vision.head_width
    for part, heads in ((vision, vision_heads), (text_encoder, text_encoder.heads)):
        # A rounded number of heads would give other features without an error.
        if heads != int(heads) or part.width % heads:
            raise DataError(
                f"{checkpoint}: expected a width that is divisible by {heads:g} heads, got "
                f"{part.width}. Pass the configuration of this model."
            )
    converted = rename_weights(
        tensors | {name: tensors[name].T for name in TRANSPOSED_WEIGHTS}, names
    )
    with storage.atomic_folder(out) as folder:
        # Copies the tokenizer. Its config and preprocessing are replaced by the following files.
        copy_config_files(text_folder, folder)
        storage.write_json(folder / "config.json", _build_config(model, converted, tokenizer))
        storage.write_json(
            folder / "preprocessor_config.json",
            _preprocessor_config(preprocessing, model.vision_cfg.image_size),
        )
        storage.write_tensors(folder / "model.safetensors", converted, for_transformers=True)
        # Opened once as a check, before the folder gets its name.
        open_dual_encoder(str(folder))
    return _conversion_result(Path(out))


KEPT_POSITIONS = 20
"""Positions that stay as they are when a text encoder is extended. CLIP was trained mostly on texts
of this length.
"""
MAX_TEXT_LENGTH = 100_000
"""Maximum length of an extended text encoder, in tokens."""


def extend_positions(name: str, max_length: int, out: str | Path) -> CheckpointConversion:
    """Write a CLIP or SigLIP model that reads longer texts. The positions after the 20th are
    interpolated.
    """
    folder = model_folder(name)
    config = storage.read_json(folder / "config.json", dict[str, Any])
    if not can_be_extended(name):
        raise DataError(
            f"{name}: expected a CLIP, SigLIP or MetaCLIP model, got a model of kind "
            f"{config.get('model_type')}. Extend one of them."
        )
    model = load_pretrained_model(folder, dtype=torch.float32)
    positions = model.text_model.embeddings.position_embedding.weight.data
    problem = ""
    if max_length <= len(positions):
        problem = (
            f"max_length: expected more than the {len(positions)} tokens that {name} reads, got "
            f"{max_length}. Set a larger number."
        )
    elif len(positions) <= KEPT_POSITIONS:
        problem = (
            f"{name}: expected a model that reads more than {KEPT_POSITIONS} tokens, got "
            f"{len(positions)}. Use another model."
        )
    if problem:
        raise DataError(problem)
    weights = {key: value.data for key, value in model.state_dict(keep_vars=True).items()}
    # The name may have a prefix.
    (position_name,) = (
        key for key in weights if key.endswith("text_model.embeddings.position_embedding.weight")
    )
    size = max_length - KEPT_POSITIONS
    # Zhang et al., Long-CLIP: Unlocking the Long-Text Capability of CLIP (2024), interpolate 77
    # positions to 248. [1, D, L]: positions are the last axis of a linear interpolation.
    interpolated = interpolate(
        positions[KEPT_POSITIONS:].T[None], size=size, mode="linear", align_corners=True
    )[0].T
    weights[position_name] = torch.cat([positions[:KEPT_POSITIONS], interpolated])
    config["text_config"] = {**config.get("text_config", {}), "max_position_embeddings": max_length}
    with storage.atomic_folder(storage.prepare_empty_folder(out, will_be_replaced=True)) as part:
        copy_config_files(folder, part)
        storage.write_json(part / "config.json", config)
        file = part / "tokenizer_config.json"
        if os.path.exists(file):
            settings = storage.read_json(file, dict[str, Any])
            storage.write_json(file, settings | {"model_max_length": max_length})
        storage.write_tensors(part / "model.safetensors", weights, for_transformers=True)
        # Opened once as a check, before the folder gets its name.
        open_dual_encoder(str(part))
    return _conversion_result(Path(out))


def _conversion_result(folder: Path) -> CheckpointConversion:
    encoder = {"encoder": str(folder)}
    return CheckpointConversion(
        folder,
        {"name": folder.name, "extends": "clip/small-data", "visual": encoder, "text": encoder},
    )


def _read_config(name: str, checkpoint: Path) -> tuple[_ModelConfig, dict[str, Any]]:
    """Return the configuration of a model, and its preprocessing."""
    installed = importlib.util.find_spec("open_clip")
    # A file, the file next to the checkpoint, or a name such as ViT-B-32 that open_clip knows.
    candidates = [Path(name) if name else checkpoint.parent / OPEN_CLIP_CONFIG]
    if name and installed is not None and installed.origin:
        candidates.append(Path(installed.origin).parent / "model_configs" / f"{name}.json")
    file = next(filter(os.path.isfile, candidates), None)
    if file is None:
        actual = f"got none, and no {OPEN_CLIP_CONFIG} next to {checkpoint}"
        if name:
            actual = f"got {name!r}, which is not a file"
        raise DataError(
            f"config: expected a configuration file of open_clip, {actual}. Weights alone do not "
            "define the number of attention heads. "
            "Pass a file, or a name such as ViT-B-32 if open_clip is "
            f"installed{'' if installed else ' (it is not installed)'}."
        )
    content = storage.read_json(file, dict[str, Any])
    model = content.get("model_cfg", content)
    preprocessing = content.get("preprocess_cfg", {})
    for part, supported in SUPPORTED_CONFIG_KEYS.items():
        section = model.get(part) if part else model
        problem = ""
        if not isinstance(section, dict):
            problem = (
                f"a configuration of open_clip with {part}, got none. Pass the configuration of "
                "the model."
            )
        elif unsupported := sorted(
            name for name, value in section.items() if name not in supported and value
        ):
            problem = (
                f"options of a CLIP of transformers, got {part or 'model'}.{unsupported[0]}. "
                "Convert a model without this option."
            )
        if problem:
            raise DataError(f"{file}: expected {problem}")
    return storage.parse_json(json.dumps(model).encode(), _ModelConfig, str(file)), preprocessing


def _weight_names(model: _ModelConfig) -> Iterator[WeightNames]:
    """Yield every weight of a complete checkpoint by its name in open_clip, with its names in
    transformers (three for a split weight).
    """
    yield from ((name, (target,)) for name, target in EMBEDDING_NAMES.items())
    yield from weight_and_bias(NORM_NAMES.items())
    for (side, encoder), depth in zip(
        ENCODER_NAMES.items(), (model.text_cfg.layers, model.vision_cfg.layers), strict=True
    ):
        for layer in range(depth):
            source = f"{side}transformer.resblocks.{layer}."
            target = f"{encoder}.encoder.layers.{layer}."
            yield from weight_and_bias(BLOCK_NAMES.items(), source, target)
            for end in ("weight", "bias"):
                yield (
                    f"{source}attn.in_proj_{end}",
                    tuple(f"{target}self_attn.{name}_proj.{end}" for name in "qkv"),
                )


def _build_config(
    model: _ModelConfig, converted: Mapping[str, Tensor], tokenizer: Any
) -> dict[str, Any]:
    """Build the ``config.json`` of transformers. The converted weights define some sizes."""

    def encoder_config(side: str, part: _TextConfig | _VisionConfig, heads: int) -> dict[str, Any]:
        return {
            "hidden_act": "quick_gelu" if model.quick_gelu else "gelu",
            "projection_dim": model.embed_dim,
            "hidden_size": part.width,
            "intermediate_size": len(converted[f"{side}.encoder.layers.0.mlp.fc1.bias"]),
            "num_hidden_layers": part.layers,
            "num_attention_heads": heads,
        }

    vision = model.vision_cfg
    vocabulary_size, max_length = (
        len(converted[f"text_model.embeddings.{name}_embedding.weight"])
        for name in ("token", "position")
    )
    tokens = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": model.embed_dim,
        "text_config": encoder_config("text_model", model.text_cfg, model.text_cfg.heads)
        | tokens
        | {"vocab_size": vocabulary_size, "max_position_embeddings": max_length},
        "vision_config": encoder_config("vision_model", vision, vision.width // vision.head_width)
        | {"image_size": vision.image_size, "patch_size": vision.patch_size},
    }


def _preprocessor_config(preprocessing: Mapping[str, Any], side: int) -> dict[str, Any]:
    """Build the preprocessing of transformers. Raises DataError for a resize mode that it does not
    have.
    """
    mode = preprocessing.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise DataError(
            f"resize_mode: expected shortest or squash, got {mode!r}. Convert a model with one of "
            "these modes."
        )
    square = {"height": side, "width": side}
    statistics = {
        f"image_{name}": list(preprocessing[name])
        for name in ("mean", "std")
        if preprocessing.get(name)
    }
    return IMAGE_PREPROCESSING | {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side} if mode == "shortest" else square,
        "resample": 2 if preprocessing.get("interpolation") == "bilinear" else 3,
        "do_center_crop": mode == "shortest",
        "crop_size": square,
        **statistics,
    }
