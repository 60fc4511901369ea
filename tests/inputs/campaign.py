"""Reads many generated inputs in worker processes, and counts the outcomes.

A worker that dies or does not answer is replaced. Inputs with a finding are kept in a folder, with
the command that replays each.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.inputs.worker import LIMIT_S

PROJECT = Path(__file__).resolve().parents[2]
FINDINGS = ("traceback", "message", "hang", "memory", "crash", "silent", "lost")
OUTCOMES = ("accepted", "refused", *FINDINGS)
START_S = 240.0
SEEDS_PER_TASK = 250


@dataclass
class Summary:
    """Outcomes of the inputs of one kind.

    Attributes:
        counts: Number of inputs by outcome.
        known: Number of inputs by what is known of them.
        slowest_s: Time of the slowest input.
        memory: Largest growth of a process in bytes.
        findings: Reply, and folder of the input, of each finding.
    """

    counts: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    memory: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reply: dict[str, Any]) -> None:
        """Count a reply."""
        self.counts[reply["outcome"]] += 1
        self.known[reply.get("known", "unknown")] += 1
        self.slowest_s = max(self.slowest_s, reply.get("seconds", 0.0))
        self.memory = max(self.memory, reply.get("memory", 0))
        if reply["outcome"] in FINDINGS:
            self.findings.append(reply)


def replay_command(kind: str, seed: int) -> str:
    """The command that reads one input again."""
    return f"python -m tests.inputs {kind!r} --seeds {seed}"


class Worker:
    """A process that reads inputs of one kind."""

    def __init__(self, kind: str):
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="visavis-inputs-"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.inputs.worker", kind, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=PROJECT,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if not (reply := self._read(START_S)) or "ready" not in reply:
            code = self.process.poll()
            self.close()
            raise RuntimeError(f"{kind}: the process did not start (exit code {code})")

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next reply. None if the process has ended or does not answer."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def read_input(self, seed: int) -> dict[str, Any]:
        """Read the input of a seed. A worker that has died must be closed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"%d\n" % seed)
            self.process.stdin.flush()
            reply = self._read(4 * LIMIT_S)
        except BrokenPipeError:
            self.process.wait()
            reply = None
        if reply is not None:
            return reply
        code = self.process.poll()
        if code is None:
            return {"seed": seed, "outcome": "hang", "message": "the process does not answer"}
        return {"seed": seed, "outcome": "crash", "message": f"the process ended with {code}"}

    @property
    def is_usable(self) -> bool:
        """Whether it can read another input."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process and remove its folder."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_inputs(kind: str, seeds: Iterable[int], saved: Path | None) -> Iterator[dict[str, Any]]:
    """Read the inputs of seeds in a process, and in a new one whenever it dies."""
    worker: Worker | None = None
    try:
        for seed in seeds:
            worker = worker or Worker(kind)
            reply = worker.read_input(seed)
            if reply["outcome"] in FINDINGS and saved is not None:
                target = saved / f"{kind}-{seed}".replace(" ", "-").replace("/", "-")
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(worker.folder / "input", target, symlinks=True, dirs_exist_ok=True)
                reply["saved"] = str(target)
            yield reply
            if reply["outcome"] in ("hang", "crash") or not worker.is_usable:
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()


def run_campaign(
    kinds: Sequence[tuple[str, Sequence[int]]],
    *,
    jobs: int = 1,
    saved: Path | None = None,
    on_finding: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    on_kind: Callable[[str, Summary], None] = lambda *_: None,
) -> dict[str, Summary]:
    """Read all inputs, with ``jobs`` processes at a time."""
    summaries = {kind: Summary() for kind, _ in kinds}
    tasks = [
        (kind, seeds[start : start + SEEDS_PER_TASK])
        for kind, seeds in kinds
        for start in range(0, len(seeds), SEEDS_PER_TASK)
    ]
    remaining = Counter(kind for kind, _ in tasks)
    lock = threading.Lock()

    def work(task: tuple[str, Sequence[int]]) -> None:
        kind, seeds = task
        for reply in read_inputs(kind, seeds, saved):
            with lock:
                summaries[kind].add(reply)
                if reply["outcome"] in FINDINGS:
                    on_finding(kind, reply)
        with lock:
            remaining[kind] -= 1
            if not remaining[kind]:
                on_kind(kind, summaries[kind])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, tasks))
    return summaries


def describe(kind: str, reply: dict[str, Any]) -> str:
    """A finding with the command that replays it."""
    place = f"\n  input: {reply['saved']}" if "saved" in reply else ""
    note = f" ({reply['note']})" if reply.get("note") else ""
    return (
        f"{kind}, seed {reply['seed']}{note}: {reply['outcome']}: {reply['message']}"
        f"\n  replay: {replay_command(kind, reply['seed'])}{place}"
    )
