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
    """Add a sentence about what is kept to Ctrl-C or a signal that ends this block.

    The command line prints the sentences of all blocks, the innermost one first.

    Args:
        describe: Returns the sentence. It is called only if the block is stopped.
        resume: Returns the folder that ``--resume`` continues. None: the command is repeated, or
            continued with the folder of an inner block.

    Yields:
        Nothing.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    # KeyboardInterrupt, or the exception of the command line for other signals.
    except BaseException as stop:
        # The innermost sentence is the most exact one about the same folder.
        if (sentence := describe()) and sentence not in getattr(stop, "__notes__", ()):
            stop.add_note(sentence)
        if (folder := resume()) is not None:
            setattr(stop, _RESUMED, os.fspath(folder))
        raise


_RESUMED = "resumed_folder"


def resumed_folder(stop: BaseException) -> str | None:
    """Return the folder that ``--resume`` continues after a stop.

    Args:
        stop: The exception.

    Returns:
        The folder. None: the command is repeated.
    """
    folder: str | None = getattr(stop, _RESUMED, None)
    return folder
