"""The loop that encodes batches with a model or a frozen encoder, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from visavis.core.encoded import Encoded


# Not inference mode: no later graph can use its results, and a simulated device has no views in it.
@torch.no_grad()
def encode_batches(
    module: nn.Module,
    encode: Callable[[Encoded], Encoded],
    inputs: Iterable[Encoded],
    output_device: torch.device | str = "cpu",
) -> Iterator[Encoded]:
    """Encode batches in evaluation mode, on the device of a model or encoder."""
    device = device_of(module)
    with evaluation_mode(module):
        # Models, splits, indexes and stores of features encode all items in this loop. Inputs are
        # read while results are consumed, and results leave the device batch by batch.
        for batch in inputs:
            yield encode(batch.to(device)).to(output_device)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a model or encoder to evaluation mode within a block."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the parameters of a model or encoder."""
    return next(module.parameters()).device
