"""Vocabulary of a recurrent text encoder.

Example:
    >>> vocabulary = Vocabulary.from_captions(["a dog", "a cat"], min_count=1)
    >>> vocabulary.encode(["a dog runs"]).vectors.tolist()
    [[1, 4, 6, 3, 2]]
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from visavis.data.words import tokenize

# A text query needs no torch, whose import takes longer than a search.
if TYPE_CHECKING:
    from visavis.core.encoded import Encoded
    from visavis.data.columns import TextColumn

PAD = "<pad>"
START = "<start>"
END = "<end>"
UNKNOWN = "<unk>"
# Captions whose words are in memory at once.
_CAPTIONS_PER_COUNT = 2**17

MULTILINGUAL_ADVICE = (
    "A vocabulary reads scripts without spaces by characters. "
    "A multilingual encoder knows their words: set text.encoder, for example to "
    "bert-base-multilingual-cased"
)


@dataclass(frozen=True)
class Vocabulary:
    """The known words in a fixed order.

    Attributes:
        words: The words. The first four are padding, start, end and unknown.
    """

    words: tuple[str, ...]

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 4) -> Vocabulary:
        """Collect the words that occur ``min_count`` times or more (VSE++ family: 4), sorted."""
        # A search encodes words, and needs no table.
        from visavis.data.columns import TextColumn

        counts = (
            _count_words_of_column(captions)
            if isinstance(captions, TextColumn)
            else _count_words(captions)
        )
        return cls(
            (
                PAD,
                START,
                END,
                UNKNOWN,
                *sorted(word for word, count in counts.items() if count >= min_count),
            )
        )

    def __len__(self) -> int:
        return len(self.words)

    def extended_by(self, other: Vocabulary) -> Vocabulary:
        """Add the unknown words of another vocabulary at the end, so that no token id changes."""
        return Vocabulary((*self.words, *(word for word in other.words if word not in self._id_of)))

    @cached_property
    def _id_of(self) -> dict[str, int]:
        # Vocabularies of earlier versions may have words in other forms.
        return {
            unicodedata.normalize("NFC", word): token_id for token_id, word in enumerate(self.words)
        }

    def unknown_words(self, caption: str) -> list[str]:
        """Return the unknown words of a caption, in order."""
        return [word for word in tokenize(caption) if word not in self._id_of]

    def knows(self, caption: str) -> bool:
        """Check whether a caption has a known word."""
        return any(word in self._id_of for word in tokenize(caption))

    def token_ids(self, caption: str) -> list[int]:
        """Convert a caption to token ids between start and end."""
        unknown = self._id_of[UNKNOWN]
        return [
            self._id_of[START],
            *(self._id_of.get(word, unknown) for word in tokenize(caption)),
            self._id_of[END],
        ]

    def encode(self, captions: Sequence[str]) -> Encoded:
        """Convert captions to token ids ``[N, L]``, padded with 0, and their mask."""
        return pad_token_ids([self.token_ids(caption) for caption in captions])


def _count_words(captions: Iterable[str]) -> Counter[str]:
    return Counter(word for caption in captions for word in tokenize(caption))


def _count_words_of_column(captions: TextColumn) -> Counter[str]:
    """Count the words of ``tokenize`` in a memory-mapped column, without a Python object per
    caption.
    """
    from visavis.data.columns import import_pyarrow

    compute = import_pyarrow().compute
    counts: Counter[str] = Counter()
    for block in captions.blocks():
        for start in range(0, len(block), _CAPTIONS_PER_COUNT):
            part = block.slice(start, _CAPTIONS_PER_COUNT)
            is_ascii = compute.string_is_ascii(part)
            counts.update(_count_words(part.filter(compute.invert(is_ascii)).to_pylist()))
            texts = compute.replace_substring_regex(
                compute.ascii_lower(part.filter(is_ascii)), f"[{re.escape(string.punctuation)}]", ""
            )
            # Python also splits at these four separators.
            texts = compute.replace_substring_regex(texts, "[\x1c-\x1f]", " ")
            words = compute.list_flatten(compute.ascii_split_whitespace(texts)).value_counts()
            counts.update(
                dict(zip(words.field(0).to_pylist(), words.field(1).to_pylist(), strict=True))
            )
    # Leading and trailing spaces yield empty words in Arrow, and none in Python.
    del counts[""]
    return counts


def pad_token_ids(sequences: Sequence[Sequence[int]]) -> Encoded:
    """Pad the token ids of captions with 0: int64 ``[N, L]``, and their mask."""
    import torch

    from visavis.core.encoded import Encoded

    token_ids, mask = pad_rows(sequences)
    return Encoded(torch.from_numpy(token_ids), torch.from_numpy(mask))


def pad_rows(sequences: Sequence[Sequence[int]], padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pad token ids to int64 ``[N, L]``, and return their mask as well."""
    lengths = np.array([len(token_ids) for token_ids in sequences])
    # One assignment through the mask is faster than padding each caption.
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.full(mask.shape, padding, np.int64)
    tokens[mask] = [token_id for token_ids in sequences for token_id in token_ids]
    return tokens, mask
