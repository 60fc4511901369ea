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

VARIABLES = {
    "PYTHONSAFEPATH": "1",
    # Windows searches programs, such as git, in the current folder first.
    "NoDefaultCurrentDirectoryInExePath": "1",
}
PRELOADED_MODULES: list[str] = []
"""Modules that the server of worker processes imports once, instead of each worker."""


def preload_in_workers(module: str) -> None:
    """Import a module once for all worker processes that start from now on.

    Args:
        module: Name of a module whose objects are sent to workers. It names itself, because the
            package of the workers does not depend on it.
    """
    PRELOADED_MODULES.append(module)


def exclude_current_folder() -> None:
    """Exclude the current folder from the import path of all children of this process."""
    os.environ.update(VARIABLES)


class _Exclusion:
    """Variables of the process while blocks of ``current_folder_excluded`` run.

    The blocks of several threads may overlap: the first one saves the variables, and the last one
    restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._before = dict[str, str | None]()

    def enter(self) -> None:
        """Begin a block."""
        with self._lock:
            if not self._num_blocks:
                self._before = {name: os.environ.get(name) for name in VARIABLES}
                exclude_current_folder()
            self._num_blocks += 1

    def leave(self) -> None:
        """End a block."""
        with self._lock:
            self._num_blocks -= 1
            if self._num_blocks:
                return
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_exclusion = _Exclusion()


@contextmanager
def current_folder_excluded() -> Iterator[None]:
    """Exclude the current folder from the import path of processes that this block starts. Programs
    that a user of the Python functions starts later keep it. Blocks of several threads may overlap.

    A worker that multiprocessing starts receives the import path of this process with its first
    object, so that it finds the modules of the user.
    """
    _exclusion.enter()
    try:
        yield
    finally:
        _exclusion.leave()
