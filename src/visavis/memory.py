"""What a score costs in memory, and the sizes of blocks that follow from that and from one memory setting.

A score of V visual items with T texts may hold far more than V x T numbers: attention of 36 regions over 20 words holds hundreds
for each pair. Whoever scores says what a pair costs (``score_cost``), or a small probe block is measured; whoever makes blocks
asks for their shape here, so that no block size is a constant of a caller.

>>> cost = ScoreCost(scored=8.0, trained=24.0).block(training=False)
>>> block_shape(1000, 5000, cost, budget("2MB", torch.device("cpu")))
(50, 5000)
>>> blocks(3, 5, (2, 5))
[(slice(0, 2, None), slice(0, 5, None)), (slice(2, 3, None), slice(0, 5, None))]
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.errors import ShapeError, SpecError, VisavisError, shown
from visavis.types import Encoded

Items = Tensor | Encoded
Memory = int | str | None
"""A memory setting: bytes, a text such as "2GiB" or "500MB", or None for a share of what is free."""

LARGEST_TILE = (1024, 5120)
"""Rows and columns of scores beyond which a block gains no speed."""
LARGEST_BLOCK = 2**27
"""Bytes of a costly block beyond which it is slower: so much memory comes anew from the system for every block."""
FEWEST_ROWS = 32
"""Below so many rows, narrower blocks are faster than lower ones."""
RESERVE = 2**27
"""Bytes of a setting that are left to libraries and their buffers; at most a quarter of what goes beyond ``SMALL``."""
SMALL = 2**25
"""A setting that has nothing to spare."""
LARGE_TENSOR = 2**20
"""Bytes from which on a tensor gets pages of its own where memory is set."""
M_MMAP_THRESHOLD = -3  # malloc.h
SHARE = 0.25
"""Of the free memory, where nobody sets any."""
UNITS = {"": 1, "b": 1} | {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}
UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class BlockCost:
    """The bytes that a block of scores holds at most: ``fixed + visual V + text T + pair V T`` for V visual items and T texts.

    >>> BlockCost(pair=4.0, visual=100.0).of(10, 20)
    1800
    """

    pair: float
    visual: float = 0.0
    text: float = 0.0
    fixed: float = 0.0

    def of(self, num_visual: int, num_text: int) -> int:
        return int(self.fixed + self.visual * num_visual + self.text * num_text + self.pair * num_visual * num_text)

    def plus(self, pair: float) -> BlockCost:
        """With what the caller itself holds for each pair beside the score, in bytes."""
        return BlockCost(self.pair + pair, self.visual, self.text, self.fixed)

    @property
    def T(self) -> BlockCost:
        """For blocks whose rows are texts."""
        return BlockCost(self.pair, self.text, self.visual, self.fixed)


@dataclass(frozen=True)
class ScoreCost:
    """What a score says it costs: bytes for each pair while it is scored without a gradient, and while it is trained.

    scored: everything alive at once, the score itself included (4 for a product of vectors in float32). trained: with the graph
    of the forward pass, and what the backward pass adds.
    """

    scored: float
    trained: float

    def __post_init__(self) -> None:
        for name in ("scored", "trained"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise SpecError(f"ScoreCost got {name}={value!r}, expected the bytes of a pair, a number above 0.")

    def block(self, *, training: bool) -> BlockCost:
        return BlockCost(float(self.trained if training else self.scored))


def declared_cost(score: Callable[..., Tensor], visual: Items, text: Items) -> ScoreCost | None:
    """What the owner of a score says that it costs for such items; None where it says nothing.

    Asked is ``score_cost(visual, text) -> ScoreCost | None`` of the callable itself, or of the object that ``score`` is a method of.
    A class that overrides its score and not its ``score_cost`` has said nothing: what its parent said is of another score.
    """
    owner = getattr(score, "__self__", score)
    ask = getattr(owner, "score_cost", None)
    if ask is None:
        return None
    name = getattr(score, "__name__", "score") if owner is not score else "forward" if hasattr(owner, "forward") else "__call__"
    order = type(owner).__mro__
    says, scores = ([rank for rank, kind in enumerate(order) if word in vars(kind)] for word in ("score_cost", name))
    return None if says and scores and scores[0] < says[0] else ask(visual, text)


def parse_memory(memory: Memory) -> int | None:
    """A memory setting in bytes; None stays None. Raises SpecError for anything that is no size.

    >>> parse_memory("2GiB"), parse_memory("500 MB"), parse_memory(4096)
    (2147483648, 500000000, 4096)
    """
    if memory is None:
        return None
    text = str(memory) if isinstance(memory, int | str) and not isinstance(memory, bool) else ""
    read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(read[1]) * UNITS[read[2]]) if read and read[2] in UNITS else 0
    if size <= 0:
        raise SpecError(
            f"memory is {shown(memory)}, expected bytes such as 2000000000, a text such as '2GiB' or '500MB', or None for a share."
        )
    return size


def budget(memory: Memory, device: torch.device | str) -> int:
    """The bytes that tensors may take on a device.

    With a setting it is that, less a part for what is no tensor (``RESERVE``); on a CPU the C library is then told to return freed
    memory at once, as what it holds on to would come on top. Without one it is the largest power of two within a quarter of what
    is free now, so that a little more or less use of the machine changes no block.
    """
    size, device = parse_memory(memory), torch.device(device)
    if size is None:
        return 2 ** max(int(SHARE * free_bytes(device)).bit_length() - 1, 20)
    if device.type == "cpu":
        _return_freed_memory()
    return size - min(max(size - SMALL, 0) // 4, RESERVE)


@cache
def _return_freed_memory() -> None:
    """Large tensors get pages of their own, which go back when they die; from the heap, pages between others would stay.

    Only the GNU C library needs to be told, and only if the user's environment does not say otherwise.
    """
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR)


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device; on a CPU also within the limits of the container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    known = [free for free in (_available(), _left_in_container()) if free is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _left_in_container() -> int | None:
    """The limit of the control group less what is used, page cache aside."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used + int(counts.get("inactive_file", 0)), 0)


def in_words(size: float) -> str:
    """Bytes as a person reads them.

    >>> in_words(3 * 2**29), in_words(2000)
    ('1.5 GiB', '2.0 KiB')
    """
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(4) if size < 1024 ** (power + 1)), 4)
    return f"{size / 1024**power:.{min(power, 1)}f} {names[power]}"


def block_shape(
    rows: int, columns: int, cost: BlockCost, memory_bytes: int, *, largest: tuple[int | None, int | None] = LARGEST_TILE
) -> tuple[int, int]:
    """The shape of the largest blocks of a ``[rows, columns]`` score matrix that fit, at least 1 x 1.

    Rows are visual items; for blocks whose rows are texts, give ``cost.T``. largest: rows and columns that a block has at most,
    whatever the memory (None: no limit); by default those beyond which it gains no speed. Where memory is short, whole rows
    are kept and become fewer; then rows become narrower. Raises VisavisError where not even one pair fits.

    >>> block_shape(1000, 5000, BlockCost(4.0), 2**30), block_shape(1000, 5000, BlockCost(2e6), 2**30)
    ((1000, 5000), (32, 16))
    """
    height, width = (max(1, length if most is None else min(length, most)) for length, most in zip((rows, columns), largest, strict=True))
    if cost.of(height, width) <= memory_bytes:
        return height, width
    if cost.of(1, 1) > memory_bytes:
        raise VisavisError(
            f"scoring one pair takes {in_words(cost.of(1, 1))}, but blocks may take {in_words(memory_bytes)}: give a larger memory."
        )
    fewest = min(height, FEWEST_ROWS)
    fewer = _fits(memory_bytes - cost.fixed - cost.text * width, cost.visual + cost.pair * width)
    if fewer >= fewest:
        return fewer, width
    while fewest > 1 and _fits(memory_bytes - cost.fixed - cost.visual * fewest, cost.text + cost.pair * fewest) < 1:
        fewest //= 2
    return fewest, min(width, _fits(memory_bytes - cost.fixed - cost.visual * fewest, cost.text + cost.pair * fewest))


def _fits(room: float, each: float) -> int:
    return max(int(room // each), 0) if each > 0 else 2**62


def spans(length: int, most: int) -> list[slice]:
    """Consecutive items, at most so many at a time.

    >>> spans(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


def blocks(rows: int, columns: int, shape: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The blocks of a matrix, row after row: which rows, which columns."""
    return [(own, other) for own in spans(rows, shape[0]) for other in spans(columns, shape[1])]


def scores_of(score: Callable[[Any, Any], Tensor], visual: Items, text: Items) -> Tensor:
    """``score(visual, text)``. Raises ShapeError unless that is a tensor ``[V, T]``, and where items of two widths cannot be scored."""
    visual, text = (items if isinstance(items, Tensor) else items.together() for items in (visual, text))
    try:
        scores = score(visual, text)
    except RuntimeError as error:
        if _width(visual) == _width(text):
            raise
        raise ShapeError(
            f"score cannot take visual items of width {_width(visual)} with texts of width {_width(text)}: {error}."
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != (len(visual), len(text)):
        found = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ShapeError(f"score returned {found} for {len(visual)} images and {len(text)} texts.")
    return scores


def _width(items: Items) -> int | None:
    """The width of items that are one tensor."""
    vectors = items if isinstance(items, Tensor) else items.vectors
    return vectors.shape[-1] if isinstance(vectors, Tensor) and vectors.dim() else None


def score_in_blocks(score: Callable[[Any, Any], Tensor], visual: Items, text: Items, shape: tuple[int, int]) -> Tensor:
    """``score(visual, text)`` as one matrix ``[V, T]``, never scoring more than a block at once; without a gradient."""
    places = blocks(len(visual), len(text), shape)
    if len(places) <= 1:
        return scores_of(score, visual, text)
    scores: Tensor | None = None
    for rows, columns in places:
        block = scores_of(score, visual[rows], text[columns])
        scores = block.new_empty(len(visual), len(text)) if scores is None else scores
        scores[rows, columns] = block
    assert scores is not None
    return scores
