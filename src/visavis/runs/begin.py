"""A training from its recipe to its result, begun anew or gone on with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis import objectives, spec, storage, supervision
from visavis.errors import MissingSupervision, RecipeError, RunError, StorageError, VisavisError
from visavis.evaluation import Evaluation
from visavis.evaluation.ranks import write_ranks
from visavis.metrics.recall import random_rsum
from visavis.models.average import Average
from visavis.models.base import Matcher
from visavis.progress import Progress
from visavis.runs.folder import open_peer, recipe_of, set_threads, with_whole_paths
from visavis.runs.forgetting import Forgetting, check_forgetting, forgetting
from visavis.runs.interpolation import Interpolation, interpolate
from visavis.runs.published import beside_published, check_published
from visavis.runs.record import Record
from visavis.training.checkpoint import complete
from visavis.training.data_module import DataModule, prepare
from visavis.training.judgements import with_judgements
from visavis.training.loss import phase_loss
from visavis.training.recipe import Recipe
from visavis.training.recipe_files import read_recipe
from visavis.training.run_files import RunFiles
from visavis.training.schedule import make_optimizer
from visavis.training.settings import Phase
from visavis.training.trainer import Trainer


@dataclass(frozen=True)
class Trained:
    """What a training ended with. targets: how positives are told ("ids", "position"). test: None without a test split.

    validation_images: how many each validation ranks, with all their captions. seconds: of training steps and validations in all;
    cache_seconds: of opening data and computing features before. interpolation, forgetting: None unless the recipe asks for them.
    members: of an ensemble, whose own numbers are those of the mean of their scores.
    """

    folder: Path
    objective: str
    targets: str
    best_step: int
    validation_rsum: float
    validation_images: int
    test: Evaluation | None
    seconds: float
    cache_seconds: float
    interpolation: Interpolation | None = None
    forgetting: Forgetting | None = None
    members: tuple[Trained, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One flat object; the test metrics by their keys; interpolation and forgetting are objects of their own."""
        names = ("objective", "targets", "best_step", "validation_rsum", "validation_images", "seconds", "cache_seconds")
        facts = {name: getattr(self, name) for name in names}
        own = {name: told.to_json() for name in ("interpolation", "forgetting") if (told := getattr(self, name)) is not None}
        members = {"members": [member.to_json() for member in self.members]} if self.members else {}
        return {"run": str(self.folder), **facts, **({} if self.test is None else self.test.to_json()), **own, **members}


def begin_run(name: str | Path, overrides: dict[str, Any], out: str | Path | None, progress: Progress) -> Trained:
    """A new run in a new folder, claimed before any work; one that fails before its first checkpoint leaves nothing behind.

    Only a disk that is full leaves a run from its first file on, to go on when there is room.
    """
    return begin_recipe(with_whole_paths(read_recipe(name, overrides)), out, progress)


def begin_recipe(recipe: Recipe, out: str | Path | None, progress: Progress) -> Trained:
    """``begin_run`` by a recipe at hand. Raises RecipeError for an ensemble, which is no single run."""
    if recipe.members:
        raise RecipeError(f"{recipe.name} is an ensemble of {', '.join(recipe.members)}, which visavis train makes a run each of.")
    check_published(recipe.published)
    recipe = with_judgements(recipe)
    check_supervisions(recipe)
    if out is not None:
        _refuse_run(Path(out))
    with storage.begun_folder(out, Path("runs") / recipe.name) as folder:
        return _begin(recipe, RunFiles(folder), progress)


def _begin(recipe: Recipe, files: RunFiles, progress: Progress) -> Trained:
    set_threads(recipe)
    started = time.perf_counter()
    check_forgetting(recipe, progress)
    data_module, matcher = prepare(recipe, progress)
    for number, phase in enumerate(recipe.phases):
        make_optimizer(matcher, phase)  # raises for a part that the model does not have, also in the last phase,
        phase_loss(matcher, phase)  # and for an objective whose scale the model cannot learn
        if sentence := nothing_read(number, phase):
            progress.say(sentence)
    cache_seconds = time.perf_counter() - started
    record = Record.of(data_module, matcher, progress)
    with storage.alone(files.run, wait=False):
        _refuse_run(files.folder)
        try:
            storage.write_json(files.environment, asdict(record))
            storage.write_toml(files.recipe, recipe.to_dict())  # the last: by it a folder is a run
            return finish(data_module, matcher, files, cache_seconds, progress)
        except VisavisError as error:
            goes_on = complete(files.checkpoints) or (isinstance(error, StorageError) and files.recipe.exists())
            if not goes_on:
                files.remove()
            raise


def _refuse_run(folder: Path) -> None:
    if os.path.exists(RunFiles(folder).recipe):  # also where such a name cannot be: a folder that cannot be made says why
        raise RunError(f"{folder} holds a run already: go on with it by --resume {folder}, or name another folder.")


def continue_run(folder: Path, progress: Progress) -> Trained:
    """Go on with a stopped run. Raises RunError if the folder is no run, or if its recipe or what it reads has changed."""
    recipe, files = recipe_of(folder), RunFiles(folder)
    with storage.alone(files.run, wait=False):
        storage.remove_parts(folder)
        record = Record.read(files.environment)
        record.check_recipe(recipe, files)
        set_threads(recipe)
        record.say_differences(progress)
        started = time.perf_counter()
        data_module, matcher = prepare(recipe, progress)
        record.check_data(data_module, folder, progress)
        if recipe.interpolation.shares:
            record.check_start(matcher, folder, progress)
        return finish(data_module, matcher, files, time.perf_counter() - started, progress)


def finish(data_module: DataModule, matcher: Matcher, files: RunFiles, cache_seconds: float, progress: Progress) -> Trained:
    """Train to the end, from the last checkpoint on if there is one; evaluate the best weights on the test split, write the result."""
    recipe = data_module.recipe
    trainer = Trainer(data_module, matcher, files, progress)
    start, interpolation = trainer.best, None
    captions, epochs = len(trainer.train.data.captions), sum(phase.epochs for phase in recipe.phases)
    progress.say(
        f"{files.folder}: {recipe.phases[0].objective}, positives by {targets_of(recipe)}, {captions:,} training captions, epochs: {epochs}"
    )
    if not trainer.resume():
        trainer.begin()
    state = trainer.run()
    matcher.load_state_dict(trainer.best)
    rsum = state.best_rsum
    if recipe.interpolation.shares:
        interpolation = interpolate(data_module, matcher, start, trainer.best, trainer.log[0]["rsum"])
        rsum = interpolation.rsum[interpolation.share]
        data_module.processor.save(matcher, files.model)
        progress.say(str(interpolation))
    if sentence := no_better_than_chance(rsum, np.bincount(trainer.val.data.image_of).tolist()):
        progress.say(sentence)
    test = None
    if recipe.evaluation.test in data_module.data.splits:
        tested = matcher if not recipe.evaluation.average else Average([matcher, open_peer(files.folder, matcher)])
        test = data_module.evaluate(tested, recipe.evaluation.test, recipe.evaluation.protocols, recipe.evaluation.degrees)
        test = beside_published(test, recipe)
    forgotten = forgetting(data_module, matcher, progress) if recipe.evaluation.forgetting else None
    if forgotten is not None:
        progress.say(str(forgotten))
    seconds = state.seconds + sum(row["time"]["validation_s"] for row in trainer.log)
    trained = Trained(
        files.folder,
        recipe.phases[-1].objective,
        targets_of(recipe),
        state.best_step,
        rsum,
        len(trainer.val.data.images),
        test,
        round(seconds, 1),
        round(cache_seconds, 1),
        interpolation,
        forgotten,
    )
    if test is not None:
        write_ranks(files.ranks, test.ranks_by_protocol)
    storage.write_json(files.result, trained.to_json())
    return trained


def no_better_than_chance(rsum: float, captions_per_image: Sequence[int]) -> str:
    """A sentence if a validation RSUM is within two standard deviations of what a random order reaches, else nothing."""
    mean, deviation = random_rsum(captions_per_image)
    if rsum > mean + 2 * deviation:
        return ""
    return (
        f"validation is not above chance: RSUM {rsum:.1f}, where a random order reaches {mean:.1f} ± {deviation:.1f} "
        f"on {len(captions_per_image):,} images: the model has learned nothing that can be shown; more pictures or a pretrained encoder help most."
    )


def check_supervisions(recipe: Recipe) -> None:
    """Raise MissingSupervision, naming the phase, for an objective that needs what the supervision of its phase does not supply."""
    for number, phase in enumerate(recipe.phases):
        try:
            spec.parse(phase.supervision, supervision.CATALOG).check_read_by(objectives.parse(phase.objective))
        except MissingSupervision as error:
            raise MissingSupervision(f"phase {number}: {error}") from None


def nothing_read(number: int, phase: Phase) -> str:
    """A sentence if the objective of a phase reads nothing of what its supervision tells beyond pairs, else nothing."""
    told = spec.parse(phase.supervision, supervision.CATALOG)
    objective = objectives.parse(phase.objective)
    if not (unread := told.unread_by(objective)):
        return ""
    return (
        f"phase {number}: {type(objective).__name__} reads nothing of what {type(told).__name__} tells it ({', '.join(unread)}): "
        "it learns as from pairs alone."
    )


def targets_of(recipe: Recipe) -> str:
    """How positives are told in a recipe's phases: "ids" or "position", or both."""
    kinds = dict.fromkeys(getattr(spec.parse(phase.supervision, supervision.CATALOG), "by", "its own rule") for phase in recipe.phases)
    return " then ".join(kinds)
