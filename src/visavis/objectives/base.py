"""What every objective is: a pure function of scores and targets, written for one direction.

An objective sees a score matrix and nothing else: no model, no device, no configuration. Concrete ones are frozen
keyword-only dataclasses, so they are hashable and printable, and their ``repr`` is text that ``visavis.parse`` reads.

Shared arguments, explained once. scores ``[Q, C]``: row = a query, column = a candidate. targets: a Targets of the
same shape. Calling an objective returns a scalar over both directions; ``one_way`` returns the terms of one.

Reductions: "sum" adds all terms of both directions; "mean" adds the two directions' means over all their terms;
"half_mean" is half of that. Each default is its paper's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.errors import ShapeError
from visavis.objectives.pairs import pairs_of
from visavis.objectives.summary import Summary
from visavis.spec import check_fields
from visavis.targets import Targets

Reduction = Literal["sum", "mean", "half_mean"]


class Objective(ABC):
    """An objective of cross-modal retrieval: ``objective(scores, targets)`` is a scalar over both directions.

    integrable: false where the gradient is prescribed and is not that of any loss. needs_positive_scores: reads the scores of
    other queries' positives. wide: holds ``[pairs x candidates]`` in memory, not ``[queries x candidates]``. reads: the fields
    of targets beside ids that change its value, by the names of queries (``query_margin`` stands for ``candidate_margin`` too).
    """

    integrable: ClassVar[bool] = True
    wide: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()

    reduction: Reduction

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs_positive_scores(self) -> bool:
        return False

    @property
    def slope(self) -> float:
        """The scale of |dL/ds| (gamma, 1 / tau, else 1): gradients divided by it can be compared between objectives."""
        return 1.0

    def at_scale(self, scale: float) -> Objective | None:
        """The same objective at another scale of the scores, 1 / temperature, to six digits.

        None for objectives with a fixed gamma or margin, whose meaning it would change.
        """
        return None

    def for_scaled_scores(self) -> Objective | None:
        """The same objective with a scale of 1, for scores that were already multiplied by a learnable one; None as in ``at_scale``."""
        return self.at_scale(1.0)

    def for_biased_scores(self) -> Objective | None:
        """The same objective without its bias, for scores to which one is added after the scale; None where it has none."""
        return None

    def summary(self, targets: Targets) -> Summary | None:
        """Which single number about a query's negatives suffices with these targets; None where all their scores are needed."""
        return None

    @abstractmethod
    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        """The terms of one direction, not reduced: one for each positive pair ``[P]`` unless the class says otherwise."""

    def __call__(self, scores: Tensor, targets: Targets) -> Tensor:
        """The value over both directions, a scalar. Half precision is promoted to float32 here and nowhere else.

        Raises ShapeError if scores and targets do not fit.
        """
        scores, targets = self.prepare(scores, targets)
        return self.reduce(self.terms(scores, targets), self.terms(scores.T, targets.T))

    def prepare(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """The arguments of ``terms``: scores in float32 at least, targets on their device, with ``positive_scores`` where they are read."""
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            given_type = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise ShapeError(f"the scores are of type {given_type}, expected a tensor of floating-point numbers: queries x candidates.")
        check_targets(targets, scores.shape)
        scores = promoted(scores)
        return scores, with_positive_scores(self, scores, targets.to(scores.device))

    def terms(self, scores: Tensor, targets: Targets) -> Tensor:
        """``one_way``, and no terms for an empty score matrix."""
        return self.one_way(scores, targets) if scores.numel() else scores.reshape(0)

    def reduce(self, *directions: Tensor) -> Tensor:
        """The terms of the directions as one scalar; a direction without terms adds 0."""
        return torch.stack([terms.sum() * self.share(len(terms)) for terms in directions]).sum()

    def share(self, count: int) -> float:
        """What one of ``count`` terms of a direction adds to the value."""
        return {"sum": 1.0, "mean": 1 / max(count, 1), "half_mean": 0.5 / max(count, 1)}[self.reduction]


class SummaryObjective(Objective):
    """An objective that needs, with some targets at least, a single number about the negatives of a query.

    ``summary`` says which number, ``pair_terms`` computes the term of a positive pair from it. Where the number does not suffice,
    ``summary`` is None and ``row_terms`` computes the terms from all scores.
    """

    @abstractmethod
    def summary(self, targets: Targets) -> Summary | None: ...

    @abstractmethod
    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        """The term of each positive pair ``[P]``: the summary of its query's negatives, its own score, its row in ``targets``."""

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        """``one_way`` where ``summary`` is None."""
        raise NotImplementedError(f"{type(self).__name__} has no summary with these targets and no row_terms.")

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        summary = self.summary(targets)
        if summary is None:
            return self.row_terms(scores, targets)
        pairs = pairs_of(scores, targets)
        return self.pair_terms(summary.of(pairs), pairs.positive, pairs.query, targets)


def check_targets(targets: Targets, shape: torch.Size) -> None:
    """Raise ShapeError if the targets are no Targets or do not fit scores of this shape."""
    if not isinstance(targets, Targets):
        raise ShapeError(f"the targets are a {type(targets).__name__}, expected a Targets: see Targets.paired and Targets(query_ids=...).")
    if shape != targets.shape:
        raise ShapeError(
            f"scores have shape {list(shape)}, but the targets speak of {targets.shape[0]} queries and {targets.shape[1]} candidates."
        )


def promoted(scores: Tensor) -> Tensor:
    """Half precision as float32, anything else as it is."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def with_positive_scores(objective: Objective, scores: Tensor, targets: Targets) -> Targets:
    """The targets with the detached scores of all positive pairs, for an objective that reads them."""
    if not objective.needs_positive_scores or targets.positive_scores is not None:
        return targets
    return replace(targets, positive_scores=scores.detach()[targets.positive])
