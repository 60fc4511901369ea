"""Under two real processes, the mean of the gradients is that of one process with all items."""

from __future__ import annotations

import pytest
import torch
from tests.processes import FORKED, in_processes
from torch import distributed
from torch.nn.functional import cross_entropy, normalize

from visavis.integrations.metric_learning import MetricLoss
from visavis.integrations.open_clip import ClipLoss
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import NTXent, Unified

LABELS = torch.tensor([1, 2, 1, 3, 3, 1])
OWN = (slice(0, 4), slice(4, 6))


class Embedded(torch.nn.Module):
    """Stands where a model does: features are embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["rows"]}


def clip_loss(first, second, third, labels, scale):
    return ClipLoss(NTXent(), local_loss=True, gather_with_grad=True, world_size=distributed.get_world_size())(first, second, scale)


def clip_loss_by_ids(first, second, third, labels, scale):
    return ClipLoss(Unified(), world_size=distributed.get_world_size())(first, second, scale, image_ids=labels)


def metric_loss(first, second, third, labels, scale):
    return MetricLoss(Unified())(first, labels)


def sentence_loss(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())([{"rows": rows} for rows in (first, second)], labels)


def sentence_loss_in_order(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())([{"rows": rows} for rows in (first, second)], None)


def sentence_loss_with_negatives(first, second, third, labels, scale):
    return VisavisLoss(Embedded(), Unified())([{"rows": rows} for rows in (first, second, third)], labels)


def trainer_loss(first, second, third, labels, scale):
    loss = TrainerLoss(NTXent(), logit_scale=torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    return loss({"image_embeds": first, "text_embeds": second}, labels)


EQUAL = (clip_loss, clip_loss_by_ids, metric_loss, sentence_loss, sentence_loss_in_order, sentence_loss_with_negatives, trainer_loss)


def inputs():
    drawn = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [normalize(rows, dim=-1).requires_grad_() for rows in drawn], torch.tensor(9.0, dtype=torch.float64, requires_grad=True)


def found(loss, part):
    """The value, and gradients of all items and the scale, 0 for items of other processes."""
    items, scale = inputs()
    value = loss(*(rows[part] for rows in items), LABELS[part], scale)
    gradients = torch.autograd.grad(value, [*items, scale], allow_unused=True, materialize_grads=True)
    return [value.detach(), *gradients]


def work(rank, number, file, results):
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=number)
    part = OWN[rank] if number > 1 else slice(None)
    for loss in EQUAL:
        numbers = found(loss, part)
        for each in numbers:
            distributed.all_reduce(each)
        results[loss.__name__] = [each / number for each in numbers]
    distributed.destroy_process_group()


def run(number, folder):
    with FORKED.Manager() as manager:
        results = manager.dict()
        in_processes(work, (number, folder / f"store{number}", results), nprocs=number)
        return dict(results)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("loss", EQUAL, ids=lambda loss: loss.__name__)
def test_two_processes_equal_one(loss, together, alone):
    torch.testing.assert_close(together[loss.__name__], alone[loss.__name__], rtol=1e-11, atol=1e-12)


def test_it_is_clips_loss_over_all(together):
    (images, texts, _), scale = inputs()
    scores = scale * images @ texts.T
    right = torch.arange(6)
    torch.testing.assert_close(together["clip_loss"][0], ((cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2).detach())
