"""Changes of the blocks of encoders before a training: synchronized batch norm, activation
checkpointing, compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from visavis.core.errors import RecipeError
from visavis.core.process_group import ProcessGroup
from visavis.models import Matcher
from visavis.models.layers import MaskedBatchNorm
from visavis.training.recipes.settings import TrainingSettings


def prepare_encoders(model: Matcher, settings: TrainingSettings, group: ProcessGroup) -> None:
    """Change the blocks of a model in place, as the settings of a training require. Names of
    parameters stay the same.
    """
    if settings.chunk_size and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise RecipeError(
            f"training.chunk_size: expected 0, got {settings.chunk_size}. {model.name} has batch "
            "norm, whose statistics would "
            "depend on the chunks. Remove it, or use an encoder without batch norm."
        )
    synchronize_batch_norm(model, group)
    for key in ("activation_checkpointing", "compile"):
        if getattr(settings, key) and not encoder_blocks(model):
            raise RecipeError(
                f"training.{key}: expected an encoder with a list of blocks, such as CLIP or BERT "
                "with trainable weights, got "
                f"{model.name}, which has none. Remove it."
            )
    for block in (
        encoder_blocks(model) if settings.activation_checkpointing or settings.compile else ()
    ):
        # The function of the class: a copy of the model runs it with its own weights.
        forward = torch.compile(type(block).forward) if settings.compile else type(block).forward
        block.forward = partial(_forward, block, forward, settings.activation_checkpointing)


def encoder_blocks(model: nn.Module) -> list[nn.Module]:
    """List the repeated blocks of a model, such as the layers of a transformer. Blocks inside of
    blocks are left out.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    return [
        block
        for name, blocks in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
        for block in blocks
    ]


def _forward(
    block: nn.Module, train_forward: Callable[..., Any], recompute: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a block. In training it may be compiled, and its activations may be computed again in the
    backward pass.
    """
    # An evaluation is not compiled. Its batches have other shapes and no gradients, and torch
    # compiles at most 8 versions of a function.
    if not (block.training and torch.is_grad_enabled()):
        return type(block).forward(block, *args, **kwargs)
    if recompute:
        return checkpoint(train_forward, block, *args, use_reentrant=False, **kwargs)
    return train_forward(block, *args, **kwargs)


class _SumOverProcesses(torch.autograd.Function):
    """Sum of a tensor over processes. Its gradient is summed as well, because each process uses the
    sum.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce_sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce_sum(gradient.clone()), None


def synchronize_batch_norm(model: nn.Module, group: ProcessGroup) -> None:
    """Make the batch norms of a model use the mean and variance over all processes in training."""
    # `torch.nn.SyncBatchNorm` does the same on CUDA only.
    for module in model.modules():
        # The batch norm over valid vectors of CE and MMT keeps the statistics of each process, because
        # a process may have no valid vector.
        if (
            isinstance(module, _BatchNorm)
            and not isinstance(module, MaskedBatchNorm)
            and group.world_size > 1
        ):
            module.forward = partial(_normalize, module, module.forward, group)  # type: ignore[method-assign]


def _normalize(
    module: _BatchNorm, forward: Callable[[Tensor], Tensor], group: ProcessGroup, items: Tensor
) -> Tensor:
    """Normalize items by the statistics of all processes in training, else as the module does."""
    if not module.training:
        return forward(items)
    axes = [0, *range(2, items.dim())]
    shape = [1, -1, *[1] * (items.dim() - 2)]
    values = items.float()
    counts = torch.full(
        (items.shape[1],), float(items.numel() // items.shape[1]), device=items.device
    )
    total, count = _SumOverProcesses.apply(torch.stack([values.sum(axes), counts]), group)
    mean = total / count
    centered = values - mean.view(shape)
    variance = _SumOverProcesses.apply(centered.square().sum(axes), group) / count
    if (
        module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    ):
        with torch.no_grad():
            module.num_batches_tracked += 1
            momentum = (
                1 / float(module.num_batches_tracked)
                if module.momentum is None
                else module.momentum
            )
            module.running_mean.lerp_(mean.to(module.running_mean), momentum)
            module.running_var.lerp_(
                (variance * count / (count - 1)).to(module.running_var), momentum
            )
    normalized = centered * (variance + module.eps).rsqrt().view(shape)
    if module.weight is not None:
        normalized = normalized * module.weight.view(shape) + module.bias.view(shape)
    return normalized.to(items.dtype)
