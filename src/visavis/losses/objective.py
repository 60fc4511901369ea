"""Interface of objectives: pure functions of scores and targets, defined for one direction.

An objective reads a score matrix and targets only: no model, device or configuration. Objectives
are frozen keyword-only dataclasses. They are hashable, and ``visavis.parse`` reads their ``repr``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from visavis.core.errors import ShapeError, SpecError
from visavis.core.fields import (
    EXPECTED_PARAMETER,
    is_valid_parameter,
    require_field,
    validate_fields,
)
from visavis.losses.auto_scale import SCALE_TIMES_SPREAD, auto_value, is_auto
from visavis.losses.logits import promote_half
from visavis.losses.pair_summaries import (
    HardestNegative,
    NegativeSummary,
    PositivePairs,
    find_positive_pairs,
)
from visavis.losses.targets import Targets

Reduction = Literal["sum", "mean", "half_mean"]
MAX_HALF_SCALE = 32752.0
"""Maximum scale of float16 scores, half of the largest number of float16."""


class Objective(ABC):
    """An objective of cross-modal retrieval. ``objective(scores, targets)`` is a scalar over both
    directions.

    ``scores [Q, C]`` has one row per query and one column per candidate, and ``targets`` has the
    same shape. ``one_way`` returns the terms of one direction. Reductions: "sum" adds all terms of
    both directions. "mean" adds the means of the two directions. "half_mean" is half of that. Each
    default is that of the paper.

    Attributes:
        integrable: False where the gradient is prescribed and is not that of any loss.
        needs_pair_matrix: Whether memory is ``[pairs x candidates]`` instead of ``[queries x
            candidates]``.
        used_annotations: Fields of `Targets` next to the ids that change the value, by the names of
            queries (``query_margin`` stands for ``candidate_margin`` too).
        reduction: How terms become a scalar.
        scores_held: Peak memory of the terms of one direction, forward and backward, as a multiple
            of the memory of the scores. PairLoss chooses the size of blocks by it. The default is
            more than that of most objectives.
        scale_times_spread: Product of the scale and the spread of the negatives, at which a scale
            of "auto" is set.
    """

    scale_times_spread: ClassVar[float] = SCALE_TIMES_SPREAD
    scores_held: ClassVar[float] = 12.0
    integrable: ClassVar[bool] = True
    needs_pair_matrix: ClassVar[bool] = False
    used_annotations: ClassVar[tuple[str, ...]] = ()

    reduction: Reduction

    def __post_init__(self) -> None:
        validate_fields(self)
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            entries = value if isinstance(value, tuple) else (value,)
            is_valid = all(
                is_valid_parameter(entry) for entry in entries if isinstance(entry, float)
            )
            require_field(is_valid, self, field.name, EXPECTED_PARAMETER)

    @property
    def auto_fields(self) -> tuple[str, ...]:
        """Names of the fields that are "auto": gamma, scale, tau or margin."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
        return tuple(name for name in names if is_auto(name, getattr(self, name)))

    def at_spread(self, spread: float) -> Self:
        """Replace each "auto" by its value for a spread of the negatives.

        Gamma and scale become ``scale_times_spread / spread``, tau its inverse, and a margin 1.5
        spreads. Values are rounded to two digits.

        Args:
            spread: Standard deviation of the scores of a query's negatives, see
                `negative_spread`, > 0.

        Returns:
            The objective, the same one if no field is "auto".

        Raises:
            SpecError: If the spread is not a positive number.
        """
        names = self.auto_fields
        if not names:
            return self
        if not 0 < spread < math.inf:
            raise SpecError(
                f"{self!r}: expected a spread of the negatives > 0 for {' and '.join(names)}, got "
                f"{spread:g}. Set a number, or use larger batches."
            )
        values = {name: auto_value(name, self.scale_times_spread, spread) for name in names}
        return replace(self, **values)  # type: ignore[type-var]

    @property
    def needs_positive_scores(self) -> bool:
        """Whether the objective reads the scores of other queries' positives."""
        return False

    @property
    def gradient_scale(self) -> float:
        """Scale of $|dL/ds|$ ($gamma$, $1 / tau$, else 1). Gradients divided by it can be compared
        between objectives.
        """
        return 1.0

    def with_scale(self, scale: float) -> Objective | None:
        """Make the same objective at another scale of the scores.

        Args:
            scale: 1 / temperature. It is rounded to six digits.

        Returns:
            The objective, or None for a fixed gamma or margin, whose meaning the scale would
            change.
        """
        return None

    def without_scale(self) -> Objective | None:
        """Make the same objective with a scale of 1, for scores that were already multiplied by a
        learnable one.

        Returns:
            The objective, or None as in `with_scale`.
        """
        return self.with_scale(1.0)

    def with_bias(self, bias: float) -> Objective | None:
        """Make the same objective with another bias, which it adds after the scale.

        Args:
            bias: The bias.

        Returns:
            The objective, or None if it has no bias.
        """
        return None

    def without_bias(self) -> Objective | None:
        """Make the same objective without its bias, for scores to which one is added after the
        scale.

        Returns:
            The objective, or None if it has no bias.
        """
        return self.with_bias(0.0)

    def summary(self, targets: Targets) -> NegativeSummary | None:
        """Return the single number per query that the objective needs about its negatives.

        Args:
            targets: The targets.

        Returns:
            The summary, or None if all scores of the negatives are needed with these targets.
        """
        return None

    @abstractmethod
    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        """Compute the terms of one direction, without reduction.

        Args:
            scores: Scores of shape ``[Q, C]``.
            targets: Targets of the same shape.

        Returns:
            One term per positive pair, shape ``[P]``, unless the class documents otherwise.
        """

    def __call__(self, scores: Tensor, targets: Targets) -> Tensor:
        """Compute the loss over both directions. Half precision is promoted to float32 here and
        nowhere else.

        Args:
            scores: Scores of shape ``[Q, C]``.
            targets: Targets of the same shape.

        Returns:
            A scalar.
        """
        scores, targets = self.prepare(scores, targets)
        if not scores.numel():
            return self.reduce(scores.flatten())
        return self.reduce(*self.both_ways(scores, targets))

    def both_ways(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Compute the terms of both directions of one score matrix. Override it where they share
        work.

        Args:
            scores: Prepared scores, not empty.
            targets: Prepared targets.

        Returns:
            Terms of rows as queries, and of columns as queries.
        """
        # A reduction of the rows of a transposed matrix takes four times as long.
        return self.one_way(scores, targets), self.one_way(scores.T.contiguous(), targets.T)

    def prepare(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Prepare the arguments of `terms`.

        Args:
            scores: Scores of shape ``[Q, C]``.
            targets: Targets of the same shape.

        Returns:
            Scores in float32 or wider, and targets on their device, with ``positive_scores`` if the
            objective reads them.

        Raises:
            ShapeError: If scores and targets do not match.
        """
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            given_type = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise ShapeError(
                "scores: expected a tensor of floating-point numbers, queries x candidates, got "
                f"{given_type}."
            )
        validate_targets(targets, scores.shape)
        if scores.dtype == torch.float16:
            validate_half_scale(self, self.gradient_scale)
        scores = promote_half(scores)
        return scores, add_positive_scores(self, scores, targets.to(scores.device))

    def terms(self, scores: Tensor, targets: Targets) -> Tensor:
        """Compute `one_way`, without terms for an empty score matrix.

        Args:
            scores: Prepared scores.
            targets: Prepared targets.

        Returns:
            Terms of one direction.
        """
        return self.one_way(scores, targets) if scores.numel() else scores.reshape(0)

    def reduce(self, *directions: Tensor) -> Tensor:
        """Reduce the terms of the directions to a scalar. A direction without terms adds 0.

        Args:
            *directions: Terms of one or two directions.

        Returns:
            A scalar.
        """
        sums = [terms.sum() for terms in directions]
        if self.reduction != "sum":
            sums = [
                total * self.term_weight(terms.shape[0])
                for total, terms in zip(sums, directions, strict=True)
            ]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def term_weight(self, count: int) -> float:
        """Return the weight of one term in the loss.

        Args:
            count: Number of terms of the direction.

        Returns:
            The weight.
        """
        return {"sum": 1.0, "mean": 1 / max(count, 1), "half_mean": 0.5 / max(count, 1)}[
            self.reduction
        ]


class SummaryObjective(Objective):
    """An objective that needs a single number about the negatives of a query, at least with some
    targets.

    ``summary`` returns this number, by default the hardest negative, and ``pair_terms`` computes
    the term of a positive pair from it. If the number does not suffice, ``summary`` returns None
    and ``row_terms`` computes the terms from all scores.
    """

    def summary(self, targets: Targets) -> NegativeSummary | None:
        return HardestNegative()

    @abstractmethod
    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        """Compute the term of each positive pair.

        Args:
            negatives: Summary of the negatives of the query of each pair, shape ``[P]``.
            positive: Score of each pair, shape ``[P]``.
            query: Row of each pair in the targets, shape ``[P]``.
            targets: The targets.

        Returns:
            Terms of shape ``[P]``.
        """

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        """Compute the terms of one direction with targets for which ``summary`` is None.

        Args:
            scores: Scores of shape ``[Q, C]``.
            targets: Targets of the same shape.

        Returns:
            Terms of one direction.

        Raises:
            NotImplementedError: If the objective always has a summary.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no summary with these targets and no row_terms."
        )

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        summary = self.summary(targets)
        if summary is None:
            return self.row_terms(scores, targets)
        pairs = find_positive_pairs(scores, targets)
        return self.pair_terms(summary.compute(pairs), pairs.positive, pairs.query, targets)


class PairwiseObjective(Objective):
    """An objective whose loss of a pair is the same in both directions. The term of a query with a
    positive is the sum over its pairs.

    So the losses of one block of scores serve both directions.
    """

    @abstractmethod
    def pair_losses(self, pairs: PositivePairs, targets: Targets) -> Tensor:
        """Compute the loss of each pair.

        Args:
            pairs: Positive pairs, with all scores.
            targets: The targets.

        Returns:
            Losses of shape ``[Q, C]``.
        """

    @abstractmethod
    def is_counted(self, num_positives: Tensor, num_negatives: Tensor) -> Tensor:
        """Decide whose pairs count. The others have a term of 0.

        Args:
            num_positives: Number of positives of each query, shape ``[Q]``.
            num_negatives: Number of negatives of each query, shape ``[Q]``.

        Returns:
            Whether the pairs of a query count, bool ``[Q]``.
        """

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        return self._query_terms(pairs, self.pair_losses(pairs, targets).sum(1))

    def both_ways(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        pairs = find_positive_pairs(scores, targets)
        losses = self.pair_losses(pairs, targets)
        return self._query_terms(pairs, losses.sum(1)), self._query_terms(pairs.T, losses.sum(0))

    def _query_terms(self, pairs: PositivePairs, sums: Tensor) -> Tensor:
        num_positives = pairs.num_positives
        is_counted = self.is_counted(num_positives, pairs.num_negatives)
        # In most batches every query counts, and the graph needs no selection.
        if not torch.compiler.is_compiling() and is_counted.all():
            return sums
        return sums.where(is_counted, 0.0)[num_positives > 0]


def validate_half_scale(objective: Objective, scale: float) -> None:
    """Check that the gradient of scores in float16 does not overflow."""
    if scale > MAX_HALF_SCALE:
        raise SpecError(
            f"{objective!r}: expected a scale <= {MAX_HALF_SCALE:g} for scores in float16, got "
            f"{scale:g}. Use bfloat16."
        )


def validate_targets(targets: Targets, shape: torch.Size) -> None:
    """Check that targets have the shape of scores."""
    if not isinstance(targets, Targets):
        raise ShapeError(
            f"targets: expected a Targets, got {type(targets).__name__}. Use Targets.paired or "
            "Targets(query_ids=...)."
        )
    if shape != targets.shape:
        raise ShapeError(
            f"targets: expected the shape of the scores, {list(shape)}, got {list(targets.shape)}."
        )


def add_positive_scores(objective: Objective, scores: Tensor, targets: Targets) -> Targets:
    """Add the detached scores ``[M]`` of all positive pairs to targets, if the objective reads them."""
    if not objective.needs_positive_scores or targets.positive_scores is not None:
        return targets
    return replace(targets, positive_scores=scores.detach()[targets.positive])
