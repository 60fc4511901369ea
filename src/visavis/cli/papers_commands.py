"""Commands of the group ``papers``. Entry points ``visavis.commands`` register them, as an installed
package registers its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from visavis import api
from visavis.core.command import Command


def _entries_to_json(key: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    return lambda entries, _: {key: [entry.to_json() for entry in entries]}


LIST = Command(api.papers_list, "dataset_tables:print_catalog", to_json=lambda entries, _: entries)
EVALUATE = Command(api.papers_evaluate, "run_tables:print_evaluation")
REPRODUCE = Command(api.papers_reproduce, "experiment_tables:print_reproduction", resumable=True)
DIAGNOSE = Command(api.papers_diagnose, "diagnostic_tables:print_diagnosis")
PROBE = Command(api.papers_probe, "diagnostic_tables:print_probes")
ANATOMY = Command(api.papers_anatomy, "diagnostic_tables:print_objective_profiles")
COHERENCE = Command(api.papers_coherence, "experiment_tables:print_coherence")
AGREEMENT = Command(
    api.papers_agreement, "experiment_tables:print_agreement", to_json=_entries_to_json("agreement")
)
RELEVANCE = Command(
    api.papers_relevance,
    "experiment_tables:print_estimator_evaluation",
    to_json=_entries_to_json("estimators"),
    options=("estimator",),
)
RELEVANCE_THRESHOLDS = Command(
    api.papers_relevance_thresholds,
    "experiment_tables:print_distributions",
    to_json=_entries_to_json("estimators"),
)
RELEVANCE_FIT = Command(
    api.papers_relevance_fit, "experiment_tables:print_fitted", options=("out",)
)
CONVERT = Command(
    api.papers_convert,
    "dataset_tables:print_converted_model",
    to_json=lambda converted, _: converted.to_recipe_sections(),
    options=("out",),
)
