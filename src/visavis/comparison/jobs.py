"""One run of a comparison: trained in a folder of its own, gone on with where it was stopped, and never trained twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.comparison.table import Rules
from visavis.errors import RunError, VisavisError
from visavis.evaluation.judged import JudgedAnswer, JudgedTest, measured
from visavis.progress import Progress
from visavis.runs.begin import Trained
from visavis.runs.judged import judged_answers
from visavis.runs.together import continue_training, train_recipe
from visavis.training.recipe import build_recipe
from visavis.training.run_files import RunFiles


@dataclass(frozen=True)
class Job:
    """A run to be made. setting: its name. content: of the recipe, resolved. folder: of the run."""

    setting: str
    seed: int
    content: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Judged:
    """How a run answers judged sentences, in their order. test: the fingerprint of what was judged."""

    test: str
    answers: tuple[JudgedAnswer, ...]


@dataclass(frozen=True)
class Outcome:
    """What a job came to. validation_rsum: of the best model, by which settings are chosen. metrics: of that model on the test split, and
    rules, under which they were measured. seconds: of training and validations. failure: the sentence of an error, instead of numbers.
    judged: of the same model, once it was asked what people judged.
    """

    setting: str
    seed: int
    folder: Path
    validation_rsum: float = float("nan")
    metrics: dict[str, float | None] | None = None
    rules: Rules | None = None
    seconds: float = 0.0
    failure: str = ""
    judged: Judged | None = None

    @classmethod
    def of(cls, job: Job, trained: Trained) -> Outcome:
        """Of several protocols that of the row of a paper which the recipe stands for, else the first: metrics and rules alike."""
        assert trained.test is not None  # begun only where the data have a test split
        test = trained.test.as_published
        return cls(job.setting, job.seed, job.folder, trained.validation_rsum, test.measured, Rules.of(test), trained.seconds)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that have a value, of captions and of what people judged."""
        metrics = (self.metrics or {}) | (measured(self.judged.answers) if self.judged else {})
        return {key: value for key, value in metrics.items() if value is not None}

    def answers(self, test: JudgedTest) -> bool:
        """Whether it was asked just what this test holds."""
        return self.judged is not None and self.judged.test == test.pairs.fingerprint

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def known_outcome(job: Job) -> Outcome | None:
    """The outcome of a job that was finished; None if it was not, or if what it left is damaged."""
    kept: Outcome | None = storage.kept(_outcome_file(job.folder), Outcome)
    return kept and replace(kept, folder=job.folder)  # where it lies now


def done(job: Job, progress: Progress) -> Outcome:
    """The outcome of a job, trained if it is not known; an error that is the training's becomes the failure. Raises Stopped."""
    if (known := known_outcome(job)) is not None:
        return known
    try:
        trained = _trained(job, progress)
    except VisavisError as error:
        return Outcome(job.setting, job.seed, job.folder, failure=str(error))
    outcome = Outcome.of(job, trained)
    storage.keep(_outcome_file(job.folder), outcome.to_json())
    return outcome


def check_models(outcomes: Iterable[Outcome]) -> None:
    """Raise RunError for a run that is finished and whose best model is no longer there to be asked anything."""
    for outcome in outcomes:
        if not outcome.failure and not (RunFiles(outcome.folder).model / "model.safetensors").exists():
            raise RunError(
                f"{outcome.folder} has its results, but no longer its model, which alone can answer what people judged: bring it back, or remove "
                "the folder, and the run is made anew."
            )


def with_judged(outcome: Outcome, test: JudgedTest) -> Outcome:
    """The outcome with how its best model answers what people judged, kept beside its other numbers. Raises RunError as ``check_models``."""
    if outcome.failure or outcome.answers(test):
        return outcome
    check_models([outcome])
    asked = replace(outcome, judged=Judged(test.pairs.fingerprint, tuple(judged_answers(outcome.folder, test))))
    storage.keep(_outcome_file(outcome.folder), asked.to_json())
    return asked


def _trained(job: Job, progress: Progress) -> Trained:
    files = RunFiles(job.folder)
    if files.recipe.exists() or files.ensemble.exists():
        return continue_training(job.folder, progress)
    files.remove()  # what a killed process left before it was a run
    storage.remove_parts(job.folder)
    return train_recipe(build_recipe(job.content, {}, job.setting), job.folder, progress)


def _outcome_file(folder: Path) -> Path:
    return folder / "outcome.json"
