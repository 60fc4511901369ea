"""A stop at any write of any operation loses nothing that was acknowledged."""

from __future__ import annotations

import pytest
from tests.crashes.crash_study import spread_sample, state_group, study
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
