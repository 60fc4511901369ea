"""Every verb of the command line as a function of the same name with the same arguments.

>>> import visavis
>>> run = visavis.train("heads-flickr8k")                                  # doctest: +SKIP
>>> visavis.evaluate(run.folder).metrics["rsum"]                           # doctest: +SKIP
"""

from visavis.verbs.comparison import compare, reproduce
from visavis.verbs.data import catalog, convert, data_audit, data_check, data_convert, data_scenes, demo, doctor, features
from visavis.verbs.graded import agreement, coherence, relevance, relevance_fit, relevance_thresholds
from visavis.verbs.objectives import anatomy
from visavis.verbs.retrieval import index, judged, label, search
from visavis.verbs.runs import diagnose, evaluate, explain, load, probe, train
from visavis.verbs.serving import serve

__all__ = [
    "agreement",
    "anatomy",
    "catalog",
    "data_audit",
    "data_check",
    "data_convert",
    "data_scenes",
    "coherence",
    "compare",
    "convert",
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
    "probe",
    "relevance",
    "relevance_fit",
    "relevance_thresholds",
    "reproduce",
    "search",
    "serve",
    "train",
]
