"""Block sizes of score matrices, from the memory cost of a score and one memory setting.

A score of V visual items with T texts may hold far more than V x T numbers. Attention of 36 regions
over 20 words holds hundreds of numbers for each pair. The cost of a pair is declared
(``score_cost``) or measured on blocks of a few items.

Example:
    >>> cost = ScoreCost(inference_bytes=8.0, training_bytes=24.0).to_block_cost(training=False)
    >>> block_shape(1000, 5000, cost, 2_000_000)
    (50, 5000)
    >>> from visavis.core.encoded import Vectors
    >>> def cosine(visual, text):
    ...     return torch.nn.functional.normalize(visual, dim=-1) @ torch.nn.functional.normalize(text, dim=-1).T
    >>> measure_score_cost(cosine, Vectors(torch.ones(9, 64)), Vectors(torch.ones(9, 64)), training=False).pair_bytes
    4.0
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError, VisavisError, format_value
from visavis.core.fields import PositiveFloat, validate_fields
from visavis.core.memory_budget import chunk_slices, format_bytes

Score = Callable[[Any, Any], Tensor]
"""``score(visual, text) -> [V, T]``, the signature of every matcher's score."""

MAX_TILE_SHAPE = (1024, 5120)
"""Rows and columns of scores above which a larger block is not faster."""
MAX_BLOCK_BYTES = 2**27
"""Size of a costly block above which it is slower, because the system provides its memory again for
every block.
"""
MIN_BLOCK_ROWS = 32
"""Number of rows below which narrower blocks are faster than blocks with fewer rows."""
PROBE_SHAPE = 2, 3
"""Visual items and texts of the smallest measured block. The other blocks have twice as many."""


@dataclass(frozen=True)
class BlockCost:
    """Peak bytes of a block of scores: $fixed + visual V + text T + pair V T$ for V visual items
    and T texts.

    Attributes:
        pair_bytes: Bytes per pair.
        visual_bytes: Bytes per visual item.
        text_bytes: Bytes per text.
        fixed_bytes: Bytes that do not depend on the size of the block.

    Example:
        >>> BlockCost(pair_bytes=4.0, visual_bytes=100.0).total_bytes(10, 20)
        1800
    """

    pair_bytes: float
    visual_bytes: float = 0.0
    text_bytes: float = 0.0
    fixed_bytes: float = 0.0

    def total_bytes(self, num_visual: int, num_text: int) -> int:
        """Return the bytes of one block."""
        return int(
            self.fixed_bytes
            + self.visual_bytes * num_visual
            + self.text_bytes * num_text
            + self.pair_bytes * num_visual * num_text
        )

    def __add__(self, other: BlockCost) -> BlockCost:
        return BlockCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def transposed(self) -> BlockCost:
        """The cost of blocks whose rows are texts."""
        return BlockCost(self.pair_bytes, self.text_bytes, self.visual_bytes, self.fixed_bytes)


@dataclass(frozen=True)
class ScoreCost:
    """Declared memory cost of a score function, in bytes per pair.

    Attributes:
        inference_bytes: Bytes that are alive at once without a gradient, including the score (4 for
            a dot product in float32).
        training_bytes: The same in training, with the graph of the forward pass and the additional
            bytes of the backward pass.

    Raises:
        SpecError: If a value is not a positive number.
    """

    inference_bytes: PositiveFloat
    training_bytes: PositiveFloat

    def __post_init__(self) -> None:
        validate_fields(self)

    def to_block_cost(self, *, training: bool) -> BlockCost:
        """Convert to the cost of a block."""
        return BlockCost(self.training_bytes if training else self.inference_bytes)


def declared_cost(score: Score, visual: Encoded, text: Encoded) -> ScoreCost | None:
    """Return the cost that a score function declares for these items by a method ``score_cost``, or
    None.
    """
    # The object that the score is a method of, or else the callable.
    owner = getattr(score, "__self__", score)
    score_cost = getattr(owner, "score_cost", None)
    if score_cost is None:
        return None
    name = (
        getattr(score, "__name__", "score")
        if owner is not score
        else "forward"
        if hasattr(owner, "forward")
        else "__call__"
    )
    # Number of each class that defines the methods, the class itself first. A subclass that
    # overrides its score only does not have the cost that its parent declares.
    declaring, scoring = (
        [rank for rank, kind in enumerate(type(owner).__mro__) if method in vars(kind)]
        for method in ("score_cost", name)
    )
    return (
        None
        if declaring and scoring and scoring[0] < declaring[0]
        else score_cost(visual.score_input(), text.score_input())
    )


def block_shape(
    rows: int,
    columns: int,
    cost: BlockCost,
    memory_bytes: int,
    *,
    max_shape: tuple[int | None, int | None] = MAX_TILE_SHAPE,
) -> tuple[int, int]:
    """Choose the largest blocks of a ``[rows, columns]`` score matrix that fit into memory.

    If memory is short, blocks first get fewer whole rows, then shorter rows.

    Args:
        rows: Visual items. For blocks whose rows are texts, pass ``cost.transposed``.
        columns: Texts.
        cost: Cost of a block.
        memory_bytes: Bytes that a block may take.
        max_shape: Maximum rows and columns of a block. None: no limit.

    Returns:
        Rows and columns of a block, at least 1 x 1.

    Raises:
        VisavisError: If one pair does not fit.

    Example:
        >>> block_shape(1000, 5000, BlockCost(4.0), 2**30), block_shape(1000, 5000, BlockCost(2e6), 2**30)
        ((1000, 5000), (32, 16))
    """
    height, width = (
        max(1, length if limit is None else min(length, limit))
        for length, limit in zip((rows, columns), max_shape, strict=True)
    )
    if cost.total_bytes(height, width) <= memory_bytes:
        return height, width
    if cost.total_bytes(1, 1) > memory_bytes:
        raise VisavisError(
            f"memory: expected at least {format_bytes(cost.total_bytes(1, 1))} to score one pair, "
            f"got {format_bytes(memory_bytes)} for blocks. "
            "Set a larger memory."
        )

    def columns_that_fit(num_rows: int) -> int:
        return _count_that_fits(
            memory_bytes - cost.fixed_bytes - cost.visual_bytes * num_rows,
            cost.text_bytes + cost.pair_bytes * num_rows,
        )

    min_rows = min(height, MIN_BLOCK_ROWS)
    num_rows = _count_that_fits(
        memory_bytes - cost.fixed_bytes - cost.text_bytes * width,
        cost.visual_bytes + cost.pair_bytes * width,
    )
    if num_rows >= min_rows:
        return num_rows, width
    while min_rows > 1 and columns_that_fit(min_rows) < 1:
        min_rows //= 2
    columns_per_block = min(width, columns_that_fit(min_rows))
    # A matrix with few columns may fit as whole rows after all, with fewer rows than the preferred
    # minimum.
    return (num_rows, width) if columns_per_block == width else (min_rows, columns_per_block)


def _count_that_fits(available_bytes: float, bytes_each: float) -> int:
    return max(int(available_bytes // bytes_each), 0) if bytes_each > 0 else 2**62


def checked_scores(score: Score, visual: Encoded, text: Encoded) -> Tensor:
    """Compute ``score(visual, text)`` and check the result."""
    try:
        scores = score(visual.score_input(), text.score_input())
    except RuntimeError as error:
        if _vector_dim(visual) == _vector_dim(text):
            raise
        raise ShapeError(
            f"score: expected visual items and texts of equal dimension, got {_vector_dim(visual)} "
            f"and {_vector_dim(text)} ({error}). "
            "Encode both with the same model."
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != (len(visual), len(text)):
        raise ShapeError(
            f"score: expected shape {[len(visual), len(text)]} for {len(visual)} images and "
            f"{len(text)} texts, got {format_value(scores)}. "
            "Return a tensor with one row per image and one column per text."
        )
    return scores


def _vector_dim(items: Encoded) -> int | None:
    """Return the last dimension of items that are one tensor."""
    vectors = items.vectors
    return vectors.shape[-1] if isinstance(vectors, Tensor) and vectors.dim() else None


def score_in_blocks(score: Score, visual: Encoded, text: Encoded, shape: tuple[int, int]) -> Tensor:
    """Compute a score matrix block by block, without a gradient."""
    slices = list(product(chunk_slices(len(visual), shape[0]), chunk_slices(len(text), shape[1])))
    if len(slices) <= 1:
        return checked_scores(score, visual, text)
    scores: Tensor | None = None
    for rows, columns in slices:
        block = checked_scores(score, visual[rows], text[columns])
        scores = block.new_empty(len(visual), len(text)) if scores is None else scores
        scores[rows, columns] = block
    assert scores is not None
    return scores


def block_cost_of(
    score: Score,
    visual: Encoded,
    text: Encoded,
    *,
    training: bool,
    declared: ScoreCost | None = None,
) -> BlockCost:
    """Return the cost of blocks of a score: declared by the caller, declared by the score function,
    or measured.
    """
    declared = declared or declared_cost(score, visual, text)
    return (
        measure_score_cost(score, visual, text, training=training)
        if declared is None
        else declared.to_block_cost(training=training)
    )


def measure_score_cost(
    score: Score, visual: Encoded, text: Encoded, *, training: bool
) -> BlockCost:
    """Measure the peak memory of blocks of a score, without the items themselves, in milliseconds.
    Random numbers and buffers of the module that scores are unchanged.
    """
    if not (len(visual) and len(text)):
        return BlockCost(0.0)

    def prepare(height: int, width: int) -> Callable[[], Any]:
        leaves = detached_leaves(_resize(visual, height)), detached_leaves(_resize(text, width))

        def score_block() -> None:
            scores = checked_scores(score, *leaves)
            if inputs := graph_leaves(scores):
                torch.autograd.grad(
                    scores, inputs, torch.ones_like(scores), retain_graph=True, allow_unused=True
                )

        return score_block

    with _preserve_state(score, visual), torch.set_grad_enabled(training):
        return measure_block_cost(prepare, *PROBE_SHAPE)


def measure_block_cost(
    prepare: Callable[[int, int], Callable[[], Any]], height: int, width: int
) -> BlockCost:
    """Measure the cost of a computation: ``prepare(height, width)`` returns that on a block of this
    size. Every tensor is counted from its creation until it is freed.
    """
    # Bytes after each step, of four blocks of two heights and two widths.
    blocks = []
    for rows, columns in product((height, 2 * height), (width, 2 * width)):
        computation = prepare(rows, columns)
        with _LiveBytes() as live_bytes:
            computation()
        blocks.append(live_bytes.after_each_step or [0])
    # The number of steps may depend on the items. Then only the largest block counts.
    if len(set(map(len, blocks))) > 1:
        return BlockCost(max(blocks[-1]) / (4 * height * width))
    # Their differences show the bytes that a step holds per row, per column and per pair. The
    # largest of each is the cost.
    pair = row = column = fixed = 0.0
    for small, wide, tall, large in zip(*blocks, strict=True):
        per_pair = (large - tall - wide + small) / (height * width)
        per_row = (tall - small) / height - per_pair * width
        per_column = (wide - small) / width - per_pair * height
        constant = small - per_pair * height * width - per_row * height - per_column * width
        pair = max(pair, per_pair)
        row = max(row, per_row)
        column = max(column, per_column)
        fixed = max(fixed, constant)
    return BlockCost(pair, row, column, fixed)


def graph_leaves(tensor: Tensor) -> list[Tensor]:
    """Collect the leaves of the autograd graph of a tensor."""
    visited = set()
    leaves = []
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            visited.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            stack += [next_node for next_node, _ in node.next_functions]
    return leaves


def _resize(items: Encoded, count: int) -> Encoded:
    """Return the given number of items, repeated if there are fewer."""
    return items[:count] if len(items) >= count else items[torch.arange(count) % len(items)]


def detached_leaves(items: Encoded) -> Encoded:
    """Detach items. With gradients enabled, they are leaves of a new graph."""
    return items.map(
        lambda part: part.detach().requires_grad_(
            part.is_floating_point() and torch.is_grad_enabled()
        )
    )


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were created since its start and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.after_each_step: list[int] = []
        self.storages: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first use: seconds, and 80 MB.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            part.untyped_storage()._cdata
            for part in tree_leaves((args, kwargs))
            if isinstance(part, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor):
                self._count(part.untyped_storage(), inputs)
        self.after_each_step.append(self.now)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in inputs or key in self.storages:
            return

        def release(_: Any) -> None:
            self.now -= size
            del self.storages[key]

        self.now += size
        self.storages[key] = weakref.ref(storage, release)


def fork_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random numbers of the CPU and of a device after a block."""
    if not has_random_numbers(device):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def has_random_numbers(device: torch.device) -> bool:
    """Return whether a device has a random number generator of its own."""
    # torch.cpu and a device of which torch knows only the name have none.
    return hasattr(getattr(torch, device.type, None), "get_rng_state")


@contextmanager
def _preserve_state(score: Score, items: Encoded) -> Iterator[None]:
    """Restore random numbers, buffers (of a batch norm) and the cast cache of autocast afterwards."""
    first = items.tensors[0]
    owner = getattr(score, "__self__", score)
    buffers = list(owner.buffers()) if isinstance(owner, nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    device = first.device.type
    mixed = torch.autocast(
        device,
        torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
    with fork_random_numbers(first.device), mixed:
        yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            # An equal value is not written: a write invalidates a graph that holds the buffer.
            if not torch.equal(buffer, value):
                buffer.copy_(value)
