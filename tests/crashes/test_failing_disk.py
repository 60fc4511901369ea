"""A disk that is full or fails at any write of any operation gives one message and loses nothing."""

from __future__ import annotations

import pytest
from tests.crashes.crash_study import failure_group, failures, spread_sample, study
from tests.crashes.operations import Operation, operation_cases
from tests.crashes.recording import missing_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_reason()), reason=missing_reason()),
]
SAMPLE = 2
"""Failures of each operation that a sample injects."""


@pytest.mark.parametrize(("operation", "size"), operation_cases(SAMPLE))
def test_failing_writes_give_one_message(operation: Operation, size: int) -> None:
    recorded = study(operation)
    cases = spread_sample(failures(recorded.trace.operations), failure_group, size, operation.name)
    results = [recorded.fail(done.number, failure) for done, failure in cases]
    problems = [result.problem for result in results if result.problem]
    assert not problems, f"{len(problems)} of {len(cases)} failures:\n" + "\n".join(problems[:5])
