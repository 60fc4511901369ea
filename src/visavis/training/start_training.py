"""Entry points of training: start or resume a run, or every member of an ensemble."""

from __future__ import annotations

from pathlib import Path

from visavis.progress import Progress
from visavis.recipes.recipe import Recipe
from visavis.runs.open_run import read_ensemble_recipe
from visavis.training.ensemble import resume_ensemble, start_ensemble
from visavis.training.training_run import TrainingResult, resume_run, start_run


def start_training(recipe: Recipe, out: str | Path | None, progress: Progress) -> TrainingResult:
    """Train a recipe in a new folder: one run, or one run for each member of an ensemble.

    Args:
        recipe: Recipe with absolute paths, from ``read_recipe`` and ``with_absolute_paths``.
        out: New folder. None: ``runs/<recipe>-<n>``.
        progress: Receives progress and messages.

    Returns:
        The result of the run, or of the ensemble.

    Raises:
        RecipeError: If the recipe cannot be trained.
        DataError: If the data set cannot be read.
        RunError: If ``out`` holds a run already.
        Stopped: After a signal, when everything is saved.
    """
    return start_ensemble(recipe, out, progress) if recipe.members else start_run(recipe, out, progress)


def resume_training(folder: Path, progress: Progress) -> TrainingResult:
    """Resume a stopped run, or the members of an ensemble that are not finished.

    Args:
        folder: Folder of the run or of the ensemble.
        progress: Receives progress and messages.

    Returns:
        The result of the run, or of the ensemble.

    Raises:
        RunError: If the folder is not a run, or if its recipe or its inputs changed.
        Stopped: After a signal, when everything is saved.
    """
    recipe = read_ensemble_recipe(folder)
    return resume_run(folder, progress) if recipe is None else resume_ensemble(recipe, folder, progress)
