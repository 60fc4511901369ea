"""Public API: one function for each command of the command line, with the same name and arguments,
and ``load``.

Example:
    >>> import visavis
    >>> result = visavis.train("heads-flickr8k")  # doctest: +SKIP
    >>> visavis.evaluate(result.run).metrics["rsum"]  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from visavis.api.datasets import (
        catalog,
        convert,
        data_audit,
        data_check,
        data_convert,
        data_scenes,
        demo,
        doctor,
        features,
    )
    from visavis.api.diagnosing import anatomy, diagnose, explain, probe
    from visavis.api.grading import (
        agreement,
        coherence,
        relevance,
        relevance_fit,
        relevance_thresholds,
    )
    from visavis.api.indexing import classify, index, mcp, search, serve
    from visavis.api.models import export, mteb
    from visavis.api.training_runs import compare, evaluate, load, mine, reproduce, train

__all__ = [
    "demo",
    "doctor",
    "catalog",
    "data_check",
    "data_audit",
    "data_convert",
    "data_scenes",
    "features",
    "convert",
    "train",
    "load",
    "evaluate",
    "mteb",
    "mine",
    "compare",
    "reproduce",
    "diagnose",
    "probe",
    "explain",
    "anatomy",
    "coherence",
    "agreement",
    "relevance",
    "relevance_thresholds",
    "relevance_fit",
    "export",
    "index",
    "search",
    "classify",
    "serve",
    "mcp",
]

_MODULES = {
    "demo": "visavis.api.datasets",
    "doctor": "visavis.api.datasets",
    "catalog": "visavis.api.datasets",
    "data_check": "visavis.api.datasets",
    "data_audit": "visavis.api.datasets",
    "data_convert": "visavis.api.datasets",
    "data_scenes": "visavis.api.datasets",
    "features": "visavis.api.datasets",
    "convert": "visavis.api.datasets",
    "train": "visavis.api.training_runs",
    "load": "visavis.api.training_runs",
    "evaluate": "visavis.api.training_runs",
    "mteb": "visavis.api.models",
    "mine": "visavis.api.training_runs",
    "compare": "visavis.api.training_runs",
    "reproduce": "visavis.api.training_runs",
    "diagnose": "visavis.api.diagnosing",
    "probe": "visavis.api.diagnosing",
    "explain": "visavis.api.diagnosing",
    "anatomy": "visavis.api.diagnosing",
    "coherence": "visavis.api.grading",
    "agreement": "visavis.api.grading",
    "relevance": "visavis.api.grading",
    "relevance_thresholds": "visavis.api.grading",
    "relevance_fit": "visavis.api.grading",
    "export": "visavis.api.models",
    "index": "visavis.api.indexing",
    "search": "visavis.api.indexing",
    "classify": "visavis.api.indexing",
    "serve": "visavis.api.indexing",
    "mcp": "visavis.api.indexing",
}
__getattr__ = lazy_names(__name__, _MODULES)
