"""PairLoss: an objective on embeddings, with a scale and any score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from visavis import PairLoss, Targets
from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError, SpecError, VisavisError
from visavis.losses.pair_loss import cosine
from visavis.objectives import CATALOG, VLC, NTXent, Triplet, TripletHN, Unified

from .cases import assert_close, every_of_family, raises_error, random_embeddings

# Scores and ids


@every_of_family
def test_pair_loss_scores_by_cosine(objective):
    images, texts = random_embeddings(4, 4)
    scores = torch.tensor(
        [[torch.dot(v, t) / v.norm() / t.norm() for t in texts.detach()] for v in images.detach()],
        dtype=torch.float64,
    )
    assert_close(cosine(images, texts).detach(), scores)
    assert_close(PairLoss(objective)(images, texts).detach(), objective(scores, Targets.paired(4)))
    assert_close(PairLoss(objective)(3 * images, 0.1 * texts), PairLoss(objective)(images, texts))
    assert cosine(torch.zeros(2, 3).half(), torch.eye(3).half()).tolist() == [[0.0, 0.0, 0.0]] * 2


@every_of_family
def test_pair_loss_ids_match_targets(objective):
    images, texts = random_embeddings(3, 5)
    image_ids, text_ids = [7, -8, 9], np.array([7, 7, -8, 9, 9])
    by_ids = PairLoss(objective)(images, texts, image_ids, text_ids)
    targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
    assert_close(PairLoss(objective)(images, texts, targets=targets), by_ids)
    assert_close(by_ids, objective(cosine(images, texts), targets))
    order = torch.randperm(5)
    assert_close(
        PairLoss(objective)(images, texts[order], torch.tensor(image_ids), text_ids[order.numpy()]),
        by_ids,
    )


def test_pair_loss_uses_image_ids_for_both_sides():
    images, texts = random_embeddings(4, 4)
    ids = [3, 3, 1, 2]
    assert_close(
        PairLoss(Unified())(images, texts, ids), PairLoss(Unified())(images, texts, ids, ids)
    )
    assert_close(
        PairLoss(Unified())(images, texts, [5, 3, 1, 2]), PairLoss(Unified())(images, texts)
    )


def test_pair_loss_accepts_mixed_precision():
    images, texts = torch.randn(4, 5), torch.randn(4, 5)
    half = PairLoss(Unified())(images, texts.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, PairLoss(Unified())(images, texts.bfloat16().float()))
    assert_close(
        PairLoss(Unified())(images, texts.double()),
        PairLoss(Unified())(images.double(), texts.double()),
    )


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_pair_loss_under_autocast_is_close_to_exact(kind):
    annotations = {name: torch.rand(16, 16) for name in ("relevance", "pair_margin")}
    annotations |= {f"{side}_offline_scores": torch.rand(16, 2) for side in ("query", "candidate")}
    targets = Targets(query_ids=torch.arange(16), candidate_ids=torch.arange(16), **annotations)
    images, texts = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)
    exact = PairLoss(kind())(images, texts, targets=targets)
    with torch.autocast("cpu", torch.bfloat16):
        value = PairLoss(kind())(images, texts, targets=targets)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=0.05)
    (ours,), (right,) = (torch.autograd.grad(each, images) for each in (value, exact))
    assert ours.isfinite().all()
    assert torch.cosine_similarity(ours.flatten(), right.flatten(), dim=0) > 0.95


# Score functions


class WordScore(nn.Module):
    """The best region for each word, averaged, through one learned map: a score that is not a
    product of vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 5, bias=False).double()

    def forward(self, images: Encoded, texts: Encoded) -> torch.Tensor:
        affinity = torch.einsum("vrd,twd->vtrw", self.map(images.vectors), texts.vectors)
        best = affinity.masked_fill(~images.mask[:, None, :, None], float("-inf")).amax(2)
        return (best * texts.mask).sum(-1) / texts.mask.sum(-1)


def random_items(number: int, longest: int) -> Encoded:
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (number, 1))
    mask[0] = True
    return Encoded(torch.randn(number, longest, 5, dtype=torch.float64), mask)


def test_pair_loss_trains_score_parameters():
    score, images, texts = WordScore(), random_items(4, 3), random_items(4, 6)
    loss = PairLoss(Unified(), score=score)
    assert [name for name, _ in loss.named_parameters()] == ["score.map.weight"]
    value = loss(images, texts)
    assert_close(value, Unified()(score(images, texts), Targets.paired(4)))
    value.backward()
    assert score.map.weight.grad.abs().sum() > 0


def test_pair_loss_joins_extra_items_of_other_lengths():
    score, images, texts, more = (
        WordScore(),
        random_items(3, 3),
        random_items(3, 4),
        random_items(2, 7),
    )
    value = PairLoss(VLC(), score=score)(images, texts, extra_texts=more, extra_text_ids=[1, 9])
    wide = torch.cat([score(images, texts), score(images, more)], 1)
    i2t = VLC().one_way(wide, Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 1, 9])).sum()
    assert_close(value, i2t + VLC().one_way(score(images, texts).T, Targets.paired(3)).sum())


def test_pair_loss_accepts_encoded_vectors():
    images, texts = random_embeddings(3, 3)
    assert_close(
        PairLoss(Unified())(Encoded(images), Encoded(texts)), PairLoss(Unified())(images, texts)
    )


def test_pair_loss_rejects_score_of_wrong_shape():
    with raises_error("score", "[3, 2]", "2 images and 3 texts"):
        PairLoss(Unified(), score=lambda images, texts: texts @ images.T)(
            torch.eye(2, 3), torch.eye(3), [1, 2], [1, 2, 2]
        )


# Scale


@pytest.mark.parametrize(
    "scale",
    [
        14.3,
        7,
        nn.Parameter(torch.tensor(14.3, dtype=torch.float64)),
        nn.Parameter(torch.tensor([7.0]).double()),
    ],
)
def test_pair_loss_scale_replaces_temperature(scale):
    images, texts = random_embeddings(4, 4)
    value = PairLoss(NTXent(tau=0.5), scale=scale)(images, texts)
    number = scale.item() if isinstance(scale, nn.Parameter) else scale
    assert_close(value, NTXent(tau=1 / number)(cosine(images, texts), Targets.paired(4)))


def test_pair_loss_clamps_learnable_scale():
    scale = nn.Parameter(torch.tensor(1000.0))
    loss = PairLoss(NTXent(), scale=scale)
    assert dict(loss.named_parameters()) == {"scale": scale}
    images = torch.eye(3)
    wrong = loss(
        images, images.roll(1, 0)
    )  # positives at 0, one negative at 1: log(1 + e^0 + e^100)
    assert wrong.item() == pytest.approx(100)
    wrong.backward()
    assert scale.grad > 0
    assert scale.item() == 100
    for bound, start in ((0.0, -5.0), (100.0, 1e9)):
        scale.data.fill_(start)
        loss(images, images)
        assert scale.item() == bound


def test_pair_loss_allows_sum_of_two_forwards():
    loss = PairLoss(NTXent(), scale=nn.Parameter(torch.tensor(300.0)))
    images, texts = torch.randn(2, 4, 5).unbind()
    (loss(images, texts) + loss(texts, images)).backward()
    assert loss.scale.grad.isfinite()


@pytest.mark.parametrize("objective", [Unified(), Triplet(), TripletHN(), VLC()], ids=str)
def test_pair_loss_rejects_scale_for_fixed_gamma_or_margin(objective):
    for scale in (2.0, nn.Parameter(torch.tensor(2.0))):
        with raises_error("scale", repr(objective), "fixed gamma or margin", kind=SpecError):
            PairLoss(objective, scale=scale)


@pytest.mark.parametrize(
    "scale", [0, -1.0, math.nan, math.inf, True, "1", nn.Parameter(torch.ones(3))], ids=str
)
def test_pair_loss_rejects_invalid_scale(scale):
    with raises_error("scale", "or an nn.Parameter of one number", kind=SpecError):
        PairLoss(NTXent(), scale=scale)


# Errors


REJECTED = {
    "lengths without ids": (((4, 5), {}), ("4", "5", "image_ids")),
    "text_ids alone": (
        ((4, 4), {"text_ids": [1, 2, 3, 4]}),
        ("text_ids", "image_ids"),
    ),
    "too few image ids": (((4, 4), {"image_ids": [1, 2, 3]}), ("image", "3", "4")),
    "one list for two lengths": (((4, 5), {"image_ids": [1, 2, 3, 4]}), ("text", "4", "5")),
    "an id": (((2, 2), {"image_ids": 3}), ("image_ids", "shape []", "torch.int64")),
    "targets and ids": (
        ((2, 2), {"image_ids": [1, 2], "targets": Targets.paired(2)}),
        ("targets", "ids"),
    ),
    "targets of others": (((2, 2), {"targets": Targets.paired(3)}), ("targets", "[2, 2]", 3)),
    "extra without ids": (
        ((2, 2), {"extra_texts": torch.eye(3, 5)}),
        ("extra_texts", "3 items", "no ids"),
    ),
    "extra with some ids": (
        ((2, 2), {"extra_images": torch.eye(3, 5), "extra_image_ids": [7]}),
        ("extra_images", "3 items", "1 ids"),
    ),
    "extra ids alone": (((2, 2), {"extra_text_ids": [7]}), ("extra_texts", "ids")),
    "extra of another dimension": (
        ((2, 2), {"extra_texts": torch.eye(3, 4), "extra_text_ids": [7, 8, 9]}),
        ("extra_texts", "both tensors [N, D]"),
    ),
    "extra Encoded": (
        ((2, 2), {"extra_texts": Encoded(torch.eye(3, 5)), "extra_text_ids": [7, 8, 9]}),
        ("extra_texts", "both tensors [N, D]"),
    ),
    "extra with targets of others": (
        (
            (2, 2),
            {"targets": Targets.paired(3), "extra_texts": torch.eye(1, 5), "extra_text_ids": [7]},
        ),
        ("targets", "[2, 2]", 3),
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_pair_loss_rejects_mismatched_inputs(case):
    (counts, arguments), parts = REJECTED[case]
    with raises_error(*parts):
        PairLoss(Unified())(*(torch.randn(count, 5) for count in counts), **arguments)


NOT_VECTORS = {
    "two dimensions": ((torch.eye(3), torch.eye(3, 4)), ("cosine", "3", "4")),
    "regions": (
        (torch.ones(2, 3, 4), torch.ones(2, 4)),
        ("cosine", "[N, D]", "PairLoss(score=...)"),
    ),
    "named parts": ((Encoded({"a": torch.eye(2)}), Encoded(torch.eye(2))), ("cosine", "[N, D]")),
    "integers": ((torch.eye(2).long(), torch.eye(2).long()), ("cosine", "[N, D]")),
    "numpy": ((np.eye(2), np.eye(2)), ("images", "ndarray", "Encoded")),
    "a number": ((torch.eye(2), torch.tensor(1.0)), ("texts", "Tensor", "Encoded")),
}


@pytest.mark.parametrize("case", NOT_VECTORS)
def test_pair_loss_rejects_invalid_embeddings(case):
    items, parts = NOT_VECTORS[case]
    with raises_error(*parts):
        PairLoss(Unified())(*items)


@pytest.mark.parametrize("rows", [0, -1, 2.0, True, "many"])
def test_pair_loss_rejects_invalid_block_rows(rows):
    with raises_error("block_rows", repr(rows), kind=SpecError):
        PairLoss(Unified(), block_rows=rows)


def test_pair_loss_gather_needs_process_group():
    loss = PairLoss(Unified(), gather=True)
    with raises_error("gather=True", "process group", kind=VisavisError):
        loss(torch.eye(2), torch.eye(2))
    alone = Unified()(torch.eye(2), Targets.paired(2))
    assert (
        loss.eval()(torch.eye(2), torch.eye(2))
        == PairLoss(Unified(), gather=False)(torch.eye(2), torch.eye(2))
        == alone
    )


@pytest.mark.parametrize("objective", [Unified, "Unified()", None], ids=str)
def test_pair_loss_rejects_non_objectives(objective):
    with pytest.raises(SpecError, match=r"expected an objective"):
        PairLoss(objective)
    with pytest.raises(
        SpecError, match=r"got the class Unified\. Make an object of it: Unified\(\)"
    ):
        PairLoss(Unified)


def test_pair_loss_takes_texts_as_ids():
    images, texts, more = torch.eye(3), torch.eye(3).flip(0), torch.ones(1, 3)
    loss = PairLoss(Unified())
    numbers = loss(images, texts, [1, 2, 1], [2, 1, 1], extra_texts=more, extra_text_ids=[2])
    words = ["a.jpg", "b.jpg", "a.jpg"], np.array(["b.jpg", "a.jpg", "a.jpg"])
    assert loss(images, texts, *words, extra_texts=more, extra_text_ids=["b.jpg"]) == numbers
    with pytest.raises(ShapeError, match=r"image_ids, text_ids: expected integers or texts"):
        loss(images, texts, [1, 2, 3], ["1", "2", "3"])


def test_pair_loss_repr_shows_objective():
    assert repr(PairLoss(Unified())) == f"PairLoss({Unified()!r})"
    assert "tau=1.0" in repr(PairLoss(NTXent(), scale=3.0))
    assert replace(NTXent(), tau=1.0) == PairLoss(NTXent(), scale=3.0).objective
