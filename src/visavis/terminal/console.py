"""What all printing shares."""

from __future__ import annotations

import sys

from rich.console import Console

WAYS = {"i2t": "image to text", "t2i": "text to image"}


def standard_output() -> Console:
    return Console(file=sys.stdout, highlight=False)
