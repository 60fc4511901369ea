"""Operations that change state, and what must hold after a stop or a failure of each.

Modules append to ``OPERATIONS``. All paths that an operation changes are below its folder, which also
holds the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

MODULES = (
    "index_operations",
    "vote_operations",
    "run_operations",
    "output_operations",
    "download_operations",
)
"""Modules that define operations."""


@dataclass(frozen=True)
class Operation:
    """A command that changes a folder.

    Attributes:
        name: Name in tests and tables.
        prepare: Fills the empty folder with the state before the command.
        command: Returns the command, which starts with ``visavis`` or ``python -m MODULE``. Its
            cache is ``cache`` in the folder, and its settings are in ``config``.
        check: Opens a folder without a manual step, after a stop at any time. It gets the text that
            the command had printed. Raises AssertionError if an acknowledged change is lost, or
            if the state is neither the old nor the new one, and any error that a user would get.
        is_long: Whether only the long tests stop and fail it, because a command or a check takes
            seconds.
        limit: Number of states, and of failures, that the long tests try at most.
    """

    name: str
    prepare: Callable[[Path], None]
    command: Callable[[Path], Sequence[str]]
    check: Callable[[Path, str], None]
    is_long: bool = False
    limit: int = 10**9


OPERATIONS: list[Operation] = []


def all_operations() -> list[Operation]:
    """Return the operations of all modules."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    return OPERATIONS


def operation_cases(sample: int) -> list[Any]:
    """Parameters of a test of each operation: the operation, and the number of cases to try. The
    slow tests try a sample.
    """
    long = [pytest.mark.long, pytest.mark.timeout(3000)]
    return [
        pytest.param(operation, size, id=f"{operation.name}-{name}", marks=marks)
        for operation in all_operations()
        for name, size, marks in (("sample", sample, []), ("all", operation.limit, long))
        if name == "all" or not operation.is_long
    ]
