"""The best model of a run on a split, of its own data or of others."""

from __future__ import annotations

from pathlib import Path

from visavis.evaluation import Evaluation
from visavis.memory import Memory
from visavis.models.average import Average
from visavis.progress import Progress
from visavis.runs.folder import open_peer, open_run, recipe_of


def evaluate_run(
    folder: Path,
    protocol: str | None,
    split: str | None,
    data: str | None,
    progress: Progress,
    degrees: str | None = None,
    semantics: str = "reference",
    memory: Memory = None,
    *,
    average: bool = False,
) -> Evaluation:
    """The best model of a run on a split, of its own data or of others. average: the mean of the scores of both its networks.

    Raises RunError for an average of a run that trained one network.
    """
    recipe = recipe_of(folder, data, memory)
    degrees = recipe.evaluation.degrees if degrees is None else degrees
    own = data is None and split in (None, recipe.evaluation.test)
    data_module, matcher = open_run(folder, recipe, progress)
    if average:
        matcher = Average([matcher, open_peer(folder, matcher)])
    protocol = protocol or (recipe.evaluation.protocol if own else "plain")
    return data_module.evaluate(matcher, split or recipe.evaluation.test, protocol, degrees, semantics)
