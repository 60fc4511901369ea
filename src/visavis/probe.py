"""The memory of a score that nobody declares, measured on blocks of a few items.

While a probe runs, every tensor that comes to life is counted until it dies. Four probes of two heights and two widths, step by
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visavis.memory import BlockCost, Items, ScoreCost, declared_cost

Score = Callable[[Any, Any], Tensor]
FEW = 2, 3
"""Visual items and texts of the smallest probe; others have twice as many."""


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
    heights, widths = ((number, 2 * number) for number in FEW)
    with _undisturbed(score, visual):
        low_narrow, low_wide, high_narrow, high_wide = (
            _live_bytes(score, _first(visual, height), _first(text, width), training=training) for height in heights for width in widths
        )
    if len({len(each) for each in (low_narrow, low_wide, high_narrow, high_wide)}) > 1:  # steps that depend on the items
        return BlockCost(max(high_wide) / (heights[1] * widths[1]))
    pair = visual_item = text_item = fixed = 0.0
    for ll, lh, hl, hh in zip(low_narrow, low_wide, high_narrow, high_wide, strict=True):
        of_pair = (hh - hl - lh + ll) / (heights[0] * widths[0])
        of_visual = (hl - ll) / heights[0] - of_pair * widths[0]
        of_text = (lh - ll) / widths[0] - of_pair * heights[0]
        rest = ll - of_pair * heights[0] * widths[0] - of_visual * heights[0] - of_text * widths[0]
        pair, visual_item = max(pair, of_pair), max(visual_item, of_visual)
        text_item, fixed = max(text_item, of_text), max(fixed, rest)
    return BlockCost(pair, visual_item, text_item, fixed)


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


def _live_bytes(score: Score, visual: Items, text: Items, *, training: bool) -> list[int]:
    """The bytes that are alive after each step of scoring a block."""

    def leaf(part: Tensor) -> Tensor:
        return part.detach().requires_grad_(training and part.is_floating_point())

    visual, text = (leaf(items) if isinstance(items, Tensor) else items.map(leaf) for items in (visual, text))
    with torch.set_grad_enabled(training), _LiveBytes() as live:
        scores = score(visual, text)
        leaves = leaves_behind(scores) if training else []
        if leaves:
            kept = torch.autograd.grad(scores, leaves, torch.ones_like(scores), retain_graph=True, allow_unused=True)
            del kept
    return live.after_each_step or [0]


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made since it began, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.after_each_step: list[int] = []
        self.known: dict[int, weakref.ref[Any]] = {}

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
            buffer.copy_(value)
