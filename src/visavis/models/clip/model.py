"""CLIP, SigLIP and other dual encoders of ``transformers``, pretrained or fine-tuned, also with
low-rank adapters (LoRA) of ``peft``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import (
    DataError,
    RunError,
    SpecError,
    VisavisError,
    requires_extra,
    suggest_name,
)
from visavis.core.fields import DropoutRate, NonNegativeInt, PositiveFloat, require_field
from visavis.losses.logits import LearnedScale
from visavis.models.base import (
    INITIAL_BIAS,
    GlobalMatcher,
    Matcher,
    MatcherConfig,
    encode_unit_rows,
    get_vectors,
)
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import VisualEncoder
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.encoders.pretrained_files import (
    DUAL_ENCODERS,
    copy_config_files,
    model_folder,
    saved_part_folder,
    weights_checksum,
)
from visavis.models.encoders.pretrained_loading import (
    build_empty_model,
    check_default_size,
    check_encoding,
    check_text_encoding,
    image_features,
    interpolated_positions,
    load_pretrained_config,
    load_pretrained_model,
    native_image_size,
    reads_padding,
)
from visavis.models.processor import Processor

LAYER_SYNONYMS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
"""Names of the same layers in encoders such as BERT, by their names in CLIP."""
LORA_A_MARK = ".lora_A."
"""Part of the name of every matrix A of an update B A. A starts at random, B at 0."""
TEMPERATURE_FILE = "temperature.safetensors"
"""File with the temperature (and bias) of the pretraining, next to config, preprocessing and
tokenizer.
"""


class CLIP(GlobalMatcher):
    """CLIP, SigLIP, Chinese-CLIP and other pairs of an image and a text encoder that were trained
    together. The score is the cosine of their projected vectors.

    Args:
        config: The architecture.

    Raises:
        DataError: If the model is not a dual encoder of ``DUAL_ENCODERS``.
        SpecError: If one of the encoders has no layer for the adapters.

    Source:
        Radford et al. (2021). Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023). Hu
        et al., LoRA (2022).

    Differs from:
        The papers include the learned temperature (and bias) in the score. Here they are not part
        of it, because they change no ranking.
    """

    name = "CLIP"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        """Architecture of ``CLIP``.

        Attributes:
            visual_granularity: "pixels", or "pooled" for the text encoder alone, which reads item
                vectors in place of images.
            text_granularity: Always "tokens".
            backbone: Folder or hub name of a dual encoder, which provides preprocessing and
                tokenizer.
            scale: "learned" multiplies the scores in training instead of the temperature of NTXent,
                InfoNCE or Sigmoid. It starts at the temperature of the pretraining.
            scale_bounds: Minimum and maximum of the learned scale. Empty: 1 to 1,000 for SigLIP, 1
                to 100 for others, and the pretrained scale if it is outside.
            logit_bias: "learned" adds a number after the learned scale, instead of the bias of
                Sigmoid. It starts at the bias of the pretraining, or at -10 for models other than
                SigLIP, which have none. Set automatically by the objective.
            lora_rank: Above 0, only low-rank adapters are trained and saved.
            lora_alpha: Updates have the factor ``lora_alpha / lora_rank``.
            lora_dropout: Dropout of the adapters.
            lora_layers: Endings of the names of linear layers with an adapter. "q_proj", "k_proj"
                and "v_proj" also mean the layers that BERT calls "query", "key" and "value".
            base_weights_checksum: Hash of the pretrained weights that adapters belong to. Set
                automatically.
        """

        visual_granularity: Literal["pixels", "pooled"] = "pixels"
        text_granularity: Literal["tokens"] = "tokens"
        backbone: str
        scale: Literal["fixed", "learned"] = "fixed"
        scale_bounds: tuple[float, ...] = ()
        logit_bias: Literal["fixed", "learned"] = "fixed"
        lora_rank: NonNegativeInt = 0
        lora_alpha: PositiveFloat = 16.0
        lora_dropout: DropoutRate = 0.0
        lora_layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
        base_weights_checksum: str = ""

        def __post_init__(self) -> None:
            super().__post_init__()
            bounds = self.scale_bounds
            require_field(
                bool(self.lora_layers), self, "lora_layers", "endings of the names of linear layers"
            )
            require_field(
                not bounds or (len(bounds) == 2 and 0 < bounds[0] <= bounds[1]),
                self,
                "scale_bounds",
                "two numbers above 0, the smaller one first",
            )

    visual_granularities = ("pixels", "pooled")
    text_granularities = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        text_only = config.visual_granularity == "pooled"
        saved = saved_part_folder(VisualEncoder.part_name, required=False)
        self.folder = saved or _pretrained_folder(config)
        self.model = (
            load_pretrained_model(self.folder, text_only=text_only, dtype=torch.float32)
            if saved is None
            else build_empty_model(saved, text_only=text_only)
        )
        kind = self.model.config.model_type
        if kind not in DUAL_ENCODERS:
            *others, last = DUAL_ENCODERS
            raise DataError(
                f"{config.backbone}: expected a model of kind {', '.join(others)} or {last}, "
                f"got {kind}. Use a dual encoder."
            )
        temperature = {
            name: parameter.data for name, parameter in self.model.named_parameters(recurse=False)
        }
        self.temperature = (
            temperature
            if saved is None
            else storage.read_tensors(saved / TEMPERATURE_FILE, temperature, error=RunError)
        )
        for name in temperature:
            # The temperature changes no ranking. It is kept aside, and trained only as learned
            # scale.
            delattr(self.model, name)
        if config.lora_rank:
            # Before the adapters are added, which change the names of the weights.
            checksum = weights_checksum(self.model)
            if config.base_weights_checksum not in ("", checksum):
                raise DataError(
                    f"{config.backbone}: expected weights {config.base_weights_checksum}, which "
                    f"these adapters belong to, got {checksum}. Restore the model that they were "
                    "trained on."
                )
            self.config = replace(config, base_weights_checksum=checksum)
            add_adapters(
                self.model,
                config.lora_rank,
                config.lora_alpha,
                config.lora_dropout,
                config.lora_layers,
            )
            if not config.base_weights_checksum:
                self._check_adapters()
        pretrained = self.pretrained_logits
        initial_scale = pretrained["scale"]
        if bounds := config.scale_bounds:
            initial_scale = min(max(initial_scale, bounds[0]), bounds[1])
        self.learned_scale = (
            LearnedScale.containing(initial_scale, bounds or (1.0, DUAL_ENCODERS[kind].max_scale))
            if config.scale == "learned"
            else None
        )
        initial_bias = torch.tensor(pretrained.get("bias", INITIAL_BIAS))
        self.learned_bias = nn.Parameter(initial_bias) if config.logit_bias == "learned" else None

    @property
    def pretrained_logits(self) -> dict[str, float]:
        logits = {"scale": self.temperature["logit_scale"].exp().item()}
        if "logit_bias" in self.temperature:
            logits["bias"] = self.temperature["logit_bias"].item()
        return logits

    def parts(self) -> dict[str, list[nn.Module | nn.Parameter]]:
        children = dict(self.model.named_children())
        text = [name for name in children if name.startswith("text_")]
        parts: dict[str, list[nn.Module | nn.Parameter]] = {
            "visual": [children[name] for name in children if name not in text],
            "text": [children[name] for name in text],
        }
        return parts | self.scale_part()

    def _check_adapters(self) -> None:
        """Raise SpecError if an encoder has no adapter, because only the other would be trained."""
        adapted = self.parameters_by_part()
        parts = self.parts()
        for part in ("visual", "text"):
            if parts[part] and not adapted.get(part):
                linear = {
                    name.rpartition(".")[2]
                    for name, layer in self.model.named_modules()
                    if isinstance(layer, nn.Linear) and name.startswith("text_") == (part == "text")
                }
                raise SpecError(
                    f"lora_layers: expected layers in each encoder, got none of the {part} "
                    f"encoder of {self.config.backbone}. Add some of {', '.join(sorted(linear))}."
                )

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Write the model folder. If all weights are trained, it also holds config, preprocessing
        and tokenizer of the pretrained model.
        """
        if not self.config.lora_rank:
            backbone_folder = Path(folder) / VisualEncoder.part_name
            copy_config_files(self.folder, backbone_folder)
            storage.write_tensors(backbone_folder / TEMPERATURE_FILE, self.temperature)
        super().save_pretrained(folder, **extra)

    def encode_visual(self, items: Encoded) -> Encoded:
        return encode_unit_rows(image_features(self.model, get_vectors(items)).pooler_output)

    def encode_text(self, items: Encoded) -> Encoded:
        mask = None if items.mask is None else items.mask.long()  # type: ignore[union-attr]
        return encode_unit_rows(
            self.model.get_text_features(
                input_ids=get_vectors(items), attention_mask=mask
            ).pooler_output
        )


def export_to_transformers(matcher: Matcher, folder: str | Path) -> Path:
    """Write a trained model as a folder of ``transformers``, with merged adapters and the tokenizer
    and preprocessing of its backbone.

    Args:
        matcher: A ``CLIP``, which may be any dual encoder.
        folder: New folder. It can be used like any pretrained model.

    Returns:
        The folder.

    Raises:
        VisavisError: If the model is not a ``CLIP``.
        RefusedOverwrite: If the folder is not empty.
    """
    if not isinstance(matcher, CLIP):
        raise VisavisError(
            f"export: expected a dual encoder such as CLIP or SigLIP, got {matcher.name}. Export "
            "only these models to transformers."
        )
    folder = storage.prepare_empty_folder(folder, will_be_replaced=True)
    with storage.atomic_folder(folder) as part:
        write_transformers_files(matcher, part)
    return folder


def write_transformers_files(matcher: CLIP, folder: Path, image_size: int = 0) -> None:
    """Write the files of ``export_to_transformers``. Position embeddings are interpolated to images
    of ``image_size`` pixels. 0: the size of the pretrained model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = matcher.model
    # transformers expects the temperature among the weights.
    weights = model.state_dict() | matcher.temperature
    if matcher.config.lora_rank:
        model = load_pretrained_model(_pretrained_folder(matcher.config), dtype=torch.float32)
        merge_adapters(matcher.model, model)
        weights = model.state_dict()
    if matcher.scale is not None:
        weights["logit_scale"] = matcher.scale.log.data.view_as(weights["logit_scale"])
    # Only SigLIP of transformers has a bias.
    if matcher.logit_bias is not None and "logit_bias" in weights:
        weights["logit_bias"] = matcher.logit_bias.data.view_as(weights["logit_bias"])
    copy_config_files(matcher.folder, folder)
    if image_size and native_image_size(matcher.model.config) != (image_size, image_size):
        positions = interpolated_positions(model.vision_model, image_size, "vision_model.")
        weights |= positions
        if positions:
            content = storage.read_json(folder / "config.json", dict[str, Any])
            # Configs before version 4.28 of transformers have both.
            names = ("vision_config", "vision_config_dict")
            parts = {name: content[name] for name in names if content.get(name)}
            for name, part in (parts or {"vision_config": {}}).items():
                content[name] = part | {"image_size": image_size}
            storage.write_json(folder / "config.json", content)
    file = folder / "tokenizer_config.json"
    if os.path.isfile(file) and not reads_padding(matcher.model.config):
        # Another side would change the vectors of padded texts, see load_pretrained_tokenizer.
        storage.write_json(
            file, storage.read_json(file, dict[str, Any]) | {"padding_side": "right"}
        )
    # Names as in published files, which can differ from those in memory.
    weights = revert_weight_conversion(model, weights)
    storage.write_tensors(folder / "model.safetensors", weights, for_transformers=True)


def _pretrained_folder(config: CLIP.Config) -> Path:
    """Return the folder of the pretrained model. A DataError also mentions adapters that need it."""
    try:
        return model_folder(config.backbone)
    except DataError as error:
        raise DataError(
            f"These adapters need their pretrained model {config.backbone}. {error}"
            if config.base_weights_checksum
            else str(error)
        ) from None


def open_dual_encoder(name: str) -> tuple[CLIP, Processor]:
    """Open a pretrained dual encoder, with a processor of its preprocessing and tokenizer."""
    processor = Processor(EncoderSpec("visual", name, "regions"), None, None, name)
    assert processor.pretrained_tokenizer is not None
    folder = model_folder(name)
    config = load_pretrained_config(folder)
    embedding_dim = getattr(config, "projection_dim", None) or config.vision_config.hidden_size
    matcher = CLIP(
        CLIP.Config(
            backbone=name,
            visual_input_dim=embedding_dim,
            text_input_dim=len(processor.pretrained_tokenizer),
        )
    ).eval()
    pixels = processor.process_images([blank_image()], "pixels")
    check_default_size(config, get_vectors(pixels).shape[-2:], folder)
    check_encoding(lambda: get_vectors(matcher.encode_visual(pixels)), folder, "an image")
    tokenizer = processor.pretrained_tokenizer.tokenizer
    check_text_encoding(
        lambda texts: get_vectors(matcher.encode_text(processor.process_texts(texts))),
        folder,
        tokenizer,
    )
    return matcher, processor


def add_adapters(
    model: nn.Module, rank: int, alpha: float, dropout: float, layers: Sequence[str]
) -> None:
    """Add a trainable update $(alpha / rank) B A$, initially 0, to the weight of every linear layer
    whose name ends in one of ``layers``, or in its synonym.
    """
    with requires_extra("lora", "a model with low-rank adapters"):
        import peft
    # torch's own attention reads the weights of its layers itself, so that adapters on them would
    # have no effect.
    attention_layers = [
        module for module in model.modules() if isinstance(module, nn.MultiheadAttention)
    ]
    excluded = {id(part) for attention in attention_layers for part in attention.modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in excluded
    ]
    endings = {name.rpartition(".")[2] for name in linear}
    selected = {*layers, *(LAYER_SYNONYMS[layer] for layer in layers if layer in LAYER_SYNONYMS)}
    for layer in layers:
        if layer not in endings and LAYER_SYNONYMS.get(layer) not in endings:
            raise SpecError(
                f"lora_layers: expected endings of linear layers of {type(model).__name__}, got "
                f"{layer!r}: {suggest_name(layer, endings)}"
            )
    targets = [name for name in linear if name.rpartition(".")[2] in selected]
    settings: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": targets,
    }
    # A is [rank, inputs] and starts uniform. B is [outputs, rank] and starts at 0.
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    # All other weights become buffers that are not saved, so that nothing can train them and a
    # state dict holds the adapters alone.
    for module in model.modules():
        buffers: dict[str, Any] = dict(module.named_buffers(recurse=False))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                buffers[name] = parameter.data
        for name, value in buffers.items():
            module.register_buffer(name, value, persistent=False)


@torch.no_grad()
def merge_adapters(adapted: nn.Module, base: nn.Module) -> None:
    """Add the updates of a model's adapters to the weights of the same model without adapters."""
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = base.get_submodule(name).weight
            # In place: the model without adapters gets the updates.
            weight += module.get_delta_weight("default").to(weight.device)
