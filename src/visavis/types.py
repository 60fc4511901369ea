"""The words for axes, and the value that flows from data to models to scores.

Axes, the same everywhere: Q queries, C candidates, P positive pairs, V visual items, T texts, N items of
either kind, D width, R regions, W words, L a padded axis (R or W).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Parts = Tensor | dict[str, Tensor]

Direction = Literal["i2t", "t2i"]
DIRECTIONS: dict[str, str] = {"i2t": "image to text", "t2i": "text to image"}
"""What is the query and what is searched, by the first part of a metric's key."""


@dataclass(frozen=True)
class Encoded:
    """Items of one side, before or after a model: cached features, token ids, pixels or embeddings.

    vectors: ``[N, D]`` for one vector an item, ``[N, L, ...]`` for regions, words or pixels, or named parts
        (experts) in a dict. mask: ``[N, L]``, true where a position holds something (None: everywhere);
        a dict when vectors are. weights: ``[N, E]``, mixture weights of experts.

    >>> items = Encoded(torch.eye(3))
    >>> len(items), len(items[:2])
    (3, 2)
    """

    vectors: Parts
    mask: Parts | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        first = self.vectors if isinstance(self.vectors, Tensor) else next(iter(self.vectors.values()))
        return len(first)

    def __getitem__(self, rows: slice | Tensor) -> Encoded:
        return self.map(lambda part: part[rows])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the items, in the order of their fields."""
        return [part for part in tree_leaves((self.vectors, self.mask, self.weights)) if part is not None]

    def part(self, name: str) -> Encoded:
        """The vectors of one part alone; all items as they are where parts have no names."""
        return Encoded(self.vectors[name]) if isinstance(self.vectors, dict) else self

    def largest(self, number: int) -> Encoded:
        """So many items, or all, that take as much memory as any."""
        return self[:number]

    def together(self) -> Encoded:
        """The same items, each part as one tensor."""
        return self

    def pieces(self) -> Iterator[tuple[Tensor, Encoded]]:
        """The items as they are kept: their places among all, and what lies there."""
        yield torch.arange(len(self)), self

    def map(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """The same items with every tensor changed: ``encoded.map(lambda part: part.to(device))``."""

        def apply(parts: Parts) -> Parts:
            return change(parts) if isinstance(parts, Tensor) else {name: change(part) for name, part in parts.items()}

        return Encoded(
            apply(self.vectors),
            None if self.mask is None else apply(self.mask),
            None if self.weights is None else change(self.weights),
        )

    def to(self, *args: object, **kwargs: object) -> Encoded:
        """Moved to a device or dtype; masks and token ids keep their dtype when a dtype is given."""
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return self.map(lambda part: part if dtypes and not part.is_floating_point() else part.to(*args, **kwargs))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Attention:
    """Which regions of one image answered each word of one text.

    weights ``[W, R]``: the share of each region in what answered a word; a row's sum is 1, or 0 where nothing did. scores ``[W]``: of each
    word with what answered it: their cosine, or the part of the whole score that is the word's.
    """

    weights: Tensor
    scores: Tensor


def concatenate(blocks: Iterable[Encoded]) -> Encoded:
    """Blocks of items as one; ragged ``L`` axes are padded with zeros (and masked) to the longest.

    >>> a, b = (Encoded(torch.ones(1, n, 2), torch.ones(1, n, dtype=torch.bool)) for n in (1, 3))
    >>> concatenate([a, b]).mask.sum(-1).tolist()
    [1, 3]
    """
    blocks = list(blocks)

    def join(parts: list[Tensor]) -> Tensor:
        if parts[0].dim() == 1 or len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(parts)
        longest = max(part.shape[1] for part in parts)
        padded = [torch.cat([part, part.new_zeros(len(part), longest - part.shape[1], *part.shape[2:])], 1) for part in parts]
        return torch.cat(padded)

    def join_all(parts: list[Parts]) -> Parts:
        if isinstance(parts[0], Tensor):
            return join(parts)  # type: ignore[arg-type]
        return {name: join([part[name] for part in parts]) for name in parts[0]}  # type: ignore[index]

    first = blocks[0]
    return Encoded(
        join_all([block.vectors for block in blocks]),
        None if first.mask is None else join_all([block.mask for block in blocks]),  # type: ignore[misc]
        None if first.weights is None else join([block.weights for block in blocks]),  # type: ignore[misc]
    )
