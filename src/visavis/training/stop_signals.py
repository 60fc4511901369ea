"""Stop signals: the first one ends a training after the current step, the second one ends the
process at once.

``torchrun`` passes each signal on to its processes. A scheduler such as SLURM sends it to these
processes as well. So there, a repetition of the same signal does not end the process before the
training is saved.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from visavis.data.workers import STOP_SIGNALS


class Stopped(Exception):
    """A signal stopped a training after everything was saved.

    Args:
        folder: Folder of the run, which is the message.
        signal: The signal.
    """

    def __init__(self, folder: str, signal: signal.Signals):
        super().__init__(folder)
        self.signal = signal


class StopRequest:
    """Records the first stop signal while its handlers are installed.

    Attributes:
        signal: The first signal, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @contextmanager
    def install_signal_handlers(self) -> Iterator[None]:
        """Install handlers for this block. Outside the main thread, this does nothing."""
        # Ignored signals stay ignored, as under `nohup`.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {
            number: handler
            for number in STOP_SIGNALS
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
        }

        def record_signal(number: int, _: FrameType | None) -> None:
            if self.signal is None:
                self.signal = signal.Signals(number)
                return
            if number == self.signal and "TORCHELASTIC_RUN_ID" in os.environ:
                return
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)

        for number in previous:
            signal.signal(number, record_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
