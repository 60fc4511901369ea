"""Blocks in any precision, on the graph, under a compiler and on a GPU."""

from __future__ import annotations

import pytest
import torch

from visavis import PairLoss, Targets
from visavis.engine import cosine
from visavis.errors import VisavisError
from visavis.objectives import CATALOG, InfoNCE, Ladder, MultiSimilarity, SmoothAP, Triplet, TripletHN, Unified

from .cases import IDS, close, every_objective, needed, planned, same, vectors

COMPILED = TripletHN, InfoNCE, Unified, SmoothAP, Ladder, MultiSimilarity
"""One of each kind of arithmetic; the others take long."""


@every_objective
@pytest.mark.parametrize("path", ["kept", "rows"])
def test_under_autocast_blocks_differ_by_the_rounding_of_products_alone(kind, path, monkeypatch):
    planned(monkeypatch, path, rows=64)
    images, texts = (torch.randn(256, 32, requires_grad=True) for _ in range(2))
    facts = {name: fact.detach().float() for name, fact in needed(256, 256).items()}
    targets = Targets(query_ids=range(256), candidate_ids=range(256), **facts)
    exact = kind()(cosine(images, texts), targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours = PairLoss(kind())(images, texts, targets=targets)
        plain = kind()(cosine(images, texts), targets)
    assert ours.dtype == torch.float32
    gradients = [torch.autograd.grad(each, images)[0].flatten() for each in (exact, ours, plain)]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert abs(ours - exact) <= 1.5 * abs(plain - exact) + 0.002 * abs(exact)
    error, plain_error = ((gradient - gradients[0]).norm() / gradients[0].norm() for gradient in gradients[1:])
    assert error <= 1.5 * plain_error + 0.01


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_precision_of_the_inputs(objective):
    images, texts = torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    value = PairLoss(objective, block_rows=4)(images, texts)
    expected = objective(cosine(images, texts), Targets.paired(9))
    assert value.dtype == torch.float32
    close(value, expected, rtol=1e-5, atol=1e-5)
    for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True):
        assert ours.dtype == right.dtype
        close(ours, right, rtol=0.01, atol=1e-4)


@every_objective
def test_only_what_wants_a_gradient_gets_one(kind):
    images, texts = vectors(5, 5)
    targets = Targets(query_ids=range(5), candidate_ids=range(5), **{name: fact.detach() for name, fact in needed(5, 5).items()})
    loss = PairLoss(kind(), block_rows=2)
    expected = kind()(cosine(images, texts), targets)
    same(loss, expected, [images], images, texts.detach(), targets=targets)
    same(loss, expected, [texts], images.detach(), texts, targets=targets)
    assert not loss(images.detach(), texts.detach(), targets=targets).requires_grad
    with torch.no_grad():
        value = loss(images, texts, targets=targets)
    assert not value.requires_grad
    close(value, expected.detach())


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_a_gradient_formed_already_has_none_itself(objective):
    images, texts = vectors(5, 5)
    value = PairLoss(objective, block_rows=2)(images, texts)
    with pytest.raises(VisavisError, match=r"^PairLoss has formed its gradient already and cannot be differentiated twice"):
        torch.autograd.grad(value, images, create_graph=True)


def test_a_function_with_a_gradient_is_not_dropped_in_silence():
    images, texts = vectors(4, 4)
    table = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    targets = Targets.paired(4, weight=lambda rows, columns: table[rows][:, columns])
    with pytest.raises(VisavisError, match=r"^the function given for weight returns numbers with a gradient"):
        PairLoss(Unified(), block_rows=2)(images, texts, targets=targets)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in COMPILED else pytest.mark.long) for kind in CATALOG], ids=lambda kind: kind.__name__
)
def test_a_compiler_sees_through_the_matrix(kind):
    images, texts = vectors(6, 6)
    facts = {name: fact.detach() for name, fact in needed(6, 6).items()}
    targets = Targets(query_ids=range(6), candidate_ids=[0, 0, 1, 2, 3, 4], **facts)
    torch._dynamo.reset()
    compiled = torch.compile(PairLoss(kind()), fullgraph=True, backend="eager")
    same(compiled, kind()(cosine(images, texts), targets), [images, texts], images, texts, targets=targets)


@pytest.mark.gpu
@every_objective
@pytest.mark.parametrize("rows", [None, 2])
def test_on_a_gpu_as_on_a_cpu(kind, rows):
    images, texts = vectors(7, 6)
    facts = {name: fact.detach() for name, fact in needed(7, 6).items()}
    targets = Targets(query_ids=IDS["duplicates"][0], candidate_ids=IDS["duplicates"][1], **facts)
    expected = kind()(cosine(images, texts), targets)
    value = PairLoss(kind(), block_rows=rows)(images.cuda(), texts.cuda(), targets=targets)
    close(value.cpu(), expected)
    for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True):
        close(ours, right, rtol=1e-10, atol=1e-11)
