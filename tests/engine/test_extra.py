"""Extra candidates: a memory bank, a queue, further negatives."""

from __future__ import annotations

import pytest
import torch

from visavis import PairLoss, Targets
from visavis.engine import cosine
from visavis.errors import MissingSupervision
from visavis.objectives import Triplet, Unified

from .cases import close, every_of_family, refused, vectors


@every_of_family
@pytest.mark.parametrize("sides", ["texts", "images", "texts and images"])
def test_extra_items_are_candidates_and_never_queries(objective, sides):
    images, texts, more_images, more_texts = vectors(3, 4, 2, 3)
    image_ids, text_ids, more_image_ids, more_text_ids = (torch.tensor(ids) for ids in ([1, 2, 3], [1, 1, 2, 3], [2, 9], [8, 3, 8]))
    extra = {"extra_texts": more_texts, "extra_text_ids": more_text_ids} if "texts" in sides else {}
    extra |= {"extra_images": more_images, "extra_image_ids": more_image_ids} if "images" in sides else {}
    all_texts, all_text_ids = (
        (torch.cat([texts, more_texts]), torch.cat([text_ids, more_text_ids])) if "texts" in sides else (texts, text_ids)
    )
    all_images, all_image_ids = (
        (torch.cat([images, more_images]), torch.cat([image_ids, more_image_ids])) if "images" in sides else (images, image_ids)
    )
    forth = objective.one_way(cosine(images, all_texts), Targets(query_ids=image_ids, candidate_ids=all_text_ids))
    back = objective.one_way(cosine(texts, all_images), Targets(query_ids=text_ids, candidate_ids=all_image_ids))
    expected = {"sum": forth.sum() + back.sum(), "mean": forth.mean() + back.mean(), "half_mean": (forth.mean() + back.mean()) / 2}
    value = PairLoss(objective)(images, texts, image_ids, text_ids, **extra)
    close(value, expected[objective.reduction])
    for ours, right in zip(*(torch.autograd.grad(each, (images, texts)) for each in (value, expected[objective.reduction])), strict=True):
        close(ours, right)


@every_of_family
def test_an_empty_bank_changes_nothing(objective):
    images, texts = vectors(4, 4)
    nothing = torch.zeros(0, 6, dtype=torch.float64)
    bank = {"extra_images": nothing, "extra_image_ids": [], "extra_texts": nothing, "extra_text_ids": torch.tensor([])}
    close(PairLoss(objective)(images, texts, **bank), PairLoss(objective)(images, texts))


def test_margins_of_queries_hold_against_extra_candidates():
    images, texts, more = vectors(3, 3, 2)
    forth, back = torch.rand(2, 3, dtype=torch.float64)
    targets = Targets.paired(3, query_margin=forth, candidate_margin=back)
    value = PairLoss(Triplet())(images, texts, targets=targets, extra_texts=more, extra_text_ids=[8, 9])
    wide = Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 8, 9], query_margin=forth, candidate_margin=torch.rand(5))
    expected = Triplet().one_way(cosine(images, torch.cat([texts, more])), wide).sum()
    close(value, expected + Triplet().one_way(cosine(texts, images), targets.T).sum())
    one_sided = Targets.paired(3, candidate_margin=back)
    with pytest.raises(MissingSupervision, match="margins for one side only"):
        PairLoss(Triplet())(images, texts, targets=one_sided, extra_texts=more, extra_text_ids=[8, 9])


@pytest.mark.parametrize("fact", ["relation", "weight", "ignore"])
def test_facts_of_pairs_say_nothing_about_extra_candidates(fact):
    images, texts, more = vectors(3, 3, 2)
    targets = Targets.from_pairs([0], [0], 3, 3) if fact == "relation" else Targets.paired(3, **{fact: torch.ones(3, 3)})
    with refused(f"extra_texts needs targets by ids alone: their {fact} does not say what holds for an extra candidate."):
        PairLoss(Unified())(images, texts, targets=targets, extra_texts=more, extra_text_ids=[8, 9])
