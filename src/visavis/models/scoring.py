"""A matcher's scores of items that are kept on the CPU, within the memory there is."""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.memory import BlockCost, Memory, block_shape, budget, spans
from visavis.models.base import Matcher
from visavis.models.encoding import device_of
from visavis.scoring import DeviceScore, block_cost, item_bytes, score_by_blocks
from visavis.types import Encoded

SHARES_OF_ITEMS = 3
"""Single pairs hold a copy of both items, and about twice as much again while they are scored."""


def score_from_cpu(matcher: Matcher) -> DeviceScore:
    """The score of a matcher, computed on its device, of items on the CPU."""
    return DeviceScore(matcher.score, device_of(matcher))


def score_all(matcher: Matcher, visual: Encoded, text: Encoded, memory: Memory = None) -> Tensor:
    """``matcher.score`` of every visual item with every text ``[V, T]``, on the CPU, in blocks that stay within ``memory``.

    memory: bytes, a text such as "2GiB", or None for a share of what is free on the matcher's device. In one block wherever
    memory allows.
    """
    return score_by_blocks(score_from_cpu(matcher), visual, text, memory)


@torch.no_grad()
def score_listed_pairs(
    matcher: Matcher, visual: Encoded, text: Encoded, visual_index: Tensor, text_index: Tensor, memory: Memory = None
) -> Tensor:
    """``matcher.score_pairs`` of the pairs (visual_index[p], text_index[p]): ``[P]``, on the CPU, so many at a time as ``memory`` allows.

    A pair is reckoned to cost a block of one by one, and ``SHARES_OF_ITEMS`` times its items.
    """
    device = device_of(matcher)
    cost = block_cost(score_from_cpu(matcher), visual, text).of(1, 1) + (SHARES_OF_ITEMS - 1) * (item_bytes(visual) + item_bytes(text))
    at_once = block_shape(1, len(visual_index), BlockCost(cost), budget(memory, device))[1]
    score_pairs = DeviceScore(matcher.score_pairs, device)
    blocks = [score_pairs(visual[visual_index[part]], text[text_index[part]]) for part in spans(len(visual_index), at_once)]
    return torch.cat(blocks) if blocks else torch.zeros(0)
