"""Parallel reading: items are decoded by threads, and results and errors arrive in the order of the items.

Threads suffice because Pillow, NumPy and hashlib release the interpreter lock while they work. They start at once and share memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch.utils.data import get_worker_info

T = TypeVar("T")
Result = TypeVar("Result")


def cpu_cores() -> int:
    """Count the processor cores that this process may use.

    Returns:
        The number of cores. Processes of torchrun on one machine share them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def map_in_order(work: Callable[[T], Result], items: Iterable[T], *, threads: int = 0, ahead: int = 0) -> Iterator[Result]:
    """Apply a function to items in threads. The results come in the order of the items, and so does the first error.

    Args:
        work: The function.
        items: The items. They are taken while results are consumed.
        threads: Number of threads. 0: one for each core. 1 thread works ahead while the caller uses a result.
        ahead: Number of results that may wait for the caller. 0: twice the number of threads.

    Yields:
        The results.
    """
    if get_worker_info() is not None:  # the other cores work on other batches
        yield from map(work, items)
        return
    threads = threads or cpu_cores()
    waiting = deque[Future[Result]]()
    with ThreadPoolExecutor(threads, "reader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > (ahead or 2 * threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
