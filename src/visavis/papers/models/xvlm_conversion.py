"""Conversion of X-VLM checkpoints to an image encoder and a BERT of ``transformers``, and a file
with all other weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.models.encoders.checkpoint_files import (
    CheckpointConversion,
    WeightNames,
    check_weight_names,
    rename_weights,
    weight_and_bias,
)
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.preprocessing import IMAGE_PREPROCESSING
from visavis.models.encoders.pretrained_files import copy_config_files
from visavis.models.encoders.pretrained_loading import (
    load_pretrained_config,
    load_pretrained_model,
    open_text_source,
)
from visavis.models.encoders.text_backbone import PretrainedTokenizer
from visavis.models.processor import Processor
from visavis.papers.models.xvlm import XVLM

VISUAL_FOLDER, TEXT_FOLDER, FUSION_FILE, MODEL_FOLDER = (
    "visual",
    "text",
    "fusion.safetensors",
    "model",
)
"""Parts of a converted checkpoint: two folders of transformers, a file of initial weights of
``XVLM``, and the complete model.
"""
_TEXT_LAYER = re.compile(r"text_encoder\.encoder\.layer\.(\d{1,2})\.")
_SWIN_BLOCK = re.compile(r"vision_encoder\.layers\.(\d{1,2})\.blocks\.(\d{1,2})\.")
# Largest edge of images in pixels. The interpolated position biases of a hostile checkpoint still
# fit in memory.
MAX_IMAGE_SIZE = 2048
# Name of the position biases of a Swin block.
POSITION_BIAS_TABLE = "relative_position_bias_table"
# Buffers, the pretraining heads for masked words and boxes, and the temperature of the pretraining
# loss.
IGNORED_WEIGHTS = re.compile(
    r".*\.(relative_position_index|attn_mask|position_ids)|text_encoder\.cls\..*|bbox_head\..*|temp"
)
# Names of projections and of the matching head, published and here.
PROJECTION_NAMES = {
    "vision_proj": "visual",
    "text_proj": "text",
    "itm_head.0": "match.0",
    "itm_head.1": "match.1",
    "itm_head.3": "match.3",
}
# Names of the parts of a Swin around its blocks, published and in transformers.
SWIN_NAMES = {
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "patch_embed.norm": "embeddings.norm",
    "norm": "layernorm",
}
# Names of the parts of a Swin block, published and in transformers.
SWIN_BLOCK_NAMES = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
# Parts of an attention layer of BERT.
BERT_ATTENTION_NAMES = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
# Weights of the embeddings of BERT.
BERT_EMBEDDING_NAMES = (
    "word_embeddings.weight",
    "position_embeddings.weight",
    "token_type_embeddings.weight",
    "LayerNorm.weight",
    "LayerNorm.bias",
)


def weight_name_map(
    checkpoint_names: Iterable[str], text_layers: int
) -> dict[str, tuple[str, ...]]:
    """Map every weight of a complete checkpoint of Swin and BERT to its part of the converted
    checkpoint and its names in it.

    Args:
        checkpoint_names: Names in a checkpoint, which define the number of stages, blocks and
            fusion layers.
        text_layers: Number of BERT layers.

    Returns:
        Parts and new names by published name. Several for a tensor that is split into equal parts.

    Example:
        >>> weight_name_map(["vision_encoder.layers.0.blocks.0.norm1.bias"], 1)["vision_encoder.norm.bias"]
        ('visual/layernorm.bias',)
    """
    checkpoint_names = list(checkpoint_names)
    blocks = {
        tuple(map(int, match.groups()))
        for name in checkpoint_names
        if (match := _SWIN_BLOCK.match(name))
    }
    # Blocks are numbered from 0 within each stage.
    depths = [
        1 + max(block for stage, block in blocks if stage == current)
        for current in sorted({stage for stage, _ in blocks})
    ]
    fused_layers = [
        int(match[1])
        for name in checkpoint_names
        if (match := _TEXT_LAYER.match(name)) and ".crossattention." in name
    ]
    # By default the upper half of the layers has cross-attention, as published.
    text_only_layers = min(fused_layers, default=text_layers // 2)
    projections = weight_and_bias(PROJECTION_NAMES.items(), target=f"{FUSION_FILE}/")
    return dict([*_visual_names(depths), *_text_names(text_layers, text_only_layers), *projections])


def _visual_names(depths: list[int]) -> Iterator[WeightNames]:
    yield from weight_and_bias(SWIN_NAMES.items(), "vision_encoder.", f"{VISUAL_FOLDER}/")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            source = f"vision_encoder.layers.{stage}.blocks.{block}."
            target = f"{VISUAL_FOLDER}/encoder.layers.{stage}.blocks.{block}."
            yield from weight_and_bias(SWIN_BLOCK_NAMES.items(), source, target)
            for end in ("weight", "bias"):
                yield (
                    f"{source}attn.qkv.{end}",
                    tuple(
                        f"{target}attention.self.{name}.{end}" for name in ("query", "key", "value")
                    ),
                )
            yield (
                f"{source}attn.{POSITION_BIAS_TABLE}",
                (f"{target}attention.self.{POSITION_BIAS_TABLE}",),
            )
        if stage + 1 < len(depths):
            for name in ("reduction.weight", "norm.weight", "norm.bias"):
                downsample = f"layers.{stage}.downsample.{name}"
                yield f"vision_encoder.{downsample}", (f"{VISUAL_FOLDER}/encoder.{downsample}",)


def _text_names(layers: int, text_only_layers: int) -> Iterator[WeightNames]:
    yield from (
        (f"text_encoder.embeddings.{name}", (f"{TEXT_FOLDER}/embeddings.{name}",))
        for name in BERT_EMBEDDING_NAMES
    )
    attention, cross_attention = (
        [f"{kind}.{part}" for part in BERT_ATTENTION_NAMES]
        for kind in ("attention", "crossattention")
    )
    parts = [*attention, "intermediate.dense", "output.dense", "output.LayerNorm"]
    for layer in range(layers):
        source = f"text_encoder.encoder.layer.{layer}."
        fusion_layer = layer - text_only_layers
        yield from weight_and_bias(
            zip(parts, parts, strict=True), source, f"{TEXT_FOLDER}/encoder.layer.{layer}."
        )
        if fusion_layer >= 0:
            names = zip(cross_attention, cross_attention, strict=True)
            yield from weight_and_bias(names, source, f"{FUSION_FILE}/fusion.layer.{fusion_layer}.")


def convert_xvlm(
    tensors: Mapping[str, Tensor],
    checkpoint: Path,
    out: str | Path,
    *,
    text: str = "",
    image_size: int | None = None,
) -> CheckpointConversion:
    """Write the weights of a published X-VLM of Swin and BERT, pretrained or fine-tuned, into a new
    folder.
    """
    # In some checkpoints the BERT is a part of a model with a head for masked words.
    tensors = {
        re.sub(r"^text_encoder\.bert\.", "text_encoder.", name): tensor
        for name, tensor in tensors.items()
    }
    layers = 1 + max(
        (int(match[1]) for name in tensors if (match := _TEXT_LAYER.match(name))), default=-1
    )
    names = weight_name_map(tensors, layers)
    check_weight_names(tensors, names, IGNORED_WEIGHTS, checkpoint, "an X-VLM of Swin and BERT")
    text = text or "bert-base-uncased"
    text_folder, _ = open_text_source(
        text, checkpoint, "needs the config and tokenizer of the BERT that it was trained from"
    )
    bert = load_pretrained_config(text_folder)
    shape = tensors["text_encoder.embeddings.word_embeddings.weight"].shape
    original_size = image_size or 0
    # [windows, w^2, w^2], where windows = (image / (w patch))^2, of the first shifted windows.
    mask = tensors.get("vision_encoder.layers.0.blocks.1.attn_mask")
    if mask is not None:
        patch_size = tensors["vision_encoder.patch_embed.proj.weight"].shape[-1]
        original_size = math.isqrt(len(mask)) * math.isqrt(mask.shape[1]) * patch_size
    size = image_size or original_size
    problem = ""
    if (layers, *shape) != (bert.num_hidden_layers, bert.vocab_size, bert.hidden_size):
        problem = (
            f"{bert.vocab_size:,} words of {bert.hidden_size:,} dimensions and "
            f"{bert.num_hidden_layers} text layers as in {text}, got {shape[0]:,} of {shape[1]:,} "
            f"and {layers}. Pass the text model that it was trained from."
        )
    elif mask is None and image_size is None:
        problem = (
            "the image size of its training, got a checkpoint without it. Set image_size, such as "
            "384."
        )
    elif not 1 <= size <= MAX_IMAGE_SIZE:
        problem = f"an image_size from 1 to {MAX_IMAGE_SIZE:,}, got {size}. Set another image_size."
    if problem:
        raise DataError(f"{checkpoint}: expected {problem}")
    converted: dict[str, dict[str, Tensor]] = {VISUAL_FOLDER: {}, TEXT_FOLDER: {}, FUSION_FILE: {}}
    for target, tensor in rename_weights(tensors, names).items():
        part, name = target.split("/")
        is_table = name.endswith(POSITION_BIAS_TABLE)
        converted[part][name] = (
            _resize_bias_table(tensor, original_size, size, checkpoint) if is_table else tensor
        )
    fields: dict[str, Any] = {
        "fusion_layers": sum(name.endswith("crossattention.self.query.weight") for name in names),
        "embedding_dim": len(tensors["vision_proj.weight"]),
        "temperature": round(tensors["temp"].item() if "temp" in tensors else 0.07, 6),
    }
    with storage.atomic_folder(out) as folder:
        _write_parts(folder, converted, text_folder, size)
        # The complete model, whose encoders refer to the final folder.
        config = XVLM.Config(
            backbone=str(folder / VISUAL_FOLDER),
            text_backbone=str(folder / TEXT_FOLDER),
            pretrained=str(folder / FUSION_FILE),
            visual_input_dim=load_pretrained_config(folder / VISUAL_FOLDER).hidden_size,
            text_input_dim=len(PretrainedTokenizer.open(folder / TEXT_FOLDER)),
            **fields,
        )
        matcher = XVLM(config)
        final_folder = Path(os.path.realpath(out))
        visual, text = (str(final_folder / part) for part in (VISUAL_FOLDER, TEXT_FOLDER))
        matcher.config = replace(config, backbone=visual, text_backbone=text, pretrained="")
        processor = Processor(EncoderSpec("visual", visual, "regions"), None, None, text)
        processor.save(matcher, folder / MODEL_FOLDER)
    return CheckpointConversion(
        Path(out),
        {
            "visual": {"encoder": str(Path(out) / VISUAL_FOLDER), "granularity": "pixels"},
            "text": {"encoder": str(Path(out) / TEXT_FOLDER), "granularity": "tokens"},
            "model": {"kind": "XVLM", "pretrained": str(Path(out) / FUSION_FILE), **fields},
        },
    )


def _write_parts(
    folder: Path, converted: Mapping[str, dict[str, Tensor]], text_folder: Path, image_size: int
) -> None:
    """Write both encoders, which are loaded once as a check, and all other weights."""
    visual = converted[VISUAL_FOLDER]
    # Stage and block of each attention.
    tables = {
        tuple(map(int, re.findall(r"\d+", name)[:2])): tensor
        for name, tensor in visual.items()
        if name.endswith(POSITION_BIAS_TABLE)
    }
    stages = range(1 + max(stage for stage, _ in tables))
    # All dimensions follow from the weights.
    patches = visual["embeddings.patch_embeddings.projection.weight"]
    config = {
        "model_type": "swin",
        "architectures": ["SwinModel"],
        "image_size": image_size,
        "patch_size": patches.shape[-1],
        "embed_dim": len(patches),
        "depths": [sum(stage == other for other, _ in tables) for stage in stages],
        "num_heads": [tables[stage, 0].shape[1] for stage in stages],
        "window_size": (math.isqrt(len(tables[0, 0])) + 1) // 2,
        "mlp_ratio": len(visual["encoder.layers.0.blocks.0.intermediate.dense.weight"])
        / len(patches),
        "qkv_bias": True,
        "drop_path_rate": 0.1,
    }
    storage.write_json(folder / VISUAL_FOLDER / "config.json", config)
    preprocessing = IMAGE_PREPROCESSING | {"size": {"height": image_size, "width": image_size}}
    storage.write_json(folder / VISUAL_FOLDER / "preprocessor_config.json", preprocessing)
    copy_config_files(text_folder, folder / TEXT_FOLDER)
    for part in (VISUAL_FOLDER, TEXT_FOLDER):
        storage.write_tensors(
            folder / part / "model.safetensors", converted[part], for_transformers=True
        )
        load_pretrained_model(folder / part)
    storage.write_tensors(folder / FUSION_FILE, converted[FUSION_FILE])


def _resize_bias_table(table: Tensor, original_size: int, size: int, checkpoint: Path) -> Tensor:
    """Interpolate the position biases ``[(2 w - 1)^2, heads]`` of windows that scale with the
    image.
    """
    if size == original_size:
        return table
    edge = math.isqrt(len(table))
    # A window of w x w has (2 w - 1)^2 relative positions.
    window = (edge + 1) // 2
    if window * size % original_size:
        raise DataError(
            f"{checkpoint}: expected an image_size that scales windows of {window} for "
            f"{original_size} pixels to an integer, got {size}. "
            "Set another image_size."
        )
    # [1, heads, 2 w - 1, 2 w - 1]. Differs from the released code, which interpolates from a grid
    # that is denser at its center.
    square = table.T.unflatten(1, (edge, edge))[None]
    new_edge = 2 * window * size // original_size - 1
    resized = interpolate(square, size=(new_edge, new_edge), mode="bicubic", align_corners=True)
    return resized[0].flatten(1).T
