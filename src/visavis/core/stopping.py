"""What is kept when Ctrl-C or another signal ends a command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kept_if_stopped(
    describe: Callable[[], str], resume: Callable[[], Path | None] = lambda: None
) -> Iterator[None]:
    """Add a sentence about what is kept to Ctrl-C or a signal that ends this block. ``resume`` returns
    the folder that ``--resume`` continues, or None.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    # KeyboardInterrupt, or the exception of the command line for other signals.
    except BaseException as stop:
        # The command line prints all of them, the innermost one first, which is the most exact one
        # about the same folder.
        if (sentence := describe()) and sentence not in getattr(stop, "__notes__", ()):
            stop.add_note(sentence)
        if (folder := resume()) is not None:
            setattr(stop, _RESUMED, os.fspath(folder))
        raise


_RESUMED = "resumed_folder"


def resumed_folder(stop: BaseException) -> str | None:
    """Return the folder that ``--resume`` continues after a stop."""
    folder: str | None = getattr(stop, _RESUMED, None)
    return folder
