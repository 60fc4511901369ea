"""The real trainers of other libraries under torchrun: the scripts of studies/peers, a way or two of each."""

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
    ("library", "way"),
    [("sentence-transformers", "one set"), ("sentence-transformers", "mini batches"), ("transformers", "fixed margin")],
)
def test_two_processes_train_the_weights_of_one(library, way):
    script = installed(library)
    assert peers.apart(peers.run(script, 1, way), peers.run(script, 2, way)) < 1e-5


@pytest.mark.parametrize("way", ["a loss for each set", "one loss for both sets"])
def test_data_sets_that_do_not_meet_end_with_the_same_weights_and_say_so(way):
    found = peers.run(installed("sentence-transformers"), 2, way)
    first, second = (line for line in found.lines if line.startswith("weights "))
    assert first == second
    assert sum(line.startswith("said: ") for line in found.lines) == 2
