"""Encoding in chunks: exact gradients, dropout included, with the activations of one chunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visavis import PairLoss
from visavis.engine import in_chunks
from visavis.errors import ShapeError
from visavis.objectives import CATALOG, TripletHN, Unified
from visavis.types import Encoded


class Tower(nn.Module):
    """Counts how many items have passed, and how many activations are alive at most."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5)).double()
        self.sizes: list[int] = []

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(items))
        return self.layers(items)


def gradients(value: torch.Tensor, *modules: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value, [parameter for module in modules for parameter in module.parameters()]))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("objective", [Unified(), TripletHN(), CATALOG[0]()], ids=str)
def test_chunks_give_the_gradient_of_the_whole(objective, dropout):
    towers, loss = (Tower(dropout), Tower(dropout)), PairLoss(objective)
    images, texts, ids = torch.randn(9, 6).double(), torch.randn(12, 6).double(), (range(9), [*range(9), 0, 1, 2])
    chunks = images.split(2), texts.split(5)
    torch.manual_seed(3)
    whole = loss(*(torch.cat([tower(chunk) for chunk in some]) for tower, some in zip(towers, chunks, strict=True)), *ids)
    expected = gradients(whole, *towers)
    torch.manual_seed(3)
    value = loss.from_chunks(*towers, *chunks, *ids)
    assert torch.equal(value, whole)
    for ours, right in zip(gradients(value, *towers), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)
    assert [tower.sizes.count(max(tower.sizes)) for tower in towers] == [12, 6]  # each full chunk: as a whole, in chunks, and again


def test_one_chunk_at_a_time_holds_its_activations():
    tower, alive, most = Tower(), [0], [0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, items):
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            return items.clone()

        @staticmethod
        def backward(ctx, gradient):
            alive[0] -= 1
            return gradient

    images, texts = torch.randn(12, 6).double(), torch.randn(12, 5).double()
    images.requires_grad_()
    value = PairLoss(Unified())(in_chunks(lambda chunk: tower(Counted.apply(chunk)), images.split(2)), texts)
    alive[0] = most[0] = 0
    value.backward()
    assert most[0] == 1


def test_chunks_of_encoded_items():
    def encode(chunk: torch.Tensor) -> Encoded:
        return Encoded(chunk[:, None].expand(-1, len(chunk), -1) * 2, torch.ones(len(chunk), len(chunk), dtype=torch.bool))

    items = in_chunks(encode, torch.randn(5, 3, requires_grad=True).split(2))
    assert items.vectors.shape == (5, 2, 3)
    assert items.mask.tolist()[-1] == [True, False]


def test_no_chunk_is_refused():
    with pytest.raises(ShapeError, match=r"^there is no chunk to encode"):
        in_chunks(Tower(), [])
