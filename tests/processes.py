"""Processes that start fast: each is forked from a server that has imported the training modules.

Without a fork server, as on Windows, each is a new interpreter.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, get_all_start_methods, get_context
from pathlib import Path

import pytest
from torch import multiprocessing

from visavis.research.experiments import jobs

START_METHOD = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
FORKED = get_context(START_METHOD)
FORKED.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "scipy.optimize",
        "scipy.stats",
        "PIL.PngImagePlugin",
        "safetensors.torch",
        "visavis.cli.printers",
        "visavis.training.training_run",
        "visavis.research.experiments",
    ]
)


def in_processes(work: Callable[..., None], arguments: tuple[object, ...], *, nprocs: int) -> None:
    """Run ``work(rank, *arguments)`` in ``nprocs`` processes and raise the first error."""
    multiprocessing.start_processes(work, arguments, nprocs, start_method=START_METHOD)


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of comparisons, audits and the demo start from the server, instead of each
    importing torch.
    """
    monkeypatch.setattr(jobs, "get_context", lambda _: FORKED)
    monkeypatch.setattr(jobs, "_start_worker", partial(_start_forked_worker, dict(os.environ)))


def _start_forked_worker(environment: dict[str, str], receiver: connection.Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    jobs._start_worker(receiver)


def run_visavis() -> None:
    """Run ``visavis`` with the arguments of this process."""
    from visavis.cli import main

    main()


class Command:
    """The command ``visavis ARGUMENTS``, or another program, in a new process.

    Its output goes to a file, its messages to the same or to ``messages``. The first terminal among
    them controls the process.
    """

    def __init__(
        self,
        output: Path,
        *arguments: object,
        messages: Path | None = None,
        program: Callable[[], None] = run_visavis,
        environment: dict[str, str] | None = None,
    ):
        self.output = output
        files = (output, messages or output)
        worker_arguments = (
            program,
            files,
            Path.cwd(),
            {**os.environ, **(environment or {})},
            ["visavis", *map(str, arguments)],
        )
        self.process = FORKED.Process(target=_run, args=worker_arguments)
        self.process.start()
        atexit.register(self.send, getattr(signal, "SIGKILL", signal.SIGTERM))

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
        assert self.process.exitcode is not None, (
            f"the process is still running: {self.output_text}"
        )
        return self.process.exitcode


def start_ranks(
    folder: Path, world_size: int, *arguments: object, program: Callable[[], None] = run_visavis
) -> list[Command]:
    """Start the same command in several processes that find each other, as torchrun does. Outputs
    go to ``folder/rank-<n>.txt``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    folder.mkdir(exist_ok=True)
    return [
        Command(
            folder / f"rank-{rank}.txt",
            *arguments,
            program=program,
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]


def _run(
    program: Callable[[], None],
    files: tuple[Path, Path],
    folder: Path,
    environment: dict[str, str],
    arguments: list[str],
) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666), stream)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # The streams of the server assume the kind of file that it wrote to.
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2)
    )
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the server may run under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    program()


def peak_memory(process: int | str = "self") -> int:
    """Return the highest resident memory of a process in bytes. Other than ``ru_maxrss``, it
    does not include the parent process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
