"""Import path of child processes, and the modules that workers share.

The path never has the current folder, which may be a folder of data.

Python starts its children as ``python -c``, which imports modules from the current folder first. A
``threading.py`` among photos would run in them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

VARIABLES = {
    "PYTHONSAFEPATH": "1",
    # Windows searches programs, such as git, in the current folder first.
    "NoDefaultCurrentDirectoryInExePath": "1",
}
PRELOADED_MODULES: list[str] = []
"""Modules that the server of worker processes imports once, instead of each worker."""


def preload_in_workers(module: str) -> None:
    """Import a module once for all worker processes that start from now on."""
    PRELOADED_MODULES.append(module)


def exclude_current_folder() -> None:
    """Exclude the current folder from the import path of all children of this process."""
    os.environ.update(VARIABLES)


@dataclass
class _Exclusion:
    """State of the blocks of ``current_folder_excluded`` that run now, in all threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_blocks: int = 0
    variables_before: dict[str, str | None] = field(default_factory=dict)


_exclusion = _Exclusion()


@contextmanager
def current_folder_excluded() -> Iterator[None]:
    """Exclude the current folder from the import path of processes that this block starts. Programs
    that a user of the Python functions starts later keep it. Blocks of several threads may overlap.
    """
    # The first block saves the variables, and the last one restores them.
    with _exclusion.lock:
        if not _exclusion.num_blocks:
            _exclusion.variables_before = {name: os.environ.get(name) for name in VARIABLES}
            exclude_current_folder()
        _exclusion.num_blocks += 1
    try:
        # A worker that multiprocessing starts receives the import path of this process with its
        # first object, so that it finds the modules of the user.
        yield
    finally:
        with _exclusion.lock:
            _exclusion.num_blocks -= 1
            restored = {} if _exclusion.num_blocks else _exclusion.variables_before
            for name, value in restored.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
