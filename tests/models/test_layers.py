"""Pooling: the generalized operator, its special cases, and padding."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from visavis.models.layers import (
    GeneralizedPooling,
    Whitening,
    max_pool,
    mean_pool,
    sinusoidal_positions,
    sort_ascending,
)

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"


def lengths_mask(lengths: list[int], longest: int) -> torch.Tensor:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


@pytest.mark.data
def test_generalized_pooling_matches_released_code():
    if not GOLDEN.is_dir():
        pytest.skip("the golden files are absent: ../shared/golden")
    (entry,) = (
        entry
        for entry in json.loads((GOLDEN / "models_manifest.json").read_text())["entries"]
        if entry["name"] == "gpo"
    )
    with np.load(GOLDEN / "models.npz", allow_pickle=False) as arrays:
        given = {
            key: torch.from_numpy(arrays[key])
            for key in (
                *entry["inputs"].values(),
                *entry["outputs"].values(),
                *entry["state"].values(),
            )
        }
    params = entry["params"]
    pooling = GeneralizedPooling(
        params["d_pe"], params["d_hidden"], params["softmax_temperature"]
    ).double()
    pooling.load_state_dict({name: given[key] for name, key in entry["state"].items()})
    regions, lengths = given[entry["inputs"]["regions"]], given[entry["inputs"]["region_lengths"]]
    pooled = pooling(regions, lengths_mask(lengths.tolist(), regions.shape[1]))
    torch.testing.assert_close(pooled, given[entry["outputs"]["pooled"]], rtol=1e-9, atol=1e-11)
    weights = pooling.weights(lengths, regions.shape[1])
    torch.testing.assert_close(
        weights, given[entry["outputs"]["weights"]].reshape(weights.shape), rtol=1e-9, atol=1e-11
    )


@pytest.fixture
def pooling() -> GeneralizedPooling:
    return GeneralizedPooling(8, 8)


def test_generalized_pooling_with_uniform_weights_is_mean(pooling):
    torch.nn.init.zeros_(pooling.linear.weight)
    items, mask = torch.randn(3, 5, 4), lengths_mask([5, 2, 1], 5)
    torch.testing.assert_close(pooling(items, mask), mean_pool(items, mask))
    torch.testing.assert_close(pooling(items), items.mean(1))


def test_generalized_pooling_with_first_weight_is_max(pooling, monkeypatch):
    first = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(pooling, "weights", lambda lengths, longest: first.expand(len(lengths), -1))
    items, mask = torch.randn(3, 5, 4), lengths_mask([5, 2, 1], 5)
    torch.testing.assert_close(pooling(items, mask), max_pool(items, mask))
    torch.testing.assert_close(pooling(items), max_pool(items, None))


def test_generalized_pooling_of_one_item_is_identity(pooling):
    items = torch.randn(3, 1, 4)
    torch.testing.assert_close(pooling(items), items[:, 0])


@pytest.mark.parametrize("pool", ["generalised", "max", "mean"])
def test_generalized_pooling_mask_equals_shorter_set(pooling, pool):
    operator = {"generalised": pooling, "max": max_pool, "mean": mean_pool}[pool]
    items, lengths = torch.randn(4, 6, 3), [6, 1, 3, 3]
    mask = lengths_mask(lengths, 6)
    expected = torch.stack(
        [operator(row[None, :length], None)[0] for row, length in zip(items, lengths, strict=True)]
    )
    torch.testing.assert_close(operator(items, mask), expected)
    for rubbish in (1e4, -1e4):
        torch.testing.assert_close(
            operator(items.masked_fill(~mask[..., None], rubbish), mask), expected
        )


@pytest.mark.parametrize("pool", ["generalised", "max", "mean"])
def test_generalized_pooling_ignores_padding_and_order(pooling, pool):
    operator = {"generalised": pooling, "max": max_pool, "mean": mean_pool}[pool]
    items, mask = torch.randn(2, 5, 3, requires_grad=True), lengths_mask([5, 2], 5)
    order = torch.randperm(5)
    torch.testing.assert_close(operator(items[:, order], mask[:, order]), operator(items, mask))
    operator(items, mask).square().sum().backward()
    assert not items.grad[~mask].any()
    assert items.grad[mask].any()


def test_generalized_pooling_weights_depend_on_size_only(pooling):
    weights = pooling.weights(torch.tensor([5, 2, 5, 1]), 5)
    assert torch.equal(weights[0], weights[2])
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert not weights[1, 2:].any()
    assert weights[3, 0] == 1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("learns", [True, False], ids=["with a gradient", "without"])
def test_sort_ascending_matches_torch(dtype, learns):
    values = torch.randn(3, 4, 9).to(dtype).requires_grad_(learns)
    found = sort_ascending(values)
    assert found.dtype == dtype
    assert torch.equal(found, values.sort(-1).values)
    if learns:
        weights = torch.rand(9, dtype=dtype)
        (expected,) = torch.autograd.grad((values.sort(-1).values * weights).sum(), values)
        assert torch.equal(torch.autograd.grad((found * weights).sum(), values)[0], expected)


def test_generalized_pooling_at_high_temperature_is_near_mean():
    items, mask = torch.randn(3, 5, 4), lengths_mask([5, 2, 1], 5)
    torch.testing.assert_close(
        GeneralizedPooling(temperature=1e4)(items, mask), mean_pool(items, mask), rtol=0, atol=1e-3
    )


def test_generalized_pooling_gradients_match_value():
    pooling = GeneralizedPooling(4, 4, temperature=1.0).double()
    items = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda items: pooling(items, lengths_mask([3, 2], 3)), items)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_generalized_pooling_in_half_precision_is_close(pooling, dtype):
    items, mask = torch.randn(3, 5, 4), lengths_mask([5, 2, 1], 5)
    with torch.autocast("cpu", dtype):
        found = pooling(items.to(dtype), mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), pooling(items, mask), rtol=0.05, atol=0.05)


def test_vse_infinity_in_half_precision(pooling):
    items, mask = torch.randn(3, 5, 4), lengths_mask([5, 2, 1], 5)
    exact = pooling(items, mask)
    torch.testing.assert_close(
        pooling.bfloat16()(items.bfloat16(), mask).float(), exact, rtol=0.05, atol=0.05
    )


def test_sinusoidal_positions_by_hand():
    table = sinusoidal_positions(3, 4)
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(expected))


@pytest.mark.parametrize("shrinkage", [0.0, 0.05])
def test_whitening_makes_covariance_identity_up_to_shrinkage(shrinkage):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3
    whitening = Whitening(6, shrinkage)
    torch.testing.assert_close(whitening(features), features)
    whitening.fit(features)
    eigenvalues = torch.linalg.eigvalsh(features.T.cov(correction=0).double())
    whitened = whitening(features).double()
    torch.testing.assert_close(
        whitened.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-5, rtol=0
    )
    expected = eigenvalues / (eigenvalues + shrinkage * eigenvalues.mean())
    torch.testing.assert_close(
        torch.linalg.eigvalsh(whitened.T.cov(correction=0)),
        expected.sort().values,
        atol=1e-4,
        rtol=0,
    )
    whitening.fit(torch.ones(4, 6))
    assert whitening(torch.ones(2, 6)).abs().max() == 0
