"""Errors that a user can cause. Each message states what was expected, what was given, where, and how to fix it.

VisavisError
+-- SpecError            a text such as "Unified(margin=0.2)" or a value in it cannot be parsed
+-- ShapeError           tensors, ids or lengths do not match
+-- MissingSupervision   an objective needs annotations (relevance, margins, a memory bank) that were not given
+-- DataError            files, captions or features are missing, corrupted or contradictory
|   +-- NoDataset        a folder contains no list of images and captions
+-- UnknownWords         a text has no word of the vocabulary of a model
+-- RecipeError          a recipe or an override holds an unknown name or an impossible value
+-- RunError             a run folder is incomplete, or belongs to another data set or version
+-- RefusedOverwrite     a file of the user exists where a file should be written
+-- StorageError         a file or an index cannot be written, or its store has failed
+-- MissingExtra         an optional package is not installed, with the name of its extra
+-- ReportedByOtherProcess   a command of several processes has ended, and another process reports why
"""

from __future__ import annotations

import copyreg
import difflib
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

__all__ = [
    "DataError",
    "MissingExtra",
    "MissingSupervision",
    "RecipeError",
    "RefusedOverwrite",
    "ReportedByOtherProcess",
    "RunError",
    "ShapeError",
    "SpecError",
    "StorageError",
    "VisavisError",
]
"""Errors that the package visavis exports."""


class VisavisError(ValueError):
    """Base class of all errors that a user can cause."""

    def __str__(self) -> str:
        """The message. Half a character, as in a damaged name, is escaped, so that it can be
        printed.
        """
        return super().__str__().encode(errors="backslashreplace").decode()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the attributes. A worker process sends errors whose constructors
        take other arguments.
        """
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SpecError(VisavisError):
    """A text, or a value in it, cannot be parsed as the object that it should name."""


class ShapeError(VisavisError):
    """Tensors, ids or lengths do not match."""


class MissingSupervision(VisavisError):
    """An objective needs annotations that the targets do not hold."""


class DataError(VisavisError):
    """Files, captions or features are missing, corrupted or contradictory."""


class NoDataset(DataError):
    """A folder contains no list of images and captions."""


class UnknownWords(VisavisError):
    """A text has no word of the vocabulary of a model."""


class RecipeError(VisavisError):
    """A recipe or an override holds an unknown name or an impossible value."""


class RunError(VisavisError):
    """A run folder is incomplete, or belongs to another data set or version."""


class RefusedOverwrite(VisavisError):
    """A file of the user exists where a file should be written."""


class StorageError(VisavisError):
    """A file or an index cannot be written, for example on a full disk, or the store of an index
    has failed.
    """


class ReportedByOtherProcess(VisavisError):
    """A command of several processes has ended, and another process reports why. The command line
    does not print it.

    Args:
        message: The message.
        exit_code: Exit code of the command.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class MissingExtra(VisavisError):
    """An optional package is needed and not installed.

    Args:
        package: Name of the package.
        extra: Extra of visavis that installs it.
        purpose: The task that needs the package, as the subject of the sentence.
    """

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: run pip install "
            f"'visavis[{extra}]'."
        )


@contextmanager
def requires_extra(extra: str, purpose: str) -> Iterator[None]:
    """Import optional packages in this block."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(error.name or extra, extra, purpose) from None


MAX_LISTED_NAMES = 20
"""Maximum number of names that an error message lists."""
SKIP_BAD_ADVICE = (
    "To skip broken items, pass --skip-bad to `visavis train`, `features` or `data audit`, or "
    "data.skip_bad=true to `compare` or `papers reproduce`."
)
"""Commands that can leave out broken items."""


def closest_name(word: str, known: Iterable[str]) -> str | None:
    """Find the known name that is most similar to an unknown one.

    Args:
        word: The unknown name.
        known: All valid names.

    Returns:
        The name. None if no name is similar.

    Example:
        >>> closest_name("marjin", ["margin", "gamma"])
        'margin'
    """
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def suggest_name(word: str, known: Iterable[str], list_command: str = "") -> str:
    """Make the end of an error message about an unknown name: the closest known name, or all of
    them.

    Args:
        word: The unknown name.
        known: All valid names.
        list_command: Command that lists the names. It is named instead of more than
            `MAX_LISTED_NAMES` names.

    Returns:
        The end of the sentence, with its punctuation.

    Example:
        >>> suggest_name("marjin", ["margin", "gamma"])
        'did you mean margin?'
        >>> suggest_name("x", ["margin", "gamma"])
        'known: gamma, margin.'
        >>> suggest_name("x", map(str, range(99)), "visavis catalog recipes")
        'visavis catalog recipes lists them.'
    """
    known = sorted(known)
    if (close := closest_name(word, known)) is not None:
        return f"did you mean {close}?"
    return (
        f"{list_command} lists them."
        if list_command and len(known) > MAX_LISTED_NAMES
        else f"known: {', '.join(known) or 'nothing'}."
    )


def format_value(value: Any) -> str:
    """Format a value for an error message: its repr where that is short, else its type and shape.

    Args:
        value: Any value.

    Returns:
        A text of one line.

    Example:
        >>> format_value(2.5), format_value([1, 2]), format_value({})
        ('2.5', '[1, 2]', '{}')
        >>> format_value(10**5000)
        'an integer of more than 60 digits'
    """
    if isinstance(value, int) and abs(value) >= 10**60:
        return "an integer of more than 60 digits"
    # The shape of a nested tensor cannot be read.
    shape = None if getattr(value, "is_nested", False) else getattr(value, "shape", None)
    if (
        value is None
        or isinstance(value, bool | int | float | complex | str | bytes | list | tuple | dict)
        or shape in ((), (1,))
    ):
        # Python formats only integers of up to 4,300 digits, and limits the depth of lists.
        with suppress(ValueError, RecursionError):
            text = repr(value)
            if len(text) <= 60 and "\n" not in text:
                return text
            if isinstance(value, str):
                return f"{text[:56]}...{text[0]}"
    return f"a {type(value).__name__}" + (
        f" of shape {list(shape)}" if isinstance(shape, tuple) else ""
    )


def warn(message: str) -> None:
    """Warn the caller about arguments or calls that should change. Python shows each message once."""
    # Events that no change of a call avoids, such as a damaged cache, are logged as warnings of the
    # logger `visavis` instead.
    warnings.warn(message, UserWarning, stacklevel=2)


def log_debug(module: str, message: str, *args: object) -> None:
    """Log how something is computed, at level DEBUG. Equal messages are logged once."""
    if logging.getLogger(module).isEnabledFor(logging.DEBUG):
        _log_once(module, message % args)


@lru_cache(maxsize=256)
def _log_once(module: str, message: str) -> None:
    logging.getLogger(module).debug("%s", message)
