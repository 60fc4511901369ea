"""Nothing is forgotten on the CPU: ``on_elsewhere.py`` in a process of its own, as torch knows a device for good once it was told of it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("which", "passed"), [("not long", 26), pytest.param("long", 2, marks=pytest.mark.long)])
def test_on_a_device_that_is_not_there(which, passed):
    tests = Path(__file__).with_name("on_elsewhere.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, str(tests)]
    done = subprocess.run(command, cwd=tests.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{passed} passed" in done.stdout
