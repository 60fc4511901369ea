"""visavis: train, evaluate, diagnose and use vision-language retrieval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

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
    "classify",
    "coherence",
    "compare",
    "convert",
    "data_audit",
    "data_check",
    "data_convert",
    "data_scenes",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "explain",
    "features",
    "index",
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

_MODULES = {
    "Factors": "visavis.targets",
    "LearnedScale": "visavis.pair_loss",
    "PairLoss": "visavis.pair_loss",
    "Retriever": "visavis.models.retriever",
    "Targets": "visavis.targets",
    "parse": "visavis.objectives",
}
"""Modules of the public names outside ``visavis.api`` and ``visavis.errors``."""

if TYPE_CHECKING:
    from visavis.api import (
        agreement,
        anatomy,
        catalog,
        classify,
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
    from visavis.pair_loss import LearnedScale, PairLoss
    from visavis.targets import Factors, Targets


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``visavis --help`` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'visavis' has no attribute {name!r}")
    module = _MODULES.get(name) or ("visavis.api" if name.islower() else "visavis.errors")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
