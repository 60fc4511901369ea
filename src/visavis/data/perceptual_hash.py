"""Perceptual hash: a few bits of an image that its copies share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as Pillow

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

# Recompressed and resized copies differ in at most this many of 256 bits (measured). Some different images of one flat color do, too.
MAX_HAMMING_DISTANCE = 10
# Of 256 levels. A flat area stays flat in a recompressed copy.
_BRIGHTER = 5
# A hash compares 16 x 16 pairs of neighbors.
_SIDE = 16


def dhash(image: PILImage) -> str:
    """Compute a perceptual hash (dHash, N. Krawetz 2013).

    The bits are whether each of 16 x 16 pixels of a small gray copy is darker than its right neighbor. Differs from the original: a neighbor
    counts as brighter from a difference of 5 of 256 levels.

    Args:
        image: The image.

    Returns:
        256 bits in hexadecimal digits.
    """
    gray = np.asarray(image.convert("L").resize((_SIDE + 1, _SIDE), Pillow.Resampling.BILINEAR), dtype=np.int16)
    return np.packbits(gray[:, 1:] >= gray[:, :-1] + _BRIGHTER).tobytes().hex()


def hamming_distance(first: str, second: str) -> int:
    """Count the bits in which two perceptual hashes differ.

    Args:
        first: A hash, or an empty text for an unknown one.
        second: A hash, or an empty text for an unknown one.

    Returns:
        Number of bits. 256 if a hash is unknown.

    Example:
        >>> hamming_distance("0f", "1e"), hamming_distance("0f", "")
        (2, 256)
    """
    return (int(first, 16) ^ int(second, 16)).bit_count() if first and second else 256
