"""Ensembles: members that are trained independently, and evaluated by the mean of their scores."""

from __future__ import annotations

from pathlib import Path

from visavis import storage
from visavis.evaluation import Evaluation
from visavis.evaluation.results import write_query_ranks
from visavis.progress import Progress
from visavis.recipes.features import check_data_exists
from visavis.recipes.files import merge_values, normalize_values
from visavis.recipes.published_tables import check_published_id
from visavis.recipes.recipe import Recipe, build_recipe
from visavis.runs.evaluate_runs import evaluate_runs
from visavis.runs.open_run import with_absolute_paths
from visavis.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.training_run import TrainingResult, check_supervisions, resume_run, start_run


def member_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Build the recipe of each member of an ensemble.

    Args:
        recipe: Recipe with ``members``.

    Returns:
        The recipes by member name. They carry no id of a published table row.

    Raises:
        RecipeError: If the changes of a member do not make a valid recipe.
    """
    shared = {key: value for key, value in recipe.to_dict().items() if key not in ("members", "published")}
    recipes = {}
    for name, changes in recipe.members.items():
        source = f"{recipe.published or recipe.name}, member {name}"
        content = merge_values(shared, normalize_values(changes), source) | {"name": f"{recipe.name}-{name}"}
        recipes[name] = build_recipe(content, {}, source)
    return recipes


def start_ensemble(recipe: Recipe, out: str | Path | None, progress: Progress) -> TrainingResult:
    """Train the members of an ensemble one after the other, in subfolders of a new folder.

    Args:
        recipe: Recipe with ``members``.
        out: New folder. None: ``runs/<recipe>-<n>``.
        progress: Receives progress and messages.

    Returns:
        The result of the ensemble, with those of its members.

    Raises:
        RecipeError: If the recipe of a member cannot be trained.
        Stopped: After a signal, when everything is saved.
    """
    check_published_id(recipe.published)
    for member in member_recipes(recipe).values():
        check_supervisions(member)
    check_data_exists(recipe)
    with storage.create_output_folder(out, Path("runs") / recipe.name) as folder:
        storage.write_toml(RunFolder(folder).ensemble, recipe.to_dict())
        try:
            return resume_ensemble(recipe, folder, progress)
        finally:
            if not any(RunFolder(folder / name).recipe.exists() for name in recipe.members):
                RunFolder(folder).ensemble.unlink()


def resume_ensemble(recipe: Recipe, folder: Path, progress: Progress) -> TrainingResult:
    """Train or resume each member in its subfolder, then evaluate them together.

    Args:
        recipe: Recipe with ``members``.
        folder: Folder of the ensemble.
        progress: Receives progress and messages.

    Returns:
        The result of the ensemble, which is also written into the folder.

    Raises:
        Stopped: After a signal, when everything is saved.
    """
    members: list[TrainingResult] = []
    for name, member in member_recipes(recipe).items():
        try:
            if RunFolder(folder / name).recipe.exists():
                members.append(resume_run(folder / name, progress))
            else:
                members.append(start_run(with_absolute_paths(member), folder / name, progress))
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None
    result = _ensemble_result(members, folder, recipe, progress)
    if result.test is not None:
        write_query_ranks(RunFolder(folder).ranks, result.test.query_ranks_by_protocol)
    storage.write_json(RunFolder(folder).result, result.to_json())
    return result


def _ensemble_result(members: list[TrainingResult], folder: Path, recipe: Recipe, progress: Progress) -> TrainingResult:
    """Evaluate the mean of the scores of all members on the validation and the test split."""

    def evaluate(split: str, protocol: tuple[str, ...] | None, max_images: int = 0) -> Evaluation:
        return evaluate_runs([folder], protocol, split, None, progress, max_images=max_images)

    validation = evaluate(recipe.evaluation.validation, ("plain",), recipe.evaluation.validation_images)
    return TrainingResult(
        run=folder,
        objective=" and ".join(dict.fromkeys(member.objective for member in members)),
        positives_by=" and ".join(dict.fromkeys(member.positives_by for member in members)),
        best_step=max(member.best_step for member in members),
        validation_rsum=validation.metrics["rsum"],
        validation_images=validation.num_images,
        test=None if any(member.test is None for member in members) else evaluate(recipe.evaluation.test, None),
        seconds=sum(member.seconds for member in members),
        cache_seconds=sum(member.cache_seconds for member in members),
        members=tuple(members),
    )
