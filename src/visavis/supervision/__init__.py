"""What objectives are told beyond scores."""

from visavis.supervision.base import PairSupervision, Setting, Supervision

CATALOG: tuple[type[Supervision], ...] = (PairSupervision,)

__all__ = ["CATALOG", "PairSupervision", "Setting", "Supervision"]
