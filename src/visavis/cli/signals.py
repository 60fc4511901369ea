"""Signals that end a command: one sentence and the shell's code instead of a silent death; a training hears them first and saves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The end that another program asks for, and a closed terminal, which Windows does not tell of."""


class Ended(BaseException):
    """A signal ends the command; no handler of errors on the way may take it for one."""

    def __init__(self, by: signal.Signals):
        super().__init__(by.name)
        self.by = by


@contextmanager
def ends_heard() -> Iterator[None]:
    """Raise Ended on a signal in this block; ignored ones stay ignored (``nohup``)."""

    def end(number: int, _: FrameType | None) -> None:
        raise Ended(signal.Signals(number))

    heard = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
