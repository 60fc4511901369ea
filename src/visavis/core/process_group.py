"""Process group: collectives over the ranks of a training. With one rank, each operation is the
identity.

In the loss, each rank scores its own queries against the candidates of all ranks. Sums over ranks
are formed in the forward pass. The backward pass therefore needs no other rank, and a rank without
items needs no special case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store, _get_default_store

from visavis.core.encoded import Encoded, concatenate
from visavis.core.errors import VisavisError, warn

T = TypeVar("T")
POLL_INTERVAL_S = 0.1
"""Time between two checks whether the first rank, which works alone for any time, is done or has
failed.
"""
FAILURES = "visavis/failures"
"""Key of the store that counts the ranks that have ended early."""


class ProcessGroup:
    """The default group of ``torch.distributed``, or this rank alone.

    Args:
        device: Device of the tensors.
        distributed_group: Whether to use the default group.
    """

    def __init__(self, device: torch.device, *, distributed_group: bool) -> None:
        self.device = device
        self.world_size = distributed.get_world_size() if distributed_group else 1
        self.rank = distributed.get_rank() if distributed_group else 0
        self._num_turns = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and reports progress."""
        return self.rank == 0

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """Numbers that make a seed different on each rank. None for one process."""
        return (self.rank,) if self.world_size > 1 else ()

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """Select the items of this rank: every ``world_size``-th one."""
        return items[self.rank :: self.world_size]

    @contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """Run a block on rank 0 before it runs on the other ranks, which then find the files that
        rank 0 wrote.
        """
        if self.world_size == 1:
            yield
            return
        store = default_store()
        self._num_turns += 1
        key = f"visavis/turn-{self._num_turns}"
        # The other ranks wait for any time. The method ``wait`` of the store prints a warning at each
        # timeout.
        while not self.is_first and not store.check([key]):
            if store.check([FAILURES]):
                raise distributed.DistStoreError("Another rank has failed.")
            time.sleep(POLL_INTERVAL_S)
        yield
        if self.is_first:
            store.set(key, "done")

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self.any_rank(False)

    def broadcast_text(self, message: str) -> str:
        """Send a text from rank 0 to all ranks."""
        return message if self.world_size == 1 else self.all_gather_text(message)[0]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of one shape over ranks. It may be overwritten."""
        if self.world_size > 1:
            tensor = tensor.contiguous()
            distributed.all_reduce(tensor)
        return tensor

    def scale_for_ddp_mean(self, gradient: Tensor) -> Tensor:
        """Scale a gradient of this rank so that the mean over ranks, which DistributedDataParallel
        forms, is the sum.
        """
        return gradient if self.world_size == 1 else gradient * self.world_size

    def mean(self, value: float) -> float:
        """Average a number over ranks."""
        return (
            value
            if self.world_size == 1
            else self.all_reduce_sum(torch.tensor(value, dtype=torch.float64)).item()
            / self.world_size
        )

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank."""
        return (
            condition
            if self.world_size == 1
            else bool(self.all_reduce_sum(torch.tensor(int(condition), device=self.device)))
        )

    def sum_over_lower_ranks(self, value: int) -> int:
        """Sum an integer over the ranks below this one."""
        return int(sum(self.all_gather(torch.tensor([value], device=self.device))[: self.rank]))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from each rank, without gradient. Sizes may differ between ranks, but not
        the number of dimensions and the dtype.
        """
        if self.world_size == 1:
            return [tensor]
        shape = torch.tensor(tensor.shape, device=tensor.device)
        shapes = [torch.empty_like(shape) for _ in range(self.world_size)]
        distributed.all_gather(shapes, shape)
        # Flat and padded to the largest, because the collective needs one shape.
        sizes = [int(other.prod()) for other in shapes]
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.detach().flatten()
        # Bytes, because the backends do not gather every dtype.
        sent = padded.view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        distributed.all_gather(received, sent)
        return [
            other.view(padded.dtype)[:size].view(*shape.tolist())
            for other, size, shape in zip(received, sizes, shapes, strict=True)
        ]

    def all_gather_text(self, message: str) -> list[str]:
        """Gather a text from each rank."""
        letters = torch.tensor(list(message.encode()), dtype=torch.uint8, device=self.device)
        return [bytes(text.tolist()).decode() for text in self.all_gather(letters)]

    def is_equal_on_all_ranks(self, tensor: Tensor) -> bool:
        """Return whether all ranks hold bit-identical tensors."""
        if self.world_size == 1:
            return True
        shape = torch.tensor(tensor.shape, device=tensor.device)
        if self.any_rank(any(not torch.equal(other, shape) for other in self.all_gather(shape))):
            return False
        if not tensor.numel():
            return True
        local = tensor.detach().flatten().view(torch.uint8)
        first = local.clone()
        distributed.broadcast(first, 0)
        return not self.any_rank(not torch.equal(first, local))

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks."""
        return torch.cat(self.all_gather(tensor))

    def all_gather_stack(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, which have one shape."""
        return torch.stack(self.all_gather(tensor))

    def all_gather_batches(self, batches: Sequence[Encoded], num_batches: int) -> list[Encoded]:
        """Gather encoded batches, of which each rank has those that ``part`` gives it."""
        if self.world_size == 1:
            return list(batches)
        gathered = list[Encoded]()
        for start in range(0, num_batches, self.world_size):
            round_number = start // self.world_size
            # A rank without a batch in the last round sends an empty one, which has the same
            # tensors.
            local = batches[round_number] if round_number < len(batches) else batches[0][:0]
            gathered += self._by_rank(local)[: num_batches - start]
        return gathered

    def all_gather_items(self, items: Encoded) -> tuple[Encoded, slice]:
        """Gather the items of all ranks, and return the rows of this rank among them."""
        if self.world_size == 1:
            return items, slice(0, len(items))
        by_rank = self._by_rank(items)
        start = sum(len(other) for other in by_rank[: self.rank])
        local_rows = slice(start, start + len(items))
        return concatenate(by_rank), local_rows

    def _by_rank(self, items: Encoded) -> list[Encoded]:
        """The items of each rank."""
        by_part = [self.all_gather(part) for part in items.tensors]
        # ``map`` visits the tensors in the order of ``tensors``.
        parts_by_rank = [iter([part[rank] for part in by_part]) for rank in range(self.world_size)]
        return [items.map(lambda _, parts=parts: next(parts)) for parts in parts_by_rank]  # type: ignore[misc]


ONE_PROCESS = ProcessGroup(torch.device("cpu"), distributed_group=False)
"""The group of a training in one process."""


def default_store() -> Store:
    """Return the store through which the ranks found each other."""
    # torch has no public function for this.
    return _get_default_store()


def select_process_group(
    gather: bool | None, device: torch.device, *, training: bool, describe_batch: Callable[[], str]
) -> ProcessGroup:
    """Select the ranks over which a loss gathers. ``gather`` True requires a group, False never
    gathers, and None warns where the ranks hold batches that cannot be compared.
    """
    grouped = distributed.is_available() and distributed.is_initialized()
    if gather and training and not grouped:
        raise VisavisError(
            "gather=True: expected a process group, got none. Start with torchrun and "
            "init_process_group, or use gather=None."
        )
    group = ProcessGroup(device, distributed_group=training and grouped and gather is not False)
    if group.world_size == 1:
        return group
    # Collectives of batches that differ in this text would mix or wait forever.
    local = describe_batch()
    others = [other for other in group.all_gather_text(local) if other != local]
    if not others:
        return group
    difference = f"Ranks passed incompatible batches to PairLoss: {local} on rank {group.rank}, {others[0]} on another."
    if gather:
        raise VisavisError(
            f"{difference} Use one loss and one data set per step on all ranks, or gather=False."
        )
    warn(
        f"{difference} In such a step each rank compares its own items only, as with gather=False."
    )
    return ProcessGroup(device, distributed_group=False)
