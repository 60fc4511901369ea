"""Matryoshka dimensions: the loss is the sum of the losses at all dimensions, on every path."""

import warnings

import pytest
import torch
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError, SpecError
from visavis.losses.pair_loss import LearnedScale
from visavis.objectives import NTXent, SmoothAP, Triplet, TripletHN, Unified

from ..matching import mentions
from ..sampling import pairwise

OBJECTIVES = [TripletHN(), Triplet(), Unified(reduction="mean"), NTXent(), SmoothAP()]
IDS = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 0, 1, 2, 3, 4, 1, 2])
PATHS = {"as planned": {}, "rows": {"block_rows": 2}, "one row": {"block_rows": 1}}


def sides(dim=7):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(len(ids), dim, generator=generator, dtype=torch.float64).requires_grad_()
        for ids in IDS
    ]


def outcome(loss, images, texts, **more):
    value = loss(images, texts, *IDS, **more)
    inputs = [
        images,
        texts,
        *loss.parameters(),
        *(each for each in more.values() if isinstance(each, torch.Tensor) and each.requires_grad),
    ]
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pairwise(objective=OBJECTIVES, path=PATHS)
def test_matryoshka_full_dim_is_bit_identical(objective, path):
    items = sides()
    for ours, plain in zip(
        *(
            outcome(PairLoss(objective, matryoshka_dims=w, **PATHS[path]), *items)
            for w in ([7], ())
        ),
        strict=True,
    ):
        assert torch.equal(ours, plain)


@pairwise(objective=OBJECTIVES, path=PATHS)
def test_matryoshka_loss_is_sum_over_dims(objective, path):
    items = sides()
    actual = outcome(PairLoss(objective, matryoshka_dims=[5, 2], **PATHS[path]), *items)
    separate = [
        PairLoss(objective, **PATHS[path])(
            *(normalize(side[:, :dim], dim=1) for side in items), *IDS
        )
        for dim in (7, 2, 5)
    ]
    expected = [sum(separate).detach(), *torch.autograd.grad(sum(separate), items)]
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_matryoshka_matches_on_tiles_and_one_matrix():
    generator = torch.Generator().manual_seed(4)
    images, texts = (
        torch.randn(number, 16, generator=generator).requires_grad_() for number in (700, 900)
    )
    for objective, path in ((Unified(), "blocks"), (SmoothAP(), "dense")):
        loss = PairLoss(objective, matryoshka_dims=[4])
        assert PairLoss(objective).plan(700, 900, embedding_dim=16).path == path
        ids = torch.arange(700), torch.arange(900) % 700
        value = loss(images, texts, *ids)
        gradients = torch.autograd.grad(value, [images, texts])
        full, truncated = (
            PairLoss(objective)(images, texts, *ids),
            PairLoss(objective)(images[:, :4], texts[:, :4], *ids),
        )
        assert value == full + truncated
        for ours, right in zip(
            gradients, torch.autograd.grad(full + truncated, [images, texts]), strict=True
        ):
            torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [None, 3])
def test_matryoshka_scale_gradient_is_sum_over_dims(rows):
    items = sides()
    scales = [LearnedScale(9.0) for _ in range(4)]
    actual = outcome(
        PairLoss(NTXent(), scale=scales[0], block_rows=rows, matryoshka_dims=[2, 5]), *items
    )
    separate = [
        outcome(
            PairLoss(NTXent(), scale=scale, block_rows=rows),
            *(side[:, :dim].detach().requires_grad_() for side in items),
        )
        for scale, dim in zip(scales[1:], (7, 2, 5), strict=True)
    ]
    for index in (0, 3):  # value, and gradient of the scale
        torch.testing.assert_close(actual[index], sum(each[index] for each in separate))


def test_matryoshka_truncates_extra_candidates():
    items, bank = (
        sides(),
        torch.randn(
            4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        ).requires_grad_(),
    )
    extra = {"extra_texts": bank, "extra_text_ids": [3, 9, 9, 1]}
    actual = outcome(PairLoss(Unified(), matryoshka_dims=[3]), *items, **extra)
    parts = [
        PairLoss(Unified())(
            *(side[:, :dim] for side in items), *IDS, **(extra | {"extra_texts": bank[:, :dim]})
        )
        for dim in (7, 3)
    ]
    expected = [sum(parts).detach(), *torch.autograd.grad(sum(parts), [*items, bank])]
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [None, 2])
def test_matryoshka_gradient_matches_finite_differences(rows):
    loss = PairLoss(Unified(gamma=5.0), matryoshka_dims=[2, 3], block_rows=rows)
    items = [
        torch.randn(
            3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)
        ).requires_grad_()
        for s in (1, 2)
    ]
    assert torch.autograd.gradcheck(lambda images, texts: loss(images, texts), items)


def test_matryoshka_matches_hand_computed_value():
    """Positives have cosine 1 at both dimensions, negatives 0.6 at dimension 2 and 1 at dimension
    1: four hinges of 0.1 and 0.5.
    """
    images, texts = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [3.0, 4.0]])
    assert PairLoss(Triplet(margin=0.5, reduction="sum"), matryoshka_dims=[1])(
        images, texts
    ).item() == pytest.approx(4 * 0.1 + 4 * 0.5)


def test_matryoshka_keeps_masks_of_encoded_items():
    items = [Encoded(side.detach(), torch.ones(len(side), 1, dtype=torch.bool)) for side in sides()]
    assert PairLoss(Unified(), matryoshka_dims=[3])(*items, *IDS) == PairLoss(
        Unified(), matryoshka_dims=[3]
    )(*(each.vectors for each in items), *IDS)


def test_matryoshka_counts_one_batch_per_call():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = PairLoss(Unified(), matryoshka_dims=[1, 2])
        loss(torch.eye(3), torch.eye(3), [7, 7, 7])
        assert not caught
        loss(torch.eye(3), torch.eye(3), [7, 7, 7])
    assert len(caught) == 1


@pytest.mark.parametrize("dims", [[0], [-1], [2.0], [True], "64", 64.0, [None]], ids=str)
def test_matryoshka_rejects_invalid_dims(dims):
    with pytest.raises(SpecError, match=mentions("matryoshka_dims", "[64, 256]")):
        PairLoss(Unified(), matryoshka_dims=dims)


def test_matryoshka_rejects_unsupported_inputs():
    with pytest.raises(ShapeError, match=mentions("matryoshka_dims", 3, 8, 7)):
        PairLoss(Unified(), matryoshka_dims=[8, 3])(*sides(), *IDS)
    with pytest.raises(SpecError, match=mentions("matryoshka_dims", "score")):
        PairLoss(Unified(), score=torch.cdist, matryoshka_dims=[2])
    offline = {
        f"{side}_offline_scores": torch.zeros(n, 2) for side, n in (("query", 6), ("candidate", 8))
    }
    targets = Targets(query_ids=IDS[0], candidate_ids=IDS[1], **offline)
    with pytest.raises(ShapeError, match=mentions("matryoshka_dims", "offline")):
        PairLoss(Unified(), matryoshka_dims=[2])(*sides(), targets=targets)
