"""Processes of one training: joining the group that torchrun started, checking the recipe, and one
message for a failure.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import wait
from threading import Event, Thread
from uuid import uuid4

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from visavis.core.errors import RecipeError, ReportedByOtherProcess, RunError, warn
from visavis.core.process_group import (
    FAILURES,
    ONE_PROCESS,
    POLL_INTERVAL_S,
    ProcessGroup,
    default_store,
)
from visavis.models.device import choose_device
from visavis.training.recipes.recipe import Recipe
from visavis.training.stop_signals import Stopped

JOIN_TIMEOUT_S = 1800.0
"""Longest time that a process waits for the others at the start."""
STORE_TIMEOUT_S = 10.0
"""Longest time that rank 0 keeps the store for the other ranks after a failure."""
CONNECTION_TIMEOUT_S = 10.0
"""Longest time that a process waits for a connection to or from rank 0."""
LOSS_GRACE_S = 10.0
"""Longest time that a process has to end by itself after another one was lost."""
FREE_TIMEOUT_S = 1.0
"""Longest time that a process waits at its end until gloo has freed a tensor."""
_ENDED, _REPORTED = b"e", b"r"
_GROUPS: list[distributed.ProcessGroup | None] = []
"""Groups that were joined. ``DistributedDataParallel`` must not be the last to hold one: torch
frees it with the interpreter locked, and then waits for a thread of gloo, which waits for the
interpreter.
"""


@contextmanager
def join_processes(
    after_kill: str = "The last checkpoint is intact. Continue with --resume RUN, with any number of processes.",
) -> Iterator[ProcessGroup]:
    """Join the other processes of a command, if ``torchrun``, or another launcher that sets the
    same variables, started this one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not distributed.is_initialized():
        if (
            "WORLD_SIZE" not in os.environ
            and (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1
        ):
            warn(
                f"srun: expected one task of torchrun on each machine, got {tasks} tasks without "
                "torchrun. Each of them does the whole work. "
                "Start torchrun to share it."
            )
        yield ONE_PROCESS
        return
    is_own_group = not distributed.is_initialized()
    if is_own_group:
        if (local_rank := int(os.environ.get("LOCAL_RANK", "0"))) < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)
        _connect(after_kill)
        _GROUPS.append(distributed.group.WORLD)
    group = ProcessGroup(torch.device("cpu"), distributed_group=True)
    store = default_store()
    try:
        with _end_with_lost_process(store, group, after_kill) if is_own_group else nullcontext():
            with warnings.catch_warnings():
                if not group.is_first:
                    warnings.simplefilter("ignore")  # rank 0 gives the same warnings
                yield group
            _last_barrier()
    except Stopped as stopped:
        if not group.is_first:
            raise ReportedByOtherProcess(
                "The first process reports that the training was stopped.", 128 + stopped.signal
            ) from None
        raise
    except BaseException as error:
        is_first = _is_first_failure(store)
        # Without torchrun, rank 0 holds the store. The others need it to learn that this process
        # has failed.
        if is_own_group and group.is_first and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            distributed.destroy_process_group()
            # Until they have looked for failures, or the time is up.
            end = time.monotonic() + STORE_TIMEOUT_S
            while store.add(FAILURES, 0) < group.world_size and time.monotonic() < end:
                time.sleep(0.05)
        # The first process that fails reports its error. The others, which lose their connection to
        # it, raise an error that the command line does not print.
        if not is_first:
            raise ReportedByOtherProcess("Another process has failed, and reports why.") from error
        if _is_lost_connection(error):
            raise _killed_process(group.world_size, after_kill) from None
        raise
    if is_own_group:
        distributed.destroy_process_group()


def _last_barrier() -> None:
    """Wait for the other ranks, and until gloo has freed the tensor of this barrier."""
    tensor = torch.zeros(1)
    distributed.all_reduce(tensor)
    reference = weakref.ref(tensor)
    end = time.monotonic() + FREE_TIMEOUT_S
    # A thread of gloo frees it, and needs the interpreter for that. If the interpreter ends first,
    # the process is aborted: one of about 15 runs.
    del tensor
    while reference() is not None and time.monotonic() < end:
        time.sleep(0.001)


def _connect(after_kill: str) -> None:
    """Connect to the other processes of this start."""
    store, rank, world_size = next(rendezvous("env://"))
    store = _store_of_start(store, rank, world_size)
    try:
        # Gloo carries what is on the CPU: validation results, texts and the agreement on signals.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (RuntimeError, distributed.DistError) as error:
        if not _is_lost_connection(error):
            raise
        if not _is_first_failure(store):
            raise ReportedByOtherProcess("Another process has failed, and reports why.") from error
        raise _killed_process(world_size, after_kill) from None


def _store_of_start(store: Store, rank: int, world_size: int) -> Store:
    """Agree on a part of the store for this start."""
    # `torchrun` starts processes again with the same store, which still has the addresses of
    # processes that were killed. Each one sends its request with a new random key, so that no reply
    # is older than the request.
    if rank > 0:
        request = uuid4().hex
        store.set(f"visavis/request-{rank}", request)
        _wait_for_processes(lambda: store.check([f"visavis/reply-{request}"]), world_size)
        start = store.get(f"visavis/reply-{request}").decode()
        store.set(f"{start}/joined-{rank}", "")
        return PrefixStore(start, store)
    start = uuid4().hex

    def reply_to_requests() -> bool:
        for other in range(1, world_size):
            if store.check([f"visavis/request-{other}"]):
                request = store.get(f"visavis/request-{other}").decode()
                store.set(f"visavis/reply-{request}", start)
        return all(store.check([f"{start}/joined-{other}"]) for other in range(1, world_size))

    _wait_for_processes(reply_to_requests, world_size)
    return PrefixStore(start, store)


@contextmanager
def _end_with_lost_process(store: Store, group: ProcessGroup, after_kill: str) -> Iterator[None]:
    """End this process after another one was lost, also if no collective raises an error."""
    # When a process is killed, gloo sometimes does not wake a send, and waits until its timeout of
    # 30 minutes. So each process holds a connection to rank 0, which the operating system closes
    # with the process.
    has_ended = Event()
    try:
        connections = _connect_to_first_rank(store, group)
    except OSError as error:
        raise RunError(
            f"MASTER_ADDR: expected that each process can connect to {os.environ['MASTER_ADDR']}, "
            f"got: {error}. "
            "Allow connections between the machines."
        ) from None

    def watch() -> None:
        watched = list(connections)
        while watched:
            ready = wait(watched)
            message = b""
            connection = next(each for each in watched if each in ready)
            with suppress(OSError):
                message = connection.recv(1)
            if message == _ENDED:
                watched.remove(connection)
                continue
            if has_ended.wait(LOSS_GRACE_S):
                return
            if message != _REPORTED and _is_first_failure(store):
                # The main thread waits in gloo, so that no exception reaches the command line.
                logging.getLogger(__name__).error(
                    "%s", _killed_process(group.world_size, after_kill)
                )
            _send(connections, _REPORTED)
            os._exit(1)

    Thread(target=watch, name="lost-process", daemon=True).start()
    try:
        yield
    except Stopped:
        _send(connections, _ENDED)
        raise
    else:
        _send(connections, _ENDED)
    finally:
        has_ended.set()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)


def _connect_to_first_rank(store: Store, group: ProcessGroup) -> list[socket.socket]:
    """Connect each rank with rank 0, which receives all connections."""
    if not group.is_first:
        port, token = store.get("visavis/watch").decode().split()
        connection = socket.create_connection(
            (os.environ["MASTER_ADDR"], int(port)), CONNECTION_TIMEOUT_S
        )
        connection.sendall(token.encode())
        return [connection]
    has_ipv6 = socket.has_dualstack_ipv6()
    token = uuid4().hex
    connections = list[socket.socket]()
    with socket.create_server(
        ("", 0), family=socket.AF_INET6 if has_ipv6 else socket.AF_INET, dualstack_ipv6=has_ipv6
    ) as server:
        server.settimeout(CONNECTION_TIMEOUT_S)
        store.set("visavis/watch", f"{server.getsockname()[1]} {token}")
        while len(connections) < group.world_size - 1:
            connection, _ = server.accept()
            connection.settimeout(CONNECTION_TIMEOUT_S)
            with suppress(OSError):  # of a client that is not a rank
                if connection.recv(len(token)) == token.encode():
                    connections.append(connection)
    return connections


def _send(connections: list[socket.socket], message: bytes) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.send(message)


def _wait_for_processes(have_joined: Callable[[], bool], world_size: int) -> None:
    """Wait until other processes have joined."""
    end = time.monotonic() + JOIN_TIMEOUT_S
    while not have_joined():
        if time.monotonic() > end:
            raise RunError(
                f"WORLD_SIZE: expected {world_size} processes within {JOIN_TIMEOUT_S:.0f} s, got "
                "fewer. Start all of them."
            )
        time.sleep(POLL_INTERVAL_S)


def _killed_process(world_size: int, after_kill: str) -> RunError:
    return RunError(
        f"A process was killed: {world_size} processes were expected, and their connection was "
        f"lost. {after_kill}"
    )


def check_processes(recipe: Recipe, group: ProcessGroup) -> None:
    """Check before any data are read that several processes can train a recipe."""
    if group.world_size == 1:
        return
    if recipe.training.batch_size < group.world_size:
        raise RecipeError(
            f"training.batch_size: expected at least one item for each of {group.world_size} "
            f"processes, got {recipe.training.batch_size}. "
            "Set a larger batch, or start fewer processes."
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count()
    if (
        local_processes > devices
        and choose_device(recipe.training.device, "training.device").type == "cuda"
    ):
        raise RecipeError(
            "training.device: expected a CUDA device for each process of this machine, got "
            f"{devices} for {local_processes} processes. "
            f'Set torchrun --nproc-per-node {devices}, or training.device = "cpu".'
        )
    if choose_device(recipe.training.device, "training.device").type == "mps":
        raise RecipeError(
            f"training.device: expected CUDA devices or CPUs for {group.world_size} processes, got "
            'mps. Start it without torchrun, or set training.device = "cpu".'
        )
    for source in (phase.supervision for phase in recipe.phases):
        if source.one_process_only:
            raise RecipeError(
                f"phases.supervision: expected one process with {type(source).__name__}, because "
                f"{source.one_process_only}, "
                f"got {group.world_size}. Start it without torchrun."
            )
        if source.reads_model and recipe.training.strategy == "fsdp":
            raise RecipeError(
                f'training.strategy: expected "ddp" with {type(source).__name__}, which reads the model in each step, got "fsdp". '
                'Set training.strategy = "ddp".'
            )


def restarted() -> bool:
    """Return whether ``torchrun --max-restarts`` has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def can_restart() -> bool:
    """Return whether ``torchrun --max-restarts`` starts this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def _is_first_failure(store: Store) -> bool:
    """Whether no other process has failed before. Also true if the store is gone with the process
    that held it.
    """
    with suppress(RuntimeError):
        return store.add(FAILURES, 1) == 1
    return True


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed because another process is gone."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
