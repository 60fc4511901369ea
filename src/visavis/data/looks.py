"""A picture as a few bits that a copy of it shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as Pillow

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SAME_LOOK = 10
"""Recompressed and resized copies differ in at most so many of 256 bits; so do some pictures of little but one flat color."""
_BRIGHTER = 5
_SIDE = 16  # a perceptual hash compares 16 x 16 pairs of neighbors


def look(picture: Picture) -> str:
    """A perceptual hash (dHash, N. Krawetz 2013): for 16 x 16 places of a small gray copy whether the right neighbor is brighter, in hex.

    Differs from it in that a neighbor counts as brighter from 5 of 256 levels on: what is flat stays so in a recompressed copy.
    """
    gray = np.asarray(picture.convert("L").resize((_SIDE + 1, _SIDE), Pillow.Resampling.BILINEAR), dtype=np.int16)
    return np.packbits(gray[:, 1:] >= gray[:, :-1] + _BRIGHTER).tobytes().hex()


def bits_apart(first: str, second: str) -> int:
    """In how many bits two perceptual hashes differ; all of them where one is not known.

    >>> bits_apart("0f", "1e"), bits_apart("0f", "")
    (2, 256)
    """
    return (int(first, 16) ^ int(second, 16)).bit_count() if first and second else 256
