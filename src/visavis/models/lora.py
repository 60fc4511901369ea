"""Low-rank adapters on the linear layers of a pretrained model that stays as it is, by ``peft``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from visavis.errors import MissingExtra, SpecError, nearest

FIRST_FACTOR = ".lora_A."
"""In the name of every A of an update B A, which begins at random, while B begins at 0."""


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, layers: Sequence[str]) -> None:
    """Give every linear layer whose name ends as one of ``layers`` an update ``(alpha / rank) B A`` of its weight, 0 at first, that learns alone.

    A: ``[rank, inputs]``, uniform at first; B: ``[outputs, rank]``, zeros; dropout: of what A reads. Layers inside torch's own attention
    get none, as it reads their weights itself. All else of the model becomes buffers that are not saved, so that nothing can train it and a
    state dict holds the adapters alone. Raises SpecError for layers that the model does not have, MissingExtra without peft.
    Source: Hu et al., LoRA (2022).
    """
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "lora", "a model with low-rank adapters") from None
    inside = {id(part) for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.modules()}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    known = {name.rpartition(".")[2] for name in linear}
    for layer in layers:
        if layer not in known:
            raise SpecError(f"lora_layers names {layer!r}, and no linear layer of {type(model).__name__} ends so: {nearest(layer, known)}")
    chosen = [name for name in linear if name.rpartition(".")[2] in layers]
    settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": chosen}
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    for module in model.modules():
        _fix(module)


@torch.no_grad()
def merge_adapters(adapted: nn.Module, plain: nn.Module) -> None:
    """Add the updates of a model's adapters to the weights of the same model without them."""
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = plain.get_submodule(name).weight
            weight += module.get_delta_weight("default").to(weight.device)


def _fix(module: nn.Module) -> None:
    """Make a module's own parameters but those of adapters, and its own buffers, part of what is neither trained nor saved."""
    own: dict[str, Any] = dict(module.named_buffers(recurse=False))
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not parameter.requires_grad:
            delattr(module, name)
            own[name] = parameter.data
    for name, value in own.items():
        module.register_buffer(name, value, persistent=False)
