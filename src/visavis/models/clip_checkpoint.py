"""A checkpoint of open_clip, one's own or published, as a CLIP of ``transformers``."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from visavis import storage
from visavis.errors import DataError
from visavis.models.checkpoints import ConvertedModel, check_weights, text_donor
from visavis.models.clip import open_dual_encoder
from visavis.models.pretrained import keep_files
from visavis.spec import Count

PUBLISHED_CONFIG = "open_clip_config.json"
"""The configuration that lies beside weights which open_clip puts on the hub."""
TOKENIZER = "openai/clip-vit-base-patch32"
LEFT_OUT = re.compile(r"attn_mask")
OUTSIDE = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "logit_scale": "logit_scale",
}
TURNED = ("text_projection", "visual.proj")
"""Matrices that open_clip multiplies from the right."""
NORMS = {
    "ln_final": "text_model.final_layer_norm",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
}
BLOCK = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
SIDES = {"": "text_model", "visual.": "vision_model"}
KNOWN = {
    "": {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale"},
    "vision_cfg": {"image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size", "patch_dropout"},
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"},
}
"""What of a configuration is understood; anything else would be another model."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class _Vision:
    layers: Count = 12
    width: Count = 768
    head_width: Count = 64
    patch_size: Count = 16
    image_size: Count = 224


@dataclass(frozen=True)
class _Text:
    layers: Count = 12
    width: Count = 512
    heads: Count = 8


@dataclass(frozen=True)
class _Model:
    """What of open_clip's configuration its weights do not tell, or must agree with, with open_clip's defaults."""

    embed_dim: Count
    vision_cfg: _Vision
    text_cfg: _Text
    quick_gelu: bool = False


@dataclass(frozen=True)
class ConvertedCLIP(ConvertedModel):
    """A folder of transformers, which stands wherever a CLIP does."""

    def to_json(self) -> dict[str, Any]:
        tower = str(self.folder)
        return {"name": self.folder.name, "extends": "clip/small-data", "visual": {"tower": tower}, "text": {"tower": tower}}


def is_clip(tensors: Iterable[str]) -> bool:
    """Whether weights are those of open_clip, by their names."""
    return any(
        name.removeprefix("text.") == "token_embedding.weight" or name.startswith(("visual.conv1.", "visual.trunk.")) for name in tensors
    )


def convert_clip(tensors: Mapping[str, Tensor], checkpoint: Path, out: str | Path, *, config: str = "", text: str = "") -> ConvertedCLIP:
    """Write the weights of a CLIP whose encoders are transformers into a new folder.

    config: the model's configuration as open_clip writes it: a file, or a name such as ViT-B-32 where open_clip is installed;
    "": open_clip_config.json beside the checkpoint. text: the folder or hub name of a CLIP of transformers, for its tokenizer.
    Raises DataError for another architecture, and naming weights that are unknown, missing or of wrong shapes.
    """
    tensors = {name.removeprefix("text."): tensor for name, tensor in tensors.items()}
    model, prepared = _configuration(config, checkpoint)
    check_weights(
        tensors,
        names := dict(_names(model)),
        LEFT_OUT,
        checkpoint,
        "a CLIP of open_clip with vision transformer, as its configuration says",
    )
    donor, tokenizer = text_donor(text or TOKENIZER, checkpoint, "reads texts by the tokenizer of CLIP")
    _check_sizes(tensors, model, len(tokenizer), checkpoint)
    made = dict(_renamed(tensors, names))
    if Path(out).exists():
        storage.new_folder(out, replaced=True)
    with storage.replacing_folder(out) as folder:
        keep_files(donor, folder)  # the tokenizer; its own config and preparation follow
        storage.write_json(folder / "config.json", _config(model, made, tokenizer))
        storage.write_json(folder / "preprocessor_config.json", _pictures(prepared, model.vision_cfg.image_size))
        storage.write_tensors(folder / "model.safetensors", made, for_transformers=True)
        open_dual_encoder(str(folder))
    return ConvertedCLIP(Path(out))


def _configuration(given: str, checkpoint: Path) -> tuple[_Model, dict[str, Any]]:
    """The configuration of a model, and how it reads pictures. Raises DataError."""
    file = _configuration_file(given, checkpoint)
    content = storage.read_json(file, dict[str, Any])
    model, prepared = content.get("model_cfg", content), content.get("preprocess_cfg", {})
    for part, known in KNOWN.items():
        found = model.get(part) if part else model
        if not isinstance(found, dict):
            raise DataError(f"{file} has no {part}, expected the configuration of a CLIP as open_clip writes it.")
        if other := sorted(name for name, value in found.items() if name not in known and value):
            raise DataError(f"{file} asks for {part or 'the model'}.{other[0]}, which no CLIP of transformers has: it cannot be converted.")
    return storage.parse_json(json.dumps(model).encode(), _Model, str(file)), prepared


def _configuration_file(given: str, checkpoint: Path) -> Path:
    if given and Path(given).is_file():
        return Path(given)
    beside = checkpoint.parent / PUBLISHED_CONFIG
    if not given and beside.is_file():
        return beside
    installed = importlib.util.find_spec("open_clip")
    named = None if installed is None or not installed.origin else Path(installed.origin).parent / "model_configs" / f"{given}.json"
    if given and named is not None and named.is_file():
        return named
    found = f"config is {given!r}, which is no file" if given else f"there is no {PUBLISHED_CONFIG} beside {checkpoint}"
    raise DataError(
        f"{found}; weights alone do not say how many heads a CLIP has: give as config the model's configuration as open_clip writes it, a file, or "
        f"a name such as ViT-B-32 where open_clip is installed{'' if installed else ' (here it is not)'}."
    )


def _names(model: _Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every weight of a whole checkpoint by its name in open_clip, with its names in transformers: three for what is cut into three."""
    for name, here in OUTSIDE.items():
        yield name, (here,)
    ends = ("weight", "bias")
    for name, here in NORMS.items():
        yield from ((f"{name}.{end}", (f"{here}.{end}",)) for end in ends)
    for (side, here), depth in zip(SIDES.items(), (model.text_cfg.layers, model.vision_cfg.layers), strict=True):
        for layer in range(depth):
            own, its = f"{side}transformer.resblocks.{layer}.", f"{here}.encoder.layers.{layer}."
            for name, target in BLOCK.items():
                yield from ((f"{own}{name}.{end}", (f"{its}{target}.{end}",)) for end in ends)
            yield from ((f"{own}attn.in_proj_{end}", tuple(f"{its}self_attn.{name}_proj.{end}" for name in "qkv")) for end in ends)


def _check_sizes(tensors: Mapping[str, Tensor], model: _Model, words: int, checkpoint: Path) -> None:
    """Raise DataError where weights are of other sizes than the configuration, or the tokenizer, says."""
    vision, text = model.vision_cfg, model.text_cfg
    expected = {
        "visual.conv1.weight": (vision.width, 3, vision.patch_size, vision.patch_size),
        "visual.positional_embedding": ((vision.image_size // vision.patch_size) ** 2 + 1, vision.width),
        "visual.proj": (vision.width, model.embed_dim),
        "text_projection": (text.width, model.embed_dim),
        "token_embedding.weight": (words, text.width),
    }
    for name, shape in expected.items():
        if (found := tuple(tensors[name].shape)) != shape:
            sizes = (" x ".join(map(str, shape)) for shape in (found, shape))
            raise DataError(
                "{} has {} of {}, but its configuration and tokenizer say {}: name those that it was trained with.".format(
                    checkpoint, name, *sizes
                )
            )
    for part, heads in ((vision, vision.width / vision.head_width), (text, text.heads)):
        if heads != int(heads) or part.width % heads:
            raise DataError(
                f"{checkpoint} has layers of width {part.width}, which do not divide into {heads:g} heads: its configuration is of another model."
            )


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, Tensor]]:
    for name, targets in names.items():
        tensor = tensors[name].float()
        tensor = tensor.T if name in TURNED else tensor
        yield from zip(targets, tensor.chunk(len(targets)) if len(targets) > 1 else [tensor], strict=True)


def _config(model: _Model, made: Mapping[str, Tensor], tokenizer: Any) -> dict[str, Any]:
    def tower(side: str, part: _Text | _Vision, heads: int) -> dict[str, Any]:
        return {
            "hidden_act": "quick_gelu" if model.quick_gelu else "gelu",
            "projection_dim": model.embed_dim,
            "hidden_size": part.width,
            "intermediate_size": len(made[f"{side}.encoder.layers.0.mlp.fc1.bias"]),
            "num_hidden_layers": part.layers,
            "num_attention_heads": heads,
        }

    vision = model.vision_cfg
    words, positions = (len(made[f"text_model.embeddings.{name}_embedding.weight"]) for name in ("token", "position"))
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": model.embed_dim,
        "text_config": tower("text_model", model.text_cfg, model.text_cfg.heads)
        | tokens
        | {"vocab_size": words, "max_position_embeddings": positions},
        "vision_config": tower("vision_model", vision, vision.width // vision.head_width)
        | {"image_size": vision.image_size, "patch_size": vision.patch_size},
    }


def _pictures(prepared: Mapping[str, Any], side: int) -> dict[str, Any]:
    """How transformers prepares pictures as open_clip does. Raises DataError for another way than it can."""
    mode = prepared.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise DataError(f"pictures are resized by {mode!r}, expected shortest or squash: it cannot be converted.")
    square = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side} if mode == "shortest" else square,
        "resample": 2 if prepared.get("interpolation") == "bilinear" else 3,
        "do_center_crop": mode == "shortest",
        "crop_size": square,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(prepared.get("mean") or MEAN),
        "image_std": list(prepared.get("std") or STD),
    }
