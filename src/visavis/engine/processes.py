"""What the processes of a training know together. The only place with collectives; alone, each is the identity.

Every process scores its own queries against everybody's candidates. Sums over processes are formed in the forward
pass, so that the backward pass needs no other process, and one without items is no exception.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from visavis.engine.items import Items, rebuilt, tensors
from visavis.errors import VisavisError, say
from visavis.types import concatenate


class Processes:
    """A group of processes, or, with ``together=False``, this one alone."""

    def __init__(self, device: torch.device, *, together: bool) -> None:
        self.device = device
        self.number = distributed.get_world_size() if together else 1
        self.rank = distributed.get_rank() if together else 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes of a tensor of one shape."""
        if self.number > 1:
            tensor = tensor.contiguous()
            distributed.all_reduce(tensor)
        return tensor

    def scaled(self, gradient: Tensor) -> Tensor:
        """A gradient of this process' own, made so that the mean over processes is the sum."""
        return gradient if self.number == 1 else gradient * self.number

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on any process."""
        return condition if self.number == 1 else bool(self.sum(torch.tensor(int(condition), device=self.device)))

    def sum_before(self, number: int) -> int:
        """The sum of a number over the processes before this one."""
        return int(sum(self.from_all(torch.tensor([number], device=self.device))[: self.rank]))

    def from_all(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, which may differ in lengths but not in kind; without a gradient."""
        if self.number == 1:
            return [tensor]
        shape = torch.tensor(tensor.shape, device=tensor.device)
        shapes = [torch.empty_like(shape) for _ in range(self.number)]
        distributed.all_gather(shapes, shape)
        sizes = [int(other.prod()) for other in shapes]
        own = tensor.new_zeros(max(sizes))
        own[: tensor.numel()] = tensor.detach().flatten()
        bits = own.view(torch.uint8)
        received = [torch.empty_like(bits) for _ in range(self.number)]
        distributed.all_gather(received, bits)
        return [other.view(own.dtype)[:size].view(*shape.tolist()) for other, size, shape in zip(received, sizes, shapes, strict=True)]

    def texts(self, own: str) -> list[str]:
        """The text of every process."""
        letters = torch.tensor(list(own.encode()), dtype=torch.uint8, device=self.device)
        return [bytes(text.tolist()).decode() for text in self.from_all(letters)]

    def agree(self, tensor: Tensor) -> bool:
        """Whether all have the same tensor, to the last bit."""
        if self.number == 1:
            return True
        shape = torch.tensor(tensor.shape, device=tensor.device)
        if self.any(any(not torch.equal(other, shape) for other in self.from_all(shape))):
            return False
        if not tensor.numel():
            return True
        own = tensor.detach().flatten().view(torch.uint8)
        first = own.clone()
        distributed.broadcast(first, 0)
        return not self.any(not torch.equal(first, own))

    def joined(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.from_all(tensor))

    def stack(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.from_all(tensor))

    def items(self, items: Items) -> tuple[Items, slice]:
        """Everybody's items, and which of them are this process' own."""
        if self.number == 1:
            return items, slice(0, len(items))
        by_part = [self.from_all(part) for part in tensors(items)]
        by_process = [rebuilt(items, [part[rank] for part in by_part]) for rank in range(self.number)]
        start = sum(len(one) for one in by_process[: self.rank])
        own = slice(start, start + len(items))
        return (torch.cat(by_process) if isinstance(items, Tensor) else concatenate(by_process)), own  # type: ignore[arg-type]


def processes_for(gather: bool | None, device: torch.device, *, training: bool, holds: Callable[[], str]) -> Processes:
    """Those that a loss works with: none but its own outside train mode, where ``gather`` is False, or, with ``gather=None``, where
    the others hold something else.

    holds: what is compared here, in words; only what is equal on all processes can be compared over them, or collectives that do
    not belong together would mix or wait for ever. Raises VisavisError if ``gather`` is True and there is no group, or no agreement.
    """
    grouped = distributed.is_available() and distributed.is_initialized()
    if gather and training and not grouped:
        raise VisavisError(
            "PairLoss(gather=True) found no process group: start with torchrun and init_process_group, or leave gather=None."
        )
    processes = Processes(device, together=training and grouped and gather is not False)
    if processes.number == 1:
        return processes
    own = holds()
    others = [other for other in processes.texts(own) if other != own]
    if not others:
        return processes
    differ = f"the processes hold batches that cannot be compared, {own} on process {processes.rank}, {others[0]} on another"
    if gather:
        raise VisavisError(f"{differ}: let all processes take each step with one loss and one data set, or give gather=False.")
    say(f"{differ}: such a step compares each process' own items alone, as gather=False does in every step.")
    return Processes(device, together=False)
