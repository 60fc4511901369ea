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


LIST = Command(api.papers_list, "printers:print_catalog", to_json=lambda entries, _: entries)
EVALUATE = Command(api.papers_evaluate)
REPRODUCE = Command(api.papers_reproduce, resumable=True)
DIAGNOSE = Command(api.papers_diagnose)
PROBE = Command(api.papers_probe)
ANATOMY = Command(api.papers_anatomy)
BOARD = Command(api.papers_board)
COHERENCE = Command(api.papers_coherence)
AGREEMENT = Command(api.papers_agreement, to_json=_entries_to_json("agreement"))
RELEVANCE = Command(
    api.papers_relevance,
    "printers:print_estimators",
    to_json=_entries_to_json("estimators"),
    options=("estimator",),
)
RELEVANCE_THRESHOLDS = Command(
    api.papers_relevance_thresholds,
    to_json=_entries_to_json("estimators"),
)
RELEVANCE_FIT = Command(api.papers_relevance_fit, options=("out",))
CONVERT = Command(
    api.papers_convert,
    "printers:print_converted_model",
    to_json=lambda converted, _: converted.to_recipe_sections(),
    options=("out",),
)
