"""What objectives are told beyond scores."""

from visavis.supervision.base import PairSupervision, Supervision

CATALOG: tuple[type[Supervision], ...] = (PairSupervision,)

__all__ = ["CATALOG", "PairSupervision", "Supervision"]
