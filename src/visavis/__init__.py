"""visavis: train, evaluate, diagnose and use vision-language retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Targets": "visavis.targets",
    "Factors": "visavis.targets",
    "PairLoss": "visavis.engine",
    "LearnedScale": "visavis.engine",
    "Retriever": "visavis.models.retriever",
    "DataError": "visavis.errors",
    "MissingExtra": "visavis.errors",
    "MissingSupervision": "visavis.errors",
    "RecipeError": "visavis.errors",
    "RefusedOverwrite": "visavis.errors",
    "RunError": "visavis.errors",
    "ShapeError": "visavis.errors",
    "SpecError": "visavis.errors",
    "StorageError": "visavis.errors",
    "VisavisError": "visavis.errors",
    "parse": "visavis.objectives",
    "load": "visavis.verbs",
    "train": "visavis.verbs",
    "evaluate": "visavis.verbs",
    "anatomy": "visavis.verbs",
    "explain": "visavis.verbs",
    "features": "visavis.verbs",
    "index": "visavis.verbs",
    "judged": "visavis.verbs",
    "label": "visavis.verbs",
    "convert": "visavis.verbs",
    "search": "visavis.verbs",
    "serve": "visavis.verbs",
    "demo": "visavis.verbs",
    "diagnose": "visavis.verbs",
    "probe": "visavis.verbs",
    "agreement": "visavis.verbs",
    "doctor": "visavis.verbs",
    "catalog": "visavis.verbs",
    "data_audit": "visavis.verbs",
    "data_check": "visavis.verbs",
    "data_convert": "visavis.verbs",
    "data_scenes": "visavis.verbs",
    "coherence": "visavis.verbs",
    "reproduce": "visavis.verbs",
    "compare": "visavis.verbs",
    "relevance": "visavis.verbs",
    "relevance_fit": "visavis.verbs",
    "relevance_thresholds": "visavis.verbs",
}

__all__ = [
    "DataError",
    "Factors",
    "LearnedScale",
    "MissingExtra",
    "MissingSupervision",
    "PairLoss",
    "RecipeError",
    "RefusedOverwrite",
    "Retriever",
    "RunError",
    "ShapeError",
    "SpecError",
    "StorageError",
    "Targets",
    "VisavisError",
    "__version__",
    "agreement",
    "anatomy",
    "catalog",
    "coherence",
    "compare",
    "data_audit",
    "data_check",
    "convert",
    "data_convert",
    "data_scenes",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "explain",
    "features",
    "index",
    "judged",
    "label",
    "load",
    "parse",
    "probe",
    "relevance",
    "relevance_fit",
    "relevance_thresholds",
    "reproduce",
    "search",
    "serve",
    "train",
]

if TYPE_CHECKING:
    from visavis.engine import LearnedScale, PairLoss
    from visavis.errors import (
        DataError,
        MissingExtra,
        MissingSupervision,
        RecipeError,
        RefusedOverwrite,
        RunError,
        ShapeError,
        SpecError,
        StorageError,
        VisavisError,
    )
    from visavis.models.retriever import Retriever
    from visavis.objectives import parse
    from visavis.targets import Factors, Targets
    from visavis.verbs import (
        agreement,
        anatomy,
        catalog,
        coherence,
        compare,
        convert,
        data_audit,
        data_check,
        data_convert,
        data_scenes,
        demo,
        diagnose,
        doctor,
        evaluate,
        explain,
        features,
        index,
        judged,
        label,
        load,
        probe,
        relevance,
        relevance_fit,
        relevance_thresholds,
        reproduce,
        search,
        serve,
        train,
    )


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``visavis --help`` never waits for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'visavis' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
