"""Histories find faults that are planted in a copy of the code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.histories.planted_bugs import BUGS, MAX_SEEDS, PROJECT
from tests.platforms import linux_calls

pytestmark = linux_calls
# Two that the first seeds find, of votes and of the store.
QUICK = ("an undo removes the last vote of anybody", "a change has the version of the former one")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_changes_the_present_code(bug):
    code = (PROJECT / "src" / "visavis" / bug.file).read_text()
    assert bug.old in code
    compile(code.replace(bug.old, bug.new), bug.file, "exec")


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug,
            id=bug.name,
            marks=[pytest.mark.slow] if bug.name in QUICK else [pytest.mark.long],
        )
        for bug in BUGS
    ],
)
def test_planted_bug_is_found(bug):
    command = [sys.executable, "-m", "tests.histories.planted_bugs", bug.name]
    found = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
    seed, name, problem = found.stdout.split("\t", 2)
    assert name == bug.name
    assert int(seed) < MAX_SEEDS, problem
