"""Perceptual hashes of images, which recompressed and resized copies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

# Recompressed and resized copies differ in at most this many of 256 bits (measured). Some different
# images of one flat color do, too.
MAX_HAMMING_DISTANCE = 10
# Of 256 levels. A flat area stays flat in a recompressed copy.
_MIN_DIFFERENCE = 5
# A hash compares 16 x 16 pairs of neighbors.
_HASH_SIDE = 16


def dhash(image: Image) -> str:
    """Compute a perceptual hash of 256 bits in hexadecimal digits (dHash, N. Krawetz 2013)."""
    from PIL.Image import Resampling

    gray = np.asarray(
        image.convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Resampling.BILINEAR), dtype=np.int16
    )
    # Whether each pixel is darker than its right neighbor. Differs from the original: a neighbor
    # counts as brighter from a difference of 5 levels.
    return np.packbits(gray[:, 1:] >= gray[:, :-1] + _MIN_DIFFERENCE).tobytes().hex()


def hamming_distances(hashes: Sequence[str], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Count the bits in which pairs of perceptual hashes differ.

    Args:
        hashes: Hashes of one length, or empty texts for unknown ones.
        first: Index of the first hash of each pair, shape ``[P]``.
        second: Index of the second hash.

    Returns:
        Number of bits, shape ``[P]``. 256 if a hash is unknown.

    Example:
        >>> hamming_distances(["0f", "1e", ""], np.array([0, 0]), np.array([1, 2])).tolist()
        [2, 256]
    """
    # Whole words of 64 bits, whose bits are counted at once.
    num_digits = -(-max(map(len, hashes), default=0) // 16) * 16
    content = bytes.fromhex("".join(code.ljust(num_digits, "0") for code in hashes))
    words = np.frombuffer(content, np.uint64).reshape(len(hashes), num_digits // 16).T
    # Unknown hashes are compared, too, and their distance is replaced afterwards.
    is_known = np.array([bool(code) for code in hashes])
    distances = np.zeros(len(first), np.int64)
    for word in words:
        distances += np.bitwise_count(word[first] ^ word[second])
    return np.where(is_known[first] & is_known[second], distances, 256)
