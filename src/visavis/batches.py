"""Many encoded items of unequal length, kept as the batches in which they were encoded, each as long as its own longest item.

Of the captions of Flickr30K's validation and test splits, 12 words on average and 70 at most, five sixths would be padding if all were as
long as the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from visavis.types import Encoded, Parts, concatenate


def collected(blocks: Sequence[Encoded]) -> Encoded:
    """Blocks of items as one: ``concatenate(blocks)``, or ``EncodedBatches`` where these are of unequal length and would have to be padded."""
    shapes = {tuple(part.shape[1:] for part in block.tensors) for block in blocks}
    return concatenate(blocks) if len(shapes) == 1 else EncodedBatches.of(blocks)


class EncodedBatches(Encoded):
    """Items in several blocks, of which only those that are asked for become one, padded to the longest of them.

    Some of the items, ``items[rows]``, are of this kind again and copy nothing; ``vectors``, ``mask`` and ``weights`` are made anew each time
    that they are asked for, all at once by ``together``.
    blocks: each padded for itself. block, row ``[N]``: where each item lies.

    >>> short, long = (Encoded(torch.ones(2, n, 3), torch.ones(2, n, dtype=torch.bool)) for n in (4, 70))
    >>> items = collected([short, long])
    >>> items[:2].vectors.shape, items[1:].vectors.shape
    (torch.Size([2, 4, 3]), torch.Size([3, 70, 3]))
    """

    blocks: Sequence[Encoded]
    block: Tensor
    row: Tensor

    def __init__(self, blocks: Sequence[Encoded], block: Tensor, row: Tensor):
        vars(self).update(blocks=blocks, block=block, row=row)  # those of a frozen class cannot be assigned to

    @classmethod
    def of(cls, blocks: Sequence[Encoded]) -> EncodedBatches:
        """All items of some blocks, one block after the other."""
        lengths = torch.tensor([len(block) for block in blocks])
        number = torch.arange(len(blocks)).repeat_interleave(lengths)
        return cls(blocks, number, torch.cat([torch.arange(length) for length in lengths.tolist()]))

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, rows: slice | Tensor) -> EncodedBatches:
        rows = rows if isinstance(rows, slice) else torch.as_tensor(rows).cpu()
        return EncodedBatches(self.blocks, self.block[rows], self.row[rows])

    @property
    def vectors(self) -> Parts:
        return self._together(lambda block: block.vectors)

    @property
    def mask(self) -> Parts | None:
        return self._together(lambda block: block.mask)

    @property
    def weights(self) -> Tensor | None:
        return self._together(lambda block: block.weights)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        return f"EncodedBatches of {len(self):,} items"

    def together(self) -> Encoded:
        return Encoded(*self._together(lambda block: (block.vectors, block.mask, block.weights)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        return self.together().map(change)

    def part(self, name: str) -> Encoded:
        if isinstance(self.blocks[0].vectors, Tensor):
            return self
        return Encoded(self._together(lambda block: block.part(name).vectors))

    def largest(self, number: int) -> Encoded:
        sizes = torch.tensor([sum(part[:1].numel() for part in block.tensors) for block in self.blocks])
        return self[sizes[self.block].argsort(descending=True, stable=True)[:number]]

    def lies_as(self, other: EncodedBatches) -> bool:
        """Whether every item lies in the same place of the same block as its counterpart."""
        same = torch.equal(self.block, other.block) and torch.equal(self.row, other.row)
        return same and list(map(len, self.blocks)) == list(map(len, other.blocks))

    def pieces(self) -> Iterator[tuple[Tensor, Encoded]]:
        for places, block, rows in self._found():
            yield places, block[rows]

    def _found(self) -> Iterator[tuple[Tensor, Encoded, Tensor]]:
        """Of every block that holds some of the items: the places of these among all, the block, and their rows in it."""
        order = self.block.argsort(stable=True)
        used, counts = self.block[order].unique_consecutive(return_counts=True)
        for number, places in zip(used.tolist(), order.split(counts.tolist()), strict=True):
            yield places, self.blocks[number], self.row[places]

    def _together(self, field: Callable[[Encoded], Any]) -> Any:
        """A field of all items, each of its tensors as one, with zeros after items that are shorter than others."""
        found = list(self._found()) or [(self.block, self.blocks[0], self.row)]

        def placed(*parts: Any) -> Any:
            if parts[0] is None:
                return None
            whole = parts[0].new_zeros(len(self), *(max(part.shape[axis] for part in parts) for axis in range(1, parts[0].dim())))
            for part, (places, _, rows) in zip(parts, found, strict=True):
                at = (places, slice(part.shape[1])) if part.dim() > 1 else places
                whole[at] = part[rows]
            return whole

        return tree_map(placed, *(field(block) for _, block, _ in found))
