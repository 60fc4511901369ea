"""Log messages and warnings of a command on stderr."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from visavis.cli.terminal import print_error

LOGGER = logging.getLogger("visavis")


class StderrHandler(logging.Handler):
    """Handler that prints each record on one line of stderr. Debug messages name their module, and
    notes have no prefix.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        source = f"{record.name}: " if record.levelno < logging.INFO else ""
        prefix = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: {source}"
        print_error(f"{prefix}{record.getMessage()}")


@contextmanager
def log_to_stderr(*, verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """Print the log of visavis, and Python warnings, on stderr within this block."""
    handler = StderrHandler()
    level = LOGGER.level
    show = warnings.showwarning
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    warnings.showwarning = _log_warning
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        warnings.showwarning = show


def _log_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001
    filename: str,
    *_: Any,
    **__: Any,
) -> None:
    # Pillow warns about odd metadata of a photo without its name. An image that cannot be decoded
    # is an error.
    is_from_pillow = os.path.basename(os.path.dirname(filename)) == "PIL"
    LOGGER.log(logging.DEBUG if is_from_pillow else logging.WARNING, "%s", message)
