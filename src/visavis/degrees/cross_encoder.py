"""Degrees from a cross-encoder: a model that reads two captions at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from visavis import storage
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.degrees.base import CaptionDegrees, Degrees, treatment_note
from visavis.degrees.kept_pairs import KeptPairs, Pair
from visavis.errors import DataError
from visavis.models.pair_tower import PairTower, open_pairs
from visavis.models.pretrained import model_files, weights_mark
from visavis.spec import check_fields, require


@dataclass(frozen=True, kw_only=True)
class CrossEncoder(Degrees):
    """The output of a model that reads two captions together (a cross-encoder).

    model: a folder of a ``transformers`` sequence classifier, or a hub name; ``visavis relevance fit --kind cross`` makes one.
    output: "sigmoid" of the model's number, or the number itself ("identity"), clamped to [0, 1]. Only the requested
    pairs are computed, and kept in the cache by their texts; both orders of a pair have one degree, that of the captions in
    alphabetical order. Equal captions have degree 1; a caption without a word has degree 0 with everything. bfloat16: half the time,
    but the third digit of a degree then depends on the pairs it was first computed with.
    Source: Zhou et al., Ladder loss (2020), eq. 1, where the model is BERT fine-tuned on STS-B.
    """

    model: str
    output: Literal["sigmoid", "identity"] = "sigmoid"
    batch_size: int = 64
    bfloat16: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.batch_size > 0, self, "batch_size", "a number above 0")

    def files(self, data: Dataset) -> list[Path]:
        return model_files(self.model)

    def of(self, captions: Sequence[str]) -> CrossDegrees:
        wordless = torch.tensor([not tokenize(caption) for caption in captions])
        return CrossDegrees(self, tuple(captions), wordless, treatment_note(captions, wordless, "without a word: degree 0 with everything"))


@dataclass(frozen=True, eq=False)
class CrossDegrees(CaptionDegrees):
    """The degrees of a CrossEncoder between the captions of one list."""

    config: CrossEncoder
    captions: tuple[str, ...]
    wordless: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.where(torch.ones(len(rows), len(columns), dtype=torch.bool), rows, columns).view(len(rows), len(columns))

    def where(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        row, column = mask.nonzero(as_tuple=True)
        return self.pairs(rows[row], columns[column])

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        parts = zip(first.split(_PART), second.split(_PART), strict=True)
        degrees = torch.cat([self._part(left.tolist(), right.tolist()) for left, right in parts])
        return degrees.masked_fill(self.wordless[first] | self.wordless[second], 0.0)

    def _part(self, first: list[int], second: list[int]) -> Tensor:
        """The degrees of some pairs: cached ones are read, new ones computed and added to the cache."""
        pairs = [tuple(sorted((self.captions[i], self.captions[j]))) for i, j in zip(first, second, strict=True)]
        different = {(left, right) for left, right in pairs if left != right}
        degrees = self._kept.read(different) if different else {}
        if new := sorted(different - degrees.keys(), key=lambda pair: (len(pair[0]) + len(pair[1]), pair)):
            computed = dict(zip(new, self._compute(new).tolist(), strict=True))
            self._kept.add(computed)
            degrees |= computed
        return torch.tensor([1.0 if left == right else degrees[left, right] for left, right in pairs])

    def _compute(self, pairs: Sequence[Pair]) -> Tensor:
        size = self.config.batch_size
        batches = (pairs[start : start + size] for start in range(0, len(pairs), size))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bfloat16):
            values = torch.cat([self._tower.encode(*zip(*batch, strict=True)) for batch in batches])
        if not values.isfinite().all():
            first = pairs[int(values.isfinite().int().argmin())]
            raise DataError(f"{self.config.model} gives no number for the captions {first[0]!r} and {first[1]!r}: its weights are broken.")
        return values.sigmoid() if self.config.output == "sigmoid" else values.clamp(0, 1)

    @cached_property
    def _tower(self) -> PairTower:
        return open_pairs(self.config.model)

    @cached_property
    def _kept(self) -> KeptPairs:
        name = Path(self.config.model).resolve().name if Path(self.config.model).exists() else self.config.model.replace("/", "--")
        mark = hashlib.sha256(f"{self.config.output} {self.config.bfloat16} {weights_mark(self.config.model)}".encode()).hexdigest()[:8]
        return KeptPairs(storage.cache_folder() / "degrees" / f"{name}-{mark}.sqlite")


_PART = 1_024  # pairs after which new degrees are on the disk
