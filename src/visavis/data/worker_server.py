"""Signals of the fork server of worker processes. Only this server imports the module, before it
starts a worker.

Ctrl-C in a terminal and SIGTERM of a job scheduler reach all processes of a group. The training
saves a checkpoint and then ends its workers. The server must outlive this: if it ends, the training
takes all of its workers for dead. It ends with the training.
"""

from __future__ import annotations

import os
import signal
import sys

from visavis.data.workers import STOP_SIGNALS

# A fork server ignores SIGINT anyway, and gives its processes the handler that it had before.
IGNORED_SIGNALS = [number for number in STOP_SIGNALS if number != signal.SIGINT]


def _restore_stop_signals() -> None:
    """Give a process of the server the default handlers: programs end their own processes with
    SIGTERM.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


if sys.platform != "win32" and any(
    "multiprocessing.forkserver" in argument for argument in sys.orig_argv
):
    # A process group of its own, which Ctrl-C in a terminal does not reach.
    os.setpgid(0, 0)
    for stop_signal in IGNORED_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_restore_stop_signals)
