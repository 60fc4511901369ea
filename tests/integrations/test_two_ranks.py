"""Integration losses on two ranks: the mean gradient equals that of one process with all items."""

from __future__ import annotations

import pytest
import torch
from tests.processes import FORKED, in_processes
from torch import distributed
from torch.nn.functional import cross_entropy, normalize

from visavis.integrations.open_clip import ClipLoss
from visavis.integrations.pytorch_metric_learning import (
    CrossBatchMemory,
    MetricLoss,
    SelfSupervisedLoss,
)
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import NTXent, Unified

pytestmark = pytest.mark.slow
LABELS = torch.tensor([1, 2, 1, 3, 3, 1])
PARTS = (slice(0, 4), slice(4, 6))


class Embedded(torch.nn.Module):
    """A model whose features are its embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["rows"]}


def clip_loss(first, second, third, labels, scale):
    return ClipLoss(
        NTXent(), local_loss=True, gather_with_grad=True, world_size=distributed.get_world_size()
    )(first, second, scale)


def clip_loss_by_ids(first, second, third, labels, scale):
    return ClipLoss(Unified(), world_size=distributed.get_world_size())(
        first, second, scale, image_ids=labels
    )


def metric_loss(first, second, third, labels, scale):
    return MetricLoss(Unified())(first, labels)


def self_supervised_loss(first, second, third, labels, scale):
    return SelfSupervisedLoss(MetricLoss(Unified()))(first, second)


def cross_batch_memory(first, second, third, labels, scale):
    memory = CrossBatchMemory(
        MetricLoss(NTXent(tau=0.1)), embedding_size=5, memory_size=14
    ).double()
    memory(first, labels)  # enters the memory
    return memory(second, labels) + memory(third, labels)


def sentence_loss(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())([{"rows": rows} for rows in (first, second)], labels)


def sentence_loss_in_order(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())([{"rows": rows} for rows in (first, second)], None)


def sentence_loss_with_negatives(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())(
        [{"rows": rows} for rows in (first, second, third)], labels
    )


def trainer_loss(first, second, third, labels, scale):
    loss = TrainerLoss(
        NTXent(), logit_scale=torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    )
    return loss({"image_embeds": first, "text_embeds": second}, labels)


LOSSES = (
    clip_loss,
    clip_loss_by_ids,
    metric_loss,
    self_supervised_loss,
    cross_batch_memory,
    sentence_loss,
    sentence_loss_in_order,
    sentence_loss_with_negatives,
    trainer_loss,
)


def inputs():
    data = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [normalize(rows, dim=-1).requires_grad_() for rows in data], torch.tensor(
        9.0, dtype=torch.float64, requires_grad=True
    )


def value_and_gradients(loss, part):
    """The value, and gradients of all items and the scale. Gradients of items on other ranks are 0."""
    items, scale = inputs()
    value = loss(*(rows[part] for rows in items), LABELS[part], scale)
    gradients = torch.autograd.grad(
        value, [*items, scale], allow_unused=True, materialize_grads=True
    )
    return [value.detach(), *gradients]


def work(rank, world_size, file, results):
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size
    )
    part = PARTS[rank] if world_size > 1 else slice(None)
    for loss in LOSSES:
        tensors = value_and_gradients(loss, part)
        for each in tensors:
            distributed.all_reduce(each)
        results[loss.__name__] = [each / world_size for each in tensors]
    distributed.destroy_process_group()


def run(world_size, folder):
    with FORKED.Manager() as manager:
        results = manager.dict()
        in_processes(work, (world_size, folder / f"store{world_size}", results), nprocs=world_size)
        return dict(results)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_integration_losses_on_two_ranks_equal_one_process(loss, two_ranks, one_process):
    torch.testing.assert_close(
        two_ranks[loss.__name__], one_process[loss.__name__], rtol=1e-11, atol=1e-12
    )


def test_clip_loss_on_two_ranks_equals_formula(two_ranks):
    (images, texts, _), scale = inputs()
    scores = scale * images @ texts.T
    labels = torch.arange(6)
    torch.testing.assert_close(
        two_ranks["clip_loss"][0],
        ((cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2).detach(),
    )
