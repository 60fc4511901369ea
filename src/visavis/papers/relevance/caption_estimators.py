"""Relevance of captions from word vectors (CBoW), sentence embeddings, and cross-encoders, which
read two captions together.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError
from visavis.core.fields import require_field
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.words import tokenize
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.encoders.pretrained_files import model_files, weights_fingerprint
from visavis.models.encoders.sentence_encoders import TextPairEncoder, open_text_pair_encoder
from visavis.papers.relevance.base import (
    CaptionRelevance,
    CosineRelevance,
    RelevanceEstimator,
    treatment_note,
)

MAX_LINE_LENGTH = 2**20
"""Maximum number of characters per line of a file of word vectors. The rest of a longer line is
read as another line and refused.
"""


Pair = tuple[str, str]
"""Two captions."""
ResultT = TypeVar("ResultT")
# New values are on the disk after this many pairs.
_PAIRS_PER_CHUNK = 1_024
# Every build of SQLite takes 999 parameters per query.
_KEYS_PER_QUERY = 900


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
        Zhou et al., Ladder loss (2020), Experiments, Relevance Degree. ``removed_components=1``:
        Arora et al., A simple but tough-to-beat baseline (2017). Differs from the released code,
        which counts nouns twice, as found by the tagger of spaCy.
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
        # Words outside of these captions need not be read.
        texts = [tokenize(caption) for caption in captions]
        words = read_word_vectors(resolve_path(self.vectors), set(chain.from_iterable(texts)))
        weights = word_weights(texts, self.weighting)
        # 1 if no word is known: all means are 0.
        word_dim = len(next(iter(words.values()), (0.0,)))
        means = torch.zeros(len(texts), word_dim)
        for row, text in enumerate(texts):
            if known := [word for word in text if word in words]:
                # [words, D]
                weighted = np.stack([words[word] for word in known]) * np.array(
                    [[weights[word]] for word in known], np.float32
                )
                means[row] = torch.from_numpy(weighted.mean(0))
        notes = treatment_note(
            captions, ~means.any(-1), "without a known word: relevance 0 to every caption"
        )
        unit = unit_rows(means)
        if self.removed_components:
            # [D, number]. The matrix D x D is small, the one of the captions is not.
            principal = torch.linalg.svd(unit.T @ unit).U[:, : self.removed_components]
            unit = unit - unit @ principal @ principal.T
            # A vector along the removed directions leaves rounding errors, which must not be
            # normalized to a random direction.
            unit = unit.masked_fill(unit.norm(dim=-1, keepdim=True) < 1e-5, 0.0)
        return CosineRelevance.from_vectors(unit, notes)


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
        return {word: math.log(len(texts) / count) for word, count in containing.items()}
    return dict.fromkeys(chain.from_iterable(texts), 1.0)


def read_word_vectors(path: Path, vocabulary: Collection[str]) -> dict[str, np.ndarray]:
    """Read the vectors of some words from a text file with one word and its vector per line."""
    words: dict[str, np.ndarray] = {}
    word_dim = 0
    try:
        with storage.reading_regular_file(path), open(path, encoding="utf-8-sig") as file:
            lines = iter(partial(file.readline, MAX_LINE_LENGTH), "")
            for number, line in enumerate(lines, start=1):
                word, *values = line.rstrip(" \n").split(" ")
                # The header of word2vec is skipped: numbers of words and dimensions.
                if number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit():
                    continue
                expected = (
                    f"{word_dim} numbers, as on the first line"
                    if word_dim
                    else "a word and its numbers"
                )
                word_dim = word_dim or len(values)
                problem = ""
                if len(values) != word_dim or not word_dim:
                    problem = f"expected {expected}, got {len(values)}. Fix this line."
                elif word in vocabulary:
                    try:
                        words[word] = np.array(values, np.float32)
                        finite = np.isfinite(words[word])
                        if not finite.all():
                            problem = (
                                f"expected finite numbers, got {values[int(finite.argmin())]}."
                            )
                    except ValueError as error:
                        problem = f"expected a word and its numbers, separated by blanks: {error}."
                if problem:
                    raise DataError(f"{path}, line {number}: {problem}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8, got the byte {error.object[error.start]:#04x}. Save the file "
            "as UTF-8."
        ) from None
    if not word_dim:
        raise DataError(f"{path}: expected word vectors, got an empty file.")
    return words


@dataclass(frozen=True, kw_only=True)
class SentenceModel(RelevanceEstimator):
    """Cosine similarity of two captions' sentence embeddings, at least 0.

    Embeddings are computed once and cached by captions and model weights. A caption without a word
    (empty, or only punctuation) has relevance 0 to every caption.

    Attributes:
        model: "minilm", a folder of ``transformers`` or ``sentence-transformers``, or a name on the
            Hugging Face hub. Words are pooled as the folder specifies, else by their mean.

    Source:
        Reimers and Gurevych, Sentence-BERT (2019).
    """

    model: str = "minilm"

    def files(self, data: Dataset) -> list[Path]:
        """List the files of the model. See `RelevanceEstimator.files`."""
        return model_files(self.model)

    def for_captions(self, captions: Sequence[str]) -> CosineRelevance:
        """Embed the captions. See `RelevanceEstimator.for_captions`."""
        unique = tuple(sorted(set(captions)))
        # Sorted distinct captions give one cache for any order and repetition.
        store = cache_features(
            Dataset("captions", (), unique, np.zeros(len(unique), np.int64)),
            EncoderSpec("text", self.model),
        )
        wordless, notes = _wordless(captions)
        vectors = store.read(store.rows(captions)).vectors.masked_fill(wordless[:, None], 0.0)  # type: ignore[union-attr]
        return CosineRelevance.from_vectors(vectors, notes)


def _wordless(captions: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Which captions have no word, bool ``[N]``, and a note about them."""
    wordless = torch.tensor([not tokenize(caption) for caption in captions])
    return wordless, treatment_note(
        captions, wordless, "without a word: relevance 0 to every caption"
    )


@dataclass(frozen=True, kw_only=True)
class CrossEncoder(RelevanceEstimator):
    """Output of a model that reads two captions together.

    Only the requested pairs are computed. They are cached by their texts. Both orders of a pair
    have the same relevance, the one of the captions in alphabetical order. Equal captions have
    relevance 1. A caption without a word has relevance 0 to every caption.

    Attributes:
        model: Folder of a ``transformers`` sequence classifier, or a name on the Hugging Face hub.
            ``visavis papers relevance fit --kind cross`` trains one.
        output: "sigmoid" of the model's output, or the output itself ("identity"), clamped to [0,
            1].
        batch_size: Number of pairs per batch.
        bfloat16: Compute in bfloat16. Takes half the time, but the third digit of a value then
            depends on the pairs in the same batch.

    Source:
        Zhou et al., Ladder loss (2020), eq. 1, where the model is BERT fine-tuned on STS-B.
    """

    model: str
    output: Literal["sigmoid", "identity"] = "sigmoid"
    batch_size: int = 64
    bfloat16: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(self.batch_size > 0, self, "batch_size", "a number above 0")

    def files(self, data: Dataset) -> list[Path]:
        """List the files of the model. See `RelevanceEstimator.files`."""
        return model_files(self.model)

    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Prepare the relevance of the captions. See `RelevanceEstimator.for_captions`."""
        return _CrossEncoderRelevance(self, tuple(captions), *_wordless(captions))


@dataclass(frozen=True, eq=False)
class _CrossEncoderRelevance(CaptionRelevance):
    """Relevance of a CrossEncoder between the captions of one list."""

    config: CrossEncoder
    captions: tuple[str, ...]
    wordless: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.masked(
            torch.ones(len(rows), len(columns), dtype=torch.bool), rows, columns
        ).view(len(rows), len(columns))

    def masked(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        row, column = mask.nonzero(as_tuple=True)
        return self.pairs(rows[row], columns[column])

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        chunks = zip(first.split(_PAIRS_PER_CHUNK), second.split(_PAIRS_PER_CHUNK), strict=True)
        values = list[Tensor]()
        # Cached pairs are read. New ones are computed, and in the cache after each chunk.
        for rows, columns in chunks:
            pairs = [
                tuple(sorted((self.captions[i], self.captions[j])))
                for i, j in zip(rows.tolist(), columns.tolist(), strict=True)
            ]
            # The relevance of equal captions is known.
            unequal = {(left, right) for left, right in pairs if left != right}
            relevance = self._cache.read(unequal) if unequal else {}
            # Pairs of similar length are in one batch, which saves padding.
            if new := sorted(
                unequal - relevance.keys(), key=lambda pair: (len(pair[0]) + len(pair[1]), pair)
            ):
                computed = dict(zip(new, self._compute(new).tolist(), strict=True))
                self._cache.add(computed)
                relevance |= computed
            values.append(
                torch.tensor(
                    [1.0 if left == right else relevance[left, right] for left, right in pairs]
                )
            )
        return torch.cat(values).masked_fill(self.wordless[first] | self.wordless[second], 0.0)

    def _compute(self, pairs: Sequence[Pair]) -> Tensor:
        size = self.config.batch_size
        batches = (pairs[start : start + size] for start in range(0, len(pairs), size))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bfloat16):
            values = torch.cat(
                [self._encoder.encode(*zip(*batch, strict=True)) for batch in batches]
            )
        if not values.isfinite().all():
            first, second = pairs[int(values.isfinite().int().argmin())]
            raise DataError(
                f"{self.config.model}: expected a finite output, got "
                f"{values[~values.isfinite()][0].item()} for the captions {first!r} and "
                f"{second!r}. The weights are damaged: use another model."
            )
        return values.sigmoid() if self.config.output == "sigmoid" else values.clamp(0, 1)

    @cached_property
    def _encoder(self) -> TextPairEncoder:
        return open_text_pair_encoder(self.config.model)

    @cached_property
    def _cache(self) -> PairCache:
        """The cache of this model: its name holds a hash of weights, output and precision."""
        model = self.config.model
        is_folder = os.path.exists(model)
        name = os.path.basename(os.path.realpath(model)) if is_folder else model.replace("/", "--")
        settings = f"{self.config.output} {self.config.bfloat16} {weights_fingerprint(model)}"
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return PairCache(storage.cache_folder() / "relevance" / f"{name}-{digest}.sqlite")


@dataclass(frozen=True)
class PairCache:
    """Disk cache of the relevance of caption pairs. Several processes can read and write at the
    same time.

    Every value has a checksum. A database with a damaged value, or one that SQLite cannot read, is
    removed and created again.

    Attributes:
        path: Path of the SQLite database.
    """

    path: Path

    def read(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Look up pairs. The result has those in the cache."""
        by_key = {_key(pair): pair for pair in pairs}
        keys = list(by_key)

        def select(database: sqlite3.Connection) -> dict[Pair, float]:
            relevance = {}
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                chunk = keys[start : start + _KEYS_PER_QUERY]
                # All rows at once: an unfinished query keeps the file open, so that Windows does
                # not remove a damaged one.
                rows = database.execute(
                    f"SELECT * FROM checked WHERE pair IN ({', '.join('?' * len(chunk))})", chunk
                ).fetchall()
                for key, value in rows:
                    is_packed = isinstance(value, bytes) and len(value) == 12
                    (number,) = struct.unpack("<d", value[:8]) if is_packed else (math.nan,)
                    if _pack(key, number) != value:
                        raise sqlite3.DatabaseError("checksum mismatch of a relevance value")
                    relevance[by_key[key]] = number
            return relevance

        return self._run(select)

    def add(self, relevance: Mapping[Pair, float]) -> None:
        """Store the relevance of pairs."""
        rows = [(key := _key(pair), _pack(key, value)) for pair, value in relevance.items()]
        self._run(
            lambda database: database.executemany(
                "INSERT OR REPLACE INTO checked VALUES (?, ?)", rows
            )
        )

    def _run(
        self, operation: Callable[[sqlite3.Connection], ResultT], *, again: bool = False
    ) -> ResultT:
        """Run an operation, if necessary a second time with an empty database."""
        try:
            with storage.sqlite_database(self.path) as database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS checked (pair BLOB PRIMARY KEY, relevance BLOB) "
                    "WITHOUT ROWID"
                )
                return operation(database)
        except sqlite3.DatabaseError as damage:
            if again:
                raise
            storage.remove_damaged(
                self.path,
                [self.path, self.path.with_name(f"{self.path.name}-journal")],
                str(damage),
            )
            return self._run(operation, again=True)


def _key(pair: Pair) -> bytes:
    return hashlib.blake2b("\x1f".join(pair).encode(), digest_size=16).digest()


def _pack(key: bytes, relevance: float) -> bytes:
    """A value as 8 bytes, and the checksum of key and value as 4 bytes."""
    number = struct.pack("<d", relevance)
    return number + struct.pack("<I", zlib.crc32(key + number))
