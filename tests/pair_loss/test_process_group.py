"""PairLoss over a process group: value and gradients equal those of one process that has all items."""

from __future__ import annotations

import pytest
import torch
from tests.processes import in_processes

from visavis import PairLoss
from visavis.objectives import Unified

from . import group_cases

pytestmark = pytest.mark.slow
CASES = {2: group_cases.daily_names(), 4: [name for name, _ in group_cases.cases(1, 0)]}
"""Names of cases by the number of processes."""
ITEM_INPUTS = {
    "images",
    "texts",
    "extra_images",
    "extra_texts",
    "query_offline_scores",
    "candidate_offline_scores",
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def group(request, tmp_path_factory):
    """Results of every rank. Each group is started once."""
    folder, world_size = tmp_path_factory.mktemp("group"), request.param
    in_processes(group_cases.main, (world_size, folder, CASES[world_size]), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def single_process(group):
    """The same cases in one process."""
    return group_cases.all_values_and_gradients(1, 0, CASES[len(group)])


def assert_close(ours, theirs, case: str = "") -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text: f"{case}: {text}"
    )


def test_group_value_and_gradients_match_single_process(group, single_process):
    for name in CASES[len(group)]:
        actual, expected = (
            [each["all_values_and_gradients"][name] for each in group],
            single_process[name],
        )
        for each in actual:
            assert_close(each["value"], expected["value"], name)
        for name_of_input, right in expected.items():
            if name_of_input in ITEM_INPUTS:
                longest = right.shape[1:]
                parts = [each[name_of_input] / len(actual) for each in actual]
                if right.dim() == 3:  # texts of several lengths, padded by each rank to its longest
                    parts = [
                        torch.nn.functional.pad(each, (0, 0, 0, longest[0] - each.shape[1]))
                        for each in parts
                    ]
                assert_close(torch.cat(parts), right, name)
            elif name_of_input in ("bank", "parameter"):
                for each in actual:
                    assert_close(each[name_of_input], right, name)


@pytest.mark.parametrize("name", group_cases.TRAINED)
def test_group_parameter_gradients_match_single_process(group, name):
    for each in group:
        for ours, right in zip(
            each["trained_gradients"][name],
            group_cases.trained_gradients(1, 0, group_cases.TRAINED[name]),
            strict=True,
        ):
            assert_close(ours, right)


def test_group_is_not_used_in_eval_mode_or_without_gather(group):
    torch.manual_seed(0)
    expected = PairLoss(Unified())(group_cases.randn(3, 6), group_cases.randn(3, 6))
    for value in group[0]["eval"]:
        assert_close(value, expected)


def test_group_rejects_local_annotations(group):
    for each in group:
        weight, relevance, relation, bank = each["errors"]
        for name, message in (("weight", weight), ("relation", relation)):
            assert name in message
            assert "candidates" in message
        assert all(
            part in relevance for part in ("relevance", "function", "Targets(rows=, columns=)")
        )
        assert all(part in bank for part in ("extra_texts", "ids", "none"))
