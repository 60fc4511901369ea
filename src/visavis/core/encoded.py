"""Encoded items: the value that flows from data to models to scores.

Axes have the same name everywhere: Q queries, C candidates, P positive pairs, V visual items, T
texts, N items of either kind, D dimensions, R regions, W words, L a padded axis (R or W).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from visavis.core.ragged import RaggedRows, offsets_from_counts

Parts: TypeAlias = Tensor | dict[str, Tensor]
"""One tensor, or named tensors (one per expert)."""

Modality = Literal["visual", "text"]
"""Side of an item: images and clips, or texts."""
Granularity = Literal["pooled", "regions", "words", "frames"]
"""Vectors of an item: one ``[N, D]``, or several with a mask ``[N, n, D]``."""
Direction = Literal["i2t", "t2i"]
"""Which side holds the queries: images ("i2t") or texts ("t2i")."""
DIRECTIONS: dict[str, str] = {"i2t": "image to text", "t2i": "text to image"}
"""Description of each direction, by the prefix of a metric's key."""
MIN_EXACT_NORM = 1e-12
"""Norm from which the squares of a vector lose nothing to underflow."""
ITEMS_PER_BLOCK = 512
"""Items of different lengths that are joined at once by code that reads all of them."""


@dataclass(frozen=True)
class Encoded:
    """Items of one side, before or after a model: cached features, token ids, pixels or embeddings.

    Attributes:
        vectors: ``[N, D]`` for one vector per item, ``[N, L, ...]`` for regions, words or pixels,
            or named parts (experts).
        mask: ``[N, L]``, true at valid positions. None: everywhere. A dict if ``vectors`` is one.
        weights: Mixture weights of experts, ``[N, E]``.

    Example:
        >>> items = Encoded(torch.eye(3))
        >>> len(items), len(items[:2])
        (3, 2)
    """

    vectors: Parts
    mask: Parts | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return self.map(lambda part: part[rows])  # type: ignore[return-value]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the items, in the order of the fields."""
        # Most items are one tensor, which needs no traversal.
        if isinstance(self.vectors, Tensor) and self.mask is None and self.weights is None:
            return [self.vectors]
        return [
            part
            for part in tree_leaves((self.vectors, self.mask, self.weights))
            if part is not None
        ]

    @property
    def float_tensors(self) -> list[Tensor]:
        """The tensors that can have a gradient."""
        return [part for part in self.tensors if part.is_floating_point()]

    def named_part(self, name: str) -> Encoded:
        """Select one named part.

        Args:
            name: Name of the part.

        Returns:
            The vectors of this part. The items themselves if their parts have no names.
        """
        return Encoded(self.vectors[name]) if isinstance(self.vectors, dict) else self

    def largest_items(self, count: int) -> Encoded:
        """Return the items that take the most memory.

        Args:
            count: Maximum number of items.

        Returns:
            At most ``count`` items.
        """
        return self[:count]

    def score_input(self) -> Encoded | Tensor:
        """Return what a score function receives.

        Returns:
            The same items with each part as one tensor, or the tensor that the items were given as.
        """
        return self

    def iter_blocks(self) -> Iterator[tuple[Tensor, Encoded]]:
        """Yield the blocks in which the items are stored.

        Yields:
            Positions of the items of a block among all items, ``[n]``, and these items.
        """
        yield torch.arange(len(self)), self

    def map(self, function: Callable[[Tensor], Tensor]) -> Encoded:
        """Apply a function to every tensor.

        Args:
            function: Maps a tensor to a tensor.

        Returns:
            The new items.
        """
        if isinstance(self.vectors, Tensor) and self.mask is None and self.weights is None:
            return Encoded(function(self.vectors))
        parts = (self.vectors, self.mask, self.weights)
        return Encoded(*tree_map(lambda part: None if part is None else function(part), parts))

    def pin_memory(self) -> Encoded:
        """Copy the items to pinned memory, as ``DataLoader(pin_memory=True)`` does.

        Returns:
            The copy.
        """
        return self.map(lambda part: part.pin_memory())

    def to(self, *args: object, **kwargs: object) -> Encoded:
        """Move the items to a device or dtype. Masks and token ids keep their dtype.

        Args:
            *args: As in ``Tensor.to``.
            **kwargs: As in ``Tensor.to``.

        Returns:
            The moved items.
        """
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return self.map(
            lambda part: (
                part if dtypes and not part.is_floating_point() else part.to(*args, **kwargs)  # type: ignore[call-overload]
            )
        )


class Vectors(Encoded):
    """Items that were given as one tensor. A score function receives the tensor.

    Args:
        vectors: The tensor, ``[N, ...]``.
    """

    vectors: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor."""
        return [self.vectors]

    def map(self, function: Callable[[Tensor], Tensor]) -> Vectors:
        """Apply a function to the tensor.

        Args:
            function: Maps a tensor to a tensor.

        Returns:
            The new items.
        """
        return Vectors(function(self.vectors))

    def score_input(self) -> Tensor:
        """Return the tensor."""
        return self.vectors


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of the words of one text over the regions of one image.

    Attributes:
        weights: Share of each region in the attended vector of a word, ``[W, R]``. A row sums to 1,
            or to 0 without attention.
        scores: Score of each word, ``[W]``: the cosine with its attended vector, or the word's part
            of the whole score.
    """

    weights: Tensor
    scores: Tensor


def seconds_part(name: str) -> str:
    """Name the part that holds the times of an expert's features. No expert can have this name."""
    return f"{name}:seconds"


Items: TypeAlias = Tensor | Encoded
"""Items of one side as a caller gives them: one tensor of vectors, or encoded items."""


def as_encoded(items: Items) -> Encoded:
    """Wrap a tensor, so that all further code reads one type of items."""
    return Vectors(items) if isinstance(items, Tensor) else items


def concatenate(blocks: Iterable[Encoded]) -> Encoded:
    """Join blocks of items. Shorter ``L`` axes are padded with zeros to the longest.

    Args:
        blocks: Blocks with the same parts.

    Returns:
        All items as one block.

    Example:
        >>> a, b = (Encoded(torch.ones(1, n, 2), torch.ones(1, n, dtype=torch.bool)) for n in (1, 3))
        >>> concatenate([a, b]).mask.sum(-1).tolist()
        [1, 3]
    """
    blocks = list(blocks)
    # A tensor has no padding: its other axes must be equal.
    tensors = [block.vectors for block in blocks if isinstance(block, Vectors)]
    if len(tensors) == len(blocks):
        return Vectors(torch.cat(tensors))

    def join(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        if parts[0].dim() == 1 or len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(parts)
        longest = max(part.shape[1] for part in parts)
        return torch.cat(
            [
                torch.cat(
                    [part, part.new_zeros(len(part), longest - part.shape[1], *part.shape[2:])], 1
                )
                for part in parts
            ]
        )

    return Encoded(
        *tree_map(join, *((block.vectors, block.mask, block.weights) for block in blocks))
    )


def collect_batches(blocks: Sequence[Encoded]) -> Encoded:
    """Collect encoded batches without padding all of them to the longest."""
    shapes = {tuple(part.shape[1:] for part in block.tensors) for block in blocks}
    return concatenate(blocks) if len(shapes) == 1 else RaggedItems.from_blocks(blocks)


def append_items(first: Encoded, second: Encoded) -> Encoded:
    """Append encoded items, without padding them to the longest."""
    if not isinstance(first, RaggedItems) and not isinstance(second, RaggedItems):
        return collect_batches([first, second])
    first, second = (
        items if isinstance(items, RaggedItems) else RaggedItems.from_blocks([items])
        for items in (first, second)
    )
    num_stored = len(tree_leaves(first.stored)[0])
    return RaggedItems(
        tree_map(_join_stored, first.stored, second.stored),
        torch.cat([first.index, second.index + num_stored]),
    )


def _join_stored(*parts: Any) -> Any:
    """Join the same part of several blocks, as ragged rows if its length differs."""
    if parts[0] is None:
        return None
    is_ragged = any(isinstance(part, RaggedRows) for part in parts)
    if not is_ragged and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    ragged = [
        part
        if isinstance(part, RaggedRows)
        else RaggedRows(part.flatten(0, 1), np.arange(len(part) + 1) * part.shape[1])
        for part in parts
    ]
    counts = np.concatenate([part.counts for part in ragged])
    return RaggedRows(torch.cat([part.rows for part in ragged]), offsets_from_counts(counts))


class RaggedItems(Encoded):
    """Items of batches that were padded to different lengths. Only selected items are joined.

    The captions of Flickr30K's validation and test splits have 12 words on average and up to 70.
    Padded to the longest, five sixths would be padding. A selection ``items[rows]`` copies nothing.
    ``vectors``, ``mask`` and ``weights`` are joined at each access, ``score_input()`` joins all of
    them at once.

    An item keeps the padding of its batch, because its mask may be false at any position (some
    models have their padding first), and a score of other lengths would be rounded differently.

    Args:
        stored: Vectors, mask and weights of all stored items. A part that has several lengths is
            ``RaggedRows``.
        index: Number of each item among the stored ones, ``[N]``.

    Example:
        >>> short, long = (Encoded(torch.ones(2, n, 3), torch.ones(2, n, dtype=torch.bool)) for n in (4, 70))
        >>> items = collect_batches([short, long])
        >>> items[:2].vectors.shape, items[1:].vectors.shape
        (torch.Size([2, 4, 3]), torch.Size([3, 70, 3]))
    """

    stored: tuple[Any, Any, Any]
    index: Tensor

    def __init__(self, stored: tuple[Any, Any, Any], index: Tensor):
        # The base class is frozen, so that its fields cannot be assigned.
        vars(self).update(stored=stored, index=index)

    @classmethod
    def from_blocks(cls, blocks: Sequence[Encoded]) -> RaggedItems:
        """Collect all items of some blocks, in their order."""
        stored = ((block.vectors, block.mask, block.weights) for block in blocks)
        return cls(tree_map(_join_stored, *stored), torch.arange(sum(map(len, blocks))))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | Tensor) -> RaggedItems:
        rows = rows if isinstance(rows, slice) else torch.as_tensor(rows).cpu()
        return RaggedItems(self.stored, self.index[rows])

    @property
    def vectors(self) -> Parts:
        """Vectors of all items, padded to the longest of them."""
        return self._select(self.stored[0])

    @property
    def mask(self) -> Parts | None:
        """Mask of all items."""
        return self._select(self.stored[1])

    @property
    def weights(self) -> Tensor | None:
        """Mixture weights of all items."""
        return self._select(self.stored[2])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the joined items, in the order of the fields."""
        return self.score_input().tensors

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"RaggedItems of {len(self):,} items"

    def score_input(self) -> Encoded:
        """Return the same items with each part as one tensor."""
        return Encoded(*self._select(self.stored))

    def map(self, function: Callable[[Tensor], Tensor]) -> Encoded:
        """Apply a function to every tensor of the joined items."""
        return self.score_input().map(function)

    def named_part(self, name: str) -> Encoded:
        """Select one named part."""
        vectors = self.stored[0]
        return Encoded(self._select(vectors[name])) if isinstance(vectors, dict) else self

    def largest_items(self, count: int) -> Encoded:
        """Return the items with the largest padded parts."""
        sizes = torch.zeros(len(self), dtype=torch.long)
        for part in self._ragged_parts():
            sizes += torch.from_numpy(part.counts)[self.index] * part.rows[:1].numel()
        return self[sizes.argsort(descending=True, stable=True)[:count]]

    def iter_blocks(self) -> Iterator[tuple[Tensor, Encoded]]:
        """Yield items with equal padded lengths, at most ``ITEMS_PER_BLOCK`` at once."""
        lengths = [torch.from_numpy(part.counts)[self.index] for part in self._ragged_parts()]
        # Lengths of all parts of each item, [N, 1 + parts], with a column for items without them.
        _, group = torch.stack([torch.zeros_like(self.index), *lengths], 1).unique(
            dim=0, return_inverse=True
        )
        for positions in group.argsort(stable=True).split(group.bincount().tolist()):
            for chunk in positions.split(ITEMS_PER_BLOCK):
                yield chunk, self[chunk].score_input()

    def _ragged_parts(self) -> list[RaggedRows[Tensor]]:
        return [part for part in tree_leaves(self.stored) if isinstance(part, RaggedRows)]

    def _select(self, stored: Any) -> Any:
        """Select the items from a stored part, or from each part of a tree."""
        items = self.index.numpy()

        def select(part: Any) -> Any:
            if not isinstance(part, RaggedRows):
                return None if part is None else part[self.index]
            # No items have the length of one, because a maximum over no words is an error.
            min_length = 0 if len(items) else int(part.counts[:1].max(initial=0))
            return part.padded(items, min_length=min_length)[0]

        return tree_map(select, stored)


def unit_rows(rows: Tensor, dim: int = -1) -> Tensor:
    """Divide vectors by their length, at any scale that the dtype holds. A zero vector stays zero,
    and its gradient is 0.

    Args:
        rows: Vectors, shape ``[..., D]``.
        dim: Axis of the vectors, if it is not the last.

    Returns:
        Vectors of length 1, of the same shape.

    Example:
        >>> unit_rows(torch.tensor([[3e30, 4e30], [0, 0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    rows, norms, _ = scaled_norms(rows, dim)
    return rows / norms


def scaled_norms(rows: Tensor, dim: int = -1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the norms of vectors, ``[..., 1]``, inf for a zero vector. Vectors whose squares
    overflow or underflow are scaled first, by the returned factors (None for 1).
    """
    norms = rows.norm(dim=dim, keepdim=True)
    exact = (norms >= MIN_EXACT_NORM) & (norms < torch.inf)
    # Only on the CPU, because the condition would wait for other devices.
    if rows.device.type == "cpu" and not torch.compiler.is_compiling() and exact.all():
        return rows, norms, None
    tiny = torch.finfo(rows.dtype).tiny
    sums = rows.detach().norm(1, dim=dim, keepdim=True).clamp(tiny, 1 / tiny)
    factors = torch.where(exact, 1.0, 1 / sums)
    rows = rows * factors
    norms = rows.norm(dim=dim, keepdim=True)
    return rows, norms.masked_fill(norms == 0, torch.inf), factors


def on_float64_device(values: Tensor) -> Tensor:
    """Move values to the CPU if their device does not have float64, as Apple GPUs."""
    return values.cpu() if values.device.type == "mps" else values


def to_float64(values: Tensor) -> Tensor:
    """Convert values to float64, on the CPU if their device does not have it."""
    return on_float64_device(values).double()
