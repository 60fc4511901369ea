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
import torch

from visavis.core.encoded import Encoded
from visavis.data.sequences import LazySequence, read_items
from visavis.data.words import tokenize

if TYPE_CHECKING:
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
        """Collect the frequent words of captions.

        Args:
            captions: The captions.
            min_count: Smallest number of occurrences (VSE++ family: 4).

        Returns:
            The words in alphabetical order.
        """
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
        """Add the words of another vocabulary that are not known, after all others.

        Args:
            other: The other vocabulary.

        Returns:
            The words, in which the known ones keep their token ids.
        """
        return Vocabulary((*self.words, *(word for word in other.words if word not in self._id_of)))

    @cached_property
    def _id_of(self) -> dict[str, int]:
        # Vocabularies of earlier versions may have words in other forms.
        return {
            unicodedata.normalize("NFC", word): token_id for token_id, word in enumerate(self.words)
        }

    def unknown_words(self, caption: str) -> list[str]:
        """Return the unknown words of a caption, in order.

        Args:
            caption: The caption.

        Returns:
            The unknown words.
        """
        return [word for word in tokenize(caption) if word not in self._id_of]

    def knows(self, caption: str) -> bool:
        """Check whether a caption has a known word.

        Args:
            caption: The caption.

        Returns:
            Whether it has one.
        """
        return any(word in self._id_of for word in tokenize(caption))

    def token_ids(self, caption: str) -> list[int]:
        """Convert a caption to token ids between start and end.

        Args:
            caption: The caption.

        Returns:
            The token ids.
        """
        unknown = self._id_of[UNKNOWN]
        return [
            self._id_of[START],
            *(self._id_of.get(word, unknown) for word in tokenize(caption)),
            self._id_of[END],
        ]

    def encode(self, captions: Sequence[str]) -> Encoded:
        """Convert captions to padded token ids.

        Args:
            captions: The captions.

        Returns:
            Token ids ``[N, L]``, padded with 0, and their mask.
        """
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
    """Pad the token ids of captions to the length of the longest caption.

    Args:
        sequences: Token ids of each caption.

    Returns:
        A LongTensor ``[N, L]``, padded with 0, and its mask.
    """
    lengths = torch.tensor([len(token_ids) for token_ids in sequences])
    # One assignment through the mask is faster than padding each caption.
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([token_id for token_ids in sequences for token_id in token_ids])
    return Encoded(tokens, mask)


class TokenizedCaptions:
    """Captions as token ids of a vocabulary, tokenized once, or when they are read if they are
    lazy.

    Args:
        captions: The captions.
        vocabulary: The vocabulary.
    """

    def __init__(self, captions: Sequence[str], vocabulary: Vocabulary):
        self.captions = captions
        self.vocabulary = vocabulary
        self.token_ids = (
            None
            if isinstance(captions, LazySequence)
            else [vocabulary.token_ids(caption) for caption in captions]
        )

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read items, as ``ItemSource.read``.

        Args:
            index: Indices of the items.
            seeds: Not used.

        Returns:
            Padded token ids in the given order.
        """
        if self.token_ids is None:
            return self.vocabulary.encode(read_items(self.captions, index))
        return pad_token_ids([self.token_ids[i] for i in index])
