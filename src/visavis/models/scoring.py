"""A matcher's scores of items that are kept on the CPU, within the memory there is."""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.memory import BlockCost, Memory, block_shape, budget, spans
from visavis.models.base import Matcher
from visavis.models.encoding import device_of
from visavis.scoring import DeviceScore, TwoStageScore, block_cost, item_bytes, score_in_order
from visavis.types import Direction, Encoded

SHARES_OF_ITEMS = 3
"""Single pairs hold a copy of both items, and about twice as much again while they are scored."""


def score_from_cpu(matcher: Matcher) -> DeviceScore:
    """The score of a matcher, computed on its device, of items on the CPU; in two stages where it has them."""
    if not matcher.rerank:
        return DeviceScore(matcher.score, device_of(matcher))
    return TwoStageScore(matcher.score, device_of(matcher), matcher.first_stage, matcher.second_stage, matcher.rerank)


def score_all(matcher: Matcher, visual: Encoded, text: Encoded, memory: Memory = None, way: Direction = "t2i") -> Tensor:
    """``matcher.score`` of every visual item with every text ``[V, T]``, on the CPU, in blocks that stay within ``memory``.

    way: which side asks, where the matcher ranks in two stages: the best of a text's images are scored anew, or of an image's texts.
    memory: bytes, a text such as "2GiB", or None for a share of what is free on the matcher's device. In one block wherever
    memory allows.
    """
    scores = score_in_order(score_from_cpu(matcher), visual, text, way, memory)
    return scores if way == "i2t" else scores.T


@torch.no_grad()
def score_listed_pairs(
    matcher: Matcher, visual: Encoded, text: Encoded, visual_index: Tensor, text_index: Tensor, memory: Memory = None
) -> Tensor:
    """``matcher.score_pairs`` of the pairs (visual_index[p], text_index[p]): ``[P]``, on the CPU, so many at a time as ``memory`` allows.

    A pair is reckoned to cost a block of one by one, and ``SHARES_OF_ITEMS`` times its items.
    """
    device = device_of(matcher)
    cost = block_cost(DeviceScore(matcher.score, device), visual, text).of(1, 1) + (SHARES_OF_ITEMS - 1) * (
        item_bytes(visual) + item_bytes(text)
    )
    at_once = block_shape(1, len(visual_index), BlockCost(cost), budget(memory, device))[1]
    score_pairs = DeviceScore(matcher.score_pairs, device)
    blocks = [score_pairs(visual[visual_index[part]], text[text_index[part]]) for part in spans(len(visual_index), at_once)]
    return torch.cat(blocks) if blocks else torch.zeros(0)
