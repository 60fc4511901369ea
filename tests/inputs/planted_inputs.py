"""Readers with faults, by which the tests check that a campaign finds each kind of fault."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from tests.inputs.cases import Case, Kind

from visavis.core.errors import DataError


def fail(message: str) -> Any:
    """Refuse an input."""
    raise DataError(message)


CASES: dict[str, Case] = {
    "accepted": Case(lambda: 3, "right"),
    "refused": Case(lambda: fail("a.png: expected an image, got a text."), "wrong"),
    "traceback": Case(lambda: {}["missing"]),
    "message": Case(lambda: fail("two\nlines")),
    "hang": Case(lambda: time.sleep(3600)),
    "memory": Case(lambda: bytearray(2**34)),
    "crash": Case(lambda: os.abort()),
    "silent": Case(lambda: 3, "wrong", lambda _: "a wrong input was accepted"),
    "lost": Case(lambda: fail("a.png: expected an image, got one."), "right"),
}
"""A case of each outcome."""


def make_planted(rng: random.Random, folder: Path, state: Any) -> Case:
    """Any case."""
    (folder / "input.txt").write_text("planted")
    return CASES[rng.choice(list(CASES))]


KINDS = [Kind("planted faults", make_planted, warms_up=False)]
