"""One training run from its recipe to its result.

``start_run`` and ``resume_run`` go through the same stages:

1. Check the recipe (``check_recipe``). A resumed run compares it with its record.
2. Open the data, compute features and build the model (``prepare_training``). A new run also checks
   every phase.
3. Record the inputs and the environment. A resumed run compares them with its record.
4. Train (``Trainer``), from the last checkpoint if there is one.
5. Interpolate the weights, if the recipe asks for it.
6. Evaluate the best model on the test split and, if the recipe asks for it, on another data set.
7. Write the result, which marks a finished run.
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
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import (
    MissingSupervision,
    RecipeError,
    RunError,
    StorageError,
    VisavisError,
)
from visavis.core.notebook import NotebookTable
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import Progress
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
from visavis.training.optimizer import make_optimizer
from visavis.training.processes import check_processes
from visavis.training.recipes.data_module import DataModule, prepare_training
from visavis.training.recipes.published_tables import check_published_id, with_published
from visavis.training.recipes.recipe import Recipe, with_feedback
from visavis.training.recipes.start_model import describe_scale_and_bias, learned_start_values
from visavis.training.runs.open_run import open_peer_network, read_run_recipe, set_threads
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.train_step import phase_loss
from visavis.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class TrainingResult(NotebookTable):
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
    interpolation: Interpolation | None = None
    forgetting: Forgetting | None = None
    members: tuple[TrainingResult, ...] = ()

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


def start_run(
    recipe: Recipe, out: str | Path | None, progress: Progress, group: ProcessGroup = ONE_PROCESS
) -> TrainingResult:
    """Train a recipe of one model in a new folder.

    A run that fails before its first checkpoint leaves nothing behind. Only after a full disk the
    folder stays, so that you can resume the run when there is space.

    Args:
        recipe: Recipe with absolute paths and without ``members``.
        out: New folder. None: ``runs/<recipe>-<n>``.
        progress: Receives progress and messages.
        group: Processes that train together. Rank 0 writes the run.

    Returns:
        The result, which is also written into the folder.

    Raises:
        RecipeError: If the recipe cannot be trained.
        RunError: If ``out`` is a run already.
        RefusedOverwrite: If ``out`` is another folder with content, or a file.
        Stopped: After a signal, when everything is saved.
    """
    recipe = check_recipe(recipe)
    check_processes(recipe, group)
    with create_run_folder(recipe, out, group) as path:
        folder = RunFolder(path)
        set_threads(recipe)
        started = time.perf_counter()
        data_module, matcher = prepare_and_check_phases(recipe, progress, group)
        cache_seconds = time.perf_counter() - started
        if not group.is_first:
            return train_and_evaluate(data_module, matcher, folder, cache_seconds, progress)
        record = RunRecord.from_training(data_module, matcher, progress)
        with storage.folder_lock(folder.lock, wait=False, subject=path):
            _check_no_run(path)  # again: another process may have been faster
            try:
                storage.write_json(folder.environment, asdict(record))
                storage.write_toml(
                    folder.recipe, recipe.to_dict()
                )  # last: it makes the folder a run
                return train_and_evaluate(data_module, matcher, folder, cache_seconds, progress)
            except VisavisError as error:
                can_resume = complete_checkpoints(folder.checkpoints) or (
                    isinstance(error, StorageError) and os.path.exists(folder.recipe)
                )
                if not can_resume:
                    folder.remove()
                raise


@contextmanager
def create_run_folder(
    recipe: Recipe, out: str | Path | None, group: ProcessGroup
) -> Iterator[Path]:
    """Create the folder of a run on rank 0.

    Args:
        recipe: Recipe of the run.
        out: New folder. None: ``runs/<recipe>-<n>``.
        group: Processes that train together.

    Yields:
        The folder, on each rank.

    Raises:
        RunError: If ``out`` is a run already.
        RefusedOverwrite: If ``out`` is another folder with content, or a file.
    """
    if not group.is_first:
        yield Path(group.broadcast_text(""))
        return
    if out is not None:
        _check_no_run(Path(out))
    with storage.create_output_folder(out, Path("runs") / recipe.name) as path:
        group.broadcast_text(str(path))
        yield path


def resume_run(path: Path, progress: Progress, group: ProcessGroup = ONE_PROCESS) -> TrainingResult:
    """Resume a stopped run with the same recipe and the same inputs.

    Args:
        path: Folder of the run.
        progress: Receives progress and messages.
        group: Processes that train together. Their number may differ from that of the start.

    Returns:
        The result, which is also written into the folder.

    Raises:
        RunError: If the folder is not a run, or if its recipe or its inputs changed.
        Stopped: After a signal, when everything is saved.
    """
    recipe, folder = read_run_recipe(path), RunFolder(path)
    check_processes(recipe, group)
    with (
        storage.folder_lock(folder.lock, wait=False, subject=path)
        if group.is_first
        else nullcontext()
    ):
        record = RunRecord.read(folder.environment)
        if group.is_first:
            storage.remove_partial_files(path)
            record.check_code(path)
            record.check_recipe(recipe, folder)
            record.warn_about_environment(progress)
        set_threads(recipe)
        started = time.perf_counter()
        data_module, matcher = prepare_training(recipe, progress, group)
        if group.is_first:
            record.check_data(data_module, path, progress)
        if recipe.interpolation.alphas:
            record.check_initial_weights(matcher, path)
        return train_and_evaluate(
            data_module, matcher, folder, time.perf_counter() - started, progress
        )


def train_and_evaluate(
    data_module: DataModule,
    matcher: Matcher,
    folder: RunFolder,
    cache_seconds: float,
    progress: Progress,
) -> TrainingResult:
    """Train from the last checkpoint or from the start, then evaluate the best weights and write
    the result.

    Args:
        data_module: Data of the recipe.
        matcher: Model with its initial weights.
        folder: Folder of the run.
        cache_seconds: Time to open the data and to compute features.
        progress: Receives progress and messages.

    Returns:
        The result of the run.
    """
    with storage.resumable(folder.path):
        return _train_and_evaluate(data_module, matcher, folder, cache_seconds, progress)


def _train_and_evaluate(
    data_module: DataModule,
    matcher: Matcher,
    folder: RunFolder,
    cache_seconds: float,
    progress: Progress,
) -> TrainingResult:
    recipe = data_module.recipe
    trainer = Trainer(data_module, matcher, folder, progress)
    initial_weights = trainer.best  # a resumed trainer replaces it: read it first
    objective = f"{recipe.phases[0].objective}{describe_scale_and_bias(matcher, recipe.phases[0])}"
    progress.message(
        f"{folder.path}: {objective}, positives by {_positives_by(recipe)}, "
        f"{_describe_supervision(recipe)}, "
        f"{len(trainer.train_loader.data.captions):,} training captions, epochs: "
        f"{sum(phase.epochs for phase in recipe.phases)}"
    )
    if not trainer.resume():
        trainer.start()
    state = trainer.run()
    data_module.group.barrier()  # until the first process has written the best model
    matcher.load_state_dict(trainer.best)
    interpolation = (
        _interpolate(trainer, initial_weights, progress) if recipe.interpolation.alphas else None
    )
    validation_rsum = (
        state.best_rsum if interpolation is None else interpolation.rsum[interpolation.alpha]
    )
    if warning := chance_warning(
        validation_rsum, np.bincount(trainer.val_loader.data.image_of).tolist()
    ):
        progress.message(warning)
    test = evaluate_test(data_module, matcher, folder)
    forgetting = (
        measure_forgetting(data_module, matcher, progress) if recipe.evaluation.forgetting else None
    )
    if forgetting is not None:
        progress.message(str(forgetting))
    result = TrainingResult(
        run=folder.path,
        objective=repr(recipe.phases[-1].objective),
        positives_by=_positives_by(recipe),
        supervision=_describe_supervision(recipe),
        best_step=state.best_step,
        validation_rsum=validation_rsum,
        validation_images=len(trainer.val_loader.data.images),
        test=test,
        seconds=round(state.seconds + sum(row["time"]["validation_s"] for row in trainer.log), 1),
        cache_seconds=round(cache_seconds, 1),
        interpolation=interpolation,
        forgetting=forgetting,
    )
    if data_module.group.is_first:
        result.write()
    return result


def check_recipe(recipe: Recipe) -> Recipe:
    """Check what can be checked before any data is read.

    Args:
        recipe: Recipe of one model.

    Returns:
        The recipe, with supervisions that use its feedback file, if it names one.

    Raises:
        RecipeError: If the recipe is an ensemble, or names an unknown table row.
        MissingSupervision: If an objective needs annotations that its supervision does not supply.
        MissingExtra: If the package of a tracker is not installed.
    """
    if recipe.members:
        raise RecipeError(
            f"{recipe.name}: expected a recipe of one model, got an ensemble of "
            f"{', '.join(recipe.members)}. "
            "Pass a recipe without members. Only visavis train trains an ensemble."
        )
    check_published_id(recipe.published)
    recipe = with_feedback(recipe)
    check_supervisions(recipe)
    check_trackers(recipe)
    return recipe


def check_supervisions(recipe: Recipe) -> None:
    """Check that each phase supplies the annotations that its objective needs.

    Args:
        recipe: Recipe to check.

    Raises:
        MissingSupervision: If a phase does not. The message names the phase.
    """
    for number, phase in enumerate(recipe.phases):
        try:
            phase.supervision.check_objective(phase.objective)
        except MissingSupervision as error:
            raise MissingSupervision(f"phases.{number}: {error}") from None


def unused_supervisions(recipe: Recipe) -> list[str]:
    """Find phases whose objective uses nothing that the supervision supplies. In a comparison that
    is a baseline.

    Args:
        recipe: Recipe to check.

    Returns:
        One sentence for each such phase.
    """
    sentences = []
    for number, phase in enumerate(recipe.phases):
        source, objective = phase.supervision, phase.objective
        if unused := source.unused_annotations(objective):
            names = f"{type(objective).__name__} does not use the annotations of {type(source).__name__}"
            sentences.append(f"phases.{number}: {names} ({', '.join(unused)}).")
    return sentences


def prepare_and_check_phases(
    recipe: Recipe, progress: Progress, group: ProcessGroup = ONE_PROCESS
) -> tuple[DataModule, Matcher]:
    """Open the data, compute features, build the model, and check every phase before the first
    step.

    Args:
        recipe: Checked recipe.
        progress: Receives progress and warnings.
        group: Processes that train together.

    Returns:
        The data and the model with its initial weights.

    Raises:
        RecipeError: If a phase trains an unknown part, or an objective does not fit the learned
            scale of the model.
        DataError: If the data set cannot be read.
    """
    check_forgetting(recipe, progress)
    data_module, matcher = prepare_training(recipe, progress, group)
    for phase in recipe.phases:
        make_optimizer(matcher, phase)
        phase_loss(matcher, phase)
        learned_start_values(matcher, phase)
    for sentence in unused_supervisions(recipe):
        progress.message(f"{sentence} It is trained on pairs alone.")
    return data_module, matcher


def evaluate_test(
    data_module: DataModule, matcher: Matcher, folder: RunFolder
) -> Evaluation | None:
    """Evaluate the best model on the test split.

    Args:
        data_module: Data of the recipe.
        matcher: Model with its best weights.
        folder: Folder of the run, with the second network where the recipe averages two.

    Returns:
        The evaluation. None if the data set has no such split.
    """
    settings = data_module.recipe.evaluation
    if settings.test not in data_module.data.splits:
        return None
    tested = (
        ScoreEnsemble([matcher, open_peer_network(folder.path, matcher)])
        if settings.average_networks
        else matcher
    )
    return with_published(
        data_module.evaluate(tested, settings.test, settings.protocols, settings.relevance),
        data_module.recipe,
    )


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


def _interpolate(
    trainer: Trainer, initial_weights: dict[str, Tensor], progress: Progress
) -> Interpolation:
    """Interpolate the best weights with the initial ones, and save the model."""
    data_module = trainer.data_module
    interpolation = choose_interpolation(
        data_module, trainer.matcher, initial_weights, trainer.best, trainer.log[0]["rsum"]
    )
    if data_module.group.is_first:
        data_module.processor.save(trainer.matcher, trainer.folder.model)
    progress.message(str(interpolation))
    return interpolation


def _check_no_run(path: Path) -> None:
    # os.path.exists is also False for a name that is too long. The error then comes from creating
    # the folder.
    if os.path.exists(RunFolder(path).recipe):
        raise RunError(
            f"{path}: expected a new folder, got an existing run. Resume it with --resume {path}, "
            "or name another folder."
        )


def _positives_by(recipe: Recipe) -> str:
    """Definition of positives in each phase, as ``TrainingResult.positives_by`` documents it."""
    rules = dict.fromkeys(
        getattr(phase.supervision, "by", "its own rule") for phase in recipe.phases
    )
    return " then ".join(rules)


def _describe_supervision(recipe: Recipe) -> str:
    """The supervisions of the phases with their settings, one after the other, and the file of
    judgments that is a key of the data.
    """
    judgments = f" of {recipe.data.feedback}" if recipe.data.feedback else ""
    return " then ".join(
        dict.fromkeys(f"{phase.supervision!r}{judgments}" for phase in recipe.phases)
    )
