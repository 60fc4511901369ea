"""Training on a simulated device, in a separate process because torch cannot unregister a device.
See ``on_elsewhere.py``.
"""

import sys
from pathlib import Path

import pytest
from tests.processes import Command

pytestmark = pytest.mark.slow

TESTS = Path(__file__).with_name("on_elsewhere.py")


def run_pytest():
    sys.exit(pytest.main(sys.argv[1:]))


@pytest.mark.parametrize(
    ("which", "passed"), [("not long", 30), pytest.param("long", 2, marks=pytest.mark.long)]
)
def test_training_on_simulated_device(which, passed, tmp_path, monkeypatch):
    monkeypatch.chdir(TESTS.parents[2])
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which]
    done = Command(tmp_path / "output", *options, TESTS, program=run_pytest)
    code = done.wait(280)
    assert code == 0, done.output_text[-6000:]
    assert f"{passed} passed" in done.output_text
