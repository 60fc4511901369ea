"""What objectives are told beyond scores."""

from visavis.supervision.bank import BankSupervision
from visavis.supervision.base import PairSupervision, Peer, Supervision, TrainingContext
from visavis.supervision.graded import GradedSupervision
from visavis.supervision.judged import JudgedSupervision
from visavis.supervision.learned import LearnedWeights
from visavis.supervision.noisy import NoisySupervision, soft_margin

CATALOG: tuple[type[Supervision], ...] = (
    PairSupervision,
    JudgedSupervision,
    GradedSupervision,
    BankSupervision,
    NoisySupervision,
    LearnedWeights,
)

__all__ = [
    "CATALOG",
    "BankSupervision",
    "GradedSupervision",
    "JudgedSupervision",
    "LearnedWeights",
    "NoisySupervision",
    "PairSupervision",
    "Peer",
    "TrainingContext",
    "Supervision",
    "soft_margin",
]
