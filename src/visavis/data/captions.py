"""Words of captions: how a caption is tokenized, and the vocabulary that a recurrent text tower learns.

>>> tokenize("Two dogs, on a beach!")
['two', 'dogs', 'on', 'a', 'beach']
>>> vocabulary = Vocabulary.of(["a dog", "a cat"], min_count=1)
>>> vocabulary.encode(["a dog runs"]).vectors.tolist()
[[1, 4, 6, 3, 2]]
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from visavis.types import Encoded

PAD, START, END, UNKNOWN = "<pad>", "<start>", "<end>", "<unk>"
_DELETE = str.maketrans("", "", string.punctuation)


def tokenize(caption: str) -> list[str]:
    """The words of a caption: lower case, without ASCII punctuation, split at blanks, as in Karpathy's caption files.

    Differs from: the code of the VSE++ family, where nltk's word_tokenize makes a word of each mark ("." ends most captions) and two of
    "man's".
    """
    return caption.lower().translate(_DELETE).split()


@dataclass(frozen=True)
class Vocabulary:
    """The known words in a fixed order; the first four are padding, start, end and unknown."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, captions: Iterable[str], min_count: int = 4) -> Vocabulary:
        """The words that occur at least ``min_count`` times, in alphabetical order (VSE++ family: 4)."""
        counts = Counter(word for caption in captions for word in tokenize(caption))
        return cls((PAD, START, END, UNKNOWN, *sorted(word for word, count in counts.items() if count >= min_count)))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _number(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def unknown(self, caption: str) -> list[str]:
        """The words of a caption that are not known, in order."""
        return [word for word in tokenize(caption) if word not in self._number]

    def numbers(self, caption: str) -> list[int]:
        """A caption as numbers, between start and end."""
        unknown = self._number[UNKNOWN]
        return [self._number[START], *(self._number.get(word, unknown) for word in tokenize(caption)), self._number[END]]

    def encode(self, captions: Sequence[str]) -> Encoded:
        """Captions as token ids ``[N, L]``, padded with 0, and their mask."""
        return pad_numbers([self.numbers(caption) for caption in captions])


def pad_numbers(rows: Sequence[Sequence[int]]) -> Encoded:
    """Rows of numbers as one padded LongTensor ``[N, L]`` and its mask."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([number for row in rows for number in row])
    return Encoded(tokens, mask)
