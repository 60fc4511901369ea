"""The ladder loss: the more relevant of two candidates should score higher, by a margin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.objectives.base import Objective, Reduction
from visavis.objectives.pairs import NEVER, Pairs, pairs_of
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Ladder(Objective):
    r"""Ladder loss: a triplet loss, plus a hinge loss (a rung) between each level of relevance and those below.

    Formula: ``sum_l beta_l L_l``, both directions. L_1 is the triplet loss with ``margins[0]``, a term for each positive pair.
    Rung l >= 2, once for each query: ``sum [margins[l-1] - s_iu + s_id]_+`` over u in the level that begins at
    ``thresholds[l-2]`` (R >= it, and below the one before) and d in all levels below (R < it), R being ``targets.relevance``;
    positives are in no level. ``sampling="hard"``: of each anchor and rung only the ``pairs`` largest hinges, by default one: the
    least similar u with the most similar d. "sum": all, by sorting and running sums, O(Q C log C) time and O(Q C) memory.
    ``cumulative``: rung l is ``[margins[0] + ... + margins[l-1] - s_ip + s_id]_+`` for each positive pair instead.
    dL/ds is beta_l at each d and -beta_l at each u (or p) of an open hinge: middle levels are both pushed and pulled.
    Advice: where the order of partly relevant candidates matters too; train with GradedSupervision.
    Source: Zhou et al., Ladder loss (2020), eqs. 5 to 8.
    Special cases: one level, or betas (1, 0, ...), is TripletHN, and Triplet with "sum". An empty level has no hinge.
    Differs from: the printed eq. 8, whose margin of rung 2 is that of rung 1; eq. 7 and the code say otherwise. The released code,
    ``semantics="reference"``: u is of all levels R >= threshold, the pair itself too; candidates outside a set enter its minimum with
    a similarity of 1 and its maximum with 0, so that an empty level has a hinge; beta_1 is 1 whatever is given.
    """

    reads: ClassVar[tuple[str, ...]] = ("relevance",)

    margins: tuple[float, ...] = (0.2, 0.01)
    thresholds: tuple[float, ...] = (0.63,)
    betas: tuple[float, ...] = (1.0, 0.25)
    sampling: Literal["hard", "sum"] = "hard"
    pairs: int = 1
    cumulative: bool = False
    semantics: Literal["paper", "reference"] = "paper"
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = len(self.margins)
        require(levels > 0, self, "margins", "one for each level, at least one")
        require(len(self.betas) == levels, self, "betas", f"as many as margins, {levels}")
        require(len(self.thresholds) == levels - 1, self, "thresholds", f"one fewer than margins, {levels - 1}")
        require(all(a > b for a, b in pairwise(self.thresholds)), self, "thresholds", "each below the one before")
        require(self.pairs > 0, self, "pairs", "a number above 0")
        require(self.sampling == "hard" or self.pairs == 1, self, "pairs", "1 with sampling='sum', which takes all")
        if self.semantics == "reference":
            require(self.sampling == "hard", self, "sampling", "'hard' with semantics='reference'")
            require(self.pairs == 1, self, "pairs", "1 with semantics='reference'")

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs, paper = pairs_of(scores, targets), self.semantics == "paper"
        first = self.below_pairs(self.margins[0], pairs.negatives(), pairs, targets)
        terms = self.betas[0] * first if paper else first
        if not self.thresholds:
            return terms
        rungs = scores.new_zeros(len(scores))
        for rung, (upper, lower) in enumerate(self.levels(targets), start=1):
            below = scores.masked_fill(~lower, NEVER if paper else 0.0)
            if self.cumulative:
                terms = terms + self.betas[rung] * self.below_pairs(sum(self.margins[: rung + 1]), below, pairs, targets)
            else:
                rungs = rungs + self.betas[rung] * self.below_level(self.margins[rung], below, upper, scores)
        if self.cumulative:
            return terms
        number = targets.positive.sum(-1)  # the rungs of a query are shared among its pairs; without a pair they are a term of their own
        return torch.cat([terms + (rungs / number.clamp(min=1))[pairs.query], rungs[number == 0]])

    def levels(self, targets: Targets) -> Iterator[tuple[Tensor, Tensor]]:
        """For each rung from the second on, which candidates should score above which others: two bool ``[Q, C]``."""
        relevance = targets.pairwise("relevance", "Ladder")
        paper = self.semantics == "paper"
        member = targets.negative if paper else targets.negative | targets.positive
        end = -NEVER
        for threshold in self.thresholds:
            yield member & (relevance >= threshold) & (relevance < end), member & (relevance < threshold)
            end = threshold if paper else end

    def below_pairs(self, margin: float, below: Tensor, pairs: Pairs, targets: Targets) -> Tensor:
        """For each positive pair, the sum of its hinges against the scores ``below [Q, C]``: ``[P]``."""
        if self.sampling == "sum":
            return hinge_sums(margin + below, pairs.scores)[targets.positive]
        return (margin + largest(below, self.pairs)[pairs.query] - pairs.positive[:, None]).relu().sum(-1)

    def below_level(self, margin: float, below: Tensor, upper: Tensor, scores: Tensor) -> Tensor:
        """For each query, the sum of the hinges of the members of ``upper`` against the scores ``below [Q, C]``: ``[Q]``."""
        if self.sampling == "sum":
            return hinge_sums(margin + below, scores).masked_fill(~upper, 0.0).sum(-1)
        above = scores.masked_fill(~upper, -NEVER if self.semantics == "paper" else 1.0)
        return (margin + largest_gaps(below, above, self.pairs)).relu().sum(-1)


def largest(values: Tensor, number: int) -> Tensor:
    """The largest values of each row, in descending order: ``[Q, C] -> [Q, number]``, or all where there are fewer."""
    return values.max(-1, keepdim=True).values if number == 1 else values.topk(min(number, values.shape[-1])).values


def largest_gaps(below: Tensor, above: Tensor, number: int) -> Tensor:
    """The largest ``below_j - above_i`` of each row ``[Q, number]``; only ranks with i j <= number can be among them."""
    closest, furthest = largest(below, number), -largest(-above, number)
    rank = torch.arange(1, closest.shape[1] + 1, device=below.device)
    i, j = (rank[:, None] * rank <= number).nonzero(as_tuple=True)
    return largest(closest[:, j] - furthest[:, i], number)


def hinge_sums(below: Tensor, above: Tensor) -> Tensor:
    """``sum_j [below_j - above_i]_+`` for every i of a row, by running sums: ``[Q, C], [Q, C] -> [Q, C]``; -inf adds nothing.

    >>> hinge_sums(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[0.0, 1.5, 9.0]]))
    tensor([[6., 2., 0.]])
    """
    falling = below.sort(-1, descending=True).values
    number = torch.searchsorted(-falling.detach(), -above.detach().contiguous())  # of those strictly above
    totals = torch.nn.functional.pad(falling.masked_fill(falling == NEVER, 0.0).cumsum(-1), (1, 0))
    return totals.gather(-1, number) - number * above
