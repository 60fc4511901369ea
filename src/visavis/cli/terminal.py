"""What reaches the terminal: text that it can show, nothing that steers it, and a quiet end where nobody reads on."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import sys
from typing import Any, NoReturn

import typer

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""A text whose control characters, which a file's name may hold, are written out; tabs and ends of lines stay.

    >>> print(visible("\x1b[2J.jpg"))
    \x1b[2J.jpg
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def show_what_can_be_shown() -> None:
    """From now on, characters that stdout and stderr cannot encode are written out by their numbers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(sentence: str) -> None:
    """A sentence on stderr; a terminal that was closed hears nothing."""
    with contextlib.suppress(OSError):
        typer.echo(visible(sentence).replace("\n", "\\n"), err=True)


def print_line(text: str) -> None:
    """Text on stdout."""
    try:
        typer.echo(visible(text))
    except BrokenPipeError:
        hang_up()


def print_json(content: dict[str, Any]) -> None:
    """One line of JSON on stdout; a number that is not finite is null."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    written = json.dumps(_finite(content), ensure_ascii=not encoding.lower().startswith("utf"), allow_nan=False)
    print_line(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", written))


def hang_up() -> NoReturn:
    """End without a word, as the shell ends a command whose reader has gone (``| head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + getattr(signal, "SIGPIPE", 13))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
