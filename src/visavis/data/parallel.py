"""Parallel work: items are decoded by threads of this process, or encoded by processes of a Ray
cluster.

Threads suffice to decode because Pillow, NumPy and hashlib release the interpreter lock while they
work. They start at once and share memory.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from torch.utils.data import get_worker_info

from visavis.core.child_processes import current_folder_excluded
from visavis.core.errors import VisavisError, requires_extra

Engine = Literal["local", "ray"]
"""Where work is done: on this machine, or by processes of a Ray cluster."""

DEFAULT_RAY_WORKERS = 2

T = TypeVar("T")
Result = TypeVar("Result")


def cpu_cores() -> int:
    """Count the processor cores that this process may use.

    Returns:
        The number of cores. Processes of torchrun on one machine share them.
    """
    # A container may allow fewer cores than the machine has.
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def map_in_order(
    work: Callable[[T], Result], items: Iterable[T], *, threads: int = 0, ahead: int = 0
) -> Iterator[Result]:
    """Apply a function to items in threads. The results come in the order of the items, and so does
    the first error of the function.

    An error of the items comes at once.

    Args:
        work: The function.
        items: The items. They are taken while results are consumed.
        threads: Number of threads. 0: one for each core. 1 thread works ahead while the caller uses
            a result.
        ahead: Number of results that may wait for the caller. 0: twice the number of threads.

    Yields:
        The results.
    """
    if get_worker_info() is not None:  # the other cores work on other batches
        yield from map(work, items)
        return
    threads = threads or cpu_cores()
    waiting = deque[Future[Result]]()
    # A bounded queue: results wait for the caller in memory.
    with ThreadPoolExecutor(threads, "reader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > (ahead or 2 * threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # A caller that stops early, or an error, leaves results that nobody reads.
            for future in waiting:
                future.cancel()


def connect_to_ray(action: str) -> Any:
    """Connect to the Ray cluster at ``RAY_ADDRESS``, or start one on this machine.

    Args:
        action: Action that needs Ray, for the error.

    Returns:
        The module ``ray``.

    Raises:
        MissingExtra: If Ray is not installed.
    """
    with requires_extra("scale", f"{action} with --workers ray"):
        import ray
    if not ray.is_initialized():
        with current_folder_excluded():
            ray.init(
                address=os.environ.get("RAY_ADDRESS", "local"),
                include_dashboard=False,
                log_to_driver=False,
                job_config=_ray_job_config(),
            )
    return ray


def _ray_job_config() -> Any:
    """Settings of Ray by which its workers import from the folder of the script and the current
    folder only if this process does. Ray adds the current folder for each job without a
    ``working_dir``.
    """
    from ray.job_config import JobConfig

    class SamePathConfig(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    folders = [os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()]
    imported = {os.path.realpath(path) for path in sys.path}
    return SamePathConfig(
        _py_driver_sys_path=[path for path in folders if os.path.realpath(path) in imported]
    )


def map_on_ray(
    actor: type,
    arguments: tuple[Any, ...],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int | None,
    action: str,
    ordered: bool,
) -> Iterator[Any]:
    """Call the method ``encode`` of actors for each job. Ray restarts a lost actor and repeats its
    job.

    Args:
        actor: Class of the actors, one per process. They share the GPUs of the cluster.
        arguments: Arguments of its constructor.
        jobs: Arguments of each call.
        workers: Number of processes. None: 2.
        action: Action that needs Ray, for errors.
        ordered: Whether results come in the order of the jobs, instead of the order in which they
            are finished.

    Yields:
        The results.

    Raises:
        VisavisError: If ``workers`` is invalid.
        MissingExtra: If Ray is not installed.
    """
    workers = DEFAULT_RAY_WORKERS if workers is None else workers
    if workers < 1:
        raise VisavisError(
            f"workers: expected an integer >= 1, got {workers}. Set a positive number."
        )
    if not jobs:
        return
    ray = connect_to_ray(action)
    from ray.util import ActorPool

    # More actors than jobs would load models for nothing.
    num_actors = min(workers, len(jobs))
    # Actors share the GPUs equally. 0 on a cluster of CPUs.
    num_gpus = min(1.0, ray.cluster_resources().get("GPU", 0) / num_actors)
    remote = ray.remote(max_restarts=-1, max_task_retries=-1, num_gpus=num_gpus)(actor)
    pool = ActorPool([remote.remote(*arguments) for _ in range(num_actors)])
    submit: Callable[..., Iterator[Any]] = pool.map if ordered else pool.map_unordered
    yield from submit(lambda worker, job: worker.encode.remote(*job), jobs)
