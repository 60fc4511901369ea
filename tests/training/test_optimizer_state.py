"""What an optimizer remembers, taken out and given back: the next step is the same, however a parameter lies in memory."""

import pytest
import torch

from visavis.training.optimizer_state import optimizer_tensors, restore_optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_next_step_is_the_same(kind, layout):
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
    )  # as a file gives it
    step(first, before, slopes[2])
    step(second, after, slopes[2])
    assert torch.equal(first, second)
