"""Evaluation: ranks and metrics of encoded items in both directions, under a named protocol.

>>> import torch
>>> from visavis.core.encoded import Encoded
>>> items = Encoded(torch.eye(4))
>>> evaluate(items, items, lambda visual, text: visual.vectors @ text.vectors.T, range(4), range(4)).metrics["rsum"]
600.0
"""

from visavis.evaluation.protocols import CATALOG, Protocol
from visavis.evaluation.results import Evaluation, evaluate, evaluate_listed, rank_scores

__all__ = ["CATALOG", "Evaluation", "Protocol", "evaluate", "evaluate_listed", "rank_scores"]
