"""Relevance from word vectors: the cosine similarity of two captions' mean vectors (CBoW)."""

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

from visavis.core import storage
from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError
from visavis.core.spec import require_field
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import resolve_path
from visavis.data.vocabulary import tokenize
from visavis.evaluation.graded.estimators.base import (
    CosineRelevance,
    RelevanceEstimator,
    treatment_note,
)

MAX_LINE_LENGTH = 2**20
"""Maximum number of characters per line of a file of word vectors. The rest of a longer line is
read as another line and refused.
"""


@dataclass(frozen=True, kw_only=True)
class CBoW(RelevanceEstimator):
    """Cosine similarity of two captions' mean word vectors, at least 0. Unknown words are ignored.

    Weights and principal components are computed over the given captions, so pass those of a whole
    data set. A caption without a known word, or with words of weight 0 only, has relevance 0 to
    every caption.

    Attributes:
        vectors: Text file of words and vectors, as GloVe's, or its name under ``VISAVIS_DATA``.
        weighting: "plain" weights all words equally. "idf" weights a word by log(captions /
            captions with the word).
        removed_components: Number of principal directions to remove from the captions' vectors,
            because all captions share them.

    Source:
        Zhou et al., Ladder loss (2020), section 4. ``removed_components=1``: Arora et al., A simple
        but tough-to-beat baseline (2017). Differs from the released code, which counts nouns twice,
        as found by the tagger of spaCy.
    """

    vectors: str = "glove/glove.6B.50d.captions.txt"
    weighting: Literal["plain", "idf"] = "plain"
    removed_components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(
            self.removed_components >= 0, self, "removed_components", "a number of at least 0"
        )

    def files(self, data: Dataset) -> list[Path]:
        """List the file of word vectors. See `RelevanceEstimator.files`."""
        return [resolve_path(self.vectors)]

    def for_captions(self, captions: Sequence[str]) -> CosineRelevance:
        """Compute the mean vectors of the captions. See `RelevanceEstimator.for_captions`."""
        texts = [tokenize(caption) for caption in captions]
        words = read_word_vectors(resolve_path(self.vectors), set(chain.from_iterable(texts)))
        weights = word_weights(texts, self.weighting)
        word_dim = len(next(iter(words.values()), (0.0,)))
        means = torch.zeros(len(texts), word_dim)
        for row, text in enumerate(texts):
            if known := [word for word in text if word in words]:
                weighted = np.stack([words[word] for word in known]) * np.array(
                    [[weights[word]] for word in known], np.float32
                )
                means[row] = torch.from_numpy(weighted.mean(0))
        notes = treatment_note(
            captions, ~means.any(-1), "without a known word: relevance 0 to every caption"
        )
        return CosineRelevance.from_vectors(
            remove_principal_components(means, self.removed_components), notes
        )


def word_weights(
    texts: Sequence[Sequence[str]], weighting: Literal["plain", "idf"]
) -> dict[str, float]:
    """Compute the weight of each word in the mean of a text.

    Args:
        texts: Words of each text.
        weighting: "plain" or "idf". See `CBoW`.

    Returns:
        Weight of each word.

    Example:
        >>> word_weights([["a", "dog"], ["a", "cat"]], "idf")
        {'a': 0.0, 'dog': 0.6931471805599453, 'cat': 0.6931471805599453}
    """
    if weighting == "idf":
        containing = Counter(chain.from_iterable(dict.fromkeys(text) for text in texts))
        return {word: log(len(texts) / count) for word, count in containing.items()}
    return dict.fromkeys(chain.from_iterable(texts), 1.0)


def remove_principal_components(vectors: Tensor, number: int) -> Tensor:
    """Normalize vectors and remove their first principal components.

    Args:
        vectors: Vectors, shape ``[N, D]``.
        number: Number of principal directions to remove.

    Returns:
        The remaining vectors, shape ``[N, D]``. Zero where nothing remains.
    """
    unit = unit_rows(vectors)
    if not number:
        return unit
    principal = torch.linalg.svd(unit.T @ unit).U[:, :number]
    rest = unit - unit @ principal @ principal.T
    # A vector along the removed directions leaves rounding errors, which must not be normalized to
    # a random direction.
    return rest.masked_fill(rest.norm(dim=-1, keepdim=True) < 1e-5, 0.0)


def read_word_vectors(path: Path, vocabulary: Collection[str]) -> dict[str, np.ndarray]:
    """Read the vectors of some words from a text file with one word and its vector per line.

    A first line with the number of words and dimensions, as word2vec writes it, is skipped.

    Args:
        path: Path of the file.
        vocabulary: Words to read.

    Returns:
        Vector of each word that the file contains.

    Raises:
        DataError: If the file is not UTF-8, or has a line with another number of dimensions or an
            invalid number.
    """
    words: dict[str, np.ndarray] = {}
    word_dim = 0
    try:
        with storage.reading_regular_file(path), open(path, encoding="utf-8") as file:
            for number, line in enumerate(
                iter(partial(file.readline, MAX_LINE_LENGTH), ""), start=1
            ):
                word, *values = line.rstrip(" \n").split(" ")
                if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                    continue
                word_dim = word_dim or len(values)
                if len(values) != word_dim or not word_dim:
                    expected = (
                        f"{word_dim} numbers, as on the first line"
                        if word_dim
                        else "a word and its numbers"
                    )
                    raise DataError(
                        f"{path}, line {number}: expected {expected}, got {len(values)}. Fix this "
                        "line."
                    )
                if word in vocabulary:
                    words[word] = _vector(values, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8, got the byte {error.object[error.start]:#04x}. Save the file "
            "as UTF-8."
        ) from None
    if not word_dim:
        raise DataError(f"{path}: expected word vectors, got an empty file.")
    return words


def _vector(values: list[str], position: str) -> np.ndarray:
    try:
        vector = np.array(values, np.float32)
    except ValueError as error:
        raise DataError(
            f"{position}: expected a word and its numbers, separated by blanks: {error}."
        ) from None
    if not np.isfinite(vector).all():
        raise DataError(
            f"{position}: expected finite numbers, got {values[int(np.isfinite(vector).argmin())]}."
        )
    return vector
