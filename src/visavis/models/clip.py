"""CLIP and SigLIP, dual encoders of ``transformers``: as they come, with no training on one's own data, or trained further."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from visavis import storage
from visavis.engine.scale import LearnedScale
from visavis.errors import DataError, RunError, VisavisError
from visavis.models.base import SCALE, GlobalMatcher, Matcher, MatcherConfig, unit, vectors
from visavis.models.foreign import lay_out_model, open_config, open_model, refuse_adapter, tried
from visavis.models.lora import add_adapters, merge_adapters
from visavis.models.pretrained import keep_files, kept_folder, model_folder, weights_checksum
from visavis.models.processor import Processor
from visavis.models.towers import TowerSpec, VisualTower, blank
from visavis.spec import CountOrZero, Dropout, Positive, require
from visavis.types import Encoded

KINDS = ("clip", "siglip")
"""The ``model_type`` of the folders that are read."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TEMPERATURE = "temperature.safetensors"
"""Where a model folder keeps the temperature (and bias) of the pretraining, beside the config, preprocessing and tokenizer."""


@dataclass(frozen=True)
class _Config:
    model_type: str | None = None


class CLIP(GlobalMatcher):
    """Two transformers, one a side, that were trained to agree on pairs; the score is the cosine of their projected vectors.

    backbone: a folder of transformers with a CLIP or SigLIP model, or the name of one on the hub; it brings its preprocessing and
    its tokenizer. visual_width: of a vector; text_width: the number of tokens. scale: "learned" multiplies the scores in training
    in place of the temperature of NTXent, InfoNCE or Sigmoid, from the one that the model was pretrained with on, within scale_bounds.
    lora_rank: above 0, low-rank adapters on all linear layers whose names end as lora_layers say; they alone learn, at lora_alpha / lora_rank
    and with lora_dropout, and are saved, with base: the hash of the weights that they belong to.
    Source: Radford et al. (2021); Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023); Hu et al., LoRA (2022).
    Differs from: both, whose learned temperature (and bias) are not part of the score here, as they change no ranking.
    """

    name = "CLIP"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        visual_view: Literal["pixels"] = "pixels"
        text_view: Literal["tokens"] = "tokens"
        backbone: str
        scale: Literal["fixed", "learned"] = "fixed"
        scale_bounds: tuple[float, ...] = (1.0, 100.0)
        lora_rank: CountOrZero = 0
        lora_alpha: Positive = 16.0
        lora_dropout: Dropout = 0.0
        lora_layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
        base: str = ""

        def __post_init__(self) -> None:
            super().__post_init__()
            bounds = self.scale_bounds
            require(bool(self.lora_layers), self, "lora_layers", "endings of the names of linear layers")
            require(len(bounds) == 2 and 0 < bounds[0] <= bounds[1], self, "scale_bounds", "two numbers above 0, the smaller one first")

    visual_views = ("pixels",)
    text_views = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        kept = kept_folder(VisualTower.kept_as, required=False)
        self.folder = kept or _folder(config)
        self.model = open_model(self.folder, dtype=torch.float32) if kept is None else lay_out_model(kept)
        kind = self.model.config.model_type
        if kind not in KINDS:
            raise DataError(f"{config.backbone} is a model of kind {kind}, expected {' or '.join(KINDS)}: two encoders trained on pairs.")
        own = {name: parameter.data for name, parameter in self.model.named_parameters(recurse=False)}
        self.temperature = own if kept is None else storage.read_tensors(kept / TEMPERATURE, own, error=RunError)
        for name in own:
            delattr(self.model, name)
        if config.lora_rank:
            self.config = replace(config, base=_checked_base(config, self.model))
            add_adapters(self.model, config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_layers)
        smallest, largest = config.scale_bounds
        start = min(max(self.temperature["logit_scale"].exp().item(), smallest), largest)
        self.learned_scale = LearnedScale(start, smallest=smallest, largest=largest) if config.scale == "learned" else None

    @property
    def scale(self) -> LearnedScale | None:
        return self.learned_scale

    def parts(self) -> dict[str, list[nn.Module]]:
        children = dict(self.model.named_children())
        text = [name for name in children if name.startswith("text_")]
        parts = {"visual": [children[name] for name in children if name not in text], "text": [children[name] for name in text]}
        return parts if self.learned_scale is None else parts | {SCALE: [self.learned_scale]}

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """As any matcher; where all weights are its own, with what else the pretrained model has, so that it is not needed any more."""
        if not self.config.lora_rank:
            kept = Path(folder) / VisualTower.kept_as
            keep_files(self.folder, kept)
            storage.write_tensors(kept / TEMPERATURE, self.temperature)
        super().save_pretrained(folder, **extra)

    def encode_visual(self, items: Encoded) -> Encoded:
        return unit(self.model.get_image_features(pixel_values=vectors(items)).pooler_output)

    def encode_text(self, items: Encoded) -> Encoded:
        mask = None if items.mask is None else items.mask.long()  # type: ignore[union-attr]
        return unit(self.model.get_text_features(input_ids=vectors(items), attention_mask=mask).pooler_output)


def export(matcher: Matcher, folder: str | Path) -> Path:
    """Write a trained model as a folder of ``transformers``, adapters merged, with the tokenizer and preprocessing of its backbone.

    It stands wherever a pretrained model does, here and elsewhere. Raises RefusedOverwrite if anything stands there, VisavisError for another matcher.
    """
    if not isinstance(matcher, CLIP):
        raise VisavisError(
            f"a model of kind {matcher.name} is none of transformers: only CLIP and SigLIP models can be written as such a folder."
        )
    weights = matcher.model.state_dict() | matcher.temperature
    if matcher.config.lora_rank:
        model = open_model(_folder(matcher.config), dtype=torch.float32)
        merge_adapters(matcher.model, model)
        weights = model.state_dict()
    if matcher.scale is not None:
        weights["logit_scale"] = matcher.scale.log.data.view_as(weights["logit_scale"])
    folder = storage.new_folder(folder, replaced=True)
    with storage.replacing_folder(folder) as part:
        keep_files(matcher.folder, part)
        storage.write_tensors(part / "model.safetensors", weights, for_transformers=True)
    return folder


def _folder(config: CLIP.Config) -> Path:
    """The folder of the pretrained model. Raises DataError where there is none, in the words of the adapters that need it."""
    try:
        return model_folder(config.backbone)
    except DataError as error:
        raise DataError(
            f"these adapters belong to {config.backbone}, which is needed beside them: {error}" if config.base else str(error)
        ) from None


def _checked_base(config: CLIP.Config, model: nn.Module) -> str:
    """The hash of the weights of the pretrained model. Raises DataError if adapters belong to others."""
    found = weights_checksum(model)
    if config.base not in ("", found):
        raise DataError(
            f"{config.backbone} holds weights {found}, and these adapters belong to {config.base}: bring back the model that they were trained on."
        )
    return found


def find_dual_encoder(name: str | Path) -> str | None:
    """The name by which ``open_dual_encoder`` opens a CLIP or SigLIP model; None if there is none of this name.

    Asked are the folder itself, the backbones in the cache, and the hub, the latter for ``owner/model`` where no folder ``owner``
    is here. Raises DataError if the hub does not give it, and for an adapter.
    """
    for folder in (Path(name), storage.cache_folder() / "backbones" / name):
        if (folder / "config.json").is_file():
            return str(folder.resolve()) if storage.read_json(folder / "config.json", _Config).model_type in KINDS else None
    refuse_adapter(Path(name))
    if Path(name).exists() or not HUB_NAME.fullmatch(str(name)) or Path(name).parent.exists():
        return None
    return str(name) if find_dual_encoder(model_folder(str(name))) else None


def open_dual_encoder(name: str) -> tuple[CLIP, Processor]:
    """A pretrained model with its preprocessing and tokenizer. Raises DataError if it cannot be read."""
    processor = Processor(TowerSpec("visual", name, "grid"), None, None, name)
    assert processor.tokens is not None
    folder = model_folder(name)
    config = open_config(folder)
    width = getattr(config, "projection_dim", config.vision_config.hidden_size)
    matcher = CLIP(CLIP.Config(backbone=name, visual_width=width, text_width=len(processor.tokens))).eval()
    tried(lambda: vectors(matcher.encode_visual(processor.images([blank()], "pixels"))), folder, "a picture")
    tried(lambda: vectors(matcher.encode_text(processor.texts(["a dog"]))), folder, "a text")
    return matcher, processor
