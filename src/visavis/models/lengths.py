"""Texts of like length are scored together, so that a long one does not make all others as long as itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from visavis.types import Encoded, Parts

LIKE = 4 / 3
"""How many times as long as its shortest a group's longest text is at most."""
SHORT = 6
"""Texts up to this length count as equally long."""
FEWEST = 16
"""Fewer texts are scored as they come: of so few the cost of a block is measured, which has to be that of the longest text."""


def by_length(score: Callable[[Encoded, Encoded], Tensor], visual: Encoded, text: Encoded) -> Tensor:
    """``score(visual, text)``, the scores ``[V, T]``, of some texts after the other, each time no longer than the longest of them.

    text: all that has a mask has the same one.
    """
    mask = next(iter(tree_leaves(text.mask)))
    if mask is None or len(text) < FEWEST:
        return score(visual, text)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths, order = (mask * places).amax(1).clamp(min=1).sort()
    ends = lengths.tolist()
    blocks = [score(visual, shortened(text[order[some]], ends[some.stop - 1])) for some in alike(ends)]
    return torch.cat(blocks, 1)[:, order.argsort()]


def alike(lengths: Sequence[int]) -> list[slice]:
    """Groups of like lengths, of lengths in ascending order.

    >>> alike([3, 6, 8, 9, 11, 12, 70])
    [slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)]
    """
    cuts = [0]
    for place, length in enumerate(lengths):
        if length > LIKE * max(lengths[cuts[-1]], SHORT):
            cuts.append(place)
    return [slice(*ends) for ends in pairwise([*cuts, len(lengths)])]


def shortened(items: Encoded, length: int) -> Encoded:
    """The first positions of every part that has a mask."""

    def cut(parts: Parts) -> Parts:
        if isinstance(parts, Tensor):
            return parts[:, :length]
        masks = items.mask if isinstance(items.mask, dict) else {}
        return {name: part[:, :length] if name in masks else part for name, part in parts.items()}

    return Encoded(cut(items.vectors), None if items.mask is None else cut(items.mask), items.weights)
