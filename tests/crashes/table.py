"""Table of all crash points and failures: ``python -m tests.crashes.table [OPTIONS] [PATTERN]``.

``--states N`` and ``--failures N`` check a sample of N states and N failures of each operation. The pattern
selects operations by name.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import time

import torch
from tests.crashes.crash_study import (
    failure_group,
    failures,
    spread_sample,
    state_group,
    study,
)
from tests.crashes.operations import Operation, all_operations

COLUMNS = (
    "operation",
    "writes",
    "crash points",
    "lost or unreadable",
    "failures",
    "one message",
    "optional write",
    "wrong",
    "seconds",
)


def row(operation: Operation, num_states: int, num_failures: int) -> tuple[object, ...]:
    """Check an operation. Problems go to stderr."""
    start = time.monotonic()
    recorded = study(operation)
    num_states, num_failures = (min(each, operation.limit) for each in (num_states, num_failures))
    states = spread_sample(recorded.states(), state_group, num_states, operation.name)
    problems = list(filter(None, map(recorded.problem_of, states)))
    cases = spread_sample(
        failures(recorded.trace.operations), failure_group, num_failures, operation.name
    )
    results = [recorded.fail(done.number, failure) for done, failure in cases]
    wrong = [result.problem for result in results if result.problem]
    optional = [result for result in results if result.succeeded]
    for text in (*problems, *wrong):
        sys.stderr.write(f"{text}\n")
    for result in optional:
        sys.stderr.write(
            f"{operation.name}: optional: {result.failure} at {result.operation.kind} "
            f"{result.operation.path}: {result.messages.strip()[:300]}\n"
        )
    return (
        operation.name,
        recorded.trace.writes,
        len(states),
        len(problems),
        len(results),
        sum(not result.succeeded and not result.problem for result in results),
        len(optional),
        len(wrong),
        round(time.monotonic() - start),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--states", type=int, default=10**9)
    parser.add_argument("--failures", type=int, default=10**9)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if os.access("/dev/shm", os.W_OK):
        tempfile.tempdir = "/dev/shm"
    rows = list[tuple[object, ...]]()
    for cells in (COLUMNS, ("---",) * len(COLUMNS)):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    for operation in all_operations():
        if re.search(options.pattern, operation.name):
            rows.append(row(operation, options.states, options.failures))
            sys.stdout.write(f"| {' | '.join(map(str, rows[-1]))} |\n")
            sys.stdout.flush()
    sums = [sum(int(str(each[column])) for each in rows) for column in range(1, len(COLUMNS))]
    sys.stdout.write(f"| all | {' | '.join(map(str, sums))} |\n")


if __name__ == "__main__":
    main()
