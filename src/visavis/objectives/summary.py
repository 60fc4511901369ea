"""Objectives that know the negatives of a query by one number: the hardest, or a log-sum-exp.

Such an objective declares the number, and what a positive pair makes of it; ``one_way`` follows. Whoever has a faster
way to the number than a matrix of masked scores may take it, and get the same terms. Of an objective with several forms,
some may need more: they are written in ``one_way``, and ``knows_enough`` tells which.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from visavis.objectives.base import Objective
from visavis.objectives.pairs import Pairs, pairs
from visavis.targets import Targets


@dataclass(frozen=True)
class Hardest:
    """``max_j s_ij``."""

    def of(self, found: Pairs) -> Tensor:
        return found.hardest


@dataclass(frozen=True)
class LogSumExp:
    """``log sum_j exp(scale s_ij)``."""

    scale: float

    def of(self, found: Pairs) -> Tensor:
        return found.log_sum_exp(self.scale)


Summary = Hardest | LogSumExp


class SummaryObjective(Objective):
    """An objective of a query's summary and each of its positives."""

    @property
    @abstractmethod
    def summary(self) -> Summary:
        """The number that stands for the negatives of a query; -inf where it has none."""

    @abstractmethod
    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        """The term of each positive pair ``[P]``: the summary of its query's negatives, its own score, its row in ``targets``."""

    def knows_enough(self, targets: Targets) -> bool:
        """Whether the summary is all that it needs of the negatives; else ``one_way`` is written out."""
        return True

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        found = pairs(scores, targets)
        return self.pair_terms(self.summary.of(found), found.positive, found.query, targets)
