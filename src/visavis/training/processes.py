"""Processes of one training: joining the group that torchrun started, and one message when a process ends early."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

from visavis.errors import ReportedByOtherProcess, RunError
from visavis.process_group import FAILURES, ONE_PROCESS, ProcessGroup, default_store
from visavis.training.stop_signals import Stopped

STORE_TIMEOUT_S = 10.0
"""Longest time that rank 0 keeps the store for the other ranks after a failure."""


@contextmanager
def join_processes() -> Iterator[ProcessGroup]:
    """Join the other processes of a training, if ``torchrun`` or a like launcher started this one.

    The first process that fails reports its error. The others, which lose their connection to it, raise
    ``ReportedByOtherProcess``, which the command line does not print.

    Yields:
        The group. One process is a group of its own.

    Raises:
        RunError: If another process was killed, so that nobody else can report it.
        ReportedByOtherProcess: If another process has failed, or reports that the training was stopped.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not distributed.is_initialized():
        yield ONE_PROCESS
        return
    is_own_group = not distributed.is_initialized()
    if is_own_group:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Gloo carries what is on the CPU: validation results, texts and the agreement on signals.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    group, store = ProcessGroup(torch.device("cpu"), distributed_group=True), default_store()
    try:
        yield group
        group.barrier()
    except Stopped as stopped:
        if not group.is_first:
            raise ReportedByOtherProcess("The first process reports that the training was stopped.", 128 + stopped.signal) from None
        raise
    except BaseException as error:
        if not _is_first_failure(store, group):
            raise ReportedByOtherProcess("Another process of the training has failed, and reports why.") from error
        if _is_lost_connection(error):
            raise RunError(
                f"A process of the training was killed: {group.world_size} processes were expected, and their connection was lost. "
                "The last checkpoint is intact. Continue with --resume RUN, with any number of processes."
            ) from None
        raise
    if is_own_group:
        distributed.destroy_process_group()


def restarted() -> bool:
    """Return whether ``torchrun --max-restarts`` has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def can_restart() -> bool:
    """Return whether ``torchrun --max-restarts`` starts this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def _is_first_failure(store: Store, group: ProcessGroup) -> bool:
    """Whether no other process has failed before. Also true if the store is gone with the process that held it."""
    is_first = True
    with suppress(RuntimeError):
        is_first = store.add(FAILURES, 1) == 1
        if group.is_first and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            # Without torchrun, rank 0 holds the store. The others need it to learn that this process has failed.
            distributed.destroy_process_group()
            end = time.monotonic() + STORE_TIMEOUT_S
            while store.add(FAILURES, 0) < group.world_size and time.monotonic() < end:
                time.sleep(0.05)
    return is_first


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed because another process is gone."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
