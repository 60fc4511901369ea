"""Supervision: builds the targets of each batch, from pairs, feedback, graded relevance (also as
weights or margins), mined or offline negatives, learned weights, or a teacher.
"""

from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext
from visavis.training.supervision.distillation import DistillationSupervision
from visavis.training.supervision.graded_relevance import (
    GradedSupervision,
    RelevanceMargins,
    RelevanceWeights,
)
from visavis.training.supervision.human_feedback import FeedbackSupervision
from visavis.training.supervision.learned_weights import LearnedWeights
from visavis.training.supervision.mined_negatives import MinedNegativeSupervision
from visavis.training.supervision.noisy_correspondence import NoisySupervision
from visavis.training.supervision.offline_negatives import OfflineNegativeSupervision

CATALOG: tuple[type[Supervision], ...] = (
    PairSupervision,
    FeedbackSupervision,
    GradedSupervision,
    RelevanceWeights,
    RelevanceMargins,
    OfflineNegativeSupervision,
    MinedNegativeSupervision,
    NoisySupervision,
    LearnedWeights,
    DistillationSupervision,
)
"""All supervisions that a recipe can name."""

__all__ = [
    "CATALOG",
    "DistillationSupervision",
    "FeedbackSupervision",
    "GradedSupervision",
    "LearnedWeights",
    "MinedNegativeSupervision",
    "NoisySupervision",
    "OfflineNegativeSupervision",
    "PairSupervision",
    "RelevanceMargins",
    "RelevanceWeights",
    "Supervision",
    "TrainingContext",
]
