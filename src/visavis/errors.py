"""Every error a user can meet, one sentence each: what was found, where, what was expected, what to do.

VisavisError
+-- SpecError            a text such as "Unified(margin=0.2)" or a value in it cannot be read
+-- ShapeError           tensors, ids or lengths do not fit together
+-- MissingSupervision   an objective needs facts (degrees, margins, a bank) that nobody supplied
+-- DataError            files, captions or features are missing, broken or contradict each other
+-- RecipeError          a recipe or an override names something unknown or impossible
+-- RunError             a run folder is incomplete, or of another data set or version
+-- RefusedOverwrite     something of the user's stands where a file should be written
+-- StorageError         a file cannot be written: the disk is full, or does not let
+-- MissingExtra         an optional package is needed; names the extra that brings it
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class VisavisError(ValueError):
    """The parent of all errors that a user can cause; its text is one clear sentence."""


class SpecError(VisavisError):
    """A text or a value in it cannot be read as the object it should name."""


class ShapeError(VisavisError):
    """Tensors, ids or lengths do not fit together."""


class MissingSupervision(VisavisError):
    """An objective needs facts that the targets do not hold."""


class DataError(VisavisError):
    """Files, captions or features are missing, broken, or contradict each other."""


class RecipeError(VisavisError):
    """A recipe or an override names something unknown or impossible."""


class RunError(VisavisError):
    """A run folder is incomplete, or belongs to another data set or version."""


class RefusedOverwrite(VisavisError):
    """Something of the user's stands where a file should be written."""


class StorageError(VisavisError):
    """A file cannot be written: the disk is full, or may not be written to."""


class MissingExtra(VisavisError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs the package {package}, which is not installed: run pip install 'visavis[{extra}]'.")


FEW = 20
"""Names that a sentence may list."""


def nearest(word: str, known: Iterable[str], listed_by: str = "") -> str:
    """The ending of an error sentence: the closest known name, or all of them; of more than a few, the command that lists them, if given.

    >>> nearest("marjin", ["margin", "gamma"])
    'did you mean margin?'
    >>> nearest("x", ["margin", "gamma"])
    'known: gamma, margin.'
    >>> nearest("x", map(str, range(99)), "visavis catalog recipes")
    'visavis catalog recipes lists them.'
    """
    known = sorted(known)
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    return f"{listed_by} lists them." if listed_by and len(known) > FEW else f"known: {', '.join(known) or 'nothing'}."


def shown(value: Any) -> str:
    """A value in an error sentence: itself where it is short and plain, else what it is.

    >>> shown(2.5), shown([1, 2]), shown({})
    ('2.5', '[1, 2]', 'a dict')
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | list | tuple):
        text = repr(value)
        if len(text) <= 60 and "\n" not in text:
            return text
        if isinstance(value, str):
            return f"{text[:57]}..."
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {list(shape)}" if isinstance(shape, tuple) else "")


def say(sentence: str) -> None:
    """A warning in one sentence, for what goes on all the same; Python shows a sentence once."""
    warnings.warn(sentence, UserWarning, stacklevel=2)


@contextmanager
def in_the_words_of(caller: str, inner: str) -> Iterator[None]:
    """Errors that name an inner class name the one that the user has called.

    >>> with in_the_words_of("MetricLoss", "PairLoss"):
    ...     raise SpecError("PairLoss got scale=0.")
    Traceback (most recent call last):
    visavis.errors.SpecError: MetricLoss got scale=0.
    """
    try:
        yield
    except VisavisError as error:
        raise type(error)(str(error).replace(inner, caller)) from None
