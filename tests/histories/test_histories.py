"""Random histories of readers, writers, votes and two servers over one index, each from one seed.

``python -m tests.histories SEED`` replays a history, ``python -m tests.histories 0:10000`` runs
many.
"""

from __future__ import annotations

import pytest
from tests.histories.history import run_history
from tests.platforms import changes_open_files

pytestmark = changes_open_files
SAMPLE = 200
ALL = 10_000


def check(seed: int) -> None:
    problems = run_history(seed).scheduler.problems
    assert not problems, f"python -m tests.histories {seed}\n{problems[0]}"


def test_folder_of_a_killed_creation_survives_a_power_loss():
    check(8843)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, SAMPLE, 50))
def test_histories_of_a_sample_have_no_violation(start):
    for seed in range(start, start + 50):
        check(seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("start", range(0, ALL, 1000))
def test_histories_have_no_violation(start):
    for seed in range(start, start + 1000):
        check(seed)


def test_equal_seeds_give_equal_histories():
    logs = []
    for _ in range(2):
        lines = list[str]()
        run_history(11, log=lines.append)
        # Names of temporary files and of folders are random.
        logs.append([line.split()[:3] for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) > 100
