"""Batches of one single id: the loss is 0 for ever, which is said once."""

import warnings

import pytest
import torch

from visavis import PairLoss
from visavis.integrations.metric_learning import MetricLoss
from visavis.integrations.open_clip import ClipLoss
from visavis.objectives import InfoNCE, NTXent, Unified


def said(loss, batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids in batches:
            loss(torch.eye(3), torch.eye(3), ids)
    return [str(each.message) for each in caught]


def test_it_is_said_once():
    sentences = said(PairLoss(Unified()), [[7, 7, 7]] * 4)
    assert len(sentences) == 1
    assert sentences[0].startswith(
        "every batch so far had no more than one id, the last one for 3 images and 3 texts: no pair is negative, "
    )
    assert sentences[0].endswith("give different things different ids, or larger batches.")


@pytest.mark.parametrize(
    "batches", [[[7, 7, 7]], [[7, 7, 7], [1, 2, 3], [7, 7, 7]], [[1, 2, 3], *[[7, 7, 7]] * 3]], ids=["one alone", "between", "later"]
)
def test_a_small_batch_among_others_is_none_of_its_kind(batches):
    assert not said(PairLoss(Unified()), batches)


def test_an_objective_that_learns_from_positives_alone_is_none_of_its_kind():
    loss = PairLoss(InfoNCE())
    assert loss(torch.eye(3), torch.eye(3), [7, 7, 7]) > 0
    assert not said(loss, [[7, 7, 7]] * 3)


def test_outside_training_nothing_is_said():
    assert not said(PairLoss(Unified()).eval(), [[7, 7, 7]] * 3)


def test_the_losses_for_other_libraries_say_it_too():
    clip = ClipLoss(NTXent())
    assert len(said(lambda images, texts, ids: clip(images, texts, 10.0, image_ids=ids), [[7, 7, 7]] * 3)) == 1
    metric = MetricLoss(Unified())
    assert len(said(lambda images, texts, ids: metric(images, torch.tensor(ids)), [[7, 7, 7]] * 3)) == 1
