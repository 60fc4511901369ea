"""Supervision: builds the targets of each batch, from pairs, feedback, graded relevance, mined or
offline negatives, or learned weights.
"""

from visavis.supervision.base import PairSupervision, Supervision, TrainingContext
from visavis.supervision.graded_relevance import GradedSupervision
from visavis.supervision.human_feedback import FeedbackSupervision
from visavis.supervision.learned_weights import LearnedWeights
from visavis.supervision.mined_negatives import MinedNegativeSupervision
from visavis.supervision.noisy_correspondence import NoisySupervision
from visavis.supervision.offline_negatives import OfflineNegativeSupervision

CATALOG: tuple[type[Supervision], ...] = (
    PairSupervision,
    FeedbackSupervision,
    GradedSupervision,
    OfflineNegativeSupervision,
    MinedNegativeSupervision,
    NoisySupervision,
    LearnedWeights,
)
"""All supervisions that a recipe can name."""

__all__ = [
    "CATALOG",
    "FeedbackSupervision",
    "GradedSupervision",
    "LearnedWeights",
    "MinedNegativeSupervision",
    "NoisySupervision",
    "OfflineNegativeSupervision",
    "PairSupervision",
    "Supervision",
    "TrainingContext",
]
