"""The best model of a run on a split, of its own data or of others."""

from __future__ import annotations

from pathlib import Path

from visavis.evaluation import Evaluation
from visavis.memory import Memory
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of


def evaluate_run(
    folder: Path,
    protocol: str | None,
    split: str | None,
    data: str | None,
    progress: Progress,
    degrees: str | None = None,
    semantics: str = "reference",
    memory: Memory = None,
) -> Evaluation:
    """The best model of a run on a split, of its own data or of others."""
    recipe = recipe_of(folder, data, memory)
    degrees = recipe.evaluation.degrees if degrees is None else degrees
    own = data is None and split in (None, recipe.evaluation.test)
    data_module, matcher = open_run(folder, recipe, progress)
    protocol = protocol or (recipe.evaluation.protocol if own else "plain")
    return data_module.evaluate(matcher, split or recipe.evaluation.test, protocol, degrees, semantics)
