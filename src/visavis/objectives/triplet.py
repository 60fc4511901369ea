"""Triplet losses: hinges on the difference between the scores of a negative and a positive, also for noisy pairs and offline negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.objectives.base import Objective, Reduction, SummaryObjective
from visavis.objectives.pairs import NEG_INF, HardestNegative, find_positive_pairs, select_by_query
from visavis.spec import PositiveFloat, PositiveInt
from visavis.targets import Targets, missing_annotation


@dataclass(frozen=True, kw_only=True)
class Triplet(Objective):
    r"""Triplet loss summed over all negatives: a hinge for each negative within the margin.

    Args:
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``sum_p sum_j [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p) and negatives j, both directions.

    Gradient:
        dL/ds_ij is 1 where the hinge is open (strictly above 0), dL/ds_ip is minus their number.

    Advice:
        As a stable start before TripletHN. Alone, most of its gradient goes to many easy violations.

    Source:
        Faghri et al., VSE++ (2018), eq. 5. Unified loss, eq. 1. COCOS, eq. 3a.

    Special cases:
        Equals TripletHN where each query has one negative. Reads ``query_margin`` (adaptive margins).

    Differs from:
        The released codes, which take other captions of the same image as negatives. Do so with Targets.paired.
    """

    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        margin = targets.query_margin_or(self.margin, "Triplet")
        if isinstance(margin, Tensor):
            margin = margin[pairs.query, None]
        return (margin + pairs.gap).relu().sum(-1)


@dataclass(frozen=True, kw_only=True)
class TripletHN(SummaryObjective):
    r"""Triplet loss with the hardest negative of the batch: only the best-scoring wrong candidate is pushed.

    Args:
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``sum_p [margin + max_j s_ij - s_ip]_+`` over positive pairs, both directions.

    Gradient:
        dL/ds is 1 at the hardest negative and -1 at the positive where the hinge is open, else 0.

    Advice:
        The usual choice of the VSE++ family. From random weights it needs a small learning rate, a warm-up or large
        batches, else it collapses.

    Source:
        Faghri et al., VSE++ (2018), eq. 6. Unified loss, eq. 1. With ``query_margin``: its eq. 27.

    Special cases:
        The limit of Unified for gamma -> infinity. COCOS calls it "semi-hard". It is the hardest.

    Differs from:
        The released codes, which take other captions of the same image as negatives. Do so with Targets.paired.
    """

    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.2
    reduction: Reduction = "sum"

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        margin = select_by_query(targets.query_margin_or(self.margin, "TripletHN"), query)
        return (margin + negatives - positive).relu()


@dataclass(frozen=True, kw_only=True)
class TripletTopK(Objective):
    r"""Triplet loss with the k hardest negatives of the batch: between TripletHN and Triplet.

    Args:
        k: Number of hardest negatives.
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``sum_p sum_{j in H_i} [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p), H_i the ``k`` negatives of i with
        the highest scores, or all where there are fewer. Both directions. dL/ds_ij is 1 where the hinge of one of them is
        open, dL/ds_ip minus their number.

    Advice:
        Where TripletHN collapses or hangs on false negatives, and Triplet stops learning: k of 4 to 16.

    Source:
        This package, between the two sums of Faghri et al., VSE++ (2018), eqs. 5 and 6.

    Special cases:
        TripletHN for k = 1, Triplet from the number of negatives on. Reads ``query_margin`` (adaptive margins).
    """

    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    k: PositiveInt = 8
    margin: float = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        hardest = pairs.negatives().topk(min(self.k, scores.shape[1])).values
        margin = select_by_query(targets.query_margin_or(self.margin, "TripletTopK"), pairs.query)
        if isinstance(margin, Tensor):
            margin = margin[:, None]
        return (margin + hardest[pairs.query] - pairs.positive[:, None]).relu().sum(-1)


@dataclass(frozen=True, kw_only=True)
class MaxMargin(Objective):
    r"""Bidirectional max-margin ranking loss: the mean hinge over all negatives.

    Args:
        margin: Margin.
        fix_norm: Whether to leave out the hinge of the pair with itself.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``(1 / N_i) sum_j [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p) and the N_i negatives of i. For B pairs
        the mean over 2 B (B - 1) hinges. With ``fix_norm=False`` the pair's own hinge, which is the margin, is averaged in:
        2 B^2 hinges. dL/ds_ij is 1 / N_i where the hinge is open, dL/ds_ip minus their sum, each over twice the number of
        pairs.

    Advice:
        To compare with the video papers. All open hinges weigh the same, so the gradient becomes small once most are
        closed.

    Source:
        Liu et al., Collaborative Experts (2019), its margin on MSR-VTT. Gabeur et al., MMT (2020), with margin 0.05.

    Special cases:
        Triplet divided by the number of its hinges. Reads ``query_margin`` (adaptive margins).

    Memory:
        ``[pairs x candidates]``.

    Differs from:
        The released code at a single pair: there ``fix_norm`` is 0 / 0, here 0.
    """

    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.0938
    fix_norm: bool = True
    reduction: Reduction = "half_mean"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        margin = select_by_query(targets.query_margin_or(self.margin, "MaxMargin"), pairs.query)
        total = (pairs.gap.T + margin).relu().sum(0)
        number = pairs.negative.sum(-1)[pairs.query]
        if self.fix_norm:
            return total / number.clamp(min=1)
        own = (torch.zeros_like(total) + margin).relu()
        return (total + own) / (number + 1)


@dataclass(frozen=True, kw_only=True)
class NCR(SummaryObjective):
    r"""Triplet loss of noisy correspondence rectifying (NCR): the hardest negative, with a soft margin for each pair.

    Args:
        margin: Margin of the warm-up without adaptive margins.
        warmup: Whether to average over all negatives.
        semantics: Whether to follow the paper or the released code.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``sum_p [max_j (m_ij + s_ij) - s_ip]_+`` over positive pairs p = (i, p), both directions. m_ij = m_i, the margin of
        the anchor (``query_margin``), or a margin of its own for each cell (``pair_margin``). With ``warmup`` ``sum_p (1 /
        n_i) sum_j [m_ij + s_ij - s_ip]_+`` over the n_i negatives and the pair itself, whose hinge is 0.

    Gradient:
        dL/ds is 1 at the hardest negative and -1 at the positive where the hinge is open, else 0. In the warm-up 1 / n_i.

    Advice:
        Where many captions are paired with wrong images. Train with NoisySupervision.

    Source:
        Huang et al., NCR (2021). Unified loss, eq. 27.

    Special cases:
        TripletHN where all margins are equal, and TripletHN with ``query_margin``. ``semantics="paper"`` reads the margins
        of anchors, or ``pair_margin`` where only these are given. "reference" reads ``pair_margin``. ``margin`` is used in
        the warm-up only, where neither is given.

    Memory:
        ``[pairs x candidates]`` with ``warmup``.

    Differs from:
        The released code, which takes the image's margin in both directions, also for a text as the anchor:
        ``semantics="reference"`` with ``pair_margin = margins[:, None].expand(B, B)``.
    """

    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin", "pair_margin")

    margin: float = 0.2
    warmup: bool = False
    semantics: Literal["paper", "reference"] = "paper"
    reduction: Reduction = "sum"

    def summary(self, targets: Targets) -> HardestNegative | None:
        """Return the hardest negative if margins belong to anchors. A margin per pair may change which one is the hardest."""
        return HardestNegative() if self.semantics == "paper" and not self.warmup and targets.query_margin is not None else None

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        return (select_by_query(targets.query_margin_or(self.margin, "NCR"), query) + negatives - positive).relu()

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        raised = pairs._replace(scores=scores + self._margins(targets))
        if not self.warmup:
            return (raised.hardest - pairs.positive).relu()
        return raised.gap.relu().sum(-1) / (1 + pairs.negative.sum(-1)[pairs.query])

    def _margins(self, targets: Targets) -> Tensor | float:
        """Margin of each pair: ``[Q, C]``, ``[Q, 1]`` or one number."""
        anchor = targets.query_margin_or(self.margin, "NCR") if self.semantics == "paper" else self.margin
        if isinstance(anchor, Tensor):
            return anchor[:, None]
        if targets.pair_margin is not None:
            return targets.pairwise("pair_margin", "NCR")
        if self.warmup:
            return anchor
        raise missing_annotation("NCR", *(("query_margin", "pair_margin") if self.semantics == "paper" else ("pair_margin",)))


@dataclass(frozen=True, kw_only=True)
class AOQ(SummaryObjective):
    r"""Adaptive offline quintuplet loss: a triplet loss weighted by how hard its negative is compared with the offline ones, plus their hinges.

    Args:
        margin: Margin of online negatives.
        offline_margin: Margin of offline negatives.
        alpha: Temperature of the weight.
        beta: Offset of the weight.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        ``sum_p w_i [margin + max_j s_ij - s_ip]_+ + sum_k [offline_margin + o_ik - s_ip]_+`` over positive pairs, both
        directions, with ``w_i = beta - (o_i0 - max_j s_ij) / alpha``. o ``[Q, K]`` are ``query_offline_scores``: column 0,
        the anchor's score with its offline negative, enters the weight. Every column has a hinge.

    Gradient:
        dL/ds_ij = w_i + hinge / alpha at the hardest negative and dL/ds_ip = -w_i where the online hinge is open, less 1
        for each open offline hinge. dL/do_ik is 1 where its hinge is open, less hinge / alpha for column 0.

    Advice:
        For a second round of training, once batches contain no hard negatives anymore. Train with
        OfflineNegativeSupervision.

    Source:
        Chen et al., AOQ (2020), and its code.

    Special cases:
        TripletHN times w where w is constant and no offline hinge is open. A query without negatives keeps its offline
        hinges. Reads ``query_margin`` (adaptive margins).

    Differs from:
        nothing. As in the released code the weight has a gradient of its own and may be negative.
    """

    used_annotations: ClassVar[tuple[str, ...]] = ("query_offline_scores", "query_margin")

    margin: float = 0.2
    offline_margin: float = 0.0
    alpha: PositiveFloat = 0.3
    beta: float = 1.5
    reduction: Reduction = "sum"

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        if targets.query_offline_scores is None or not targets.query_offline_scores.shape[1]:
            raise missing_annotation("AOQ", "query_offline_scores")
        offline = targets.query_offline_scores[query]
        online = (select_by_query(targets.query_margin_or(self.margin, "AOQ"), query) + negatives - positive).relu()
        weight = self.beta - (offline[:, 0] - negatives.masked_fill(negatives == NEG_INF, 0.0)) / self.alpha
        return weight * online + (self.offline_margin + offline - positive[:, None]).relu().sum(-1)
