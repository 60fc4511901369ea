"""Saved and restored optimizer state gives the same next step for any memory layout of a parameter."""

import pytest
import torch

from visavis.training.optimizer import optimizer_tensors, restore_optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_optimizer_state_restores_next_step(kind, layout):
    start, slopes = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2)

    def begun():
        parameter = torch.nn.Parameter(start.clone().to(memory_format=layout))
        return parameter, kind([("conv", parameter)], lr=0.1, fused=True)

    def step(parameter, optimizer, slope):
        parameter.grad = slope.to(memory_format=layout)
        optimizer.step()

    first, before = begun()
    for slope in slopes[:2]:
        step(first, before, slope)
    second, after = begun()
    second.data.copy_(first.data)
    restore_optimizer(
        after, {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in optimizer_tensors(before).items()}
    )  # Contiguous, as loaded from a file.
    step(first, before, slopes[2])
    step(second, after, slopes[2])
    assert torch.equal(first, second)
