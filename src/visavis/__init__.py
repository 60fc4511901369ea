"""visavis: train, compare, explain and serve vision-language retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Targets": "visavis.targets",
    "Factors": "visavis.targets",
    "PairLoss": "visavis.engine",
    "parse": "visavis.objectives",
    "load": "visavis.verbs",
    "train": "visavis.verbs",
    "evaluate": "visavis.verbs",
    "features": "visavis.verbs",
    "search": "visavis.verbs",
    "demo": "visavis.verbs",
    "diagnose": "visavis.verbs",
    "agreement": "visavis.verbs",
    "doctor": "visavis.verbs",
    "catalog": "visavis.verbs",
    "data_check": "visavis.verbs",
    "coherence": "visavis.verbs",
    "relevance": "visavis.verbs",
    "relevance_fit": "visavis.verbs",
    "relevance_thresholds": "visavis.verbs",
}

__all__ = [
    "Factors",
    "PairLoss",
    "Targets",
    "__version__",
    "agreement",
    "catalog",
    "data_check",
    "coherence",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "features",
    "load",
    "parse",
    "relevance",
    "relevance_fit",
    "relevance_thresholds",
    "search",
    "train",
]

if TYPE_CHECKING:
    from visavis.engine import PairLoss
    from visavis.objectives import parse
    from visavis.targets import Factors, Targets
    from visavis.verbs import (
        agreement,
        catalog,
        coherence,
        data_check,
        demo,
        diagnose,
        doctor,
        evaluate,
        features,
        load,
        relevance,
        relevance_fit,
        relevance_thresholds,
        search,
        train,
    )


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``visavis --help`` never waits for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'visavis' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
