"""Objectives on graded relevance: the Ladder loss, and VLC with a divergence that orders the
negatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.core.fields import Auto, NonNegativeFloat, PositiveFloat, PositiveInt, require_field
from visavis.losses.auto_scale import number
from visavis.losses.objective import Objective, Reduction
from visavis.losses.objectives.contrastive import VLC
from visavis.losses.pair_summaries import (
    NEG_INF,
    NegativeLogSumExp,
    PositivePairs,
    find_positive_pairs,
)
from visavis.losses.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Ladder(Objective):
    r"""Ladder loss: a triplet loss, plus a hinge loss between each level of relevance and those below.

    Args:
        margins: Margin of each level. The first margin belongs to the triplet loss.
        thresholds: Lower bound of relevance of each level, descending.
        betas: Weight of each level.
        sampling: Which hinges of a level count.
        pairs: Number of hinges per anchor and level with "hard" sampling.
        cumulative: Whether levels compare with the positive.
        semantics: Whether to follow the paper or the released code.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_l beta_l L_l$, both directions. $L_1$ is the triplet loss with ``margins[0]``, a term for each positive pair.
        Level $l >= 2$, once for each query: $sum_u sum_d [m_l - s_iu + s_id]_+$, over u in the level that begins at
        ``thresholds[l-2]`` ($R$ is at least this, and below the one before) and d in all levels below, where
        $m_l$ is ``margins[l-1]`` and $R$ is ``targets.relevance``. Positives are in no level. ``sampling="hard"``: of each anchor and level only the ``pairs``
        largest hinges, by default one: the least similar u with the most similar d. "sum": all, by sorting and prefix
        sums, $O(Q C log C)$ time and $O(Q C)$ memory. ``cumulative``: level l is $[m_1 + ... + m_l - s_ip + s_id]_+$
        for each positive pair instead.

    Gradient:
        $dL/ds$ is $beta_l$ at each d and $-beta_l$ at each u (or p) of an open hinge: middle levels are both pushed and pulled.

    Advice:
        Where the order of partly relevant candidates matters too. Train with GradedSupervision.

    Source:
        Zhou et al., Ladder loss (2020), eqs. 5 to 8.

    Special cases:
        One level, or betas (1, 0, ...), is TripletHN, and Triplet with "sum". An empty level has no hinge.

    Differs from:
        The printed eq. 8, which uses the margin of level 1 for level 2, unlike eq. 7 and the code. The released code,
        ``semantics="reference"``: u is of all levels R >= threshold, the pair itself too. Candidates outside a set enter
        its minimum with a similarity of 1 and its maximum with 0, so that an empty level has a hinge. $beta_1$ is 1 whatever
        is given.
    """

    used_annotations: ClassVar[tuple[str, ...]] = ("relevance",)

    margins: tuple[float, ...] = (0.2, 0.01)
    thresholds: tuple[float, ...] = (0.63,)
    betas: tuple[float, ...] = (1.0, 0.25)
    sampling: Literal["hard", "sum"] = "hard"
    pairs: PositiveInt = 1
    cumulative: bool = False
    semantics: Literal["paper", "reference"] = "paper"
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = len(self.margins)
        require_field(levels > 0, self, "margins", "one for each level, at least one")
        require_field(len(self.betas) == levels, self, "betas", f"as many as margins, {levels}")
        require_field(
            len(self.thresholds) == levels - 1,
            self,
            "thresholds",
            f"one fewer than margins, {levels - 1}",
        )
        require_field(
            all(a > b for a, b in pairwise(self.thresholds)),
            self,
            "thresholds",
            "each below the one before",
        )
        require_field(
            self.sampling == "hard" or self.pairs == 1,
            self,
            "pairs",
            "1 with sampling='sum', which takes all",
        )
        if self.semantics == "reference":
            require_field(
                self.sampling == "hard", self, "sampling", "'hard' with semantics='reference'"
            )
            require_field(self.pairs == 1, self, "pairs", "1 with semantics='reference'")

    @property
    def scores_held(self) -> float:  # type: ignore[override]
        levels = len(self.margins)
        return 6.0 + 0.5 * levels if self.sampling == "hard" else 8.0 + 6.0 * levels

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        follows_paper = self.semantics == "paper"
        triplet_hinges = self._positive_hinges(self.margins[0], pairs.negatives(), pairs, targets)
        terms = self.betas[0] * triplet_hinges if follows_paper else triplet_hinges
        if not self.thresholds:
            return terms
        level_sums = scores.new_zeros(len(scores))
        for level, (upper, lower) in enumerate(self._relevance_levels(targets), start=1):
            below = scores.masked_fill(~lower, NEG_INF if follows_paper else 0.0)
            if self.cumulative:
                terms = terms + self.betas[level] * self._positive_hinges(
                    sum(self.margins[: level + 1]), below, pairs, targets
                )
            else:
                level_sums = level_sums + self.betas[level] * self._level_hinges(
                    self.margins[level], below, upper, scores
                )
        if self.cumulative:
            return terms
        # The levels of a query are divided among its positive pairs.
        num_positives = pairs.num_positives
        return torch.cat(
            [
                terms + (level_sums / num_positives.clamp(min=1))[pairs.query],
                level_sums[num_positives == 0],
            ]
        )

    def _relevance_levels(self, targets: Targets) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level from the second on, which candidates should score above which others: two
        bool ``[Q, C]``.
        """
        relevance = targets.pairwise("relevance", "Ladder")
        follows_paper = self.semantics == "paper"
        is_member = targets.negative if follows_paper else targets.negative | targets.positive
        upper_bound = -NEG_INF
        for threshold in self.thresholds:
            yield (
                is_member & (relevance >= threshold) & (relevance < upper_bound),
                is_member & (relevance < threshold),
            )
            upper_bound = threshold if follows_paper else upper_bound

    def _positive_hinges(
        self, margin: float, below: Tensor, pairs: PositivePairs, targets: Targets
    ) -> Tensor:
        """For each positive pair, the sum of its hinges against the scores ``below [Q, C]``:
        ``[P]``.
        """
        if self.sampling == "sum":
            return _hinge_sums(margin + below, pairs.scores)[targets.positive]
        return (
            (margin + _top_values(below, self.pairs)[pairs.query] - pairs.positive[:, None])
            .relu()
            .sum(-1)
        )

    def _level_hinges(self, margin: float, below: Tensor, upper: Tensor, scores: Tensor) -> Tensor:
        """For each query, the sum of the hinges of the members of ``upper`` against the scores
        ``below [Q, C]``: ``[Q]``.
        """
        if self.sampling == "sum":
            return _hinge_sums(margin + below, scores).masked_fill(~upper, 0.0).sum(-1)
        above = scores.masked_fill(~upper, -NEG_INF if self.semantics == "paper" else 1.0)
        # The largest gaps `below_j - above_i` of each row. Only ranks with i j <= pairs can be among
        # them.
        highest_below = _top_values(below, self.pairs)
        lowest_above = -_top_values(-above, self.pairs)
        rank = torch.arange(1, highest_below.shape[1] + 1, device=below.device)
        i, j = (rank[:, None] * rank <= self.pairs).nonzero(as_tuple=True)
        gaps = _top_values(highest_below[:, j] - lowest_above[:, i], self.pairs)
        return (margin + gaps).relu().sum(-1)


def _top_values(values: Tensor, count: int) -> Tensor:
    """The largest values of each row, in descending order: ``[Q, C] -> [Q, count]``, or all where
    there are fewer.
    """
    return (
        values.max(-1, keepdim=True).values
        if count == 1
        else values.topk(min(count, values.shape[-1])).values
    )


def _hinge_sums(below: Tensor, above: Tensor) -> Tensor:
    """$sum_j [below_j - above_i]_+$ for every i of a row, by prefix sums: ``[Q, C], [Q, C] -> [Q,
    C]``. -inf adds nothing.
    """
    descending = below.sort(-1, descending=True).values
    num_strictly_above = torch.searchsorted(-descending.detach(), -above.detach().contiguous())
    prefix_sums = torch.nn.functional.pad(
        descending.masked_fill(descending == NEG_INF, 0.0).cumsum(-1), (1, 0)
    )
    return prefix_sums.gather(-1, num_strictly_above) - num_strictly_above * above


@dataclass(frozen=True, kw_only=True)
class GradedVLC(VLC):
    r"""VLC plus a KL divergence that orders the negatives of a query by graded relevance.

    Args:
        gamma: Scale of the contrastive part.
        reduction: How terms become a scalar, see `Objective`.
        beta: Weight of the divergence.
        tau: Temperature of the relevance.
        graded_gamma: Scale of the scores in the divergence.

    Formula:
        $sum_p log(1 + sum_j e^(gamma (s_ij - s_ip)))$ over positive pairs, and once for each query that has one $beta
        sum_j p_ij log(p_ij / q_ij)$ over its negatives, both directions. $p_ij$ is the softmax of $R_ij / tau$, $q_ij$ the
        softmax of $graded_gamma s_ij$, where $R$ is ``targets.relevance``.

    Gradient:
        $dL/ds_ij$ is that of VLC plus $beta graded_gamma (q_ij - p_ij)$: a negative that scores higher than its relevance
        is pushed, one that scores lower is pulled.

    Advice:
        As Ladder, without thresholds. Set tau to about the spread of the highest relevance values. A larger beta favors order, a smaller
        one R@1.

    Source:
        This package. The second part is the top-one form of Cao et al., ListNet (2007), taken over the negatives.

    Special cases:
        Beta 0 is VLC. The second part is 0 where $R_ij / tau - graded_gamma s_ij$ is the same for all negatives.

    Differs from:
        Ladder, which sets margins between levels of relevance. Here every two negatives are ordered by their own relevance.
    """

    scores_held: ClassVar[float] = 9.0
    used_annotations: ClassVar[tuple[str, ...]] = ("relevance",)

    gamma: PositiveFloat | Auto = 40.0
    reduction: Reduction = "mean"
    beta: NonNegativeFloat = 1.0
    tau: PositiveFloat = 0.15
    graded_gamma: PositiveFloat = 20.0

    def summary(self, targets: Targets) -> NegativeLogSumExp | None:
        return super().summary(targets) if self.beta == 0 else None

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        terms = self.pair_terms(
            pairs.log_sum_exp(number(self.gamma)), pairs.positive, pairs.query, targets
        )
        # The divergence of a query is divided among its positive pairs.
        weight_per_pair = self.beta / pairs.num_positives.clamp(min=1)
        return terms + (weight_per_pair * self._divergence(pairs, targets))[pairs.query]

    def _divergence(self, pairs: PositivePairs, targets: Targets) -> Tensor:
        """$sum_j p_ij log(p_ij / q_ij)$ over the negatives of each query, shape ``[Q]``, 0 without
        negatives.
        """
        negative = pairs.negative
        # Without negatives nothing is masked, so that the sum is 0 and not NaN.
        is_masked = ~negative & negative.any(-1, keepdim=True)
        log_p, log_q = (
            logits.masked_fill(is_masked, NEG_INF).log_softmax(-1).masked_fill(~negative, 0.0)
            for logits in (
                targets.pairwise("relevance", "GradedVLC") / self.tau,
                self.graded_gamma * pairs.scores,
            )
        )
        return (log_p.exp() * (log_p - log_q)).masked_fill(~negative, 0.0).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Distillation(Objective):
    r"""KL divergence between two softmax distributions: of a teacher's scores, and of the model's own.

    Args:
        tau: Temperature of the scores.
        teacher_tau: Temperature of the teacher's scores.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_j p_ij log(p_ij / q_ij)$ over all candidates j, both directions. $p_ij$ is the softmax of $R_ij /
        teacher_tau$, $q_ij$ the softmax of $s_ij / tau$. $R$ is ``targets.relevance``.

    Gradient:
        $dL/ds_ij = (q_ij - p_ij) / tau$. One term for each query. Pairs play no role.

    Advice:
        To train a small model on the scores of a large one, by ``DistillationSupervision``. Set both temperatures to the one
        of the teacher's own objective, $1 / gamma$.

    Source:
        Hinton et al., Distilling the Knowledge in a Neural Network (2015), with the candidates of a batch as classes, as in
        Wu et al., TinyCLIP (2023), affinity mimicking.

    Special cases:
        0 where $s_ij / tau - R_ij / teacher_tau$ is the same for all candidates. InfoNCE where ``teacher_tau`` approaches 0
        and each query has one positive, with the highest $R$.

    Differs from:
        GradedVLC, which compares the negatives only, next to a loss of the pairs.
    """

    scores_held: ClassVar[float] = 8.0
    used_annotations: ClassVar[tuple[str, ...]] = ("relevance",)

    tau: PositiveFloat = 0.025
    teacher_tau: PositiveFloat = 0.025
    reduction: Reduction = "half_mean"

    @property
    def gradient_scale(self) -> float:
        return 1 / self.tau

    def with_scale(self, scale: float) -> Distillation:
        return replace(self, tau=round(1 / scale, 6))

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        return self._divergence(*self._logits(scores, targets))

    def both_ways(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        # A teacher may be costly, so both directions share its scores.
        logits, teacher_logits = self._logits(scores, targets)
        return self._divergence(logits, teacher_logits), self._divergence(
            logits.T, teacher_logits.T
        )

    def _logits(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Scores and the teacher's scores at their temperatures, so low where pairs are ignored
        that their softmax is 0.
        """
        teacher_scores = targets.pairwise("relevance", "Distillation").to(scores.dtype)
        logits = scores / self.tau
        teacher_logits = teacher_scores / self.teacher_tau
        if targets.ignore is None:
            return logits, teacher_logits
        # Not -inf, whose differences are NaN.
        ignored = targets.pairwise("ignore").bool()
        lowest = torch.finfo(scores.dtype).min / 4
        return logits.masked_fill(ignored, lowest), teacher_logits.masked_fill(ignored, lowest)

    @staticmethod
    def _divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """$sum_j p_ij log(p_ij / q_ij)$ of each query, shape ``[Q]``."""
        log_p, log_q = (part.log_softmax(-1) for part in (teacher_logits, logits))
        return (log_p.exp() * (log_p - log_q)).sum(-1)
