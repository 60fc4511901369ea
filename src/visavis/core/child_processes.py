"""Import path of child processes, and the modules that workers share.

The path never has the current folder, which may be a folder of data.

Python starts its children as ``python -c``, which imports modules from the current folder first. A
``threading.py`` among photos would run in them.
"""

from __future__ import annotations

import os
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


@contextmanager
def current_folder_excluded() -> Iterator[None]:
    """Exclude the current folder from the import path of processes that this block starts. Programs
    that a user of the Python functions starts later keep it.

    A worker that multiprocessing starts receives the import path of this process with its first
    object, so that it finds the modules of the user.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    exclude_current_folder()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
