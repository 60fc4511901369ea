"""Catalog of relevance estimators, and the combination of a fast and an accurate one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from visavis.core.own_code import named_by_user
from visavis.core.spec import parse, require_field
from visavis.data.dataset import Dataset
from visavis.evaluation.graded.estimators.base import CaptionRelevance, RelevanceEstimator
from visavis.evaluation.graded.estimators.known_relevance import MatrixRelevance, SceneRelevance
from visavis.evaluation.graded.estimators.sentence_models import CrossEncoder, SentenceModel
from visavis.evaluation.graded.estimators.word_vectors import CBoW

CAPTION_ESTIMATORS: tuple[type[RelevanceEstimator], ...] = (CBoW, SentenceModel, CrossEncoder)
"""Estimators that compare captions without another estimator."""


@dataclass(frozen=True, kw_only=True)
class CoarseToFine(RelevanceEstimator):
    """Relevance from a fast estimator, refined by an accurate one for pairs above a threshold.

    Equal captions have the fine relevance, too.

    Attributes:
        coarse: Spec of the fast estimator: CBoW, SentenceModel or CrossEncoder.
        fine: Spec of the accurate estimator.
        threshold: Pairs with a coarse relevance above this value are refined.
        semantics: "paper" keeps the coarse relevance of the other pairs. "reference" sets it to 0,
            as the released code.

    Source:
        Zhou et al., Ladder loss (2020), section 4, with CBoW, BERT fine-tuned on STS-B, and
        threshold 0.8. Differs from the hybrid matrix of the released code
        (``semantics="reference"``), which is 0 below the threshold and 1 for a caption with itself.
    """

    coarse: str = "CBoW()"
    fine: str = "SentenceModel()"
    threshold: float = 0.8
    semantics: Literal["paper", "reference"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(0 <= self.threshold <= 1, self, "threshold", "a number from 0 to 1")
        self._estimators()

    def _estimators(self) -> tuple[RelevanceEstimator, RelevanceEstimator]:
        return parse(self.coarse, CAPTION_ESTIMATORS), parse(self.fine, CAPTION_ESTIMATORS)

    def files(self, data: Dataset) -> list[Path]:
        """List the files that both estimators read. See `RelevanceEstimator.files`."""
        return [file for estimator in self._estimators() for file in estimator.files(data)]

    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Prepare both estimators. See `RelevanceEstimator.for_captions`."""
        coarse, fine = (estimator.for_captions(captions) for estimator in self._estimators())
        number = {caption: i for i, caption in enumerate(captions)}
        text_ids = torch.tensor([number[caption] for caption in captions])
        return _RefinedRelevance(
            coarse, fine, self, text_ids, tuple(dict.fromkeys((*coarse.notes, *fine.notes)))
        )


@dataclass(frozen=True, eq=False)
class _RefinedRelevance(CaptionRelevance):
    """Relevance of CoarseToFine. Equal captions have equal ``text_ids``."""

    coarse: CaptionRelevance
    fine: CaptionRelevance
    config: CoarseToFine
    text_ids: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        coarse = self.coarse(rows, columns)
        refined = coarse > self.config.threshold
        equal = self.text_ids[rows, None] == self.text_ids[columns]
        return self._combine(coarse, refined, self.fine.masked(refined, rows, columns), equal)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        coarse = self.coarse.pairs(first, second)
        refined = coarse > self.config.threshold
        return self._combine(
            coarse,
            refined,
            self.fine.pairs(first[refined], second[refined]),
            self.text_ids[first] == self.text_ids[second],
        )

    def _combine(self, coarse: Tensor, refined: Tensor, fine: Tensor, equal: Tensor) -> Tensor:
        if self.config.semantics == "paper":
            return coarse.masked_scatter(refined, fine)
        return torch.zeros_like(coarse).masked_scatter(refined, fine).masked_fill(equal, 1.0)


CATALOG: tuple[type[RelevanceEstimator], ...] = (
    *CAPTION_ESTIMATORS,
    CoarseToFine,
    SceneRelevance,
    MatrixRelevance,
)
"""All relevance estimators that a spec can name."""


def parse_estimator(text: str) -> RelevanceEstimator:
    """Parse a relevance estimator.

    Args:
        text: A spec such as "CBoW()", or "estimator.py:MyEstimator()" of code that the user named.

    Returns:
        The estimator.

    Raises:
        SpecError: If the text names no estimator, or an invalid value.
    """
    return parse(text, CATALOG, RelevanceEstimator, "estimators")


def named_estimator(text: str) -> RelevanceEstimator:
    """Parse a relevance estimator that the user names now, so that its code may run.

    Args:
        text: A spec, as in `parse_estimator`.

    Returns:
        The estimator.

    Raises:
        SpecError: As in `parse_estimator`.
    """
    with named_by_user(text):
        return parse_estimator(text)
