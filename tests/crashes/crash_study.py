"""Recording of an operation, and checks of the states and failures of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.crashes.crash_states import CrashState, read_tree, write_tree
from tests.crashes.operations import Operation
from tests.crashes.recording import (
    NEEDS_SPACE,
    Failure,
    RecordedOperation,
    Trace,
    record,
    run_with_failure,
    temporary_folder,
)

T = TypeVar("T")
_RANDOM_NAME = re.compile(r"\.[a-z0-9_]{8}\.part")
_NUMBER = re.compile(r"\d+")


@dataclass
class Study:
    """An operation that was recorded once.

    Attributes:
        operation: The operation.
        folder: The folder that it changes. All states are written here, so that paths stay the same.
        before: A copy of the folder before the command.
        trace: Its operations.
    """

    operation: Operation
    folder: Path
    before: Path
    trace: Trace = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the command and of the checks."""
        return _environment(self.folder)

    def states(self) -> list[CrashState]:
        """Return all crash states."""
        return list(self.trace.crash_states(self.before))

    def problem_of(self, state: CrashState) -> str:
        """Return why a state fails its check, or no text."""
        state.write_to(self.folder)
        return self._problem(state.acknowledged, state.label)

    def _problem(self, acknowledged: str, label: str) -> str:
        try:
            with variables(self.environment):
                self.operation.check(self.folder, acknowledged)
        except Exception as error:  # noqa: BLE001 - any error of a check is a finding
            trace = "".join(traceback.format_exception(error)[-4:])
            return f"{self.operation.name}: {label}: {type(error).__name__}: {error}\n{trace}"
        return ""

    def fail(self, number: int, failure: Failure) -> FailureResult:
        """Let one operation of the command fail, and check what it leaves."""
        write_tree(read_tree(self.before), self.folder)
        command = self.operation.command(self.folder)
        process = run_with_failure(command, self.folder, number, failure, self.environment)
        done = self.trace.operations[number - 1]
        label = f"{failure} at operation {number} ({done.kind} {done.path})"
        messages = [line for line in process.stderr.splitlines() if line.startswith("visavis: ")]
        problem = ""
        if "Traceback" in process.stderr:
            problem = f"a traceback: {process.stderr[-3000:]}"
        elif process.returncode not in (0, 1):
            problem = f"exit code {process.returncode}: {process.stderr[-500:]}"
        elif process.returncode == 1 and len(messages) != 1:
            problem = f"expected one message, got {process.stderr[-500:]!r}"
        if problem:
            problem = f"{self.operation.name}: {label}: {problem}"
        else:
            problem = self._problem(process.stdout, label)
        return FailureResult(done, failure, process.returncode == 0, process.stderr, problem)


class FailureResult(NamedTuple):
    """Result of a command with a failure.

    Attributes:
        operation: The operation that failed.
        failure: How it failed.
        succeeded: Whether the command succeeded, because the operation was optional.
        messages: What it printed on stderr.
        problem: Why this is wrong, or no text.
    """

    operation: RecordedOperation
    failure: Failure
    succeeded: bool
    messages: str
    problem: str


def _environment(folder: Path) -> dict[str, str]:
    return {
        "VISAVIS_CACHE": str(folder / "cache"),
        "VISAVIS_CONFIG": str(folder / "config"),
        "VISAVIS_TEXT_TOWERS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in this block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def study(operation: Operation) -> Study:
    """Prepare an operation and record it once."""
    root = temporary_folder() / re.sub(r"\W+", "-", operation.name)
    folder = root / "work"
    folder.mkdir(parents=True)
    with variables(_environment(folder)):
        operation.prepare(folder)
    shutil.copytree(folder, root / "before", symlinks=True)
    command = operation.command(folder)
    trace = record(command, folder, root / "log", _environment(folder))
    assert trace.process.returncode == 0, (trace.process.stdout, trace.process.stderr)
    return Study(operation, folder, root / "before", trace)


def pattern(path: str) -> str:
    """Path without random names and numbers."""
    return _NUMBER.sub("N", _RANDOM_NAME.sub(".*.part", path))


def state_group(state: CrashState) -> object:
    """What a sample of states covers evenly."""
    return state.kind, pattern(state.path), state.variant.partition(" of ")[0]


def spread_sample(
    items: Iterable[T], group: Callable[[T], object], size: int, seed: object
) -> list[T]:
    """Choose items by a seed, evenly over groups: one of each group first."""
    chooser = random.Random(f"{seed}")
    groups = dict[object, list[T]]()
    for item in items:
        groups.setdefault(group(item), []).append(item)
    queues = list(groups.values())
    chooser.shuffle(queues)
    for queue in queues:
        chooser.shuffle(queue)
    chosen = list[T]()
    while len(chosen) < size and any(queues):
        for queue in queues:
            if queue and len(chosen) < size:
                chosen.append(queue.pop())
    return chosen


def failures(operations: Sequence[RecordedOperation]) -> list[tuple[RecordedOperation, Failure]]:
    """All failures that a disk may give."""
    found = list[tuple[RecordedOperation, Failure]]()
    for operation in operations:
        # The recorder sees renames by other libraries only afterwards.
        if operation.kind in ("ack", "rename by a library"):
            continue
        found.append((operation, "EIO"))
        if operation.kind in NEEDS_SPACE:
            found += [(operation, "ENOSPC"), (operation, "full")]
    return found


def failure_group(case: tuple[RecordedOperation, Failure]) -> object:
    """What a sample of failures covers evenly."""
    return case[0].kind, pattern(case[0].path), case[1]
