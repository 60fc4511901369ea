"""A training from its plan to its result.

``start_training`` and ``resume_training`` go through the same stages:

1. Open the data, compute features and build the model (``prepare_training``). A new run also checks
   that every phase fits the model.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import RunError, StorageError, VisavisError
from visavis.core.process_group import ProcessGroup
from visavis.core.result import Result
from visavis.core.run_context import RunContext
from visavis.core.stopping import kept_if_stopped
from visavis.core.table import Table
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
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.learned_scale import describe_scale_and_bias
from visavis.training.recipes.prepare_training import prepare_training
from visavis.training.recipes.published_tables import with_published
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.evaluate_runs import evaluate_runs
from visavis.training.runs.open_run import (
    open_peer_network,
    read_ensemble_recipe,
    read_run_recipe,
    set_threads,
)
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.runs.teacher import open_teacher
from visavis.training.stop_signals import Stopped
from visavis.training.train_step import check_phase
from visavis.training.trainer import Trainer
from visavis.training.training_plan import TrainingPlan, resolve


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
    members: tuple[TrainingResult, ...] = ()

    def tables(self) -> list[Table]:
        """Return the test metrics, and in sentences validation RSUM and folder."""
        summary = (
            f"{self.objective}, positives by {self.positives_by}, {self.supervision}: best "
            f"validation RSUM {self.validation_rsum:.1f} ({self.validation_images:,} images "
            f"against all their captions), step {self.best_step:,}. Training: {self.seconds:.0f} s. "
            f"Data and features: {self.cache_seconds:.0f} s."
        )
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
        """Convert to plain values.

        Returns:
            One flat object with the test metrics by their keys. Interpolation, forgetting and
            members are nested.
        """
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
        storage.write_json(
            RunFolder(self.run).result, self.to_json()
        )  # last: it marks a finished run


def start_training(
    plan: TrainingPlan, out: str | Path | None = None, context: RunContext | None = None
) -> TrainingResult:
    """Train a plan in a new folder: one run, or one run for each member of an ensemble.

    A run that fails before its first checkpoint leaves nothing behind. Only after a full disk the
    folder stays, so that you can resume the run when there is space.

    Args:
        plan: Plan, from ``resolve``.
        out: New folder. None: ``runs/<recipe>-<n>``.
        context: Progress and processes. Rank 0 writes the run. None: one silent process.

    Returns:
        The result of the run, or of the ensemble. It is also written into the folder.

    Raises:
        RecipeError: If the data or the model do not suit the recipe.
        DataError: If the data set cannot be read.
        RunError: If ``out`` is a run already.
        RefusedOverwrite: If ``out`` is another folder with content, or a file.
        Stopped: After a signal, when everything is saved.
    """
    context = context or RunContext()
    with _create_run_folder(plan.recipe, out, context.group) as path:
        if plan.members:
            return _start_ensemble(plan, path, context)
        return _start_run(plan, RunFolder(path), context)


def resume_training(folder: Path, context: RunContext | None = None) -> TrainingResult:
    """Resume a stopped run, or the members of an ensemble that are not finished.

    Args:
        folder: Folder of the run or of the ensemble.
        context: Progress and processes, whose number may differ from that of the start.

    Returns:
        The result of the run, or of the ensemble.

    Raises:
        RunError: If the folder is not a run, or if its recipe or its inputs changed.
        Stopped: After a signal, when everything is saved.
    """
    context = context or RunContext()
    ensemble = read_ensemble_recipe(folder)
    if ensemble is None:
        return _resume_run(folder, context)
    return _train_members(resolve(ensemble, context), folder, context)


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
    with storage.create_output_folder(out, Path("runs") / recipe.name) as path:
        group.broadcast_text(str(path))
        yield path


def _check_no_run(path: Path) -> None:
    # os.path.exists is also False for a name that is too long. The error then comes from creating
    # the folder.
    if os.path.exists(RunFolder(path).recipe):
        raise RunError(
            f"{path}: expected a new folder, got an existing run. Resume it with --resume {path}, "
            "or name another folder."
        )


def _start_run(plan: TrainingPlan, folder: RunFolder, context: RunContext) -> TrainingResult:
    recipe = plan.recipe
    set_threads(recipe)
    started = time.perf_counter()
    check_forgetting(recipe, context.progress)
    data_module, matcher = prepare_training(recipe, context)
    for phase in recipe.phases:
        check_phase(matcher, phase)
    for sentence in plan.baselines:
        context.progress.message(f"{sentence} It is trained on pairs alone.")
    cache_seconds = time.perf_counter() - started
    if not context.group.is_first:
        return _train_and_evaluate(data_module, matcher, folder, cache_seconds)
    record = RunRecord.from_training(data_module, matcher, context.progress)
    with storage.folder_lock(folder.lock, wait=False, subject=folder.path):
        _check_no_run(folder.path)  # again: another process may have been faster
        try:
            storage.write_json(folder.environment, asdict(record))
            # Last: it makes the folder a run.
            storage.write_toml(folder.recipe, recipe.to_dict())
            return _train_and_evaluate(data_module, matcher, folder, cache_seconds)
        except VisavisError as error:
            can_resume = complete_checkpoints(folder.checkpoints) or (
                isinstance(error, StorageError) and os.path.exists(folder.recipe)
            )
            if not can_resume:
                folder.remove()
            raise


def _resume_run(path: Path, context: RunContext) -> TrainingResult:
    recipe = read_run_recipe(path)
    folder = RunFolder(path)
    is_first = context.group.is_first
    check_processes(recipe, context.group)
    check_trackers(recipe)  # the machine may be another one
    with storage.folder_lock(folder.lock, wait=False, subject=path) if is_first else nullcontext():
        record = RunRecord.read(folder.environment)
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


def _start_ensemble(plan: TrainingPlan, path: Path, context: RunContext) -> TrainingResult:
    """Train the members one after the other, in subfolders of a new folder."""
    group = context.group
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
            file.unlink()


def _train_members(plan: TrainingPlan, folder: Path, context: RunContext) -> TrainingResult:
    """Train or resume each member in its subfolder, then evaluate their ensemble."""

    def resumed() -> Path | None:
        has_runs = any(RunFolder(folder / name).is_run for name in plan.members)
        return folder if has_runs else None

    with kept_if_stopped(lambda: "", resumed):
        return _train_members_in_turn(plan, folder, context)


def _train_members_in_turn(plan: TrainingPlan, folder: Path, context: RunContext) -> TrainingResult:
    group = context.group
    members = list[TrainingResult]()
    for name, member in plan.members.items():
        try:
            # Rank 0 decides, because it may already have created the run.
            if group.broadcast_text("run" if RunFolder(folder / name).is_run else ""):
                members.append(_resume_run(folder / name, context))
            else:
                members.append(start_training(member, folder / name, context))
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None
    settings = plan.recipe.evaluation
    has_test = all(member.test is not None for member in members)
    group.barrier()  # until rank 0 has written the models
    validation = evaluate_runs(
        [folder],
        "plain",
        settings.validation,
        None,
        context.progress,
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
        test=evaluate_runs([folder], None, settings.test, None, context.progress)
        if has_test
        else None,
        seconds=sum(member.seconds for member in members),
        cache_seconds=sum(member.cache_seconds for member in members),
        members=tuple(members),
    )
    if group.is_first:
        result.write()
    return result


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
        trainer = Trainer(data_module, matcher, folder, open_teacher)
        initial_weights = trainer.best  # a resumed trainer replaces it: read it first
        first = recipe.phases[0]
        progress.message(
            f"{folder.path}: {first.objective}{describe_scale_and_bias(matcher, first)}, positives "
            f"by {recipe.positives_by}, {recipe.supervision}, "
            f"{len(trainer.train_loader.data.captions):,} training captions, epochs: "
            f"{sum(phase.epochs for phase in recipe.phases)}"
        )
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
        captions_per_image = np.bincount(trainer.val_loader.data.image_of).tolist()
        if warning := chance_warning(validation_rsum, captions_per_image):
            progress.message(warning)
        test = _evaluate_test(data_module, matcher, folder)
        forgetting = None
        if recipe.evaluation.forgetting:
            forgetting = measure_forgetting(data_module, matcher)
            progress.message(str(forgetting))
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
        )
        if group.is_first:
            result.write()
        return result


def _evaluate_test(
    data_module: DataModule, matcher: Matcher, folder: RunFolder
) -> Evaluation | None:
    """Evaluate the best model on the test split, with the second network where the recipe averages
    two. None if the data set has no such split.
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


def chance_warning(rsum: float, captions_per_image: Sequence[int]) -> str:
    """Warn about a validation RSUM that is not above a random ranking by more than two standard
    deviations.

    Args:
        rsum: Validation RSUM, in percent.
        captions_per_image: Number of captions of each validation image.

    Returns:
        The warning. "" if the RSUM is higher.
    """
    mean, std = random_rsum(captions_per_image)
    if rsum > mean + 2 * std:
        return ""
    return (
        f"Validation is not above chance: RSUM {rsum:.1f}, a random ranking of "
        f"{len(captions_per_image):,} images reaches "
        f"{mean:.1f} ± {std:.1f}. The model has not learned anything measurable. Use more images "
        "or a pretrained encoder."
    )
