"""The scores of all items of one side with all of the other, within the memory there is."""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.memory import Memory, block_shape, budget, declared_cost, score_in_blocks
from visavis.models.base import Matcher
from visavis.models.encoding import device_of
from visavis.probe import cost_of
from visavis.types import Encoded

PROBED = 8
"""Items of a side at which the cost of a score is measured."""


@torch.inference_mode()
def score_all(matcher: Matcher, visual: Encoded, text: Encoded, memory: Memory = None) -> Tensor:
    """``matcher.score`` of every visual item with every text ``[V, T]``, on the CPU, in blocks that stay within ``memory``.

    memory: bytes, a text such as "2GiB", or None for a share of what is free on the matcher's device. In one block wherever
    memory allows.
    """
    device = device_of(matcher)

    def score(visual: Encoded, text: Encoded) -> Tensor:
        return matcher.score(visual.to(device), text.to(device)).cpu()

    few = visual[:PROBED].to(device), text[:PROBED].to(device)
    cost = cost_of(matcher.score, *few, training=False, declared=declared_cost(matcher.score, *few))
    shape = block_shape(len(visual), len(text), cost, budget(memory, device), largest=(None, None))
    return score_in_blocks(score, visual, text, shape)
