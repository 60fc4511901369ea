"""A scale that learns by its logarithm, is shared and saved, or is given at a call."""

import math
import re

import pytest
import torch
from torch import nn

from visavis import PairLoss
from visavis.engine import LearnedScale
from visavis.errors import SpecError
from visavis.objectives import InfoNCE, NTXent, Unified


def sides():
    return torch.randn(2, 5, 4, dtype=torch.float64).unbind()


@pytest.mark.parametrize("start", [1.0, 20.0, 80])
def test_a_step_changes_it_by_a_share_wherever_it_stands(start):
    scale = LearnedScale(start)
    loss = PairLoss(NTXent(), scale=scale)
    assert dict(loss.named_parameters()) == {"scale.log": scale.log}
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)  # its first step is of 0.01, whatever the gradient
    loss(*sides()).backward()
    optimizer.step()
    assert abs(math.log(scale().item() / start)) == pytest.approx(0.01, rel=1e-3)


def test_its_value_and_gradient_are_those_of_the_exponential():
    images, texts = sides()
    scale, number = LearnedScale(14.0), torch.tensor(math.log(14), requires_grad=True)
    value = PairLoss(InfoNCE(), scale=scale)(images, texts)
    expected = PairLoss(InfoNCE(), scale=number.exp())(images, texts)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(*torch.autograd.grad(value, scale.log), *torch.autograd.grad(expected, number))


def test_it_is_shared_saved_and_bounded():
    scale = LearnedScale(20.0)
    losses = nn.ModuleDict({name: PairLoss(NTXent(), scale=scale) for name in "ab"})
    assert len(list(losses.parameters())) == 1
    scale.log.data.fill_(9.0)
    losses["a"](*sides())
    other = PairLoss(NTXent(), scale=LearnedScale(1.0))
    other.load_state_dict(losses["b"].state_dict())
    assert other.scale().item() == pytest.approx(100)


@pytest.mark.parametrize("start", [0, -1.0, 101, math.nan, math.inf, True, "20", None, torch.tensor(20.0)], ids=str)
def test_a_start_that_is_none_is_refused(start):
    with pytest.raises(SpecError, match=r"^LearnedScale got start=.* expected a number above 0 and at most 100: 1 / temperature\.$"):
        LearnedScale(start)


def test_a_scale_may_be_given_at_a_call():
    images, texts = sides()
    loss = PairLoss(NTXent(), scale=1.0)
    assert loss(images, texts, scale=torch.tensor(7.0)) == PairLoss(NTXent(), scale=7.0)(images, texts)
    with pytest.raises(
        SpecError, match=r"^PairLoss got scale=7\.0 in a call, expected one number, of a loss that was made with a scale\.$"
    ):
        PairLoss(Unified())(images, texts, scale=7.0)


def test_a_tensor_of_whole_numbers_is_named():
    sentence = "PairLoss got scale=tensor(10), of torch.int64, expected a number above 0 or an nn.Parameter of one number."
    with pytest.raises(SpecError, match=f"^{re.escape(sentence)}$"):
        PairLoss(NTXent(), scale=torch.tensor(10))
