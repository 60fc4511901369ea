"""A bias that is added after the scale, on every path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.engine import LearnedScale, cosine
from visavis.errors import SpecError
from visavis.objectives import NTXent, Sigmoid, Unified

from .cases import IDS, WordScore, close, every_reduction, items, planned, refused, same, vectors

PATHS = ("dense", "kept", "rows")


def numbers(scale: float = 6.0, bias: float = -3.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(number, dtype=torch.float64)) for number in (scale, bias)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ids", IDS)
@every_reduction
def test_it_is_added_after_the_scale_and_learns(path, ids, reduction, monkeypatch):
    planned(monkeypatch, path, rows=2)
    query_ids, candidate_ids = map(torch.tensor, map(list, IDS[ids]))
    images, texts = vectors(len(query_ids), len(candidate_ids))
    scale, bias = numbers()
    targets = Targets(query_ids=query_ids, candidate_ids=candidate_ids)
    expected = Sigmoid(scale=1, bias=0, reduction=reduction)(scale * cosine(images, texts) + bias, targets)
    loss = PairLoss(Sigmoid(reduction=reduction), scale=scale, bias=bias)
    assert dict(loss.named_parameters()) == {"scale": scale, "bias": bias}
    same(loss, expected, [images, texts, scale, bias], images, texts, query_ids, candidate_ids)


@pytest.mark.parametrize("rows", [None, 3])
def test_it_is_added_to_any_score(rows):
    images, texts, score = items(5, 4), items(7, 3), WordScore()
    scale, bias = numbers()
    ids = {"image_ids": [1, 2, 3, 4, 5], "text_ids": [1, 1, 2, 3, 4, 5, 5]}
    targets = Targets(query_ids=ids["image_ids"], candidate_ids=ids["text_ids"])
    expected = Sigmoid(scale=1, bias=0)(scale * score(images, texts) + bias, targets)
    inputs = [images.vectors, texts.vectors, *score.parameters(), scale, bias]
    same(PairLoss(Sigmoid(), score=score, block_rows=rows, scale=scale, bias=bias), expected, inputs, images, texts, **ids)


@pytest.mark.parametrize("rows", [None, 2])
def test_it_alone_may_learn_also_with_extra_candidates_and_at_several_widths(rows):
    images, texts, extra = (each.detach() for each in vectors(4, 4, 3))
    bias, targets = numbers()[1], Targets.paired(4)
    to_all = Targets(query_ids=range(4), candidate_ids=[0, 1, 2, 3, -1, -1, -1])
    loss = Sigmoid()

    def directions(width):
        first = [each[:, :width] for each in (images, texts, extra)]
        forth = loss.one_way(cosine(first[0], torch.cat(first[1:])) + (bias + 10) / 10, to_all)
        back = loss.one_way(cosine(first[1], first[0]) + (bias + 10) / 10, targets)
        return (forth.mean() + back.mean()) / 2

    given = PairLoss(loss, bias=bias, block_rows=rows, widths=(3,))
    same(given, directions(3) + directions(6), [bias], images, texts, extra_texts=extra, extra_text_ids=[-1, -1, -1])


@pytest.mark.parametrize("rows", [None, 2])
def test_fixed_numbers_are_those_of_the_objective(rows):
    images, texts = vectors(5, 5)
    expected = Sigmoid(scale=7, bias=-4)(cosine(images, texts), Targets.paired(5))
    for objective, given in (
        (Sigmoid(scale=7, bias=-4), {}),
        (Sigmoid(), {"scale": 7, "bias": -4}),
        (Sigmoid(scale=7), {"bias": -4.0}),
        (Sigmoid(bias=-4), {"scale": 7.0}),
    ):
        same(PairLoss(objective, block_rows=rows, **given), expected, [images, texts], images, texts)


def test_a_learned_scale_and_a_bias_are_trained_together():
    images, texts = (each.detach() for each in vectors(12, 12))
    loss = PairLoss(Sigmoid(), scale=LearnedScale(10.0), bias=nn.Parameter(torch.tensor(-10.0)))
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    before = loss(images, texts).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss(images, texts).backward()
        optimizer.step()
    assert loss(images, texts).item() < before
    assert loss.bias.item() > -10  # of twelve, not of ten thousand negatives


def test_a_bias_may_be_given_at_a_call():
    images, texts = vectors(5, 5)
    loss, bias = PairLoss(Sigmoid(), scale=1.0, bias=0.0), numbers()[1]
    same(loss, PairLoss(Sigmoid(), scale=7.0, bias=bias)(images, texts), [images, bias], images, texts, scale=7.0, bias=bias)
    for loss in (PairLoss(Unified()), PairLoss(Sigmoid())):
        with refused("PairLoss got bias=-7.0 in a call, expected one number, of a loss that was made with a bias.", SpecError):
            loss(images, texts, bias=-7.0)


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_is_promoted_before_it_is_added(path, monkeypatch):
    planned(monkeypatch, path, rows=16)
    images, texts = torch.randn(2, 64, 32).unbind()
    loss = PairLoss(Sigmoid(), scale=1.0, bias=-200.0)  # of which bfloat16 knows no fractions
    exact = loss(images, texts)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(images, texts)
    assert value.dtype == torch.float32
    close(value, exact, rtol=1e-4, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        other = loss(images, -texts)
    assert abs(other - exact) > 3 * abs(value - exact)  # the cosines are not lost beside the bias


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, of numbers on a graph
def test_a_compiler_sees_through_it():
    images, texts = vectors(6, 6)
    scale, bias = numbers()
    torch._dynamo.reset()
    loss = PairLoss(Sigmoid(), scale=1.0, bias=0.0)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    same(compiled, loss(images, texts, scale=scale.exp(), bias=bias), [images, scale, bias], images, texts, scale=scale.exp(), bias=bias)


@pytest.mark.parametrize("objective", [Unified(), NTXent()], ids=str)
def test_other_objectives_have_none(objective):
    sentence = f"{objective!r} has no bias that could be given or learned: give PairLoss(bias=) only to Sigmoid."
    for bias in (-1.0, numbers()[1]):
        with refused(sentence, SpecError):
            PairLoss(objective, scale=10.0, bias=bias)


@pytest.mark.parametrize("bias", [math.nan, math.inf, True, "1", nn.Parameter(torch.ones(3)), torch.tensor(-10)], ids=str)
def test_a_bias_that_is_none_is_refused(bias):
    with pytest.raises(SpecError, match=r"(?s)^PairLoss got bias=.*, expected a finite number or an nn\.Parameter of one number\.$"):
        PairLoss(Sigmoid(), bias=bias)
