"""A training of one model, or of the members of an ensemble one after the other, each a run in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visavis import storage
from visavis.evaluation import Evaluation
from visavis.evaluation.ranks import write_ranks
from visavis.progress import Progress
from visavis.runs.begin import Trained, begin_recipe, check_supervisions, continue_run
from visavis.runs.ensemble import ensemble_of
from visavis.runs.evaluating import evaluate_runs
from visavis.runs.folder import with_whole_paths
from visavis.runs.published import check_published
from visavis.training.inputs import check_data_there
from visavis.training.members import member_recipes
from visavis.training.recipe import Recipe
from visavis.training.recipe_files import read_recipe
from visavis.training.run_files import RunFiles
from visavis.training.stopping import Stopped


def begin_training(name: str | Path, overrides: dict[str, Any], out: str | Path | None, progress: Progress) -> Trained:
    """A new run, or one for each member of an ensemble, in a new folder. Raises as ``begin_run``."""
    return train_recipe(with_whole_paths(read_recipe(name, overrides)), out, progress)


def train_recipe(recipe: Recipe, out: str | Path | None, progress: Progress) -> Trained:
    """``begin_training`` by a recipe at hand."""
    if not recipe.members:
        return begin_recipe(recipe, out, progress)
    check_published(recipe.published)
    for own in member_recipes(recipe).values():
        check_supervisions(own)
    check_data_there(recipe)
    with storage.begun_folder(out, Path("runs") / recipe.name) as folder:
        storage.write_toml(RunFiles(folder).ensemble, recipe.to_dict())
        try:
            return _train(recipe, folder, progress)
        finally:
            if not any(RunFiles(folder / name).recipe.exists() for name in recipe.members):
                RunFiles(folder).ensemble.unlink()


def continue_training(folder: Path, progress: Progress) -> Trained:
    """Go on with a stopped run, or with the members of an ensemble that are not trained yet. Raises as ``continue_run``."""
    recipe = ensemble_of(folder)
    return continue_run(folder, progress) if recipe is None else _train(recipe, folder, progress)


def _train(recipe: Recipe, folder: Path, progress: Progress) -> Trained:
    members: list[Trained] = []
    for name, own in member_recipes(recipe).items():
        begun = RunFiles(folder / name).recipe.exists()
        try:
            members.append(continue_run(folder / name, progress) if begun else begin_recipe(with_whole_paths(own), folder / name, progress))
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.by) from None
    trained = _together(members, folder, recipe, progress)
    if trained.test is not None:
        write_ranks(RunFiles(folder).ranks, trained.test.ranks_by_protocol)
    storage.write_json(RunFiles(folder).result, trained.to_json())
    return trained


def _together(members: list[Trained], folder: Path, recipe: Recipe, progress: Progress) -> Trained:
    """What the members came to by the mean of their scores."""

    def evaluated(split: str, protocol: tuple[str, ...] | None, images: int = 0) -> Evaluation:
        return evaluate_runs([folder], protocol, split, None, progress, images=images)

    validation = evaluated(recipe.evaluation.validation, ("plain",), recipe.evaluation.validation_images)
    return Trained(
        folder,
        " and ".join(dict.fromkeys(member.objective for member in members)),
        " and ".join(dict.fromkeys(member.targets for member in members)),
        max(member.best_step for member in members),
        validation.metrics["rsum"],
        validation.num_images,
        None if any(member.test is None for member in members) else evaluated(recipe.evaluation.test, None),
        sum(member.seconds for member in members),
        sum(member.cache_seconds for member in members),
        members=tuple(members),
    )
