"""Processes that begin in no time: each is forked from a server that has imported what a training needs, and has begun nothing."""

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
FORKED.set_forkserver_preload(["torch", "torch._dynamo", "visavis.cli.output", "visavis.runs.together", "visavis.comparison"])


def in_processes(work: Callable[..., None], given: tuple[object, ...], *, nprocs: int) -> None:
    """``work(rank, *given)`` in so many processes; an error in one of them is raised here."""
    multiprocessing.start_processes(work, given, nprocs, start_method="forkserver")


class Command:
    """``visavis ARGUMENTS`` in a process of its own; what it says goes to a file."""

    def __init__(self, output: Path, *arguments: object):
        self.output = output
        given = (output, Path.cwd(), dict(os.environ), ["visavis", *map(str, arguments)])
        self.process = FORKED.Process(target=_visavis, args=given)
        self.process.start()
        atexit.register(self.send, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def send(self, number: int) -> None:
        """A signal, to a process that runs."""
        if not self.ended:
            os.kill(self.process.pid, number)

    def wait(self, seconds: float) -> int:
        """The exit code, which is minus the number of the signal that killed it."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"it does not end: {self.said}"
        return self.process.exitcode


def _visavis(output: Path, folder: Path, environment: dict[str, str], arguments: list[str]) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the server began under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    from visavis.cli import main

    main()
