"""Warning about batches with a single id, for which the loss is always 0."""

import warnings

import pytest
import torch

from visavis import PairLoss
from visavis.integrations.open_clip import ClipLoss
from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.objectives import InfoNCE, NTXent, Unified


def warnings_of(loss, batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids in batches:
            loss(torch.eye(3), torch.eye(3), ids)
    return [str(each.message) for each in caught]


def test_single_id_warning_is_emitted_once():
    messages = warnings_of(PairLoss(Unified()), [[7, 7, 7]] * 4)
    assert len(messages) == 1
    assert "3 images and 3 texts" in messages[0]
    assert "different ids" in messages[0]


@pytest.mark.parametrize(
    "batches",
    [[[7, 7, 7]], [[7, 7, 7], [1, 2, 3], [7, 7, 7]], [[1, 2, 3], *[[7, 7, 7]] * 3]],
    ids=["one alone", "between", "later"],
)
def test_single_id_warning_is_not_emitted_for_mixed_batches(batches):
    assert not warnings_of(PairLoss(Unified()), batches)


def test_single_id_warning_is_not_emitted_for_info_nce():
    loss = PairLoss(InfoNCE())
    assert loss(torch.eye(3), torch.eye(3), [7, 7, 7]) > 0
    assert not warnings_of(loss, [[7, 7, 7]] * 3)


def test_single_id_warning_is_not_emitted_in_eval_mode():
    assert not warnings_of(PairLoss(Unified()).eval(), [[7, 7, 7]] * 3)


def test_single_id_warning_is_emitted_by_integrations():
    clip = ClipLoss(NTXent())
    assert (
        len(
            warnings_of(
                lambda images, texts, ids: clip(images, texts, 10.0, image_ids=ids), [[7, 7, 7]] * 3
            )
        )
        == 1
    )
    metric = MetricLoss(Unified())
    assert (
        len(
            warnings_of(
                lambda images, texts, ids: metric(images, torch.tensor(ids)), [[7, 7, 7]] * 3
            )
        )
        == 1
    )
