"""Plan of a training: a recipe that is resolved and checked once, before any data are read.

``resolve`` makes the plan of every training: of ``visavis train``, of each run of a comparison or
reproduction, and of ``visavis train --dry-run``, which prints it. Later stages trust it: none reads
a name again, completes a path or repeats a check.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from visavis.core.errors import MissingSupervision
from visavis.core.result import Result
from visavis.core.run_context import RunContext
from visavis.core.table import Column, Table
from visavis.data.dataset import Dataset
from visavis.training.monitoring.tracking import check_trackers
from visavis.training.processes import check_processes
from visavis.training.recipes.data_module import batch_schedule
from visavis.training.recipes.features import training_subset
from visavis.training.recipes.files import merge_values
from visavis.training.recipes.open_data import check_data_exists, open_data
from visavis.training.recipes.prepare_training import check_model_fields
from visavis.training.recipes.published_tables import check_published_id
from visavis.training.recipes.recipe import Recipe, build_recipe, normalize_values, with_feedback
from visavis.training.runs.open_run import with_absolute_paths


@dataclass(frozen=True)
class TrainingPlan(Result):
    """A training that can start. ``print`` describes it.

    Attributes:
        recipe: Recipe with absolute paths, whose supervisions use its feedback file.
        members: Plans of the members of an ensemble, by name. Empty for one model.
        baselines: One sentence for each phase whose objective uses nothing that its supervision
            supplies. In a comparison that is a baseline.
        data: Data set with the reduced training split. None until ``open_data``.
    """

    recipe: Recipe
    members: dict[str, TrainingPlan] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()
    data: Dataset | None = None

    def open_data(self, context: RunContext) -> TrainingPlan:
        """Open the data set, to count its items. No features are computed and no model is built.

        Args:
            context: Receives progress.

        Returns:
            The plan with ``data``.

        Raises:
            DataError: If the data set cannot be read.
        """
        data = training_subset(self.recipe, open_data(self.recipe, context.progress))
        return replace(self, data=data)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of an epoch. None until ``open_data``, and where shards or feedback add items."""
        recipe = self.recipe
        if self.data is None or recipe.data.stream or recipe.data.feedback:
            return None
        train = self.data.split("train")
        return batch_schedule(recipe.training, train).num_batches(train)

    def lines(self) -> list[list[str]]:
        """Describe the plan, one line for each part of the training.

        Returns:
            Name and description of each line.
        """
        recipe = self.recipe
        training = self.recipe.training
        steps = self.steps_per_epoch
        lines = [["recipe", f"{recipe.name}, seed {recipe.seed}"], ["data", recipe.data.path]]
        if self.data is not None:
            for name in self.data.splits:
                split = self.data.split(name)
                images = len(split.images)
                captions = len(split.captions)
                lines.append([name, f"{images:,} images, {captions:,} captions"])
        if recipe.data.stream:
            lines.append(["training shards", recipe.data.stream])
        for side, settings in (("images", recipe.visual), ("texts", recipe.text)):
            source = settings.features or settings.encoder
            lines.append([side, f"{source}, {settings.granularity}"])
        fields = ", ".join(
            f"{key}={value!r}" for key, value in recipe.model.items() if key != "kind"
        )
        lines.append(["model", f"{recipe.model['kind']}({fields})"])
        unit = "pairs" if training.captions_per_image is None else "images"
        for number, phase in enumerate(recipe.phases):
            optimizer = phase.optimizer
            length = "" if steps is None else f" of {steps:,} steps"
            text = (
                f"{phase.epochs} {'epoch' if phase.epochs == 1 else 'epochs'}{length} with {training.batch_size} {unit}, "
                f"{phase.objective!r}, {phase.supervision!r}, {optimizer.name} at "
                f"{optimizer.lr:g}, {phase.schedule.kind} schedule"
            )
            lines.append([f"phase {number}", text])
        evaluation = recipe.evaluation
        tested = f", tested on {evaluation.test}" if evaluation.test else ""
        text = f"validated on {evaluation.validation}{tested}, protocol {' and '.join(evaluation.protocols)}"
        lines.append(["evaluation", text])
        for name, member in self.members.items():
            lines += [[f"{name}: {key}", text] for key, text in member.lines()]
        return lines

    def tables(self) -> list[Table]:
        """Return a line for each part of the training."""
        rows = tuple((f"{name}:", text) for name, text in self.lines())
        return [Table((Column(is_text=True), Column(is_text=True)), rows)]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            The recipe with all its keys, the numbers of images and captions of each split, and the
            steps of each phase.
        """
        splits = (
            {} if self.data is None else {name: self.data.split(name) for name in self.data.splits}
        )
        steps = self.steps_per_epoch
        return {
            "recipe": self.recipe.to_dict(),
            "images": {name: len(split.images) for name, split in splits.items()},
            "captions": {name: len(split.captions) for name, split in splits.items()},
            "steps": [
                None if steps is None else phase.epochs * steps for phase in self.recipe.phases
            ],
            "members": {name: member.to_json() for name, member in self.members.items()},
        }


def resolve(recipe: Recipe, context: RunContext | None = None) -> TrainingPlan:
    """Resolve a recipe, and check what can be checked before any data are read.

    Args:
        recipe: Recipe of one model, or of an ensemble.
        context: Processes that will train. None: one.

    Returns:
        The plan.

    Raises:
        RecipeError: If the recipe names an unknown table row, model or field of a model, or does not
            suit the processes.
        MissingSupervision: If an objective needs annotations that its supervision does not supply.
        MissingExtra: If the package of a tracker is not installed.
    """
    check_published_id(recipe.published)
    recipe = with_absolute_paths(recipe)
    if recipe.members:
        check_data_exists(recipe)
        members = member_recipes(recipe)
        return TrainingPlan(
            recipe, {name: resolve(member, context) for name, member in members.items()}
        )
    recipe = with_feedback(recipe)
    check_model_fields(recipe)
    baselines = list[str]()
    for number, phase in enumerate(recipe.phases):
        objective = phase.objective
        supervision = phase.supervision
        try:
            supervision.check_objective(objective)
        except MissingSupervision as error:
            raise MissingSupervision(f"phases.{number}: {error}") from None
        if unused := supervision.unused_annotations(objective):
            baselines.append(
                f"phases.{number}: {type(objective).__name__} does not use the annotations of "
                f"{type(supervision).__name__} ({', '.join(unused)})."
            )
    check_trackers(recipe)
    check_processes(recipe, (context or RunContext()).group)
    return TrainingPlan(recipe, baselines=tuple(baselines))


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
        content = merge_values(shared, normalize_values(changes), source)
        recipes[name] = build_recipe(content | {"name": f"{recipe.name}-{name}"}, {}, source)
    return recipes
