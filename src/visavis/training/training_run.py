"""A training from its recipe to its result.

``resolve`` checks a recipe once, before any data are read, and makes the plan of every training: of
``visavis train``, of each run of a comparison or reproduction, and of ``visavis train --dry-run``,
which prints it. Later stages trust it: none reads a name again, completes a path or repeats a check.

``start_training`` and ``resume_training`` then go through the same stages:

1. Open the data, compute features and build the model (``prepare_training``). A new run also
   measures scales and margins of "auto", and checks that every phase fits the model.
2. Record the inputs and the environment. A resumed run compares them with its record.
3. Train (``Trainer``), from the last checkpoint if there is one.
4. Interpolate the weights, if the recipe asks for it.
5. Evaluate the best model on the test split and, if the recipe asks for it, on another data set.
6. Write the result, which marks a finished run.

The members of an ensemble are runs in subfolders, evaluated by the mean of their scores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import MissingSupervision, RunError, StorageError, VisavisError
from visavis.core.process_group import ProcessGroup
from visavis.core.result import Result
from visavis.core.run_context import RunContext
from visavis.core.stopping import kept_if_stopped
from visavis.core.table import Column, Table
from visavis.data.dataset import Dataset
from visavis.data.noise import noise_index
from visavis.evaluation import Evaluation
from visavis.evaluation.metrics.ranking import random_rsum
from visavis.evaluation.query_ranks import write_query_ranks
from visavis.models.base import Matcher
from visavis.models.inference import ScoreEnsemble
from visavis.training.checkpoint import complete_checkpoints
from visavis.training.fine_tuned_models import (
    Forgetting,
    Interpolation,
    check_forgetting,
    choose_interpolation,
    measure_forgetting,
)
from visavis.training.monitoring.tracking import check_trackers
from visavis.training.processes import check_processes
from visavis.training.recipes.data_module import DataModule, batch_schedule
from visavis.training.recipes.features import training_subset
from visavis.training.recipes.files import merge_values
from visavis.training.recipes.initial_model import (
    check_model_fields,
    initial_matcher,
    load_start_model,
    resolve_matryoshka_dims,
)
from visavis.training.recipes.learned_scale import describe_scale_and_bias
from visavis.training.recipes.open_data import check_data_exists, open_data, open_data_module
from visavis.training.recipes.published_tables import check_published_id, with_published
from visavis.training.recipes.recipe import Recipe, build_recipe, normalize_values, with_feedback
from visavis.training.runs.evaluate_runs import EvaluationOptions, evaluate_runs
from visavis.training.runs.open_run import (
    open_peer_network,
    read_ensemble_recipe,
    read_run_recipe,
    set_threads,
    with_absolute_paths,
)
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.runs.teacher import open_teacher
from visavis.training.scale_trials import check_auto, with_auto_values
from visavis.training.stop_signals import Stopped
from visavis.training.train_step import check_phase
from visavis.training.trainer import Trainer


@dataclass(frozen=True)
class TrainingPlan(Result):
    """A training that can start. ``print`` describes it.

    Attributes:
        recipe: Recipe with absolute paths, whose supervisions use its feedback.
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
        """Open the data set, to count its items. No features are computed and no model is built."""
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
        """Describe the plan, one line for each part of the training."""
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
        """Convert to plain values."""
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


@dataclass(frozen=True, kw_only=True)
class TrainingResult(Result):
    """Result of a training run or of an ensemble.

    Attributes:
        run: Folder of the run.
        objective: Objective of the last phase.
        positives_by: Definition of positives in each phase: "ids", "position", "ids and feedback"
            of FeedbackSupervision, or "its own rule" of a supervision that does not name it.
            Different phases are joined by "then", members by "and".
        supervision: Supervision of each phase with all its settings and files, such as
            MinedNegativeSupervision(file='FILE', per_query=1). Joined as ``positives_by``.
        best_step: Step with the best validation RSUM.
        validation_rsum: Validation RSUM of the final model, in percent.
        validation_images: Images that each validation ranks, with all their captions.
        test: Evaluation on the test split. None if the data set has no such split.
        seconds: Time of training steps and validations.
        cache_seconds: Time to open the data and to compute features.
        raw_validation_rsum: Best validation RSUM of the raw weights, if the run keeps averaged ones
            (``training.ema_decay``).
        interpolation: Chosen interpolation, if the recipe asks for one.
        forgetting: Result on another data set before and after the training, if the recipe asks for
            it.
        noise: Kind of noise with its seed, joined by "and" for members. "": none.
        noise_index: Hash of the assignment of the training captions to images. "": no noise.
        members: Results of the members of an ensemble, whose other fields are those of the mean of
            their scores.
    """

    run: Path
    objective: str
    positives_by: str
    supervision: str
    best_step: int
    validation_rsum: float
    validation_images: int
    test: Evaluation | None
    seconds: float
    cache_seconds: float
    raw_validation_rsum: float | None = None
    interpolation: Interpolation | None = None
    forgetting: Forgetting | None = None
    noise: str = ""
    noise_index: str = ""
    members: tuple[TrainingResult, ...] = ()

    def tables(self) -> list[Table]:
        """Return the test metrics, and in sentences validation RSUM and folder."""
        summary = (
            f"{self.objective}, positives by {self.positives_by}, {self.supervision}: best "
            f"validation RSUM {self.validation_rsum:.1f} ({self.validation_images:,} images "
            f"against all their captions), step {self.best_step:,}. Training: {self.seconds:.0f} s. "
            f"Data and features: {self.cache_seconds:.0f} s."
        )
        if self.noise:
            summary += f" Captions on wrong images: {self.noise}, noise index {self.noise_index}."
        notes = [summary]
        for member in self.members:
            test = "" if member.test is None else f"; test RSUM {member.test.metrics['rsum']:.1f}"
            notes.append(
                f"{member.run.name}: best validation RSUM {member.validation_rsum:.1f}, step "
                f"{member.best_step:,}{test}"
            )
        notes.append(f"Run folder: {self.run}")
        tested = [] if self.test is None else self.test.tables()
        return [*tested, Table(notes=tuple(notes))]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        keys = (
            "objective",
            "positives_by",
            "supervision",
            "best_step",
            "validation_rsum",
            "validation_images",
            "seconds",
            "cache_seconds",
        )
        values = {key: getattr(self, key) for key in keys}
        if self.raw_validation_rsum is not None:
            values["raw_validation_rsum"] = self.raw_validation_rsum
        if self.noise:
            values |= {"noise": self.noise, "noise_index": self.noise_index}
        nested = {
            key: part.to_json()
            for key in ("interpolation", "forgetting")
            if (part := getattr(self, key)) is not None
        }
        members = {"members": [member.to_json() for member in self.members]} if self.members else {}
        return {
            "run": str(self.run),
            **values,
            **({} if self.test is None else self.test.to_json()),
            **nested,
            **members,
        }

    def write(self) -> None:
        """Write the ranks of the test queries and the result into the folder."""
        if self.test is not None:
            write_query_ranks(RunFolder(self.run).ranks, self.test.query_ranks_by_protocol)
        # Last: it marks a finished run.
        storage.write_json(RunFolder(self.run).result, self.to_json())


def resolve(recipe: Recipe, context: RunContext | None = None) -> TrainingPlan:
    """Resolve a recipe, and check what can be checked before any data are read."""
    # Names and paths: nothing after this point depends on the current folder.
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
    check_auto(recipe)
    # Phases: an objective must get the annotations that it needs, and should use one that it gets.
    baselines = list[str]()
    for number, phase in enumerate(recipe.phases):
        objective = phase.objective
        supervision = phase.supervision
        try:
            # Whether annotations are missing does not depend on a scale.
            supervision.check_objective(objective.at_spread(1.0))
        except MissingSupervision as error:
            raise MissingSupervision(f"phases.{number}: {error}") from None
        if unused := supervision.unused_annotations(objective):
            baselines.append(
                f"phases.{number}: {type(objective).__name__} does not use the annotations of "
                f"{type(supervision).__name__} ({', '.join(unused)})."
            )
    # The machine: packages and processes.
    check_trackers(recipe)
    check_processes(recipe, (context or RunContext()).group)
    return TrainingPlan(recipe, baselines=tuple(baselines))


def member_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Build the recipe of each member of an ensemble. A member is not a row of a published table."""
    shared = {
        key: value for key, value in recipe.to_dict().items() if key not in ("members", "published")
    }
    recipes = {}
    for name, changes in recipe.members.items():
        source = f"{recipe.published or recipe.name}, member {name}"
        content = merge_values(shared, normalize_values(changes), source)
        recipes[name] = build_recipe(content | {"name": f"{recipe.name}-{name}"}, {}, source)
    return recipes


def start_training(
    plan: TrainingPlan, out: str | Path | None = None, context: RunContext | None = None
) -> TrainingResult:
    """Train a plan in a new folder: one run, or one run for each member of an ensemble."""
    context = context or RunContext()
    group = context.group
    # A run that fails before its first checkpoint leaves nothing behind. Only after a full disk the
    # folder stays, so that you can resume the run when there is space.
    with _create_run_folder(plan.recipe, out, group) as path:
        if not plan.members:
            return _start_run(plan, RunFolder(path), context)
        # The file makes the folder an ensemble. Its members are runs in subfolders.
        file = RunFolder(path).ensemble
        with group.first_rank_first():
            if group.is_first:
                storage.write_toml(file, plan.recipe.to_dict())
        try:
            return _train_members(plan, path, context)
        finally:
            if group.is_first and not any(
                os.path.exists(RunFolder(path / name).recipe) for name in plan.members
            ):
                storage.current_disk().unlink(file)


def start_subfolder(plan: TrainingPlan, path: Path, context: RunContext) -> TrainingResult:
    """Train a plan in a subfolder of an ensemble or an experiment."""
    if context.group.is_first and os.path.isdir(path):
        # A killed process may have left files of a folder that is not a run yet.
        RunFolder(path).remove()
        storage.remove_partial_files(path)
    return start_training(plan, path, context)


def resume_training(folder: Path, context: RunContext | None = None) -> TrainingResult:
    """Resume a stopped run, or the members of an ensemble that are not finished."""
    context = context or RunContext()
    ensemble = read_ensemble_recipe(folder)
    if ensemble is None:
        return _resume_run(folder, context)
    return _train_members(resolve(ensemble, context), folder, context)


def _start_run(plan: TrainingPlan, folder: RunFolder, context: RunContext) -> TrainingResult:
    """Train one model in a new folder. Stages are numbered as above."""
    recipe = plan.recipe
    # 1. Open the data, compute features and build the model. The data of stage 5 and
    # later phases are checked now, before hours of training.
    set_threads(recipe)
    started = time.perf_counter()
    check_forgetting(recipe, context.progress)
    data_module, matcher = prepare_training(recipe, context)
    recipe = with_auto_values(data_module, matcher)
    data_module = replace(data_module, recipe=recipe)
    for phase in recipe.phases:
        check_phase(matcher, phase)
    for sentence in plan.baselines:
        context.progress.message(f"{sentence} It is trained on pairs alone.")
    cache_seconds = time.perf_counter() - started
    if not context.group.is_first:
        return _train_and_evaluate(data_module, matcher, folder, cache_seconds)
    # 2. Record the inputs, the environment and the recipe.
    record = RunRecord.from_training(data_module, matcher, context.progress, plan.recipe)
    with storage.folder_lock(folder.lock, wait=False, subject=folder.path):
        _check_no_run(folder.path)  # again: another process may have been faster
        try:
            storage.write_json(folder.environment, asdict(record))
            # Last: it makes the folder a run.
            storage.write_toml(folder.recipe, recipe.to_dict())
            return _train_and_evaluate(data_module, matcher, folder, cache_seconds)
        except VisavisError as error:
            # A full disk is the one failure without a checkpoint after which the run can continue.
            can_resume = complete_checkpoints(folder.checkpoints) or (
                isinstance(error, StorageError) and os.path.exists(folder.recipe)
            )
            if not can_resume:
                folder.remove()
            raise


def _resume_run(path: Path, context: RunContext) -> TrainingResult:
    """Continue one model from its last checkpoint, if its inputs are unchanged."""
    recipe = read_run_recipe(path)
    folder = RunFolder(path)
    is_first = context.group.is_first
    check_processes(recipe, context.group)
    check_trackers(recipe)  # the machine may be another one
    with storage.folder_lock(folder.lock, wait=False, subject=path) if is_first else nullcontext():
        record = RunRecord.read(folder.environment)
        # First the checks that need no data.
        if is_first:
            storage.remove_partial_files(path)
            record.check_code(path)
            record.check_recipe(recipe, folder)
            record.warn_about_environment(context.progress)
        set_threads(recipe)
        started = time.perf_counter()
        data_module, matcher = prepare_training(recipe, context)
        if is_first:
            record.check_data(data_module, path, context.progress)
        if recipe.interpolation.alphas:
            record.check_initial_weights(matcher, path)
        return _train_and_evaluate(data_module, matcher, folder, time.perf_counter() - started)


def prepare_training(
    recipe: Recipe, context: RunContext | None = None
) -> tuple[DataModule, Matcher]:
    """Open the data, compute or open the features, and build the model with its initial weights."""
    context = context or RunContext()
    check_model_fields(recipe)  # again: a resumed run has no plan
    with context.group.first_rank_first():
        start = load_start_model(recipe)
    data_module = open_data_module(
        recipe, context, start.processor if start else None, training=True
    )
    matcher = initial_matcher(data_module, start)
    matcher.matryoshka_dims = resolve_matryoshka_dims(data_module, matcher)
    return data_module, matcher


def _train_and_evaluate(
    data_module: DataModule, matcher: Matcher, folder: RunFolder, cache_seconds: float
) -> TrainingResult:
    """Train from the last checkpoint or from the start, then evaluate the best weights and write
    the result.
    """
    recipe = data_module.recipe
    progress = data_module.progress
    group = data_module.group
    with (
        storage.resumable(folder.path),
        kept_if_stopped(lambda: "The run is kept up to its last checkpoint.", lambda: folder.path),
    ):
        # 3. Train.
        trainer = Trainer(data_module, matcher, folder, open_teacher)
        initial_weights = trainer.best  # a resumed trainer replaces it: read it first
        first = recipe.phases[0]
        progress.message(
            f"{folder.path}: {first.objective}{describe_scale_and_bias(matcher, first)}, positives "
            f"by {recipe.positives_by}, {recipe.supervision}, "
            f"{len(trainer.train_loader.data.captions):,} training captions, epochs: "
            f"{sum(phase.epochs for phase in recipe.phases)}"
        )
        noise = recipe.noise
        index = noise_index(data_module.data) if noise else ""
        if noise:
            wrong = "captions on wrong images"
            progress.message(f"{folder.path}: {wrong}: {noise}, noise index {index}")
        if not trainer.resume():
            trainer.start()
        state = trainer.run()
        group.barrier()  # until the first process has written the best model
        matcher.load_state_dict(trainer.best)
        raw_rsum = None
        if decay := recipe.training.ema_decay:
            raw_rsum = max(row["raw_weights"]["rsum"] for row in trainer.log)
            progress.message(
                f"Kept the averaged weights (ema_decay {decay:g}) of step {state.best_step}, the "
                f"best of {len(trainer.log)} validations of the averaged weights: RSUM "
                f"{state.best_rsum:.1f}. The raw weights reached {raw_rsum:.1f}."
            )
        # 4. Interpolate the weights.
        validation_rsum = state.best_rsum
        interpolation = None
        if recipe.interpolation.alphas:
            interpolation = choose_interpolation(
                data_module, matcher, initial_weights, trainer.best, trainer.log[0]["rsum"]
            )
            if group.is_first:
                data_module.processor.save(matcher, folder.model)
            progress.message(str(interpolation))
            validation_rsum = interpolation.rsum[interpolation.alpha]
        # 5. Evaluate the best model.
        captions_per_image = np.bincount(trainer.val_loader.data.image_of).tolist()
        chance, std = random_rsum(captions_per_image)
        if validation_rsum <= chance + 2 * std:
            progress.message(
                f"Validation is not above chance: RSUM {validation_rsum:.1f}, a random ranking of "
                f"{len(captions_per_image):,} images reaches {chance:.1f} ± {std:.1f}. The model "
                "has not learned anything measurable. Use more images or a pretrained encoder."
            )
        test = _evaluate_test(data_module, matcher, folder)
        forgetting = None
        if recipe.evaluation.forgetting:
            forgetting = measure_forgetting(data_module, matcher)
            progress.message(str(forgetting))
        # 6. Write the result.
        result = TrainingResult(
            run=folder.path,
            objective=repr(recipe.phases[-1].objective),
            positives_by=recipe.positives_by,
            supervision=recipe.supervision,
            best_step=state.best_step,
            validation_rsum=validation_rsum,
            validation_images=len(trainer.val_loader.data.images),
            test=test,
            seconds=round(
                state.seconds + sum(row["time"]["validation_s"] for row in trainer.log), 1
            ),
            cache_seconds=round(cache_seconds, 1),
            raw_validation_rsum=raw_rsum,
            interpolation=interpolation,
            forgetting=forgetting,
            noise=noise,
            noise_index=index,
        )
        if group.is_first:
            result.write()
        return result


def _evaluate_test(
    data_module: DataModule, matcher: Matcher, folder: RunFolder
) -> Evaluation | None:
    """Evaluate the best model on the test split, with the second network where the recipe averages
    two. None: the data set has no such split.
    """
    settings = data_module.recipe.evaluation
    if settings.test not in data_module.data.splits:
        return None
    tested = (
        ScoreEnsemble([matcher, open_peer_network(folder.path, matcher)])
        if settings.average_networks
        else matcher
    )
    evaluation = data_module.evaluate(tested, settings.test, settings.protocols, settings.sections)
    return with_published(evaluation, data_module.recipe)


def _train_members(plan: TrainingPlan, folder: Path, context: RunContext) -> TrainingResult:
    """Train or resume each member in its subfolder, one after the other, then evaluate their
    ensemble.
    """
    group = context.group

    def resumable_folder() -> Path | None:
        has_runs = any(RunFolder(folder / name).is_run for name in plan.members)
        return folder if has_runs else None

    with kept_if_stopped(lambda: "", resumable_folder):
        members = list[TrainingResult]()
        for name, member in plan.members.items():
            try:
                # Rank 0 decides, because it may already have created the run.
                if group.broadcast_text("run" if RunFolder(folder / name).is_run else ""):
                    members.append(_resume_run(folder / name, context))
                else:
                    members.append(start_subfolder(member, folder / name, context))
            except Stopped as stopped:
                raise Stopped(str(folder), stopped.signal) from None

        group.barrier()  # until rank 0 has written the models
        if group.is_first:
            storage.remove_partial_files(folder)
        settings = plan.recipe.evaluation
        options = EvaluationOptions(
            protocol="plain", split=settings.validation, max_images=settings.validation_images
        )
        validation = evaluate_runs([folder], options, context.progress)
        test = None
        if all(member.test is not None for member in members):
            options = EvaluationOptions(split=settings.test)
            test = evaluate_runs([folder], options, context.progress)
        result = TrainingResult(
            run=folder,
            objective=" and ".join(dict.fromkeys(member.objective for member in members)),
            positives_by=" and ".join(dict.fromkeys(member.positives_by for member in members)),
            supervision=" and ".join(dict.fromkeys(member.supervision for member in members)),
            best_step=max(member.best_step for member in members),
            validation_rsum=validation.metrics["rsum"],
            validation_images=validation.num_images,
            test=test,
            seconds=sum(member.seconds for member in members),
            cache_seconds=sum(member.cache_seconds for member in members),
            noise=" and ".join(dict.fromkeys(member.noise for member in members)),
            noise_index=" and ".join(dict.fromkeys(member.noise_index for member in members)),
            members=tuple(members),
        )
        if group.is_first:
            result.write()
        return result


@contextmanager
def _create_run_folder(
    recipe: Recipe, out: str | Path | None, group: ProcessGroup
) -> Iterator[Path]:
    """Create the folder of a run on rank 0, and yield it on each rank."""
    if not group.is_first:
        yield Path(group.broadcast_text(""))
        return
    if out is not None:
        _check_no_run(Path(out))
        RunFolder(Path(out)).remove_killed_start()
    with storage.create_output_folder(out, Path("runs") / recipe.name) as path:
        group.broadcast_text(str(path))
        yield path


def _check_no_run(path: Path) -> None:
    """Refuse a folder that is a run already."""
    # os.path.exists is also False for a name that is too long. The error then comes from creating
    # the folder.
    if RunFolder(path).is_run:
        raise RunError(
            f"{path}: expected a new folder, got an existing run. Resume it with --resume {path}, "
            "or name another folder."
        )
