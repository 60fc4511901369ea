"""Extra candidates of PairLoss, such as a memory bank or further negatives."""

from __future__ import annotations

import pytest
import torch

from visavis import PairLoss, Targets
from visavis.core.errors import MissingSupervision
from visavis.losses.pair_loss import cosine
from visavis.objectives import Triplet, Unified

from ..sampling import pairwise
from .cases import FAMILY, assert_close, every_of_family, raises_error, random_embeddings


@pairwise(sides=["texts", "images", "texts and images"], objective=FAMILY)
def test_extra_candidates_are_never_queries(objective, sides):
    images, texts, more_images, more_texts = random_embeddings(3, 4, 2, 3)
    image_ids, text_ids, more_image_ids, more_text_ids = (
        torch.tensor(ids) for ids in ([1, 2, 3], [1, 1, 2, 3], [2, 9], [8, 3, 8])
    )
    extra = {"extra_texts": more_texts, "extra_text_ids": more_text_ids} if "texts" in sides else {}
    extra |= (
        {"extra_images": more_images, "extra_image_ids": more_image_ids}
        if "images" in sides
        else {}
    )
    all_texts, all_text_ids = (
        (torch.cat([texts, more_texts]), torch.cat([text_ids, more_text_ids]))
        if "texts" in sides
        else (texts, text_ids)
    )
    all_images, all_image_ids = (
        (torch.cat([images, more_images]), torch.cat([image_ids, more_image_ids]))
        if "images" in sides
        else (images, image_ids)
    )
    i2t = objective.one_way(
        cosine(images, all_texts), Targets(query_ids=image_ids, candidate_ids=all_text_ids)
    )
    t2i = objective.one_way(
        cosine(texts, all_images), Targets(query_ids=text_ids, candidate_ids=all_image_ids)
    )
    expected = {
        "sum": i2t.sum() + t2i.sum(),
        "mean": i2t.mean() + t2i.mean(),
        "half_mean": (i2t.mean() + t2i.mean()) / 2,
    }
    value = PairLoss(objective)(images, texts, image_ids, text_ids, **extra)
    assert_close(value, expected[objective.reduction])
    for ours, right in zip(
        *(
            torch.autograd.grad(each, (images, texts))
            for each in (value, expected[objective.reduction])
        ),
        strict=True,
    ):
        assert_close(ours, right)


@every_of_family
def test_extra_candidates_empty_bank_changes_nothing(objective):
    images, texts = random_embeddings(4, 4)
    nothing = torch.zeros(0, 6, dtype=torch.float64)
    bank = {
        "extra_images": nothing,
        "extra_image_ids": [],
        "extra_texts": nothing,
        "extra_text_ids": torch.tensor([]),
    }
    assert_close(PairLoss(objective)(images, texts, **bank), PairLoss(objective)(images, texts))


def test_extra_candidates_use_query_margins():
    images, texts, more = random_embeddings(3, 3, 2)
    i2t, t2i = torch.rand(2, 3, dtype=torch.float64)
    targets = Targets.paired(3, query_margin=i2t, candidate_margin=t2i)
    value = PairLoss(Triplet())(
        images, texts, targets=targets, extra_texts=more, extra_text_ids=[8, 9]
    )
    wide = Targets(
        query_ids=[0, 1, 2],
        candidate_ids=[0, 1, 2, 8, 9],
        query_margin=i2t,
        candidate_margin=torch.rand(5),
    )
    expected = Triplet().one_way(cosine(images, torch.cat([texts, more])), wide).sum()
    assert_close(value, expected + Triplet().one_way(cosine(texts, images), targets.T).sum())
    one_sided = Targets.paired(3, candidate_margin=t2i)
    with pytest.raises(MissingSupervision, match="one side only"):
        PairLoss(Triplet())(
            images, texts, targets=one_sided, extra_texts=more, extra_text_ids=[8, 9]
        )


@pytest.mark.parametrize("annotation", ["relation", "weight", "ignore"])
def test_extra_candidates_reject_pairwise_annotations(annotation):
    images, texts, more = random_embeddings(3, 3, 2)
    targets = (
        Targets.from_pairs([0], [0], 3, 3)
        if annotation == "relation"
        else Targets.paired(3, **{annotation: torch.ones(3, 3)})
    )
    with raises_error("extra_texts", annotation):
        PairLoss(Unified())(images, texts, targets=targets, extra_texts=more, extra_text_ids=[8, 9])
