"""Bias of PairLoss: added after the scale, on every path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.core.errors import SpecError, format_value
from visavis.losses.pair_loss import LearnedScale, cosine
from visavis.objectives import NTXent, Sigmoid, Unified

from ..sampling import pairwise
from .cases import (
    IDS,
    REDUCTIONS,
    WordScore,
    assert_close,
    assert_matches,
    force_plan,
    raises_error,
    random_embeddings,
    random_items,
)

PATHS = ("dense", "rows")


def learnable_scale_and_bias(scale: float = 6.0, bias: float = -3.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (scale, bias)]


@pairwise(path=PATHS, ids=IDS, reduction=REDUCTIONS)
def test_bias_is_added_after_scale_and_learned(path, ids, reduction, monkeypatch):
    force_plan(monkeypatch, path, rows=2)
    query_ids, candidate_ids = map(torch.tensor, map(list, IDS[ids]))
    images, texts = random_embeddings(len(query_ids), len(candidate_ids))
    scale, bias = learnable_scale_and_bias()
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids)
    expected = Sigmoid(scale=1, bias=0, reduction=reduction)(
        scale * cosine(images, texts) + bias, targets
    )
    loss = PairLoss(Sigmoid(reduction=reduction), scale=scale, bias=bias)
    assert dict(loss.named_parameters()) == {"scale": scale, "bias": bias}
    assert_matches(
        loss, expected, [images, texts, scale, bias], images, texts, query_ids, candidate_ids
    )


@pytest.mark.parametrize("rows", [None, 3])
def test_bias_is_added_to_function_score(rows):
    images, texts, score = random_items(5, 4), random_items(7, 3), WordScore()
    scale, bias = learnable_scale_and_bias()
    ids = {"image_ids": [1, 2, 3, 4, 5], "text_ids": [1, 1, 2, 3, 4, 5, 5]}
    targets = Targets(query_ids=ids["image_ids"], candidate_ids=ids["text_ids"])
    expected = Sigmoid(scale=1, bias=0)(scale * score(images, texts) + bias, targets)
    inputs = [images.vectors, texts.vectors, *score.parameters(), scale, bias]
    assert_matches(
        PairLoss(Sigmoid(), score=score, block_rows=rows, scale=scale, bias=bias),
        expected,
        inputs,
        images,
        texts,
        **ids,
    )


@pytest.mark.parametrize("rows", [None, 2])
def test_bias_learns_with_extra_candidates_and_matryoshka_dims(rows):
    images, texts, extra = (each.detach() for each in random_embeddings(4, 4, 3))
    bias, targets = learnable_scale_and_bias()[1], Targets.paired(4)
    to_all = Targets(query_ids=range(4), candidate_ids=[0, 1, 2, 3, -1, -1, -1])
    loss = Sigmoid()

    def directions(dim):
        first = [each[:, :dim] for each in (images, texts, extra)]
        i2t = loss.one_way(cosine(first[0], torch.cat(first[1:])) + (bias + 10) / 10, to_all)
        t2i = loss.one_way(cosine(first[1], first[0]) + (bias + 10) / 10, targets)
        return (i2t.mean() + t2i.mean()) / 2

    options = PairLoss(loss, bias=bias, block_rows=rows, matryoshka_dims=(3,))
    assert_matches(
        options,
        directions(3) + directions(6),
        [bias],
        images,
        texts,
        extra_texts=extra,
        extra_text_ids=[-1, -1, -1],
    )


@pytest.mark.parametrize("rows", [None, 2])
def test_bias_and_scale_override_objective_fields(rows):
    images, texts = random_embeddings(5, 5)
    expected = Sigmoid(scale=7, bias=-4)(cosine(images, texts), Targets.paired(5))
    for objective, options in (
        (Sigmoid(scale=7, bias=-4), {}),
        (Sigmoid(), {"scale": 7, "bias": -4}),
        (Sigmoid(scale=7), {"bias": -4.0}),
        (Sigmoid(bias=-4), {"scale": 7.0}),
    ):
        assert_matches(
            PairLoss(objective, block_rows=rows, **options),
            expected,
            [images, texts],
            images,
            texts,
        )


def test_bias_and_learned_scale_train_together():
    images, texts = (each.detach() for each in random_embeddings(12, 12))
    loss = PairLoss(Sigmoid(), scale=LearnedScale(10.0), bias=nn.Parameter(torch.tensor(-10.0)))
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    before = loss(images, texts).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss(images, texts).backward()
        optimizer.step()
    assert loss(images, texts).item() < before
    assert loss.bias.item() > -10  # twelve negatives, not ten thousand


def test_bias_can_be_passed_per_call():
    images, texts = random_embeddings(5, 5)
    loss, bias = PairLoss(Sigmoid(), scale=1.0, bias=0.0), learnable_scale_and_bias()[1]
    assert_matches(
        loss,
        PairLoss(Sigmoid(), scale=7.0, bias=bias)(images, texts),
        [images, bias],
        images,
        texts,
        scale=7.0,
        bias=bias,
    )
    for loss in (PairLoss(Unified()), PairLoss(Sigmoid())):
        with raises_error("bias", "-7.0", kind=SpecError):
            loss(images, texts, bias=-7.0)


@pytest.mark.parametrize("path", PATHS)
def test_bias_is_added_in_float32_under_autocast(path, monkeypatch):
    force_plan(monkeypatch, path, rows=16)
    images, texts = torch.randn(2, 64, 32).unbind()
    loss = PairLoss(Sigmoid(), scale=1.0, bias=-200.0)  # bfloat16 has no fractions near 200
    exact = loss(images, texts)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(images, texts)
    assert value.dtype == torch.float32
    assert_close(value, exact, rtol=1e-4, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        other = loss(images, -texts)
    assert abs(other - exact) > 3 * abs(value - exact)  # the bias does not swamp the cosines


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # raised by torch.compile for tensors on a graph
@pytest.mark.slow
def test_bias_compiles():
    images, texts = random_embeddings(6, 6)
    scale, bias = learnable_scale_and_bias()
    torch._dynamo.reset()
    loss = PairLoss(Sigmoid(), scale=1.0, bias=0.0)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    assert_matches(
        compiled,
        loss(images, texts, scale=scale.exp(), bias=bias),
        [images, scale, bias],
        images,
        texts,
        scale=scale.exp(),
        bias=bias,
    )


@pytest.mark.parametrize("objective", [Unified(), NTXent()], ids=str)
def test_bias_is_rejected_for_other_objectives(objective):
    for bias in (-1.0, learnable_scale_and_bias()[1]):
        with raises_error("bias", "Sigmoid", repr(objective), kind=SpecError):
            PairLoss(objective, scale=10.0, bias=bias)


@pytest.mark.parametrize(
    "bias", [math.nan, math.inf, True, "1", nn.Parameter(torch.ones(3)), torch.tensor(-10)], ids=str
)
def test_bias_rejects_invalid_values(bias):
    with raises_error(
        "bias",
        "expected a number up to 1e12 or an nn.Parameter",
        format_value(bias),
        kind=SpecError,
    ):
        PairLoss(Sigmoid(), bias=bias)
