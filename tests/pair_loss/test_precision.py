"""Row blocks under autocast, in mixed precision, with torch.compile and on a GPU."""

from __future__ import annotations

import pytest
import torch

from visavis import PairLoss, Targets
from visavis.core.encoded import unit_rows
from visavis.core.errors import VisavisError
from visavis.losses.pair_loss import cosine
from visavis.objectives import (
    CATALOG,
    InfoNCE,
    NTXent,
    Sigmoid,
    SmoothAP,
    Triplet,
    TripletHN,
    Unified,
)

from ..matching import mentions
from ..sampling import for_each, pairwise
from .cases import (
    IDS,
    assert_close,
    assert_matches,
    every_objective,
    force_plan,
    random_embeddings,
    required_annotations,
)

COMPILED = TripletHN, Unified, SmoothAP
"""One objective of each path of PairLoss. Compiling the others is slow."""


@for_each(kind=CATALOG)
def test_row_blocks_under_autocast_match_full_matrix(kind, monkeypatch):
    force_plan(monkeypatch, "rows", rows=64)
    images, texts = (torch.randn(256, 32, requires_grad=True) for _ in range(2))
    annotations = {
        name: annotation.detach().float()
        for name, annotation in required_annotations(256, 256).items()
    }
    targets = Targets(query_ids=range(256), candidate_ids=range(256), **annotations)
    exact = kind()(cosine(images, texts), targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours = PairLoss(kind())(images, texts, targets=targets)
        plain = kind()(cosine(images, texts), targets)
    assert ours.dtype == torch.float32
    gradients = [torch.autograd.grad(each, images)[0].flatten() for each in (exact, ours, plain)]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert abs(ours - exact) <= 1.5 * abs(plain - exact) + 0.002 * abs(exact)
    error, plain_error = (
        (gradient - gradients[0]).norm() / gradients[0].norm() for gradient in gradients[1:]
    )
    assert error <= 1.5 * plain_error + 0.01


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_row_blocks_support_mixed_precision(objective):
    images, texts = (
        torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(9, 5, requires_grad=True),
    )
    value = PairLoss(objective, block_rows=4)(images, texts)
    expected = objective(cosine(images, texts), Targets.paired(9))
    assert value.dtype == torch.float32
    assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for ours, right in zip(
        *(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True
    ):
        assert ours.dtype == right.dtype
        assert_close(ours, right, rtol=0.01, atol=1e-4)


@every_objective
def test_row_blocks_compute_requested_gradients_only(kind):
    images, texts = random_embeddings(5, 5)
    targets = Targets(
        query_ids=range(5),
        candidate_ids=range(5),
        **{name: annotation.detach() for name, annotation in required_annotations(5, 5).items()},
    )
    loss = PairLoss(kind(), block_rows=2)
    expected = kind()(cosine(images, texts), targets)
    assert_matches(loss, expected, [images], images, texts.detach(), targets=targets)
    assert_matches(loss, expected, [texts], images.detach(), texts, targets=targets)
    assert not loss(images.detach(), texts.detach(), targets=targets).requires_grad
    with torch.no_grad():
        value = loss(images, texts, targets=targets)
    assert not value.requires_grad
    assert_close(value, expected.detach())


@pytest.mark.parametrize("objective", [Triplet(), TripletHN(), Unified()], ids=str)
def test_row_blocks_reject_double_backward(objective):
    images, texts = random_embeddings(5, 5)
    value = PairLoss(objective, block_rows=2)(images, texts)
    with pytest.raises(VisavisError, match="differentiated twice"):
        torch.autograd.grad(value, images, create_graph=True)


@pytest.mark.parametrize("kind", [NTXent, Sigmoid, InfoNCE], ids=lambda kind: kind.__name__)
def test_dense_loss_has_second_derivatives(kind):
    images, texts = random_embeddings(5, 5)
    penalties = []
    for value in (
        PairLoss(kind())(images, texts),
        kind()(unit_rows(images) @ unit_rows(texts).T, Targets.paired(5)),
    ):
        gradients = torch.autograd.grad(value, (images, texts), create_graph=True)
        penalties.append(sum(gradient.square().sum() for gradient in gradients))
    ours, right = (torch.autograd.grad(penalty, (images, texts)) for penalty in penalties)
    for each, expected in zip(ours, right, strict=True):
        assert_close(each, expected, rtol=1e-9, atol=1e-12)


def test_row_blocks_reject_function_with_gradient():
    images, texts = random_embeddings(4, 4)
    table = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    targets = Targets.paired(4, weight=lambda rows, columns: table[rows][:, columns])
    with pytest.raises(VisavisError, match=mentions("weight", "function", "with a gradient")):
        PairLoss(Unified(), block_rows=2)(images, texts, targets=targets)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in COMPILED else pytest.mark.long) for kind in CATALOG],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.slow
def test_pair_loss_compiles(kind):
    images, texts = random_embeddings(6, 6)
    annotations = {
        name: annotation.detach() for name, annotation in required_annotations(6, 6).items()
    }
    targets = Targets(query_ids=range(6), candidate_ids=[0, 0, 1, 2, 3, 4], **annotations)
    torch._dynamo.reset()
    compiled = torch.compile(PairLoss(kind()), fullgraph=True, backend="eager")
    assert_matches(
        compiled,
        kind()(cosine(images, texts), targets),
        [images, texts],
        images,
        texts,
        targets=targets,
    )


@pytest.mark.gpu
@pairwise(rows=[None, 2], kind=CATALOG)
def test_pair_loss_on_gpu_matches_cpu(kind, rows):
    images, texts = random_embeddings(7, 6)
    annotations = {
        name: annotation.detach() for name, annotation in required_annotations(7, 6).items()
    }
    targets = Targets(
        query_ids=IDS["duplicates"][0], candidate_ids=IDS["duplicates"][1], **annotations
    )
    expected = kind()(cosine(images, texts), targets)
    value = PairLoss(kind(), block_rows=rows)(images.cuda(), texts.cuda(), targets=targets)
    assert_close(value.cpu(), expected)
    for ours, right in zip(
        *(torch.autograd.grad(each, (images, texts)) for each in (value, expected)), strict=True
    ):
        assert_close(ours, right, rtol=1e-10, atol=1e-11)
