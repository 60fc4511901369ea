"""Two real processes that hold other data sets in a step, mini batches under DDP, and outputs that no loss uses."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.processes import FORKED, in_processes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import PairLoss
from visavis.errors import VisavisError
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import NTXent, Unified

OBJECTIVE, LABELS = Unified(gamma=10), torch.tensor([1, 2, 1, 3, 3, 1])
OWN = (slice(0, 4), slice(4, 6))


class Tower(nn.Module):
    """Stands where a model does: one map for all columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.map, self.logit_scale = nn.Linear(5, 4).double(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, features):
        if isinstance(features, dict):
            return {"sentence_embedding": self.map(features["rows"])}
        embeddings = [self.map(rows) for rows in features]
        return dict(zip(("image_embeds", "text_embeds"), embeddings, strict=True)) | {
            "logits": self.logit_scale.exp() * embeddings[0] @ embeddings[1].T,
            "layers": (embeddings[0], None),
        }


def columns(part=slice(None), number=2):
    drawn = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [{"rows": rows[part]} for rows in drawn[:number]]


def gradient_of(model, value):
    model.zero_grad()
    value.backward()
    return model.map.weight.grad.clone()


def alone(rank, losses):
    """What each process finds by its own items."""
    found = losses[rank](columns(OWN[rank], 2 + rank), LABELS[OWN[rank]])
    losses[rank].loss.gather = losses[rank].gather = False
    return found.item(), losses[rank](columns(OWN[rank], 2 + rank), LABELS[OWN[rank]]).item()


def embedded(model, part):
    return [model(features)["sentence_embedding"] for features in columns(part)]


def work(rank, number, file, results):
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=number)
    model, own = Tower(), OWN[rank]
    losses = [VisavisLoss(model, OBJECTIVE) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results["apart", rank] = alone(rank, losses)
        results["said", rank] = [str(each.message) for each in caught]
    losses = [VisavisLoss(model, OBJECTIVE, gather=True) for _ in range(2)]
    try:
        losses[rank](columns(own), LABELS[own])
    except VisavisError as error:
        results["refused", rank] = str(error)
    results["together", rank] = VisavisLoss(model, OBJECTIVE)(columns(own), LABELS[own]).item()
    model.model_card_data = type("Card", (), {"train_datasets": [{}] * 9})()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results["shared", rank] = VisavisLoss(model, OBJECTIVE)(columns(own), LABELS[own]).item()
        results["shared said", rank] = [str(each.message) for each in caught]
    with warnings.catch_warnings(record=True):  # by ids on one process, in order on the other
        warnings.simplefilter("always")
        results["unlike", rank] = PairLoss(OBJECTIVE)(*embedded(model, own), *([LABELS[own]] if rank else [])).item()
    del model.model_card_data
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss = VisavisLoss(model, OBJECTIVE, mini_batch_size=3)
    loss.model = wrapped  # as the trainer does
    results["mini batches", rank] = gradient_of(model, loss(columns(own), LABELS[own]))
    strict, loss = DistributedDataParallel(model), TrainerLoss(NTXent())
    for _ in range(2):
        outputs = strict([features["rows"] for features in columns(own)])
        results["unused", rank] = gradient_of(model, loss(outputs, LABELS[own]))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with FORKED.Manager() as manager:
        results = manager.dict()
        in_processes(work, (2, tmp_path_factory.mktemp("two") / "store", results), nprocs=2)
        return dict(results)


@pytest.fixture(scope="module")
def whole():
    return PairLoss(OBJECTIVE)(*embedded(Tower(), slice(None)), LABELS).item()


def test_processes_of_other_data_sets_compare_their_own_items_and_say_so(found):
    for rank in range(2):
        value, expected = found["apart", rank]
        assert value == expected
        (sentence,) = found["said", rank]
        assert sentence.startswith("the processes hold batches that cannot be compared, ")
        assert (
            f"of VisavisLoss {rank + 1} of its model on 4 numbers of torch.float64"
            in sentence.split(" on another: ")[0].split("process")[1]
        )
        assert sentence.endswith("such a step compares each process' own items alone, as gather=False does in every step.")


def test_gathering_that_was_asked_for_is_refused_on_every_process(found):
    for rank in range(2):
        assert found["refused", rank].endswith("let all processes take each step with one loss and one data set, or give gather=False.")


def test_processes_of_one_data_set_gather(found, whole):
    assert found["together", 0] == pytest.approx(whole, rel=1e-12) == found["together", 1]


def test_one_loss_for_more_data_sets_than_losses_gathers_nothing(found):
    for rank in range(2):
        expected = PairLoss(OBJECTIVE)(*embedded(Tower(), OWN[rank]), LABELS[OWN[rank]]).item()
        assert found["shared", rank] == pytest.approx(expected, rel=1e-12)
        (sentence,) = found["shared said", rank]
        assert sentence.startswith("9 data sets share ")


def test_ids_on_one_process_and_order_on_another_wait_for_nobody(found):
    expected = PairLoss(OBJECTIVE)(*embedded(Tower(), OWN[1]), LABELS[OWN[1]]).item()
    assert found["unlike", 1] == pytest.approx(expected, rel=1e-12)


def test_mini_batches_under_ddp_have_the_gradient_of_one_process(found):
    model = Tower()
    right = gradient_of(model, VisavisLoss(model, OBJECTIVE)(columns(), LABELS))
    for rank in range(2):
        torch.testing.assert_close(found["mini batches", rank], right, rtol=1e-11, atol=1e-12)


def test_ddp_waits_for_no_output_that_the_loss_leaves_out(found):
    model = Tower()
    outputs = model([features["rows"] for features in columns()])
    right = gradient_of(model, TrainerLoss(NTXent())(outputs, LABELS))
    for rank in range(2):
        torch.testing.assert_close(found["unused", rank], right, rtol=1e-11, atol=1e-12)
