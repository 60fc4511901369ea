"""Processes that start fast: each is forked from a server that has imported the training modules."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from torch import multiprocessing

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch", "torch._dynamo", "visavis.cli.run_tables", "visavis.training.start_training", "visavis.experiments"]
)


def in_processes(work: Callable[..., None], arguments: tuple[object, ...], *, nprocs: int) -> None:
    """Run ``work(rank, *arguments)`` in ``nprocs`` processes and raise the first error."""
    multiprocessing.start_processes(work, arguments, nprocs, start_method="forkserver")


class Command:
    """The command ``visavis ARGUMENTS`` in a new process. Its output goes to a file."""

    def __init__(self, output: Path, *arguments: object):
        self.output = output
        worker_arguments = (output, Path.cwd(), dict(os.environ), ["visavis", *map(str, arguments)])
        self.process = FORKED.Process(target=_visavis, args=worker_arguments)
        self.process.start()
        atexit.register(self.send, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def output_text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal if the process is running."""
        if not self.ended:
            os.kill(self.process.pid, number)

    def wait(self, seconds: float) -> int:
        """Wait for the exit code, which is negative for a signal."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"the process is still running: {self.output_text}"
        return self.process.exitcode


def _visavis(output: Path, folder: Path, environment: dict[str, str], arguments: list[str]) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the server may have been started under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    from visavis.cli import main

    main()
