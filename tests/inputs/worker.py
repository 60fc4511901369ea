"""A process that reads inputs of one kind with limits of time and memory: ``python -m
tests.inputs.worker KIND FOLDER``. It gets seeds on stdin, one per line, and answers each with a JSON
object on a line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.inputs.cases import REAL_DATA, Case, Kind, Refused
from tests.processes import peak_memory

LIMIT_S = float(os.environ.get("VISAVIS_INPUTS_LIMIT_S", "20"))
"""Time of one input. The slowest right one takes a second."""
MEMORY = 2 * 2**30
"""Address space of one input, beyond what the process has before."""
COMMAND_EVERY = 25
"""Inputs per command that is run."""
MAX_MESSAGE = 7000


class TooLong(BaseException):
    """An input has taken longer than its limit."""


def environment(folder: Path) -> None:
    """Keep caches and settings in a folder, and forbid the network."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "VISAVIS_CACHE": str(folder / "cache"),
        "VISAVIS_CONFIG": str(folder / "config"),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    # No data set may be found by its name.
    os.environ[REAL_DATA] = os.environ.get("VISAVIS_DATA", "")
    os.environ["VISAVIS_DATA"] = str(folder / "none")
    os.environ.setdefault("VISAVIS_TEXT_TOWERS", "0")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in this block after some seconds."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_case(case: Case) -> tuple[str, str]:
    """Outcome of an input, and its message."""
    from visavis.core.errors import VisavisError

    try:
        with time_limit(LIMIT_S):
            result = case.run()
            problem = case.check(result)
    except TooLong:
        return "hang", f"no result after {LIMIT_S:g} s"
    except MemoryError as error:
        return "memory", str(error)
    except (VisavisError, Refused) as error:
        message = str(error)
        if "more memory than is available" in message:
            return "memory", message
        if problem := message_problem(message):
            return "message", f"{problem}: {message[:500]!r}"
        return ("lost" if case.known == "right" else "refused"), message
    except AssertionError as error:
        return "silent", f"{error}"[:2000] or traceback.format_exc(limit=-2)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = traceback.format_exception(error)
        return "traceback", "".join(lines)[-3000:]
    if problem:
        return "silent", problem
    return "accepted", ""


def message_problem(message: str) -> str:
    """What is wrong with the message of a refused input. "": nothing."""
    if "\n" in message or "\r" in message:
        return "the message has several lines"
    if not message.strip() or len(message) > MAX_MESSAGE:
        return f"the message has {len(message):,} characters"
    if " object at 0x" in message or "Traceback" in message:
        return "the message shows the inside of the program"
    return ""


def run_command(arguments: tuple[str, ...], outcome: str) -> tuple[str, str]:
    """Run a command on an input that was read before. Its exit code must agree."""
    from visavis import cli

    out, err = io.StringIO(), io.StringIO()
    argv = sys.argv
    sys.argv = ["visavis", *arguments]
    code: Any = 0
    try:
        with (
            time_limit(2 * LIMIT_S),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    except TooLong:
        return "hang", f"visavis {' '.join(arguments)}: no end"
    except BaseException:  # noqa: BLE001 - any other error is a finding
        return "traceback", f"visavis {' '.join(arguments)}: " + traceback.format_exc()[-3000:]
    finally:
        sys.argv = argv
    lines = err.getvalue().strip().splitlines()
    text = f"visavis {' '.join(arguments)}: exit code {code}, {lines[-1:]}"
    if code not in (0, 1) or any("Traceback" in line for line in lines):
        return "traceback", text
    if code == 0 and outcome == "refused":
        return "silent", text
    if code == 1 and not out.getvalue() and not (lines and lines[-1].startswith("visavis: ")):
        return "traceback", text
    return outcome, ""


def run_seed(kind: Kind, state: Any, seed: int, folder: Path, *, command: bool) -> dict[str, Any]:
    """Make and read the input of a seed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    generator = random.Random(f"{kind.name} {seed}")
    random.seed(seed)
    case = kind.make(generator, folder, state)
    started = time.perf_counter()
    outcome, message = read_case(case)
    seconds = time.perf_counter() - started
    if command and case.command and outcome in ("accepted", "refused"):
        outcome, text = run_command(case.command, outcome)
        message = text or message
    return {
        "seed": seed,
        "outcome": outcome,
        "known": case.known,
        "note": case.note,
        "message": message,
        "seconds": seconds,
    }


def address_space() -> int:
    """Address space of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve(name: str, folder: Path) -> None:
    """Read seeds from stdin, and answer each."""
    replies = os.fdopen(os.dup(1), "w")
    # Libraries print on both streams.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        if "VISAVIS_INPUTS_STDERR" not in os.environ:
            os.dup2(nowhere.fileno(), 2)
    environment(folder)
    warnings.simplefilter("ignore")
    import logging

    import torch
    from tests.inputs.catalog import find_kind

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    kind = find_kind(name)
    originals = folder / "originals"
    originals.mkdir(parents=True)
    state = kind.prepare(originals)
    if kind.warms_up:
        run_seed(kind, state, 0, folder / "input", command=True)
    first = peak_memory()
    import resource  # Windows has no such module

    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        seed = int(line)
        reply = run_seed(kind, state, seed, folder / "input", command=seed % COMMAND_EVERY == 0)
        reply["memory"] = max(0, peak_memory() - first)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
