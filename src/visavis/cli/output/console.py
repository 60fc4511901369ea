"""The console that all tables are printed to."""

from __future__ import annotations

import sys

from rich.console import Console


def standard_output() -> Console:
    return Console(file=sys.stdout, highlight=False)
