"""Degrees from two sources: a fast one for every pair, a better one where the fast one is high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.degrees.base import CaptionDegrees, Degrees
from visavis.degrees.cross_encoder import CrossEncoder
from visavis.degrees.sentences import SentenceModel
from visavis.degrees.words import CBoW
from visavis.spec import check_fields, parse, require

OF_CAPTIONS: tuple[type[Degrees], ...] = (CBoW, SentenceModel, CrossEncoder)
"""Estimators that compare captions on their own, without another estimator."""


@dataclass(frozen=True, kw_only=True)
class CoarseToFine(Degrees):
    """The fine degree of pairs whose coarse degree exceeds a threshold; the coarse one of all others.

    coarse, fine: specs of CBoW, SentenceModel or CrossEncoder. above: the threshold. Equal captions have the fine degree too.
    Source: Zhou et al., Ladder loss (2020), section 4, with CBoW, BERT fine-tuned on STS-B, and 0.8.
    Differs from: the released code's hybrid matrix, ``semantics="reference"``, which leaves 0, not the coarse degree, below the
    threshold, and sets a caption's degree to itself to 1.
    """

    coarse: str = "CBoW()"
    fine: str = "SentenceModel()"
    above: float = 0.8
    semantics: Literal["paper", "reference"] = "paper"

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 <= self.above <= 1, self, "above", "a number from 0 to 1")
        parse(self.coarse, OF_CAPTIONS)
        parse(self.fine, OF_CAPTIONS)

    def files(self, data: Dataset) -> list[Path]:
        return [file for degrees in (self.coarse, self.fine) for file in parse(degrees, OF_CAPTIONS).files(data)]

    def of(self, captions: Sequence[str]) -> CaptionDegrees:
        coarse, fine = parse(self.coarse, OF_CAPTIONS).of(captions), parse(self.fine, OF_CAPTIONS).of(captions)
        number = {caption: i for i, caption in enumerate(captions)}
        same = torch.tensor([number[caption] for caption in captions])
        return _TwoDegrees(coarse, fine, self, same, tuple(dict.fromkeys((*coarse.notes, *fine.notes))))


@dataclass(frozen=True, eq=False)
class _TwoDegrees(CaptionDegrees):
    """same ``[N]``: equal numbers for equal captions."""

    coarse: CaptionDegrees
    fine: CaptionDegrees
    config: CoarseToFine
    same: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        coarse = self.coarse(rows, columns)
        refined = coarse > self.config.above
        return self._joined(coarse, refined, self.fine.where(refined, rows, columns), self.same[rows, None] == self.same[columns])

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        coarse = self.coarse.pairs(first, second)
        refined = coarse > self.config.above
        return self._joined(coarse, refined, self.fine.pairs(first[refined], second[refined]), self.same[first] == self.same[second])

    def _joined(self, coarse: Tensor, refined: Tensor, fine: Tensor, equal: Tensor) -> Tensor:
        if self.config.semantics == "paper":
            return coarse.masked_scatter(refined, fine)
        return torch.zeros_like(coarse).masked_scatter(refined, fine).masked_fill(equal, 1.0)
