"""Operations that change state, and what must hold after a stop or a failure of each.

Modules append to ``OPERATIONS``. All paths that an operation changes are below its folder, which also
holds the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

MODULES = ("index_operations", "vote_operations", "run_operations", "output_operations")
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
    """

    name: str
    prepare: Callable[[Path], None]
    command: Callable[[Path], Sequence[str]]
    check: Callable[[Path, str], None]


OPERATIONS: list[Operation] = []


def all_operations() -> list[Operation]:
    """Return the operations of all modules."""
    for name in MODULES:
        if find_spec(f"{__package__}.{name}") is not None:
            import_module(f"{__package__}.{name}")
    # The collection of doctests imports these modules under other names first.
    found = dict[str, Operation]()
    for operation in OPERATIONS:
        found.setdefault(operation.name, operation)
    return list(found.values())
