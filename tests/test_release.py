"""The release: wheel and sdist are built, and the wheel works in an empty environment."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from .conftest import PROJECT


def test_workflow_and_hooks_call_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    workflow = (PROJECT / ".github" / "workflows" / "check.yml").read_text()
    named = re.search(r"target: \[(.+)\]", workflow)[1].split(", ")
    hooks = re.findall(r"entry: make (\S+)", (PROJECT / ".pre-commit-config.yaml").read_text())
    assert {"lint", "test", "release-check"} <= set(named) <= targets
    assert hooks == ["lint", "test"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec("build") is None,
    reason="build is not installed: pip install 'visavis[dev]'",
)
def test_wheel_works_in_an_empty_environment(tmp_path):
    """Needs the package index."""
    command = [sys.executable, PROJECT / "tools" / "release_check.py", "--out", tmp_path / "dist"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "visavis search" in done.stdout
