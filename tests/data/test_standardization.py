"""Standardization of features: mean, standard deviation, blocks, constants and signs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis.core.encoded import Encoded
from visavis.data.features.standardization import Standardization


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape", [(50, 6), (20, 4, 6)])
def test_standardization_gives_mean_0_and_std_1(root, shape):
    features = torch.randn(shape) * torch.linspace(0.1, 9, 6) + 3
    fitted = Standardization.fit(features.split(7), signed_sqrt=root)
    values = fitted(Encoded(features)).vectors.flatten(0, -2)
    torch.testing.assert_close(values.mean(0), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(6), atol=1e-4, rtol=0)


@given(st.integers(1, 9), st.booleans())
def test_standardization_of_blocks_equals_whole(size, root):
    features = torch.randn(9, 3, dtype=torch.float64)
    blocks, whole = (
        Standardization.fit(parts, signed_sqrt=root) for parts in (features.split(size), [features])
    )
    assert blocks.mean == pytest.approx(whole.mean)
    assert blocks.std == pytest.approx(whole.std)


def test_standardization_keeps_signs_and_centers_constants():
    fitted = Standardization.fit(
        [torch.tensor([[4.0, -9.0, 2.0], [0.0, 9.0, 2.0]])], signed_sqrt=True
    )
    assert fitted.mean == pytest.approx((1.0, 0.0, 2**0.5))
    assert fitted.std == pytest.approx((1.0, 3.0, 1.0))
    mask = torch.tensor([[True, False]])
    items = fitted(Encoded(torch.tensor([[[9.0, -36.0, 2.0], [0.0, 0.0, 0.0]]]), mask))
    torch.testing.assert_close(items.vectors[0, 0], torch.tensor([2.0, -2.0, 0.0]))
    assert items.mask is mask


def test_standardization_refuses_invalid_std():
    for values in (
        {"mean": (0.0,), "std": (1.0, 1.0)},
        {"mean": (0.0,), "std": (0.0,)},
        {"mean": (), "std": ()},
    ):
        with pytest.raises(ValueError, match=r"std: expected \d values above 0"):
            Standardization(**values, signed_sqrt=False)
