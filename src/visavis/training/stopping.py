"""Signals that ask a training to stop: the first one is heard after the step at hand, a second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, the end that another program asks for, and a closed terminal, which Windows does not tell of."""


class Stopped(Exception):
    """A signal asked to stop; everything is saved; the text is the run folder."""

    def __init__(self, folder: str, by: signal.Signals):
        super().__init__(folder)
        self.by = by


class StopRequest:
    """Whether a signal has asked to stop. asked: the first one, while ``heard`` lasts."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear signals in this block; elsewhere than in the main thread there are none, and ignored ones stay so (``nohup``)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)}

        def hear(number: int, _: FrameType | None) -> None:
            if self.asked is None:
                self.asked = signal.Signals(number)
                return
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

        for number in before:
            signal.signal(number, hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
