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
        data_audit,
        data_check,
        data_convert,
        data_scenes,
        demo,
        doctor,
        features,
        papers_convert,
        papers_list,
    )
    from visavis.api.diagnosing import explain, papers_anatomy, papers_diagnose, papers_probe
    from visavis.api.evaluating import evaluate, papers_board, papers_evaluate
    from visavis.api.existing_indexes import (
        indexes_calibrate,
        indexes_compress,
        indexes_correct,
        indexes_default_model,
        indexes_evaluate,
        indexes_export,
        indexes_export_votes,
        indexes_list_queries,
        indexes_measure,
        indexes_move,
        indexes_prune,
        indexes_restore_queries,
        indexes_use_queries,
    )
    from visavis.api.grading import (
        papers_agreement,
        papers_coherence,
        papers_relevance,
        papers_relevance_fit,
        papers_relevance_thresholds,
    )
    from visavis.api.indexing import classify, index, mcp, search, serve
    from visavis.api.models import export, mteb
    from visavis.api.training_runs import (
        compare,
        data_mine,
        load,
        papers_reproduce,
        train,
    )

__all__ = [
    "demo",
    "doctor",
    "catalog",
    "data_check",
    "data_audit",
    "data_convert",
    "data_scenes",
    "features",
    "papers_convert",
    "train",
    "load",
    "evaluate",
    "mteb",
    "data_mine",
    "compare",
    "papers_list",
    "papers_evaluate",
    "papers_board",
    "papers_reproduce",
    "papers_diagnose",
    "papers_probe",
    "explain",
    "papers_anatomy",
    "papers_coherence",
    "papers_agreement",
    "papers_relevance",
    "papers_relevance_thresholds",
    "papers_relevance_fit",
    "export",
    "index",
    "search",
    "indexes_evaluate",
    "indexes_export",
    "indexes_export_votes",
    "indexes_list_queries",
    "indexes_use_queries",
    "indexes_restore_queries",
    "indexes_correct",
    "indexes_measure",
    "indexes_compress",
    "indexes_calibrate",
    "indexes_move",
    "indexes_prune",
    "indexes_default_model",
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
    "papers_convert": "visavis.api.datasets",
    "train": "visavis.api.training_runs",
    "load": "visavis.api.training_runs",
    "evaluate": "visavis.api.evaluating",
    "mteb": "visavis.api.models",
    "data_mine": "visavis.api.training_runs",
    "compare": "visavis.api.training_runs",
    "papers_list": "visavis.api.datasets",
    "papers_evaluate": "visavis.api.evaluating",
    "papers_board": "visavis.api.evaluating",
    "papers_reproduce": "visavis.api.training_runs",
    "papers_diagnose": "visavis.api.diagnosing",
    "papers_probe": "visavis.api.diagnosing",
    "explain": "visavis.api.diagnosing",
    "papers_anatomy": "visavis.api.diagnosing",
    "papers_coherence": "visavis.api.grading",
    "papers_agreement": "visavis.api.grading",
    "papers_relevance": "visavis.api.grading",
    "papers_relevance_thresholds": "visavis.api.grading",
    "papers_relevance_fit": "visavis.api.grading",
    "export": "visavis.api.models",
    "index": "visavis.api.indexing",
    "search": "visavis.api.indexing",
    "indexes_evaluate": "visavis.api.existing_indexes",
    "indexes_export": "visavis.api.existing_indexes",
    "indexes_export_votes": "visavis.api.existing_indexes",
    "indexes_list_queries": "visavis.api.existing_indexes",
    "indexes_use_queries": "visavis.api.existing_indexes",
    "indexes_restore_queries": "visavis.api.existing_indexes",
    "indexes_correct": "visavis.api.existing_indexes",
    "indexes_measure": "visavis.api.existing_indexes",
    "indexes_compress": "visavis.api.existing_indexes",
    "indexes_calibrate": "visavis.api.existing_indexes",
    "indexes_move": "visavis.api.existing_indexes",
    "indexes_prune": "visavis.api.existing_indexes",
    "indexes_default_model": "visavis.api.existing_indexes",
    "classify": "visavis.api.indexing",
    "serve": "visavis.api.indexing",
    "mcp": "visavis.api.indexing",
}
__getattr__ = lazy_names(__name__, _MODULES)
