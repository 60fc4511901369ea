"""Supervision: builds the targets of each batch, from pairs, feedback, mined or offline negatives,
learned weights, or a teacher.
"""

from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext
from visavis.training.supervision.distillation import DistillationSupervision
from visavis.training.supervision.human_feedback import FeedbackSupervision
from visavis.training.supervision.learned_weights import LearnedWeights
from visavis.training.supervision.mined_negatives import MinedNegativeSupervision
from visavis.training.supervision.noisy_correspondence import NoisySupervision
from visavis.training.supervision.offline_negatives import OfflineNegativeSupervision

CATALOG: tuple[type[Supervision], ...] = (
    PairSupervision,
    FeedbackSupervision,
    OfflineNegativeSupervision,
    MinedNegativeSupervision,
    NoisySupervision,
    LearnedWeights,
    DistillationSupervision,
)
"""Supervisions that a recipe can name, besides those of installed packages."""

__all__ = [
    "CATALOG",
    "DistillationSupervision",
    "FeedbackSupervision",
    "LearnedWeights",
    "MinedNegativeSupervision",
    "NoisySupervision",
    "OfflineNegativeSupervision",
    "PairSupervision",
    "Supervision",
    "TrainingContext",
]
