"""Many items through a matcher, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from visavis.batches import collected
from visavis.data.description import Side
from visavis.models.base import Matcher, evaluating
from visavis.types import Encoded

OnBatch = Callable[[int, int], None]
"""Called after each batch with items done and items in all."""


@torch.inference_mode()
def encode(
    matcher: Matcher,
    side: Side,
    read: Callable[[np.ndarray], Encoded],
    batches: Sequence[np.ndarray],
    *,
    keep_on: torch.device | str = "cpu",
    on_batch: OnBatch | None = None,
) -> Encoded:
    """Items of one side, encoded in evaluation mode on the matcher's device, in ascending order of their indices.

    read: gives the items at some indices, as ``Source.read`` does. batches: the indices, each once, in the order of computing;
    items of like length in one batch need little padding. keep_on: where the result lies.
    """
    device = device_of(matcher)
    through = matcher.encode_visual if side == "visual" else matcher.encode_text
    total, encoded = sum(map(len, batches)), list[Encoded]()
    with evaluating(matcher):
        for batch in batches:
            encoded.append(through(read(batch).to(device)).to(keep_on))
            if on_batch is not None:
                on_batch(sum(map(len, encoded)), total)
    items, index = collected(encoded), np.concatenate(batches)
    in_order = bool((index[1:] >= index[:-1]).all())
    return items if in_order else items[torch.from_numpy(np.argsort(index, kind="stable")).to(keep_on)]


def batches_of_at_most(count: int, size: int) -> list[np.ndarray]:
    """The indices 0 to count - 1 in order, at most ``size`` of them in each batch.

    >>> [batch.tolist() for batch in batches_of_at_most(5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def batches_of_about(index: np.ndarray, size: int) -> list[np.ndarray]:
    """Indices in the given order, in batches of nearly equal length, ``size`` or a little more.

    >>> [batch.tolist() for batch in batches_of_about(np.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    return np.array_split(index, max(1, len(index) // size))


def batches_by_length(texts: Sequence[str], size: int) -> list[np.ndarray]:
    """Texts of like length in one batch, the shortest first, in batches of ``size`` or a little more.

    >>> [batch.tolist() for batch in batches_by_length(["a red dog", "a", "a dog"], 1)]
    [[1], [2], [0]]
    """
    return batches_of_about(np.argsort([len(text) for text in texts], kind="stable"), size)


def device_of(matcher: Matcher) -> torch.device:
    """Where a matcher's parameters lie."""
    return next(matcher.parameters()).device
