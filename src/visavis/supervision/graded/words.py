"""Degrees from word vectors: the cosine of two captions' mean vectors (CBoW)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.data.captions import tokenize
from visavis.data.reading import find_file
from visavis.errors import DataError
from visavis.spec import check_fields
from visavis.supervision.graded.degrees import CaptionDegrees, Degrees


@dataclass(frozen=True, kw_only=True)
class CBoW(Degrees):
    """The cosine of two captions' mean word vectors, at least 0; unknown words are left out.

    vectors: a text file of words and their numbers, as GloVe's; also by its name under ``VISAVIS_DATA``. A caption without a
    known word has degree 0 with everything.
    Source: Zhou et al., Ladder loss (2020), section 3.
    """

    vectors: str = "glove/glove.6B.50d.captions.txt"

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, captions: Sequence[str]) -> Cosines:
        words = read_vectors(find_file(self.vectors))
        width = len(next(iter(words.values())))
        means = [
            np.mean(known, 0) if (known := [words[word] for word in tokenize(caption) if word in words]) else np.zeros(width)
            for caption in captions
        ]
        return Cosines(normalize(torch.from_numpy(np.array(means, np.float32)), dim=-1))


@dataclass(frozen=True, eq=False)
class Cosines(CaptionDegrees):
    """Degrees as cosines of unit vectors, one a caption; below 0 counts as 0."""

    vectors: Tensor

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return (self.vectors[rows] @ self.vectors[columns].T).clamp(0, 1)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        return (self.vectors[first] * self.vectors[second]).sum(-1).clamp(0, 1)


def read_vectors(path: Path) -> dict[str, np.ndarray]:
    """Word vectors of a text file: a word and its numbers on each line. Raises DataError naming the line that differs."""
    words: dict[str, np.ndarray] = {}
    width = 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            word, *values = line.rstrip().split(" ")
            try:
                words[word] = np.array(values, np.float32)
            except ValueError:
                raise DataError(f"{path}, line {number}: {line[:40]!r} is no word with its numbers, separated by blanks.") from None
            width = width or len(values)
            if len(values) != width or not width:
                raise DataError(f"{path}, line {number}: {len(values)} numbers, expected {width} as on the first line.")
    if not words:
        raise DataError(f"{path} holds no word vectors.")
    return words
