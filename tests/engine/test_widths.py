"""Losses over the first numbers of vectors: the sum of the losses of all widths, by every path."""

import warnings

import pytest
import torch
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.engine import LearnedScale
from visavis.errors import ShapeError, SpecError
from visavis.objectives import NTXent, SmoothAP, Triplet, TripletHN, Unified
from visavis.types import Encoded

OBJECTIVES = [TripletHN(), Triplet(), Unified(reduction="mean"), NTXent(), SmoothAP()]
IDS = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 0, 1, 2, 3, 4, 1, 2])
PATHS = {"as planned": {}, "rows": {"block_rows": 2}, "one row": {"block_rows": 1}}


def sides(width=7):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(len(ids), width, generator=generator, dtype=torch.float64).requires_grad_() for ids in IDS]


def outcome(loss, images, texts, **more):
    value = loss(images, texts, *IDS, **more)
    inputs = [images, texts, *loss.parameters(), *(each for each in more.values() if isinstance(each, torch.Tensor) and each.requires_grad)]
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_the_whole_width_alone_changes_no_bit(objective, path):
    items = sides()
    for ours, plain in zip(*(outcome(PairLoss(objective, widths=w, **PATHS[path]), *items) for w in ([7], ())), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_it_is_the_sum_of_the_losses_of_each_width(objective, path):
    items = sides()
    found = outcome(PairLoss(objective, widths=[5, 2], **PATHS[path]), *items)
    apart = [PairLoss(objective, **PATHS[path])(*(normalize(side[:, :width], dim=1) for side in items), *IDS) for width in (7, 2, 5)]
    expected = [sum(apart).detach(), *torch.autograd.grad(sum(apart), items)]
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_by_tiles_and_kept_cosines_too():
    generator = torch.Generator().manual_seed(4)
    images, texts = (torch.randn(number, 16, generator=generator).requires_grad_() for number in (700, 900))
    for objective, path in ((Unified(), "tiles"), (SmoothAP(), "kept")):
        loss = PairLoss(objective, widths=[4])
        assert PairLoss(objective).plan(700, 900, width=16).path == path
        ids = torch.arange(700), torch.arange(900) % 700
        value = loss(images, texts, *ids)
        gradients = torch.autograd.grad(value, [images, texts])
        whole, narrow = PairLoss(objective)(images, texts, *ids), PairLoss(objective)(images[:, :4], texts[:, :4], *ids)
        assert value == whole + narrow
        for ours, right in zip(gradients, torch.autograd.grad(whole + narrow, [images, texts]), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [None, 3])
def test_a_learned_scale_learns_from_all_widths(rows):
    items = sides()
    scales = [LearnedScale(9.0) for _ in range(4)]
    found = outcome(PairLoss(NTXent(), scale=scales[0], block_rows=rows, widths=[2, 5]), *items)
    apart = [
        outcome(PairLoss(NTXent(), scale=scale, block_rows=rows), *(side[:, :width].detach().requires_grad_() for side in items))
        for scale, width in zip(scales[1:], (7, 2, 5), strict=True)
    ]
    for place in (0, 3):  # the value, and the gradient of the scale
        torch.testing.assert_close(found[place], sum(each[place] for each in apart))


def test_extra_candidates_are_cut_as_the_batch_is():
    items, bank = sides(), torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    extra = {"extra_texts": bank, "extra_text_ids": [3, 9, 9, 1]}
    found = outcome(PairLoss(Unified(), widths=[3]), *items, **extra)
    parts = [
        PairLoss(Unified())(*(side[:, :width] for side in items), *IDS, **(extra | {"extra_texts": bank[:, :width]})) for width in (7, 3)
    ]
    expected = [sum(parts).detach(), *torch.autograd.grad(sum(parts), [*items, bank])]
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [None, 2])
def test_the_gradient_is_that_of_differences(rows):
    loss = PairLoss(Unified(gamma=5.0), widths=[2, 3], block_rows=rows)
    items = [torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (1, 2)]
    assert torch.autograd.gradcheck(lambda images, texts: loss(images, texts), items)


def test_a_value_by_hand():
    """Right pairs have cosine 1 at both widths; wrong ones 0.6 at width 2, and at width 1 also 1: four hinges of 0.1 and of 0.5."""
    images, texts = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [3.0, 4.0]])
    assert PairLoss(Triplet(margin=0.5, reduction="sum"), widths=[1])(images, texts).item() == pytest.approx(4 * 0.1 + 4 * 0.5)


def test_encoded_items_keep_what_is_not_a_vector():
    items = [Encoded(side.detach(), torch.ones(len(side), 1, dtype=torch.bool)) for side in sides()]
    assert PairLoss(Unified(), widths=[3])(*items, *IDS) == PairLoss(Unified(), widths=[3])(*(each.vectors for each in items), *IDS)


def test_one_batch_is_one_batch_at_however_many_widths():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = PairLoss(Unified(), widths=[1, 2])
        loss(torch.eye(3), torch.eye(3), [7, 7, 7])
        assert not caught
        loss(torch.eye(3), torch.eye(3), [7, 7, 7])
    assert len(caught) == 1


@pytest.mark.parametrize("widths", [[0], [-1], [2.0], [True], "64", 64.0, [None]], ids=str)
def test_widths_that_are_none_are_refused(widths):
    with pytest.raises(SpecError, match=r"^widths are .*, expected a list of whole numbers above 0, such as \[64, 256\]\.$"):
        PairLoss(Unified(), widths=widths)


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(ShapeError, match=r"^widths are 3, 8, but the vectors have 7 numbers: expected none above 7\.$"):
        PairLoss(Unified(), widths=[8, 3])(*sides(), *IDS)
    with pytest.raises(SpecError, match=r"^PairLoss got widths with a score function: only cosines are scores of the first numbers "):
        PairLoss(Unified(), score=torch.cdist, widths=[2])
    offline = {f"{side}_offline_scores": torch.zeros(n, 2) for side, n in (("query", 6), ("candidate", 8))}
    targets = Targets(query_ids=IDS[0], candidate_ids=IDS[1], **offline)
    with pytest.raises(ShapeError, match=r"^PairLoss got widths with offline scores, which are those of whole vectors: "):
        PairLoss(Unified(), widths=[2])(*sides(), targets=targets)
