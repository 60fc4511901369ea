"""How well sentences are answered of which people said what fits them, and what does not.

>>> answer = JudgedAnswer.of(np.array([0.9, 0.8, 0.7, 0.6]), fits=[1, 3], wrong=[0])  # the third was not judged
>>> answer, recalls([answer]), share_ordered([answer])
(JudgedAnswer(rank=2, pairs=2, ordered=0), {1: 0.0, 5: 100.0, 10: 100.0}, 0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from visavis.data.judged import JudgedPairs
from visavis.metrics.recall import hit_by_chance

KS = (1, 5, 10)
ORDERED = "judged_ordered"


@dataclass(frozen=True)
class JudgedAnswer:
    """What a model made of one sentence that something fits.

    rank: 1 + the number of items that were not judged to fit and score at least as high as the best that was. pairs: of an item that fits
    and one that does not. ordered: those with the fitting one above.
    """

    rank: int
    pairs: int
    ordered: int

    @classmethod
    def of(cls, scores: np.ndarray, fits: Sequence[int], wrong: Sequence[int]) -> JudgedAnswer:
        """scores ``[C]``: of all items. fits, wrong: the places of those that were judged; the first has at least one."""
        right = scores[list(fits)]
        above = np.delete(scores, fits) >= right.max()
        return cls(1 + int(above.sum()), len(fits) * len(wrong), int((right[:, None] > scores[list(wrong)]).sum()))


def recalls(answers: Sequence[JudgedAnswer]) -> dict[int, float]:
    """The share of sentences, in percent, with something that fits among the first K of what was not judged to fit."""
    return {k: 100 * float(np.mean([answer.rank <= k for answer in answers])) for k in KS}


def share_ordered(answers: Sequence[JudgedAnswer]) -> float | None:
    """The share of pairs, in percent, with the fitting item above; None without any."""
    pairs = sum(answer.pairs for answer in answers)
    return 100 * sum(answer.ordered for answer in answers) / pairs if pairs else None


def measured(answers: Sequence[JudgedAnswer]) -> dict[str, float | None]:
    """Both, by the keys of ``JudgedTest.labels``."""
    return {f"judged_r{k}": value for k, value in recalls(answers).items()} | {ORDERED: share_ordered(answers)}


@dataclass(frozen=True)
class JudgedTest:
    """What people judged of a test split, as another test of what searches it. pairs: not all sentences fit something. images: the names of all
    that are searched.
    """

    pairs: JudgedPairs
    images: tuple[str, ...]

    @cached_property
    def asked(self) -> dict[str, tuple[list[int], list[int]]]:
        """Each sentence that something fits: the places of the images that fit it, and of those that do not."""
        fits, wrong = (
            [pairs[pairs[:, 0] == sentence, 1].tolist() for sentence in range(len(self.pairs.sentences))]
            for pairs in (self.pairs.fits, self.pairs.wrong)
        )
        return {text: (yes, no) for text, yes, no in zip(self.pairs.sentences, fits, wrong, strict=True) if yes}

    @property
    def labels(self) -> dict[str, str]:
        """The metrics, with what stands above their columns; the order of pairs only where there are pairs."""
        ordered = {ORDERED: "in order"} if any(no for _, no in self.asked.values()) else {}
        return {f"judged_r{k}": f"R@{k}" for k in KS} | ordered

    def chance(self, metric: str) -> float:
        """What a random order reaches, in percent."""
        if metric == ORDERED:
            return 50.0
        k = int(metric.rpartition("_r")[2])
        return 100 * float(np.mean([hit_by_chance(len(self.images), len(yes), k) for yes, _ in self.asked.values()]))

    def __str__(self) -> str:
        """What was asked, what of it counts, and what is left out."""
        pairs = sum(len(yes) * len(no) for yes, no in self.asked.values())
        fits = sum(len(yes) for yes, _ in self.asked.values())
        told = f"{len(self.asked):,} sentences that {fits:,} judged images fit, each ranking {len(self.images):,} images of split {self.pairs.split}"
        told += f"; in order: of {pairs:,} pairs of an image that fits and one that does not, those with the first above" if pairs else ""
        alone = len(self.pairs.sentences) - len(self.asked)
        told += f"; not asked: {alone:,} that none of them fits" if alone else ""
        return f"{told}; {self.pairs.told_left_out}" if self.pairs.left_out else f"{told}."
