"""Entry points of training: start or resume one run, or an ensemble of members that are evaluated
by the mean of their scores.
"""

from __future__ import annotations

import os
from pathlib import Path

from visavis.core import storage
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import Progress
from visavis.training.recipes.features import check_data_exists
from visavis.training.recipes.files import merge_values
from visavis.training.recipes.published_tables import check_published_id
from visavis.training.recipes.recipe import Recipe, build_recipe, normalize_values
from visavis.training.runs.evaluate_runs import evaluate_runs
from visavis.training.runs.open_run import read_ensemble_recipe, with_absolute_paths
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.training_run import (
    TrainingResult,
    check_supervisions,
    create_run_folder,
    resume_run,
    start_run,
)


def start_training(
    recipe: Recipe, out: str | Path | None, progress: Progress, group: ProcessGroup = ONE_PROCESS
) -> TrainingResult:
    """Train a recipe in a new folder: one run, or one run for each member of an ensemble.

    Args:
        recipe: Recipe with absolute paths, from ``read_recipe`` and ``with_absolute_paths``.
        out: New folder. None: ``runs/<recipe>-<n>``.
        progress: Receives progress and messages.
        group: Processes that train together.

    Returns:
        The result of the run, or of the ensemble.

    Raises:
        RecipeError: If the recipe cannot be trained.
        DataError: If the data set cannot be read.
        RunError: If ``out`` is a run already.
        RefusedOverwrite: If ``out`` is another folder with content, or a file.
        Stopped: After a signal, when everything is saved.
    """
    return (_start_ensemble if recipe.members else start_run)(recipe, out, progress, group)


def resume_training(
    folder: Path, progress: Progress, group: ProcessGroup = ONE_PROCESS
) -> TrainingResult:
    """Resume a stopped run, or the members of an ensemble that are not finished.

    Args:
        folder: Folder of the run or of the ensemble.
        progress: Receives progress and messages.
        group: Processes that train together. Their number may differ from that of the start.

    Returns:
        The result of the run, or of the ensemble.

    Raises:
        RunError: If the folder is not a run, or if its recipe or its inputs changed.
        Stopped: After a signal, when everything is saved.
    """
    recipe = read_ensemble_recipe(folder)
    return (
        resume_run(folder, progress, group)
        if recipe is None
        else _train_members(recipe, folder, progress, group)
    )


def member_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Build the recipe of each member of an ensemble.

    Args:
        recipe: Recipe with ``members``.

    Returns:
        The recipes by member name. They carry no id of a published table row.

    Raises:
        RecipeError: If the changes of a member do not make a valid recipe.
    """
    shared = {
        key: value for key, value in recipe.to_dict().items() if key not in ("members", "published")
    }
    recipes = {}
    for name, changes in recipe.members.items():
        source = f"{recipe.published or recipe.name}, member {name}"
        content = merge_values(shared, normalize_values(changes), source) | {
            "name": f"{recipe.name}-{name}"
        }
        recipes[name] = build_recipe(content, {}, source)
    return recipes


def _start_ensemble(
    recipe: Recipe, out: str | Path | None, progress: Progress, group: ProcessGroup
) -> TrainingResult:
    """Train the members one after the other, in subfolders of a new folder."""
    check_published_id(recipe.published)
    for member in member_recipes(recipe).values():
        check_supervisions(member)
    check_data_exists(recipe)
    with create_run_folder(recipe, out, group) as folder:
        with group.first_rank_first():
            if group.is_first:
                storage.write_toml(RunFolder(folder).ensemble, recipe.to_dict())
        try:
            return _train_members(recipe, folder, progress, group)
        finally:
            if group.is_first and not any(
                os.path.exists(RunFolder(folder / name).recipe) for name in recipe.members
            ):
                RunFolder(folder).ensemble.unlink()


def _train_members(
    recipe: Recipe, folder: Path, progress: Progress, group: ProcessGroup
) -> TrainingResult:
    """Train or resume each member in its subfolder, then evaluate their ensemble."""
    members: list[TrainingResult] = []
    for name, member in member_recipes(recipe).items():
        try:
            # Rank 0 decides, because it may already have created the run.
            if group.broadcast_text("run" if RunFolder(folder / name).is_run else ""):
                members.append(resume_run(folder / name, progress, group))
            else:
                members.append(
                    start_run(with_absolute_paths(member), folder / name, progress, group)
                )
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None
    settings, has_test = recipe.evaluation, all(member.test is not None for member in members)
    group.barrier()  # until rank 0 has written the models
    validation = evaluate_runs(
        [folder],
        "plain",
        settings.validation,
        None,
        progress,
        max_images=settings.validation_images,
    )
    result = TrainingResult(
        run=folder,
        objective=" and ".join(dict.fromkeys(member.objective for member in members)),
        positives_by=" and ".join(dict.fromkeys(member.positives_by for member in members)),
        supervision=" and ".join(dict.fromkeys(member.supervision for member in members)),
        best_step=max(member.best_step for member in members),
        validation_rsum=validation.metrics["rsum"],
        validation_images=validation.num_images,
        test=evaluate_runs([folder], None, settings.test, None, progress) if has_test else None,
        seconds=sum(member.seconds for member in members),
        cache_seconds=sum(member.cache_seconds for member in members),
        members=tuple(members),
    )
    if group.is_first:
        result.write()
    return result
