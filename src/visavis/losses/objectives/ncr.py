"""NCR: triplet loss for noisy pairs, with a soft margin for each pair that grows with its trust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from visavis.losses.objective import Reduction, SummaryObjective
from visavis.losses.pair_summaries import HardestNegative, anchor_margins, find_positive_pairs
from visavis.losses.targets import Targets, missing_annotation


@dataclass(frozen=True, kw_only=True)
class NCR(SummaryObjective):
    r"""Triplet loss of noisy correspondence rectifying (NCR): the hardest negative, with a soft margin for each pair.

    Args:
        margin: Margin of the warm-up without adaptive margins.
        warmup: Whether to average over all negatives.
        semantics: Whether to follow the paper or the released code.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p [max_j (m_ij + s_ij) - s_ip]_+$ over positive pairs $p = (i, p)$, both directions. $m_ij = m_i$, the margin of
        the anchor (``query_margin``), or a margin of its own for each pair (``pair_margin``). With ``warmup``
        $sum_p (1 / n_i) sum_j [m_ij + s_ij - s_ip]_+$ over the $n_i - 1$ negatives and the pair itself, whose hinge is 0.

    Gradient:
        $dL/ds$ is 1 at the hardest negative and -1 at the positive where the hinge is open, else 0. In the warm-up $1 / n_i$.

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

    scores_held: ClassVar[float] = 4.0
    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin", "pair_margin")

    margin: float = 0.2
    warmup: bool = False
    semantics: Literal["paper", "reference"] = "paper"
    reduction: Reduction = "sum"

    def summary(self, targets: Targets) -> HardestNegative | None:
        """Return the hardest negative if margins belong to anchors. A margin per pair may change
        which one is the hardest.
        """
        return (
            HardestNegative()
            if self.semantics == "paper" and not self.warmup and targets.query_margin is not None
            else None
        )

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        return (anchor_margins(self.margin, query, targets, "NCR") + negatives - positive).relu()

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        with_margins = pairs._replace(scores=scores + self._margins(targets))
        if not self.warmup:
            return (with_margins.hardest - pairs.positive).relu()
        return with_margins.gap.relu().sum(-1) / (1 + pairs.num_negatives[pairs.query])

    def _margins(self, targets: Targets) -> Tensor | float:
        """Margin of each pair: ``[Q, C]``, ``[Q, 1]`` or one number."""
        anchor = (
            targets.query_margin_or(self.margin, "NCR")
            if self.semantics == "paper"
            else self.margin
        )
        if isinstance(anchor, Tensor):
            return anchor[:, None]
        if targets.pair_margin is not None:
            return targets.pairwise("pair_margin", "NCR")
        if self.warmup:
            return anchor
        raise missing_annotation(
            "NCR",
            *(("query_margin", "pair_margin") if self.semantics == "paper" else ("pair_margin",)),
        )
