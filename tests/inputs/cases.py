"""Inputs that a seed determines, and their right outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REAL_DATA = "VISAVIS_INPUTS_DATA"
"""Variable of the folder of real data sets."""
Known = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        run: Reads the input as a command does.
        known: Expectation of the generator. "right": it must be accepted. "wrong": the call must
            raise, or its result must report the problem. "unknown": both are right.
        check: The problem of the result of an accepted input. "": none.
        note: Short description for the report.
        command: Arguments of a command that reads the same input. Run for some of the inputs.
    """

    run: Callable[[], Any]
    known: Known = "unknown"
    check: Callable[[Any], str] = field(default=lambda _: "")
    note: str = ""
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: Name on the command line.
        make: Writes the input of a random state into an empty folder.
        prepare: Writes what all inputs share into a folder, once per process. ``make`` gets its
            result.
        inputs: Number of inputs of a complete run.
        warms_up: Whether a first input is read without a limit of memory, to load libraries.
    """

    name: str
    make: Callable[[random.Random, Path, Any], Case]
    prepare: Callable[[Path], Any] = lambda _: None
    inputs: int = 1000
    warms_up: bool = True


class Refused(Exception):
    """An answer of a server that refuses a request with one sentence."""
