"""LearnedScale, and a scale that is passed per call."""

import math

import pytest
import torch
from torch import nn

from visavis import PairLoss
from visavis.core.errors import SpecError
from visavis.losses.pair_loss import LearnedScale
from visavis.objectives import InfoNCE, NTXent, Unified

from ..matching import mentions


def sides():
    return torch.randn(2, 5, 4, dtype=torch.float64).unbind()


@pytest.mark.parametrize("start", [1.0, 20.0, 80])
def test_learned_scale_step_is_relative(start):
    scale = LearnedScale(start)
    loss = PairLoss(NTXent(), scale=scale)
    assert dict(loss.named_parameters()) == {"scale.log": scale.log}
    optimizer = torch.optim.Adam(
        loss.parameters(), lr=0.01
    )  # Adam's first step is 0.01 for any gradient
    loss(*sides()).backward()
    optimizer.step()
    assert abs(math.log(scale().item() / start)) == pytest.approx(0.01, rel=1e-3)


def test_learned_scale_matches_exponential():
    images, texts = sides()
    scale, number = LearnedScale(14.0), torch.tensor(math.log(14), requires_grad=True)
    value = PairLoss(InfoNCE(), scale=scale)(images, texts)
    expected = PairLoss(InfoNCE(), scale=number.exp())(images, texts)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(
        *torch.autograd.grad(value, scale.log), *torch.autograd.grad(expected, number)
    )


def test_learned_scale_is_shared_saved_and_clamped():
    scale = LearnedScale(20.0)
    losses = nn.ModuleDict({name: PairLoss(NTXent(), scale=scale) for name in "ab"})
    assert len(list(losses.parameters())) == 1
    scale.log.data.fill_(9.0)
    losses["a"](*sides())
    other = PairLoss(NTXent(), scale=LearnedScale(1.0))
    other.load_state_dict(losses["b"].state_dict())
    assert other.scale().item() == pytest.approx(100)


@pytest.mark.parametrize(
    "start", [0, -1.0, 101, math.nan, math.inf, True, "20", None, torch.tensor(20.0)], ids=str
)
def test_learned_scale_rejects_invalid_initial_scale(start):
    with pytest.raises(SpecError, match=mentions(start, "expected a number")):
        LearnedScale(start)


def test_scale_can_be_passed_per_call():
    images, texts = sides()
    loss = PairLoss(NTXent(), scale=1.0)
    assert loss(images, texts, scale=torch.tensor(7.0)) == PairLoss(NTXent(), scale=7.0)(
        images, texts
    )
    with pytest.raises(SpecError, match=mentions("scale", "7.0")):
        PairLoss(Unified())(images, texts, scale=7.0)


def test_scale_rejects_integer_tensor():
    with pytest.raises(
        SpecError, match=mentions("scale", "tensor(10)", "torch.int64", "nn.Parameter")
    ):
        PairLoss(NTXent(), scale=torch.tensor(10))
