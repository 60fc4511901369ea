"""Who makes the runs of a comparison: this process, several processes, or those of a Ray cluster; the numbers are the same.

Each run computes with as many threads as its recipe says, so that it does not matter how many run beside one another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context
from threading import Event, Thread
from typing import Any, Literal, TypeAlias

from visavis.comparison.jobs import Job, Outcome, done
from visavis.errors import MissingExtra, RunError, VisavisError
from visavis.progress import Progress, Silent
from visavis.spec import whole_number
from visavis.training.stopping import Stopped, StopRequest

Engine = Literal["local", "ray"]
Work: TypeAlias = Callable[[Sequence[Job]], Iterator[Outcome]]
"""Does jobs, and gives their outcomes in the order in which they end. Raises Stopped once all that ran is saved."""
POLL_S = 0.3
_ending = Event()
"""This worker was told to end; a training that was just over heard it, and nobody else."""


@dataclass(frozen=True)
class Workers:
    """Who makes the runs. number: how many at once; None: one for each core. Raises VisavisError for none, and for an engine that is none."""

    engine: Engine = "local"
    number: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise VisavisError(f'engine is {self.engine!r}, expected "local" or "ray".')
        if self.number is not None:
            whole_number(self.number, "workers", 1)

    @contextmanager
    def at_work(self, threads: int, progress: Progress) -> Iterator[Work]:
        """The workers, in this block. threads: of a run. Raises MissingExtra without Ray."""
        number, stop = self.number or max(1, _cores() // threads), StopRequest()
        with stop.heard():
            if self.engine == "ray":
                yield partial(_by_ray, number, stop)
            elif number == 1:
                yield partial(_by_this_process, stop, progress)
            else:
                with pool_of(number) as pool:
                    yield partial(_by_processes, pool, stop)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_this_process(stop: StopRequest, progress: Progress, jobs: Sequence[Job]) -> Iterator[Outcome]:
    for job in jobs:
        if stop.asked is not None:
            raise Stopped("", stop.asked)
        yield done(job, progress)


@contextmanager
def pool_of(number: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when this one does: what they train is saved, and left to be gone on with."""
    context = get_context("spawn")
    kept, held = context.Pipe(duplex=False)
    with kept, held:
        pool = ProcessPoolExecutor(number, context, _begin_worker, (kept,))
        try:
            yield pool
        except BaseException:
            held.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _by_processes(pool: ProcessPoolExecutor, stop: StopRequest, jobs: Sequence[Job]) -> Iterator[Outcome]:
    running: set[Future[Outcome]] = {pool.submit(_done_by_worker, job) for job in jobs}
    while running:
        ended, running = wait(running, POLL_S, FIRST_COMPLETED)
        if stop.asked is not None:
            raise Stopped("", stop.asked)
        for future in ended:
            try:
                yield future.result()
            except BrokenProcessPool:
                raise _lost() from None


def _lost() -> RunError:
    return RunError("a process of the comparison was ended from outside, perhaps for want of memory: go on with fewer workers.")


def _begin_worker(kept: connection.Connection) -> None:
    for name in ("SIGINT", "SIGHUP"):  # a terminal's, which the comparison hears and hands on
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    Thread(target=_end_with, args=(kept,), daemon=True).start()


def _end_with(kept: connection.Connection) -> None:
    """End this process when the other end of a pipe is closed, as it is when the comparison dies; a training hears it and saves everything."""
    connection.wait([kept])
    _ending.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _done_by_worker(job: Job) -> Outcome:
    """The outcome of a job; a worker that was asked to end, and whose training is saved, has nothing more to do."""
    try:
        outcome = done(job, Silent())
    except Stopped as stopped:
        os._exit(128 + stopped.by)  # an exit by exception would be the outcome, and the worker wait for a next job
    end_if_asked()
    return outcome


def end_if_asked() -> None:
    """End a worker whose training was over when it heard that it should."""
    if _ending.is_set():
        os._exit(128 + signal.SIGTERM)


def _by_ray(number: int, stop: StopRequest, jobs: Sequence[Job]) -> Iterator[Outcome]:
    """A task for each job, so many at once; folders are those that all machines of the cluster see."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "scale", "comparing with --engine ray") from None
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
    task = ray.remote(num_cpus=1, max_retries=2)(_unless_stopped)
    waiting, running = list(reversed(jobs)), list[Any]()
    while waiting or running:
        while waiting and len(running) < number:
            running.append(task.remote(waiting.pop()))
        ended, running = ray.wait(running, timeout=POLL_S)
        if stop.asked is not None:
            for reference in running:
                ray.cancel(reference)
            ray.wait(running, num_returns=len(running), timeout=60) if running else None
            raise Stopped("", stop.asked)
        try:
            outcomes = ray.get(ended)
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError):
            raise _lost() from None
        yield from (outcome for outcome in outcomes if outcome is not None)


def _unless_stopped(job: Job) -> Outcome | None:
    """The outcome of a job; None if it was stopped, and saved."""
    try:
        return done(job, Silent())
    except Stopped:
        return None
