"""A stop at any write of any operation loses nothing that was acknowledged."""

from __future__ import annotations

import pytest
from tests.crashes.crash_study import spread_sample, state_group, study
from tests.crashes.index_operations import unsynced_update
from tests.crashes.operations import Operation, operation_cases
from tests.crashes.recording import missing_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_reason()), reason=missing_reason()),
]
SAMPLE = 8
"""States of each operation that a sample checks."""


@pytest.mark.parametrize(("operation", "size"), operation_cases(SAMPLE))
def test_stops_lose_nothing_acknowledged(operation: Operation, size: int) -> None:
    recorded = study(operation)
    states = spread_sample(recorded.states(), state_group, size, operation.name)
    problems = list(filter(None, map(recorded.problem_of, states)))
    assert not problems, f"{len(problems)} of {len(states)} states:\n" + "\n".join(problems[:5])


def test_missing_sync_is_found() -> None:
    """A planted fault: vectors are not synced before the transaction that names their rows."""
    recorded = study(unsynced_update())
    states = [state for state in recorded.states() if state.variant.startswith("data that was")]
    sample = spread_sample(states, state_group, 30, "unsynced")
    problems = list(filter(None, map(recorded.problem_of, sample)))
    assert problems
