"""Evaluation: ranks and metrics of encoded items in both directions, under a named protocol.

>>> import torch
>>> from visavis.core.encoded import Encoded
>>> from visavis.evaluation import evaluate
>>> items = Encoded(torch.eye(4))
>>> evaluate(items, items, lambda visual, text: visual.vectors @ text.vectors.T, range(4), range(4)).metrics["rsum"]
600.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from visavis.evaluation.evaluate_items import evaluate, evaluate_listed, rank_scores
    from visavis.evaluation.protocols import CATALOG, Protocol
    from visavis.evaluation.results import Evaluation

__all__ = ["CATALOG", "Evaluation", "Protocol", "evaluate", "evaluate_listed", "rank_scores"]

__getattr__ = lazy_names(
    __name__,
    {
        "CATALOG": "visavis.evaluation.protocols",
        "Protocol": "visavis.evaluation.protocols",
        "Evaluation": "visavis.evaluation.results",
        "evaluate": "visavis.evaluation.evaluate_items",
        "evaluate_listed": "visavis.evaluation.evaluate_items",
        "rank_scores": "visavis.evaluation.evaluate_items",
    },
)
