"""encode_in_chunks: exact gradients with dropout, and the activations of one chunk in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visavis import PairLoss
from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError
from visavis.losses.pair_loss import encode_in_chunks
from visavis.objectives import CATALOG, TripletHN, Unified


class CountingEncoder(nn.Module):
    """An encoder that records the size of every batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5)
        ).double()
        self.sizes: list[int] = []

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(items))
        return self.layers(items)


def gradients(value: torch.Tensor, *modules: nn.Module) -> list[torch.Tensor]:
    return list(
        torch.autograd.grad(
            value, [parameter for module in modules for parameter in module.parameters()]
        )
    )


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("objective", [Unified(), TripletHN(), CATALOG[0]()], ids=str)
def test_chunks_match_full_batch_gradient(objective, dropout):
    encoders, loss = (CountingEncoder(dropout), CountingEncoder(dropout)), PairLoss(objective)
    images, texts, ids = (
        torch.randn(9, 6).double(),
        torch.randn(12, 6).double(),
        (range(9), [*range(9), 0, 1, 2]),
    )
    chunks = images.split(2), texts.split(5)
    torch.manual_seed(3)
    whole = loss(
        *(
            torch.cat([encoder(chunk) for chunk in some])
            for encoder, some in zip(encoders, chunks, strict=True)
        ),
        *ids,
    )
    expected = gradients(whole, *encoders)
    torch.manual_seed(3)
    value = loss.from_chunks(*encoders, *chunks, *ids)
    assert torch.equal(value, whole)
    for ours, right in zip(gradients(value, *encoders), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)
    assert [encoder.sizes.count(max(encoder.sizes)) for encoder in encoders] == [
        12,
        6,
    ]  # full batch, forward pass, backward pass


def test_chunks_keep_activations_of_one_chunk():
    encoder, alive, peak = CountingEncoder(), [0], [0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, items):
            alive[0] += 1
            peak[0] = max(peak[0], alive[0])
            return items.clone()

        @staticmethod
        def backward(ctx, gradient):
            alive[0] -= 1
            return gradient

    images, texts = torch.randn(12, 6).double(), torch.randn(12, 5).double()
    images.requires_grad_()
    value = PairLoss(Unified())(
        encode_in_chunks(lambda chunk: encoder(Counted.apply(chunk)), images.split(2)), texts
    )
    alive[0] = peak[0] = 0
    value.backward()
    assert peak[0] == 1


def test_chunks_join_encoded_items():
    def encode(chunk: torch.Tensor) -> Encoded:
        return Encoded(
            chunk[:, None].expand(-1, len(chunk), -1) * 2,
            torch.ones(len(chunk), len(chunk), dtype=torch.bool),
        )

    items = encode_in_chunks(encode, torch.randn(5, 3, requires_grad=True).split(2))
    assert items.vectors.shape == (5, 2, 3)
    assert items.mask.tolist()[-1] == [True, False]


def test_chunks_reject_empty_list():
    with pytest.raises(ShapeError, match="chunk"):
        encode_in_chunks(CountingEncoder(), [])
