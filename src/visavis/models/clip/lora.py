"""Low-rank adapters (LoRA) on linear layers of a frozen pretrained model, with ``peft``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from visavis.errors import MissingExtra, SpecError, suggest_name

LORA_A_MARK = ".lora_A."
"""Part of the name of every matrix A of an update B A. A starts at random, B at 0."""


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, layers: Sequence[str]) -> None:
    """Add a trainable update ``(alpha / rank) B A``, initially 0, to the weight of every linear layer whose name ends in one of ``layers``.

    A is ``[rank, inputs]`` and starts uniform. B is ``[outputs, rank]`` and starts at 0. All other weights of the model become buffers that are
    not saved, so that nothing can train them and a state dict holds the adapters alone.

    Args:
        model: The model, changed in place.
        rank: Rank of the updates.
        alpha: Numerator of their factor.
        dropout: Dropout of the input of A.
        layers: Endings of layer names.

    Raises:
        SpecError: If the model has no such layer.
        MissingExtra: If peft is not installed.

    Source:
        Hu et al., LoRA (2022).
    """
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "lora", "a model with low-rank adapters") from None
    # torch's own attention reads the weights of its layers itself, so that adapters on them would have no effect.
    inside = {id(part) for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.modules()}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    known = {name.rpartition(".")[2] for name in linear}
    for layer in layers:
        if layer not in known:
            raise SpecError(
                f"lora_layers: expected endings of linear layers of {type(model).__name__}, got {layer!r}. {suggest_name(layer, known)}"
            )
    targets = [name for name in linear if name.rpartition(".")[2] in layers]
    settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": targets}
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    for module in model.modules():
        _freeze(module)


@torch.no_grad()
def merge_adapters(adapted: nn.Module, base: nn.Module) -> None:
    """Add the updates of a model's adapters to the weights of the same model without adapters.

    Args:
        adapted: Model with adapters.
        base: Model without adapters, changed in place.
    """
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = base.get_submodule(name).weight
            weight += module.get_delta_weight("default").to(weight.device)


def _freeze(module: nn.Module) -> None:
    """Turn parameters of a module, except those of adapters, and its buffers into buffers that are not saved."""
    buffers: dict[str, Any] = dict(module.named_buffers(recurse=False))
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not parameter.requires_grad:
            delattr(module, name)
            buffers[name] = parameter.data
    for name, value in buffers.items():
        module.register_buffer(name, value, persistent=False)
