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

from visavis.core.child_processes import current_folder_excluded
from visavis.core.errors import VisavisError, requires_extra

Engine = Literal["local", "ray"]
"""Where work is done: on this machine, or by processes of a Ray cluster."""

DEFAULT_RAY_WORKERS = 2

T = TypeVar("T")
Result = TypeVar("Result")


def cpu_cores() -> int:
    """Count the processor cores that this process may use."""
    # A container may allow fewer cores than the machine has.
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # Processes of torchrun on one machine share them.
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def map_in_order(
    work: Callable[[T], Result], items: Iterable[T], *, threads: int = 0, ahead: int = 0
) -> Iterator[Result]:
    """Apply a function to items in threads, 0: one for each core. The results come in the order of
    the items, and so does the first error of the function.
    """
    # In a worker of a DataLoader, the other cores work on other batches. Without torch there is none.
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        yield from map(work, items)
        return
    threads = threads or cpu_cores()
    waiting = deque[Future[Result]]()
    # A bounded queue: results wait for the caller in memory.
    with ThreadPoolExecutor(threads, "reader") as pool:
        try:
            # An error of the items comes at once.
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
    """Connect to the Ray cluster at ``RAY_ADDRESS``, or start one on this machine."""
    with requires_extra("scale", f"{action} with --workers ray"):
        import ray
    if ray.is_initialized():
        return ray
    from ray.job_config import JobConfig

    # Ray adds the current folder to the imports of each job without a ``working_dir``.
    class SamePathConfig(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    # Workers import from the folder of the script and the current folder only if this process does.
    folders = [os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()]
    imported = {os.path.realpath(path) for path in sys.path}
    job_config = SamePathConfig(
        _py_driver_sys_path=[path for path in folders if os.path.realpath(path) in imported]
    )
    with current_folder_excluded():
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "local"),
            include_dashboard=False,
            log_to_driver=False,
            job_config=job_config,
        )
    return ray


def map_on_ray(
    actor: type,
    arguments: tuple[Any, ...],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int | None,
    action: str,
    ordered: bool,
) -> Iterator[Any]:
    """Call the method ``encode`` of actors, one per process, for each job. Ray restarts a lost actor
    and repeats its job.
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
    # Without an order, results come as they are finished.
    submit: Callable[..., Iterator[Any]] = pool.map if ordered else pool.map_unordered
    yield from submit(lambda worker, job: worker.encode.remote(*job), jobs)
