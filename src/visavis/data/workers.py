"""Worker processes that read batches for a training or an encoder, with the ``DataLoader`` of
torch.

Workers are started by a fork server, which never ran the training. A fork of the training itself
would copy locks that its threads hold, for example in OpenMP, and the lock of the run folder, which
would then outlive a killed training.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from visavis.core import storage
from visavis.core.child_processes import PRELOADED_MODULES, current_folder_excluded
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, VisavisError
from visavis.data.item_sources import ItemSource, read_unnormalized
from visavis.data.parallel import cpu_cores

# Windows has no SIGHUP. There, a closed window sends SIGBREAK.
STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
# Batches that each worker reads ahead.
PREFETCH_FACTOR = 2

MAX_DEFAULT_WORKERS = 16
# Below this number of cores, a training on a CPU is faster if its threads read
# (``benchmarks/data_path.py --only workers``).
MIN_CORES_FOR_WORKERS = 3
# Below this number of images, workers take longer to start than they save.
MIN_IMAGES_FOR_WORKERS = 256
# Free bytes of shared memory that batches of pixels need. Containers often have 64 MiB.
MIN_SHARED_MEMORY = 2**30


def choose_workers(setting: int, num_images: int, *, has_gpu: bool) -> int:
    """Choose the number of workers of a training. -1: one for each core and at most 16, but 0 for few
    images, for few cores without a GPU, and for little shared memory.
    """
    # Workers send batches through it on Linux. Elsewhere they send them in another way.
    shared_memory = "/dev/shm"
    has_memory = (
        not os.path.isdir(shared_memory)
        or shutil.disk_usage(shared_memory).free >= MIN_SHARED_MEMORY
    )
    has_cores = cpu_cores() >= MIN_CORES_FOR_WORKERS or has_gpu
    default = (
        min(cpu_cores(), MAX_DEFAULT_WORKERS)
        if num_images >= MIN_IMAGES_FOR_WORKERS and has_memory and has_cores
        else 0
    )
    return default if setting < 0 else setting


def choose_readers(setting: int | None, device: torch.device, num_images: int) -> int:
    """Choose the number of workers that read images for an encoder. 0: threads read the images."""
    validate_workers(setting)
    # Threads of one process read about 1,000 small images per second on 16 cores, which can be too
    # few for a GPU.
    if setting is None:
        return choose_workers(-1, num_images, has_gpu=True) if device.type != "cpu" else 0
    return setting


def validate_workers(setting: int | None) -> None:
    """Raise VisavisError if a number of workers is negative."""
    if setting is not None and setting < 0:
        raise VisavisError(
            f"workers: expected an integer >= 0, got {setting}. Set 0 to read with threads."
        )


@dataclass(frozen=True)
class BatchRequest:
    """A global batch, this rank's part of it, and the seeds of random transforms.

    Attributes:
        images: Indices of the images of all ranks.
        captions: Indices of the captions of all ranks.
        own_images: Positions of this rank in ``images``.
        own_captions: Positions of this rank in ``captions``.
        seeds: Seed of each image of this rank. None: no random transforms.
    """

    images: np.ndarray
    captions: np.ndarray
    own_images: slice
    own_captions: slice
    seeds: np.ndarray | None

    def split(self, size: int) -> tuple[list[BatchRequest], np.ndarray]:
        """Divide the images of this rank into parts of ``size`` different images. Return the parts,
        and the position of each of their images in this rank's part of the batch.
        """
        # Equal images stay together, because they are decoded once. They are numbered by their first
        # occurrence, so that the first part has the first images.
        images = self.images[self.own_images]
        captions = self.own_captions
        _, first_positions, unique_index = np.unique(images, return_index=True, return_inverse=True)
        order_of_unique = np.argsort(np.argsort(first_positions))
        part_of_image = order_of_unique[unique_index] // size
        positions = [
            np.flatnonzero(part_of_image == part) for part in range(part_of_image.max() + 1)
        ]
        parts = [
            replace(
                self,
                images=images[part_positions],
                own_images=slice(0, len(part_positions)),
                # All captions are in the first part.
                own_captions=slice(0, 0) if part else captions,
                seeds=None if self.seeds is None else self.seeds[part_positions],
            )
            for part, part_positions in enumerate(positions)
        ]
        return parts, np.concatenate(positions)


@dataclass(frozen=True)
class BatchReader:
    """Reads the items of a batch, in this process or in a worker.

    Attributes:
        visual: Model input of the images.
        text: Model input of the captions.
    """

    visual: ItemSource
    text: ItemSource

    def __call__(self, request: BatchRequest) -> tuple[Encoded, Encoded | None]:
        captions = request.captions[request.own_captions]
        visual = read_unnormalized(self.visual, request.images[request.own_images], request.seeds)
        # Only the first part of a divided batch has captions.
        return visual, self.text.read(captions) if len(captions) else None


class WorkerPool:
    """Worker processes that read batches, of several splits if needed. They start with the first
    batch and stay until the pool is closed.

    Args:
        readers: Functions that read a batch. They are sent to each worker, so they must be
            picklable.
        workers: Number of processes.
        setting: Name of the setting of ``workers``, for an error.
    """

    def __init__(
        self, readers: Sequence[Callable[[Any], Any]], workers: int, setting: str = "workers"
    ):
        self._readers = readers
        self._workers = workers
        self._setting = setting
        self._sampler = _RequestSampler()
        self._closes_at_exit = False

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        # Built with the first batch, because the training uses CUDA by then.
        return DataLoader(
            _RequestDataset(self._readers),
            # A request is a whole batch: torch must neither collate nor split it.
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_return_unchanged,
            num_workers=self._workers,
            persistent_workers=True,
            prefetch_factor=PREFETCH_FACTOR,
            # Pinned memory needs a CUDA context. A training on the CPU must not create one.
            pin_memory=torch.cuda.is_initialized(),
            multiprocessing_context=_context(),
            worker_init_fn=_start_worker,
        )

    def read(self, requests: Iterable[Any], reader: int = 0) -> Iterator[Any]:
        """Read batches in order. An earlier call that did not end is abandoned."""
        # The identity of this generator marks the epoch in progress.
        numbered_requests = ((reader, request) for request in requests)
        self._sampler.requests = numbered_requests
        try:
            with _without_main_module(), current_folder_excluded():
                contents = iter(self._loader)
            if not self._closes_at_exit:
                # After torch has registered its functions, and so before they run. They would wait
                # for workers that ignore SIGTERM.
                atexit.register(_close, weakref.ref(self))
                self._closes_at_exit = True
            for content in contents:
                # An error of the reader, see _RequestDataset.
                if isinstance(content, VisavisError):
                    raise content
                yield content
                assert self._sampler.requests is numbered_requests, "a later epoch has begun"
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith(
                ("DataLoader worker", "Pin memory thread")
            ):
                raise
            raise DataError(
                f"{self._setting}: expected running processes that read batches, got one that "
                f"ended ({storage.error_reason(error)}). "
                f"Free memory, or set {self._setting} to 0."
            ) from None
        finally:
            if self._sampler.requests is numbered_requests:
                self._sampler.requests = ()

    @property
    def is_idle(self) -> bool:
        """Whether workers are running, and no call of ``read`` is in progress."""
        return (
            "_loader" in self.__dict__
            and self._loader._iterator is not None
            and self._sampler.requests == ()
        )

    def close(self) -> None:
        """End the workers. A later call of ``read`` starts new ones."""
        if "_loader" in self.__dict__ and (workers := self._loader._iterator) is not None:
            # torch itself ends workers only when the iterator is collected.
            workers._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None


def read_in_workers(
    reader: Callable[[Any], Any], requests: Iterable[Any], workers: int
) -> Iterator[Any]:
    """Read batches in worker processes, which end with the last batch. The reader is sent to each
    worker, so it must be picklable.
    """
    pool = WorkerPool([reader], workers)
    try:
        yield from pool.read(requests)
    finally:
        pool.close()


def _close(reference: weakref.ref[WorkerPool]) -> None:
    if (pool := reference()) is not None:
        pool.close()


class _RequestDataset(Dataset[Any]):
    """Reads in a worker. Errors of the data are returned, because torch would wrap them into a
    traceback.
    """

    def __init__(self, readers: Sequence[Callable[[Any], Any]]):
        self._readers = readers

    def __getitem__(self, numbered_request: tuple[int, Any]) -> Any:
        reader, request = numbered_request
        try:
            return self._readers[reader](request)
        except VisavisError as error:
            return error


class _RequestSampler(Sampler[Any]):
    """The requests of the current epoch."""

    requests: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


# A function of the module, because a lambda cannot be sent to a worker.
def _return_unchanged(content: Any) -> Any:
    return content


def _start_worker(_: int) -> None:
    """Leave signals to the training, and end with it. torch would notice the end of the fork server
    only, which waits for its workers.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Pillow warns about odd metadata of a photo without its name.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    threading.Thread(target=_end_with_training, daemon=True).start()


def _end_with_training() -> None:
    training = multiprocessing.parent_process()
    assert training is not None
    training.join()
    os._exit(1)


def start_resource_tracker() -> None:
    """Start the process with which Python removes the semaphores of killed processes, without its
    warning about them.
    """
    # Windows removes them itself.
    if sys.platform != "win32":
        # It prints "leaked semaphore objects" each time that a program with workers is killed, while
        # it removes them. A tracker that the program has started before stays as it is. The tracker
        # receives the options of this interpreter.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        try:
            with current_folder_excluded():
                resource_tracker.ensure_running()
        finally:
            sys.warnoptions.pop()


def _context() -> BaseContext:
    """The context of the fork server. Windows has none, and starts new interpreters."""
    start_resource_tracker()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first one starts the parent of all workers.
    context.set_forkserver_preload(["visavis.data.worker_server", __name__, *PRELOADED_MODULES])
    return context


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Start processes without importing the main script in them: a script that trains at its top
    level would train again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
