"""Degrees from word vectors: the cosine of two captions' mean vectors (CBoW)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import log
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis import storage
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.reading import find_file
from visavis.degrees.base import Degrees, treatment_note
from visavis.degrees.cosines import CosineDegrees
from visavis.errors import DataError
from visavis.spec import check_fields, require

LONGEST_LINE = 2**20
"""Characters of a line of word vectors; what follows would be another line, of another width."""


@dataclass(frozen=True, kw_only=True)
class CBoW(Degrees):
    """The cosine of two captions' mean word vectors, at least 0; unknown words are left out.

    vectors: a text file of words and their numbers, as GloVe's; also by its name under ``VISAVIS_DATA``. weighting: "idf" weighs a
    word by log(captions / captions with it). common: how many principal directions to remove from the captions' vectors,
    since all captions share them. Both are computed over the captions given: give all of a data set. A caption without a known word,
    or only with words of weight 0, has degree 0 with everything.
    Source: Zhou et al., Ladder loss (2020), section 4; common=1: Arora et al., A simple but tough-to-beat baseline (2017).
    Differs from: the released code, which counts nouns twice, as found by spaCy's tagger.
    """

    vectors: str = "glove/glove.6B.50d.captions.txt"
    weighting: Literal["plain", "idf"] = "plain"
    common: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.common >= 0, self, "common", "a number from 0 on")

    def files(self, data: Dataset) -> list[Path]:
        return [find_file(self.vectors)]

    def of(self, captions: Sequence[str]) -> CosineDegrees:
        texts = [tokenize(caption) for caption in captions]
        words = read_vectors(find_file(self.vectors), set(chain.from_iterable(texts)))
        weights = word_weights(texts, self.weighting)
        width = len(next(iter(words.values()), (0.0,)))
        means = torch.zeros(len(texts), width)
        for row, text in enumerate(texts):
            if known := [word for word in text if word in words]:
                weighted = np.stack([words[word] for word in known]) * np.array([[weights[word]] for word in known], np.float32)
                means[row] = torch.from_numpy(weighted.mean(0))
        notes = treatment_note(captions, ~means.any(-1), "without a known word: degree 0 with everything")
        return CosineDegrees.of(without_common(means, self.common), notes)


def word_weights(texts: Sequence[Sequence[str]], weighting: Literal["plain", "idf"]) -> dict[str, float]:
    """The weight of each word in the mean of a text, by how common it is in all texts.

    >>> word_weights([["a", "dog"], ["a", "cat"]], "idf")
    {'a': 0.0, 'dog': 0.6931471805599453, 'cat': 0.6931471805599453}
    """
    if weighting == "idf":
        containing = Counter(chain.from_iterable(dict.fromkeys(text) for text in texts))
        return {word: log(len(texts) / count) for word, count in containing.items()}
    return dict.fromkeys(chain.from_iterable(texts), 1.0)


def without_common(vectors: Tensor, number: int) -> Tensor:
    """Unit vectors ``[N, D]`` without their components along their first ``number`` principal directions; 0 where nothing is left."""
    unit = normalize(vectors, dim=-1)
    if not number:
        return unit
    main = torch.linalg.svd(unit.T @ unit).U[:, :number]
    rest = unit - unit @ main @ main.T
    return rest.masked_fill(rest.norm(dim=-1, keepdim=True) < 1e-5, 0.0)


def read_vectors(path: Path, vocabulary: Collection[str]) -> dict[str, np.ndarray]:
    """The vectors of the words of a vocabulary, from a text file with a word and its numbers per line, after an optional line of counts.

    Raises DataError naming the line that differs.
    """
    words: dict[str, np.ndarray] = {}
    width = 0
    try:
        with storage.regular_file(path), open(path, encoding="utf-8") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), ""), start=1):
                word, *values = line.rstrip(" \n").split(" ")
                if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                    continue
                width = width or len(values)
                if len(values) != width or not width:
                    raise DataError(f"{path}, line {number}: {len(values)} numbers, expected {width or 'some'} as on the first line.")
                if word in vocabulary:
                    words[word] = _vector(values, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: it holds {error.object[error.start]:#04x}; save it as UTF-8.") from None
    if not width:
        raise DataError(f"{path} holds no word vectors.")
    return words


def _vector(values: list[str], place: str) -> np.ndarray:
    try:
        vector = np.array(values, np.float32)
    except ValueError as error:
        raise DataError(f"{place}: {error}; expected a word and its numbers, separated by blanks.") from None
    if not np.isfinite(vector).all():
        raise DataError(f"{place}: a number of the word's vector is {values[int(np.isfinite(vector).argmin())]}, expected a finite one.")
    return vector
