"""Contributing samples of the runs of a reproduction, kept in their folders."""

from __future__ import annotations

import math
from typing import TypeAlias

from visavis.core import storage
from visavis.core.progress import Progress
from visavis.papers.diagnostics.contributing_samples import Semantics
from visavis.papers.diagnostics.contribution_analysis import diagnose_run
from visavis.research.experiments.jobs import RunOutcome, check_models_exist

CONTRIBUTIONS_FILE = "contributions.json"
Contributions: TypeAlias = dict[Semantics, dict[str, tuple[float, float]]]
"""Mean and standard deviation over batches by key, for the definition of COCOS ("paper") and its
released code ("reference").
"""


def run_contributions(outcome: RunOutcome, progress: Progress) -> Contributions:
    """Count the contributing samples of the best model of a run over its training batches, or read
    the counts that its folder keeps.
    """
    if outcome.failure:
        return {}
    file = outcome.folder / CONTRIBUTIONS_FILE
    kept: Contributions | None = storage.read_checksummed_json(file, Contributions)
    if kept is not None:
        return kept
    check_models_exist([outcome])
    # A measure without a value in any batch is left out.
    contributions: Contributions = {
        count.semantics: {
            key: (mean, count.std[key]) for key, mean in count.mean.items() if not math.isnan(mean)
        }
        for count in diagnose_run(outcome.folder, (), None, progress).counts
    }
    storage.write_checksummed_json(file, contributions)
    return contributions
