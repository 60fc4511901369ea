"""Optimizer state that is saved and restored, and the optimizer Ranger."""

from functools import partial

import pytest
import torch

from visavis.training.optimizer import Ranger, optimizer_tensors, restore_optimizer


@pytest.mark.parametrize(
    "kind",
    [
        partial(torch.optim.Adam, fused=True),
        partial(torch.optim.AdamW, fused=True),
        partial(Ranger, k=3),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_optimizer_state_restores_next_step(kind, layout):
    start, slopes = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2)

    def begun():
        parameter = torch.nn.Parameter(start.clone().to(memory_format=layout))
        return parameter, kind([("conv", parameter)], lr=0.1)

    def step(parameter, optimizer, slope):
        parameter.grad = slope.to(memory_format=layout)
        optimizer.step()

    first, before = begun()
    for slope in slopes[:2]:
        step(first, before, slope)
    second, after = begun()
    second.data.copy_(first.data)
    restore_optimizer(
        after,
        {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in optimizer_tensors(before).items()
        },
    )  # Contiguous, as loaded from a file.
    step(first, before, slopes[2])
    step(second, after, slopes[2])
    assert torch.equal(first, second)


def trained_by(make, slopes):
    """Parameter after a step for each slope."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 3))
    optimizer = make([parameter])
    for slope in slopes:
        parameter.grad = slope
        optimizer.step()
    return parameter.detach()


def test_ranger_without_lookahead_is_radam():
    slopes = torch.randn(9, 3)  # the variance is rectified from step 6 on
    given = {"lr": 0.1, "betas": (0.95, 0.999), "eps": 1e-5, "weight_decay": 0.1}
    radam = trained_by(partial(torch.optim.RAdam, decoupled_weight_decay=True, **given), slopes)
    assert torch.equal(trained_by(partial(Ranger, k=1, alpha=1.0, **given), slopes), radam)
    assert not torch.equal(trained_by(partial(Ranger, **given), slopes), radam)


def test_ranger_returns_halfway_every_k_steps():
    """With a slope of 1, each of the first five steps is -lr."""
    positions = [
        trained_by(partial(Ranger, lr=1.0, k=2), torch.ones(steps, 3))[2].item()
        for steps in range(6)
    ]
    assert positions == pytest.approx([1, 0, 0, -1, -1, -2], abs=1e-6)


def test_ranger_matches_formula_of_released_code():
    """RAdam with decay on the parameter first, and eps outside the root, step by step in float64."""
    lr, decay, eps, beta1, beta2 = 0.1, 0.01, 1e-5, 0.95, 0.999
    slopes = torch.randn(13, 3, dtype=torch.float64)
    position = slow = torch.linspace(-1, 1, 3).double()
    mean, square, longest = torch.zeros(3).double(), torch.zeros(3).double(), 2 / (1 - beta2) - 1
    for step, slope in enumerate(slopes, 1):
        mean, square = beta1 * mean + (1 - beta1) * slope, beta2 * square + (1 - beta2) * slope**2
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        position = position * (1 - lr * decay)
        if length > 5:
            rectified = (
                (1 - beta2**step)
                * (length - 4)
                / (longest - 4)
                * (length - 2)
                / length
                * longest
                / (longest - 2)
            )
            position = position - lr * rectified**0.5 / (1 - beta1**step) * mean / (
                square.sqrt() + eps
            )
        else:
            position = position - lr / (1 - beta1**step) * mean
        if step % 6 == 0:
            slow = position = slow + 0.5 * (position - slow)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 3).double())
    optimizer = Ranger([parameter], lr, decay)
    for slope in slopes:
        parameter.grad = slope
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), position)
