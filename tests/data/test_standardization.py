"""Standardized features: what mean and deviation they have, and that blocks, constants and signs do not spoil it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis.data.standardization import Standardization
from visavis.types import Encoded


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape", [(50, 6), (20, 4, 6)])
def test_training_features_come_to_mean_0_and_deviation_1(root, shape):
    features = torch.randn(shape) * torch.linspace(0.1, 9, 6) + 3
    fitted = Standardization.of(features.split(7), root=root)
    values = fitted(Encoded(features)).vectors.flatten(0, -2)
    torch.testing.assert_close(values.mean(0), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(6), atol=1e-4, rtol=0)


@given(st.integers(1, 9), st.booleans())
def test_blocks_are_as_good_as_all_at_once(size, root):
    features = torch.randn(9, 3, dtype=torch.float64)
    blocks, whole = (Standardization.of(parts, root=root) for parts in (features.split(size), [features]))
    assert blocks.mean == pytest.approx(whole.mean)
    assert blocks.deviation == pytest.approx(whole.deviation)


def test_roots_keep_the_sign_and_constants_are_only_centered():
    fitted = Standardization.of([torch.tensor([[4.0, -9.0, 2.0], [0.0, 9.0, 2.0]])], root=True)
    assert fitted.mean == pytest.approx((1.0, 0.0, 2**0.5))
    assert fitted.deviation == pytest.approx((1.0, 3.0, 1.0))
    mask = torch.tensor([[True, False]])
    items = fitted(Encoded(torch.tensor([[[9.0, -36.0, 2.0], [0.0, 0.0, 0.0]]]), mask))
    torch.testing.assert_close(items.vectors[0, 0], torch.tensor([2.0, -2.0, 0.0]))
    assert items.mask is mask


def test_deviations_are_those_of_the_means_and_above_0():
    for values in ({"mean": (0.0,), "deviation": (1.0, 1.0)}, {"mean": (0.0,), "deviation": (0.0,)}, {"mean": (), "deviation": ()}):
        with pytest.raises(ValueError, match="as many deviations, all above 0, as means"):
            Standardization(**values, root=False)
