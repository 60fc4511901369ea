"""The memory of a score that nobody declares, measured on blocks of a few items.

While a small block is worked on, every tensor that comes to life is counted until it dies. Four blocks of two heights and two widths, step by
step beside each other, tell what each step holds for an item, for a text, and for a pair; the largest of each is the cost.

>>> def cosine(visual, text):
...     return torch.nn.functional.normalize(visual, dim=-1) @ torch.nn.functional.normalize(text, dim=-1).T
>>> measure_cost(cosine, torch.ones(9, 64), torch.ones(9, 64), training=False).pair
4.0
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visavis.memory import BlockCost, Items, ScoreCost, declared_cost, scores_of

Score = Callable[[Any, Any], Tensor]
FEW = 2, 3
"""Visual items and texts of the smallest block; others have twice as many."""


def cost_of(score: Score, visual: Items, text: Items, *, training: bool, declared: ScoreCost | None = None) -> BlockCost:
    """What blocks of a score cost: as declared here, as its owner declares (``declared_cost``), or else as measured."""
    declared = declared or declared_cost(score, visual, text)
    return measure_cost(score, visual, text, training=training) if declared is None else declared.block(training=training)


def measure_cost(score: Score, visual: Items, text: Items, *, training: bool) -> BlockCost:
    """What blocks of ``score(visual, text) -> [V, T]`` hold at most beside the items themselves.

    training: with the graph of the forward pass, kept, and the gradients by items and parameters. Takes milliseconds; changes
    neither random numbers nor the buffers of the module that scores.
    """
    if not (len(visual) and len(text)):
        return BlockCost(0.0)

    def prepare(height: int, width: int) -> Callable[[], Any]:
        return partial(_scored, score, _leaves(_first(visual, height), training), _leaves(_first(text, width), training), training)

    with _undisturbed(score, visual):
        return measure_blocks(prepare, *FEW)


def measure_blocks(prepare: Callable[[int, int], Callable[[], Any]], height: int, width: int) -> BlockCost:
    """The cost of any work on a block of so many rows and columns: ``prepare(height, width)`` gives the work, which is measured.

    Four blocks are worked on, of these sizes and of twice as many.
    """
    low_narrow, low_wide, high_narrow, high_wide = (_live_bytes(prepare(h, w)) for h in (height, 2 * height) for w in (width, 2 * width))
    if len({len(steps) for steps in (low_narrow, low_wide, high_narrow, high_wide)}) > 1:  # steps that depend on the items
        return BlockCost(max(high_wide) / (4 * height * width))
    pair = row = column = fixed = 0.0
    for ll, lh, hl, hh in zip(low_narrow, low_wide, high_narrow, high_wide, strict=True):
        of_pair = (hh - hl - lh + ll) / (height * width)
        of_row = (hl - ll) / height - of_pair * width
        of_column = (lh - ll) / width - of_pair * height
        rest = ll - of_pair * height * width - of_row * height - of_column * width
        pair, row, column, fixed = max(pair, of_pair), max(row, of_row), max(column, of_column), max(fixed, rest)
    return BlockCost(pair, row, column, fixed)


def leaves_behind(tensor: Tensor) -> list[Tensor]:
    """The leaves of the graph that a tensor was made of."""
    seen, leaves, waiting = set(), [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            waiting += [following for following, _ in node.next_functions]
    return leaves


def _first(items: Items, number: int) -> Items:
    """So many items; of fewer, some again."""
    return items[:number] if len(items) >= number else items[torch.arange(number) % len(items)]


def _leaves(items: Items, training: bool) -> Items:
    def leaf(part: Tensor) -> Tensor:
        return part.detach().requires_grad_(training and part.is_floating_point())

    return leaf(items) if isinstance(items, Tensor) else items.map(leaf)


def _scored(score: Score, visual: Items, text: Items, training: bool) -> Any:
    """A block forth and, in training, back again."""
    with torch.set_grad_enabled(training):
        scores = scores_of(score, visual, text)
        leaves = leaves_behind(scores) if training else []
        return leaves and torch.autograd.grad(scores, leaves, torch.ones_like(scores), retain_graph=True, allow_unused=True)


def _live_bytes(work: Callable[[], Any]) -> list[int]:
    """The bytes that are alive after each step of some work."""
    with _LiveBytes() as live:
        work()
    return live.after_each_step or [0]


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made since it began, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.after_each_step: list[int] = []
        self.known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first use: seconds, and 80 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {part.untyped_storage()._cdata for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        result = func(*args, **kwargs)
        for part in tree_leaves(result):
            if isinstance(part, Tensor):
                self._count(part.untyped_storage(), given)
        self.after_each_step.append(self.now)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self.known:
            return

        def die(_: Any) -> None:
            self.now -= size
            del self.known[key]

        self.now += size
        self.known[key] = weakref.ref(storage, die)


@contextmanager
def _undisturbed(score: Score, items: Items) -> Iterator[None]:
    """Random numbers, buffers (of a batch norm) and the casts that autocast keeps are afterwards as they were."""
    some = items if isinstance(items, Tensor) else next(iter(tree_leaves(items.vectors)))
    owner = getattr(score, "__self__", score)
    buffers = list(owner.buffers()) if isinstance(owner, nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    device = some.device.type
    mixed = torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device), cache_enabled=False)
    with torch.random.fork_rng([some.device] if device == "cuda" else []), mixed:
        yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            if not torch.equal(buffer, value):  # writing the same again would spoil a graph that holds the buffer
                buffer.copy_(value)
