"""Encoders larger than memory: items encoded in chunks, of which one at a time holds its activations.

>>> import torch
>>> tower = torch.nn.Linear(4, 2)
>>> chunks = torch.ones(6, 4).split(2)
>>> torch.equal(in_chunks(tower, chunks), tower(torch.ones(6, 4)))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from visavis.engine.items import Items
from visavis.errors import ShapeError
from visavis.types import Encoded, concatenate


def in_chunks(encode: Callable[[Any], Items], chunks: Iterable[Any]) -> Items:
    """The items of all chunks, as if encoded at once; what lies between is computed again in the backward pass, chunk by chunk.

    Gradients are exact, dropout included: a chunk meets the same random numbers again. Each chunk is what ``encode`` takes.
    Statistics that an encoder keeps of its batches (BatchNorm) are those of chunks, and are updated twice. Raises ShapeError.
    """
    encoded = [checkpoint(encode, chunk, use_reentrant=False) for chunk in chunks]
    if not encoded:
        raise ShapeError("there is no chunk to encode: give one at least, it may hold no items.")
    return concatenate(encoded) if isinstance(encoded[0], Encoded) else torch.cat(encoded)
