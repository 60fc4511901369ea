"""One number that stands for all negatives of a query: the hardest, or a log-sum-exp.

An objective that needs no more about its negatives says so by ``Objective.summary``. The number may then be computed without a
matrix of masked scores, with the same terms as result.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visavis.objectives.pairs import Pairs


@dataclass(frozen=True)
class Hardest:
    """``max_j s_ij`` over the negatives of a query; -inf where it has none."""

    def of(self, pairs: Pairs) -> Tensor:
        return pairs.hardest


@dataclass(frozen=True)
class LogSumExp:
    """``log sum_j exp(scale s_ij)`` over the negatives of a query; -inf where it has none."""

    scale: float

    def of(self, pairs: Pairs) -> Tensor:
        return pairs.log_sum_exp(self.scale)


Summary = Hardest | LogSumExp
