"""PairLoss: an objective on embeddings, with a scale and any score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.engine import cosine
from visavis.errors import SpecError, VisavisError
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified
from visavis.types import Encoded

from .cases import close, every_of_family, refused, vectors

# the score and the ids


@every_of_family
def test_the_score_is_the_cosine(objective):
    images, texts = vectors(4, 4)
    scores = torch.tensor([[torch.dot(v, t) / v.norm() / t.norm() for t in texts.detach()] for v in images.detach()], dtype=torch.float64)
    close(cosine(images, texts).detach(), scores)
    close(PairLoss(objective)(images, texts).detach(), objective(scores, Targets.paired(4)))
    close(PairLoss(objective)(3 * images, 0.1 * texts), PairLoss(objective)(images, texts))
    assert cosine(torch.zeros(2, 3).half(), torch.eye(3).half()).tolist() == [[0.0, 0.0, 0.0]] * 2


@every_of_family
def test_ids_mean_the_same_as_targets(objective):
    images, texts = vectors(3, 5)
    image_ids, text_ids = [7, -8, 9], np.array([7, 7, -8, 9, 9])
    by_ids = PairLoss(objective)(images, texts, image_ids, text_ids)
    targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
    close(PairLoss(objective)(images, texts, targets=targets), by_ids)
    close(by_ids, objective(cosine(images, texts), targets))
    order = torch.randperm(5)
    close(PairLoss(objective)(images, texts[order], torch.tensor(image_ids), text_ids[order.numpy()]), by_ids)


def test_image_ids_serve_both_sides():
    images, texts = vectors(4, 4)
    ids = [3, 3, 1, 2]
    close(PairLoss(Unified())(images, texts, ids), PairLoss(Unified())(images, texts, ids, ids))
    close(PairLoss(Unified())(images, texts, [5, 3, 1, 2]), PairLoss(Unified())(images, texts))


def test_embeddings_may_be_of_two_precisions():
    images, texts = torch.randn(4, 5), torch.randn(4, 5)
    half = PairLoss(Unified())(images, texts.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, PairLoss(Unified())(images, texts.bfloat16().float()))
    close(PairLoss(Unified())(images, texts.double()), PairLoss(Unified())(images.double(), texts.double()))


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_under_autocast_value_and_gradient_are_finite_and_close(kind):
    facts = {name: torch.rand(16, 16) for name in ("relevance", "pair_margin")}
    facts |= {f"{side}_offline_scores": torch.rand(16, 2) for side in ("query", "candidate")}
    targets = Targets(query_ids=torch.arange(16), candidate_ids=torch.arange(16), **facts)
    images, texts = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)
    exact = PairLoss(kind())(images, texts, targets=targets)
    with torch.autocast("cpu", torch.bfloat16):
        value = PairLoss(kind())(images, texts, targets=targets)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=0.05)
    (ours,), (right,) = (torch.autograd.grad(each, images) for each in (value, exact))
    assert ours.isfinite().all()
    assert torch.cosine_similarity(ours.flatten(), right.flatten(), dim=0) > 0.95


# other scores


class WordScore(nn.Module):
    """The best region for each word, averaged, through one learned map: a score that is no product of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 5, bias=False).double()

    def forward(self, images: Encoded, texts: Encoded) -> torch.Tensor:
        affinity = torch.einsum("vrd,twd->vtrw", self.map(images.vectors), texts.vectors)
        best = affinity.masked_fill(~images.mask[:, None, :, None], float("-inf")).amax(2)
        return (best * texts.mask).sum(-1) / texts.mask.sum(-1)


def parts(number: int, longest: int) -> Encoded:
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (number, 1))
    mask[0] = True
    return Encoded(torch.randn(number, longest, 5, dtype=torch.float64), mask)


def test_a_score_with_parameters_learns():
    score, images, texts = WordScore(), parts(4, 3), parts(4, 6)
    loss = PairLoss(Unified(), score=score)
    assert [name for name, _ in loss.named_parameters()] == ["score.map.weight"]
    value = loss(images, texts)
    close(value, Unified()(score(images, texts), Targets.paired(4)))
    value.backward()
    assert score.map.weight.grad.abs().sum() > 0


def test_extra_encoded_items_of_other_lengths_are_joined():
    score, images, texts, more = WordScore(), parts(3, 3), parts(3, 4), parts(2, 7)
    value = PairLoss(VLC(), score=score)(images, texts, extra_texts=more, extra_text_ids=[1, 9])
    wide = torch.cat([score(images, texts), score(images, more)], 1)
    forth = VLC().one_way(wide, Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 1, 9])).sum()
    close(value, forth + VLC().one_way(score(images, texts).T, Targets.paired(3)).sum())


def test_encoded_vectors_are_their_tensor():
    images, texts = vectors(3, 3)
    close(PairLoss(Unified())(Encoded(images), Encoded(texts)), PairLoss(Unified())(images, texts))


def test_a_score_of_another_shape_is_refused():
    with refused("score returned shape [3, 2] for 2 images and 3 texts."):
        PairLoss(Unified(), score=lambda images, texts: texts @ images.T)(torch.eye(2, 3), torch.eye(3), [1, 2], [1, 2, 2])


# the scale


@pytest.mark.parametrize(
    "scale", [14.3, 7, nn.Parameter(torch.tensor(14.3, dtype=torch.float64)), nn.Parameter(torch.tensor([7.0]).double())]
)
def test_a_scale_takes_the_place_of_the_temperature(scale):
    images, texts = vectors(4, 4)
    value = PairLoss(NTXent(tau=0.5), scale=scale)(images, texts)
    number = scale.item() if isinstance(scale, nn.Parameter) else scale
    close(value, NTXent(tau=1 / number)(cosine(images, texts), Targets.paired(4)))


def test_a_learnable_scale_learns_and_comes_back_from_beyond_its_bounds():
    scale = nn.Parameter(torch.tensor(1000.0))
    loss = PairLoss(NTXent(), scale=scale)
    assert dict(loss.named_parameters()) == {"scale": scale}
    images = torch.eye(3)
    wrong = loss(images, images.roll(1, 0))  # every positive at 0, a negative at 1: log(1 + e^0 + e^100)
    assert wrong.item() == pytest.approx(100)
    wrong.backward()
    assert scale.grad > 0
    assert scale.item() == 100
    for bound, start in ((0.0, -5.0), (100.0, 1e9)):
        scale.data.fill_(start)
        loss(images, images)
        assert scale.item() == bound


def test_forwards_may_be_added_up_before_a_backward():
    loss = PairLoss(NTXent(), scale=nn.Parameter(torch.tensor(300.0)))
    images, texts = torch.randn(2, 4, 5).unbind()
    (loss(images, texts) + loss(texts, images)).backward()
    assert loss.scale.grad.isfinite()


@pytest.mark.parametrize("objective", [Unified(), Triplet(), TripletHN(), VLC()], ids=str)
def test_a_fixed_gamma_or_margin_takes_no_scale(objective):
    for scale in (2.0, nn.Parameter(torch.tensor(2.0))):
        with refused(f"{objective!r} has a fixed gamma or margin, which a scale would change: give PairLoss(scale=) only to", SpecError):
            PairLoss(objective, scale=scale)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, True, "1", nn.Parameter(torch.ones(3))], ids=str)
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(SpecError, match=r"expected a number above 0 or an nn\.Parameter of one number\.$"):
        PairLoss(NTXent(), scale=scale)


# sentences


REFUSED = {
    "lengths without ids": (((4, 5), {}), "4 images and 5 texts without ids: give image_ids and text_ids, or equally many of both."),
    "text_ids alone": (
        ((4, 4), {"text_ids": [1, 2, 3, 4]}),
        "text_ids are given without image_ids: give both, or none for pairs in order.",
    ),
    "too few image ids": (((4, 4), {"image_ids": [1, 2, 3]}), "3 image ids for 4 images: give one id for each."),
    "one list for two lengths": (((4, 5), {"image_ids": [1, 2, 3, 4]}), "4 text ids for 5 texts: give one id for each."),
    "ids that are texts": (((2, 2), {"image_ids": ["a", "b"]}), "image_ids must be whole numbers in one row; texts and nested lists"),
    "an id": (((2, 2), {"image_ids": 3}), "image_ids has shape [] and dtype torch.int64, expected one whole number for each item."),
    "targets and ids": (
        ((2, 2), {"image_ids": [1, 2], "targets": Targets.paired(2)}),
        "PairLoss got both targets and ids: give one of them.",
    ),
    "targets of others": (((2, 2), {"targets": Targets.paired(3)}), "scores have shape [2, 2], but the targets speak of 3 queries and 3"),
    "extra without ids": (((2, 2), {"extra_texts": torch.eye(3, 5)}), "extra_texts has 3 items and no ids: give one id for each."),
    "extra with some ids": (
        ((2, 2), {"extra_images": torch.eye(3, 5), "extra_image_ids": [7]}),
        "extra_images has 3 items and 1 ids: give one id for each.",
    ),
    "extra ids alone": (((2, 2), {"extra_text_ids": [7]}), "PairLoss got ids of extra items without the items"),
    "extra of another width": (
        ((2, 2), {"extra_texts": torch.eye(3, 4), "extra_text_ids": [7, 8, 9]}),
        "extra_texts must be of the same kind and width as the batch's own: both tensors [N, D], or both Encoded.",
    ),
    "extra Encoded": (
        ((2, 2), {"extra_texts": Encoded(torch.eye(3, 5)), "extra_text_ids": [7, 8, 9]}),
        "extra_texts must be of the same kind and width as the batch's own: both tensors [N, D], or both Encoded.",
    ),
    "extra with targets of others": (
        ((2, 2), {"targets": Targets.paired(3), "extra_texts": torch.eye(1, 5), "extra_text_ids": [7]}),
        "scores have shape [2, 2], but the targets speak of 3 queries and 3 candidates.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said_in_one_sentence(case):
    (numbers, arguments), sentence = REFUSED[case]
    with refused(sentence):
        PairLoss(Unified())(*(torch.randn(number, 5) for number in numbers), **arguments)


NOT_VECTORS = {
    "two widths": ((torch.eye(3), torch.eye(3, 4)), "images are 3 wide and texts 4: a cosine needs equal widths."),
    "regions": (
        (torch.ones(2, 3, 4), torch.ones(2, 4)),
        "cosine scores need one floating-point vector an item, [N, D]: give PairLoss(score=...)",
    ),
    "named parts": ((Encoded({"a": torch.eye(2)}), Encoded(torch.eye(2))), "cosine scores need one floating-point vector an item, [N, D]"),
    "whole numbers": ((torch.eye(2).long(), torch.eye(2).long()), "cosine scores need one floating-point vector an item, [N, D]"),
    "numpy": ((np.eye(2), np.eye(2)), "PairLoss got images of type ndarray, expected a tensor [N, D] or Encoded items."),
    "a number": ((torch.eye(2), torch.tensor(1.0)), "PairLoss got texts of type Tensor, expected a tensor [N, D] or Encoded items."),
}


@pytest.mark.parametrize("case", NOT_VECTORS)
def test_what_is_no_embedding_is_refused(case):
    items, sentence = NOT_VECTORS[case]
    with refused(sentence):
        PairLoss(Unified())(*items)


@pytest.mark.parametrize("rows", [0, -1, 2.0, True, "many"])
def test_block_rows_that_are_no_number_of_rows_are_refused(rows):
    with refused(f"PairLoss got block_rows={rows!r}, expected a whole number above 0, or None to let it choose.", SpecError):
        PairLoss(Unified(), block_rows=rows)


def test_gathering_needs_a_group():
    loss = PairLoss(Unified(), gather=True)
    with refused("PairLoss(gather=True) found no process group: start with torchrun", VisavisError):
        loss(torch.eye(2), torch.eye(2))
    alone = Unified()(torch.eye(2), Targets.paired(2))
    assert loss.eval()(torch.eye(2), torch.eye(2)) == PairLoss(Unified(), gather=False)(torch.eye(2), torch.eye(2)) == alone


@pytest.mark.parametrize("objective", [Unified, "Unified()", None], ids=str)
def test_only_an_objective_is_an_objective(objective):
    with pytest.raises(SpecError, match=r"expected an objective"):
        PairLoss(objective)


def test_it_prints_its_objective():
    assert repr(PairLoss(Unified())) == f"PairLoss({Unified()!r})"
    assert "tau=1.0" in repr(PairLoss(NTXent(), scale=3.0))
    assert replace(NTXent(), tau=1.0) == PairLoss(NTXent(), scale=3.0).objective
