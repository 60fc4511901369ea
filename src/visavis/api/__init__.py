"""Public API: one function for each command of the command line, with the same name and arguments,
and ``load``.

Example:
    >>> import visavis
    >>> result = visavis.train("heads-flickr8k")  # doctest: +SKIP
    >>> visavis.evaluate(result.run).metrics["rsum"]  # doctest: +SKIP
"""

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
from visavis.api.grading import agreement, coherence, relevance, relevance_fit, relevance_thresholds
from visavis.api.indexing import classify, index, search, serve
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
]
