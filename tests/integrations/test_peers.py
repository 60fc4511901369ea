"""Trainers of other libraries under torchrun, by the scripts of studies/peers."""

import importlib.util
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "peers.py"
spec = importlib.util.spec_from_file_location("peers", STUDY)
peers = importlib.util.module_from_spec(spec)
sys.modules["peers"] = peers
spec.loader.exec_module(peers)

pytestmark = pytest.mark.long


def installed(name):
    for package in peers.PEERS[name].packages:
        pytest.importorskip(package)
    return peers.PEERS[name].script


@pytest.mark.parametrize(
    ("library", "setting"),
    [
        ("sentence-transformers", "one set"),
        ("sentence-transformers", "mini batches"),
        ("transformers", "fixed margin"),
        ("transformers", "accumulation"),
    ],
)
def test_two_ranks_train_same_weights_as_one_process(library, setting):
    script = installed(library)
    assert peers.apart(peers.run(script, 1, setting), peers.run(script, 2, setting)) < 1e-6


@pytest.mark.parametrize("setting", ["a loss for each set", "one loss for both sets"])
def test_ranks_with_disjoint_data_sets_agree_and_report(setting):
    actual = peers.run(installed("sentence-transformers"), 2, setting)
    first, second = (line for line in actual.lines if line.startswith("weights "))
    assert first == second
    assert sum(line.startswith("reported: ") for line in actual.lines) == 2
