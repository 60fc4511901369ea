"""Two ranks with different data sets in one step, mini batches under DDP, and unused outputs."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.processes import FORKED, in_processes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import PairLoss
from visavis.core.errors import VisavisError
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import NTXent, Unified

pytestmark = pytest.mark.slow
OBJECTIVE, LABELS = Unified(gamma=10), torch.tensor([1, 2, 1, 3, 3, 1])
PARTS = (slice(0, 4), slice(4, 6))


class TinyModel(nn.Module):
    """A linear map for all columns, in place of a model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.map, self.logit_scale = (
            nn.Linear(5, 4).double(),
            nn.Parameter(torch.tensor(2.0, dtype=torch.float64)),
        )

    def forward(self, features):
        if isinstance(features, dict):
            return {"sentence_embedding": self.map(features["rows"])}
        embeddings = [self.map(rows) for rows in features]
        return dict(zip(("image_embeds", "text_embeds"), embeddings, strict=True)) | {
            "logits": self.logit_scale.exp() * embeddings[0] @ embeddings[1].T,
            "layers": (embeddings[0], None),
        }


def columns(part=slice(None), world_size=2):
    data = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [{"rows": rows[part]} for rows in data[:world_size]]


def gradient_of(model, value):
    model.zero_grad()
    value.backward()
    return model.map.weight.grad.clone()


def values_without_gather(rank, losses):
    """Value of each rank for its items, with the default and without gathering."""
    results = losses[rank](columns(PARTS[rank], 2 + rank), LABELS[PARTS[rank]])
    losses[rank].loss.gather = losses[rank].gather = False
    return results.item(), losses[rank](columns(PARTS[rank], 2 + rank), LABELS[PARTS[rank]]).item()


def embedded(model, part):
    return [model(features)["sentence_embedding"] for features in columns(part)]


def work(rank, world_size, file, results):
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size
    )
    model, part = TinyModel(), PARTS[rank]
    losses = [VisavisLoss(model, OBJECTIVE) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results["apart", rank] = values_without_gather(rank, losses)
        results["warnings", rank] = [str(each.message) for each in caught]
    losses = [VisavisLoss(model, OBJECTIVE, gather=True) for _ in range(2)]
    try:
        losses[rank](columns(part), LABELS[part])
    except VisavisError as error:
        results["error of gather=True", rank] = str(error)
    results["together", rank] = VisavisLoss(model, OBJECTIVE)(columns(part), LABELS[part]).item()
    model.model_card_data = type("Card", (), {"train_datasets": [{}] * 9})()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results["shared", rank] = VisavisLoss(model, OBJECTIVE)(columns(part), LABELS[part]).item()
        results["shared warnings", rank] = [str(each.message) for each in caught]
    with warnings.catch_warnings(record=True):  # by ids on one rank, in order on the other
        warnings.simplefilter("always")
        results["unlike", rank] = PairLoss(OBJECTIVE)(
            *embedded(model, part), *([LABELS[part]] if rank else [])
        ).item()
    del model.model_card_data
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss = VisavisLoss(model, OBJECTIVE, mini_batch_size=3)
    loss.model = wrapped  # as the trainer does
    results["mini batches", rank] = gradient_of(model, loss(columns(part), LABELS[part]))
    strict, loss = DistributedDataParallel(model), TrainerLoss(NTXent())
    for _ in range(2):
        outputs = strict([features["rows"] for features in columns(part)])
        results["unused", rank] = gradient_of(model, loss(outputs, LABELS[part]))
    # torch can deadlock if DistributedDataParallel is the last to hold the group.
    del wrapped, strict, loss, outputs
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with FORKED.Manager() as manager:
        results = manager.dict()
        in_processes(work, (2, tmp_path_factory.mktemp("two") / "store", results), nprocs=2)
        return dict(results)


@pytest.fixture(scope="module")
def expected():
    return PairLoss(OBJECTIVE)(*embedded(TinyModel(), slice(None)), LABELS).item()


def test_ranks_with_different_data_sets_do_not_gather_and_warn(results):
    for rank in range(2):
        value, expected = results["apart", rank]
        assert value == expected
        (message,) = results["warnings", rank]
        assert all(
            part in message
            for part in (f"VisavisLoss {rank + 1} of its model", "torch.float64", "gather=False")
        )
        assert message.index(f"VisavisLoss {rank + 1} of") < message.index(
            f"VisavisLoss {2 - rank} of"
        )


def test_gather_true_with_different_data_sets_fails_on_all_ranks(results):
    for rank in range(2):
        assert "gather=False" in results["error of gather=True", rank]


def test_ranks_with_one_data_set_gather(results, expected):
    assert results["together", 0] == pytest.approx(expected, rel=1e-12) == results["together", 1]


def test_shared_loss_for_several_data_sets_does_not_gather(results):
    for rank in range(2):
        expected = PairLoss(OBJECTIVE)(
            *embedded(TinyModel(), PARTS[rank]), LABELS[PARTS[rank]]
        ).item()
        assert results["shared", rank] == pytest.approx(expected, rel=1e-12)
        (message,) = results["shared warnings", rank]
        assert "VisavisLoss serve 9 data sets" in message.replace("serves", "serve")


def test_ranks_with_and_without_ids_do_not_deadlock(results):
    expected = PairLoss(OBJECTIVE)(*embedded(TinyModel(), PARTS[1]), LABELS[PARTS[1]]).item()
    assert results["unlike", 1] == pytest.approx(expected, rel=1e-12)


def test_mini_batches_under_ddp_match_single_process_gradient(results):
    model = TinyModel()
    right = gradient_of(model, VisavisLoss(model, OBJECTIVE)(columns(), LABELS))
    for rank in range(2):
        torch.testing.assert_close(results["mini batches", rank], right, rtol=1e-11, atol=1e-12)


def test_ddp_does_not_wait_for_unused_outputs(results):
    model = TinyModel()
    outputs = model([features["rows"] for features in columns()])
    right = gradient_of(model, TrainerLoss(NTXent())(outputs, LABELS))
    for rank in range(2):
        torch.testing.assert_close(results["unused", rank], right, rtol=1e-11, atol=1e-12)
