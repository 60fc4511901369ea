"""Over processes, value and gradients are those of one process that has all items. Real processes; each group is started once."""

from __future__ import annotations

import pytest
import torch
from tests.processes import in_processes

from visavis import PairLoss
from visavis.objectives import Unified

from . import on_processes as one

CASES = [name for name, _ in one.cases(1, 0)]
OF_ITEMS = {"images", "texts", "extra_images", "extra_texts", "query_offline_scores", "candidate_offline_scores"}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def group(request, tmp_path_factory):
    """What every process of a group has found."""
    folder, number = tmp_path_factory.mktemp("group"), request.param
    in_processes(one.main, (number, folder), nprocs=number)
    return [torch.load(folder / f"{rank}.pt") for rank in range(number)]


@pytest.fixture(scope="module")
def alone():
    """The same cases in one process."""
    return one.answers(1, 0)


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_one_process(group, alone, name):
    found, expected = [each["answers"][name] for each in group], alone[name]
    for each in found:
        close(each["value"], expected["value"])
    for kind, right in expected.items():
        if kind in OF_ITEMS:
            longest = right.shape[1:]
            mine = [each[kind] / len(found) for each in found]
            if right.dim() == 3:  # texts of several lengths: padded by each process to its own
                mine = [torch.nn.functional.pad(each, (0, 0, 0, longest[0] - each.shape[1])) for each in mine]
            close(torch.cat(mine), right)
        elif kind in ("bank", "parameter"):
            for each in found:
                close(each[kind], right)


@pytest.mark.parametrize("name", one.TRAINED)
def test_parameters_learn_as_in_one_process(group, name):
    for each in group:
        for ours, right in zip(each["trained"][name], one.trained(1, 0, one.TRAINED[name]), strict=True):
            close(ours, right)


def test_outside_train_mode_or_without_gathering_a_process_is_alone(group):
    torch.manual_seed(0)
    expected = PairLoss(Unified())(one.draw(3, 6), one.draw(3, 6))
    for value in group[0]["eval"]:
        close(value, expected)


def test_what_cannot_be_known_over_processes_is_said(group):
    for each in group:
        weight, relevance, relation, bank = each["refusals"]
        for name, sentence in (("weight", weight), ("relation", relation)):
            assert sentence.startswith(f"{name} does not say what holds for the candidates of other processes: ")
        assert relevance.startswith("the function given for relevance fails at positions of other processes: give Targets(rows=, columns=)")
        assert bank.startswith("extra_texts have ids, but the batches of several processes have none: ")
