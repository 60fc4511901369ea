"""The loss of a phase: its objective on the scores of a matcher, at the scale that the matcher learns, if it does, and at its widths."""

from __future__ import annotations

from visavis import objectives
from visavis.engine import PairLoss
from visavis.errors import RecipeError
from visavis.memory import Memory
from visavis.models import Matcher
from visavis.training.settings import Phase


def phase_loss(matcher: Matcher, phase: Phase, memory: Memory = None) -> PairLoss:
    """The loss of a phase. Raises RecipeError for an objective of fixed gamma or margin where the matcher learns a scale."""
    objective = objectives.parse(phase.objective)
    if matcher.scale is not None and objective.for_scaled_scores() is None:
        raise RecipeError(
            f"{objective!r} has a fixed gamma or margin, which the learned scale of {type(matcher).__name__} would change: "
            'take NTXent, InfoNCE or Sigmoid, or model.scale="fixed".'
        )
    score = None if matcher.score_is_cosine else matcher.score
    return PairLoss(objective, score=score, scale=matcher.scale, memory=memory, widths=matcher.widths)
