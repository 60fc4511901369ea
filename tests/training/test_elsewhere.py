"""Training on a simulated device, in a separate process because torch cannot unregister a device. See ``on_elsewhere.py``."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("which", "passed"), [("not long", 26), pytest.param("long", 2, marks=pytest.mark.long)])
def test_training_on_simulated_device(which, passed):
    tests = Path(__file__).with_name("on_elsewhere.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, str(tests)]
    done = subprocess.run(command, cwd=tests.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{passed} passed" in done.stdout
