"""Function scores in blocks: parameters, dropout and a scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.core.encoded import Encoded
from visavis.core.errors import MissingSupervision
from visavis.losses.pair_loss import cosine
from visavis.objectives import CATALOG, NTXent, Triplet, TripletHN, Unified

from ..sampling import pairwise
from .cases import (
    NEED_PAIRWISE_ANNOTATIONS,
    REDUCTIONS,
    WordScore,
    assert_close,
    assert_matches,
    random_embeddings,
    random_items,
    required_annotations,
)


@pairwise(kind=CATALOG, reduction=REDUCTIONS, extra=[False, True])
def test_function_scores_blocks_match_full_matrix(kind, reduction, extra):
    score, images, texts, more = (
        WordScore(),
        random_items(5, 3),
        random_items(6, 4),
        random_items(2, 7),
    )
    annotations = {
        name: annotation
        for name, annotation in required_annotations(5, 6).items()
        if not extra or "offline" in name
    }
    targets = Targets(query_ids=[1, 1, 2, 3, 4], candidate_ids=[1, 2, 2, 3, 4, 4], **annotations)
    arguments = {"targets": targets} | (
        {"extra_texts": more, "extra_text_ids": [2, 9]} if extra else {}
    )
    objective = kind(reduction=reduction)
    if extra and kind.__name__ in NEED_PAIRWISE_ANNOTATIONS:
        with pytest.raises(MissingSupervision):
            PairLoss(objective, score=score)(images, texts, **arguments)
        return
    expected = PairLoss(objective, score=score)(images, texts, **arguments)
    inputs = [images.vectors, texts.vectors, more.vectors, score.map.weight]
    assert_matches(
        PairLoss(objective, score=score, block_rows=2), expected, inputs, images, texts, **arguments
    )


def test_function_scores_find_parameters():
    module, outer = WordScore(), torch.randn(6, dtype=torch.float64, requires_grad=True)
    weights = outer.exp()
    images, texts = random_embeddings(4, 4)
    for objective in (Triplet(), Unified()):
        expected = objective((images * weights) @ texts.T, Targets.paired(4))
        loss = PairLoss(
            objective, block_rows=3, score=lambda images, texts: (images * weights) @ texts.T
        )
        assert_matches(loss, expected, [images, texts, outer], images, texts)
    regions, words = random_items(4, 3), random_items(4, 5)
    value = PairLoss(Unified(), block_rows=3, score=module.forward)(regions, words)
    value.backward()
    right = torch.autograd.grad(
        Unified()(module(regions, words), Targets.paired(4)), module.map.weight
    )
    assert_close(module.map.weight.grad, *right)


@pytest.mark.parametrize("objective", [Unified(gamma=3.0), TripletHN()], ids=str)
def test_function_scores_repeat_dropout_in_second_pass(objective):
    score, images, texts = WordScore(dropout=0.5), random_items(8, 3), random_items(8, 4)
    loss = PairLoss(objective, score=score, block_rows=3)
    torch.manual_seed(1)
    value = loss(images, texts)
    (actual,) = torch.autograd.grad(value, images.vectors)
    step = 1e-6 * torch.randn_like(actual)
    torch.manual_seed(1)
    moved = loss(Encoded(images.vectors.detach() + step, images.mask), texts)
    torch.testing.assert_close(
        (moved - value).detach(), (actual * step).sum(), rtol=1e-3, atol=1e-12
    )


@pytest.mark.parametrize(
    "scale",
    [7.0, nn.Parameter(torch.tensor(7.0).double()), nn.Parameter(torch.tensor([7.0]).double())],
    ids=str,
)
@pytest.mark.parametrize(
    "score", [None, lambda images, texts: cosine(images, texts)], ids=["cosine", "function"]
)
def test_function_scores_apply_scale(scale, score):
    images, texts = random_embeddings(7, 7)
    for objective in (NTXent(), NTXent(denominator="negatives", reduction="sum")):
        expected = replace(objective, tau=1.0)(scale * cosine(images, texts), Targets.paired(7))
        inputs = [images, texts, *([scale] if isinstance(scale, nn.Parameter) else [])]
        assert_matches(
            PairLoss(objective, scale=scale, score=score, block_rows=3),
            expected,
            inputs,
            images,
            texts,
        )
