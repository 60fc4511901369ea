"""Equal texts of different images, which can be positives of each other's images."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def text_keys(texts: Iterable[str]) -> Tensor:
    """Number the different texts. Texts are equal if they differ only in Unicode normalization
    (NFC), case, or white space.

    Args:
        texts: The texts.

    Returns:
        One number per text, shape ``[T]``.

    Example:
        >>> text_keys(["A dog.", "a  dog. ", "a dog"]).tolist()
        [0, 0, 1]
    """
    numbers: dict[str, int] = {}
    # Most tokenizers ignore case and white space, so that these texts have equal vectors.
    normalized = (
        re.sub(r"\s+", " ", unicodedata.normalize("NFC", text).casefold()).strip() for text in texts
    )
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in normalized])


def unseen_texts(texts: Sequence[str], seen: Sequence[str]) -> list[str]:
    """Select the texts that are equal to none of other texts, see `text_keys`.

    Args:
        texts: The texts.
        seen: The other texts.

    Returns:
        The selected texts, in order.

    Example:
        >>> unseen_texts(["A  dog", "a cat"], ["a dog"])
        ['a cat']
    """
    keys = text_keys([*seen, *texts]).tolist()
    known = set(keys[: len(seen)])
    return [text for text, key in zip(texts, keys[len(seen) :], strict=True) if key not in known]
