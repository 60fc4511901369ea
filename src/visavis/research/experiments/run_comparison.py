"""Comparison of settings over seeds, with a fixed number of seeds or with successive halving under
a time budget.

Files of a comparison: ``plan.json`` (recipe, settings and their learning rates), ``feedback.jsonl``
(a copy of the feedback, if any), ``tuning/`` with a folder for each try of a learning rate,
``runs/`` with a folder for each run, and the results ``comparison.json``, ``table.md``,
``table.csv`` and ``table.tex``.

With successive halving (Karnin et al. 2013, Jamieson and Talwalkar 2016) all settings start with
one seed. After each round the better half by mean validation RSUM continues with twice as many
seeds, until two settings are left or the time is over. All remaining settings have the same seeds,
so that they are compared in pairs. The test split decides nothing.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from visavis.core import storage
from visavis.core.errors import RecipeError, RunError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.core.stopping import kept_if_stopped
from visavis.research.experiments.comparison_result import Comparison
from visavis.research.experiments.feedback_test import FeedbackTest
from visavis.research.experiments.grid import Choices, Setting, build_settings
from visavis.research.experiments.jobs import (
    MAX_RUNS,
    Job,
    JobRunner,
    RunOutcome,
    Workers,
    check_models_exist,
    read_outcome,
    with_feedback_answers,
)
from visavis.research.experiments.tuning import TunedRate, tune_learning_rates, with_rate
from visavis.training.recipes.open_data import open_data
from visavis.training.recipes.prepare_training import prepare_training
from visavis.training.recipes.recipe import Recipe, build_recipe, parse_override
from visavis.training.runs.open_run import with_absolute_paths
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped

T = TypeVar("T")
PLAN_FILE, FEEDBACK_FILE = "plan.json", "feedback.jsonl"


Round = list[tuple[Setting, int]]
"""Settings and seeds to train."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class ExperimentPlan:
    """Runs of an experiment.

    Attributes:
        name: Name of the recipe or table.
        settings: Settings.
        seeds: Seeds of each setting: 1, 2, ...
        successive_halving: Whether settings are dropped after each round.
        tune: Whether the learning rate of each setting is selected before its runs.
        rates: The selected learning rates, which ``recipe`` uses. Empty before they are selected,
            and without tuning.
    """

    name: str
    settings: tuple[Setting, ...]
    seeds: int
    successive_halving: bool = False
    tune: bool = False
    rates: tuple[TunedRate, ...] = ()

    def recipe(self, setting: Setting, seed: int) -> Recipe:
        """Build the recipe of one run.

        Args:
            setting: Setting.
            seed: Seed.

        Returns:
            The recipe.
        """
        factor = next((rate.factor for rate in self.rates if rate.setting == setting.name), 1.0)
        setting = with_rate(setting, factor)
        # One thread by default, so that results do not depend on the number of runs at the same
        # time.
        threads = setting.recipe_values["training"]["threads"] or 1
        return build_recipe(
            setting.recipe_values, {"seed": seed, "training.threads": threads}, setting.name
        )


def plan_comparison(
    recipe: Recipe, choices: Choices, seeds: int, *, successive_halving: bool, tune: bool = False
) -> ExperimentPlan:
    """Plan a comparison.

    Args:
        recipe: Recipe that the settings change.
        choices: Objectives, models and grid, as texts.
        seeds: Number of seeds.
        successive_halving: Whether settings are dropped after each round.
        tune: Whether to select the learning rate of each setting, if there are several and the grid
            has no learning rates.

    Returns:
        The plan.

    Raises:
        RecipeError: If the recipe is an ensemble, or a setting is not a valid recipe.
        SpecError: If an objective or a model cannot be parsed.
    """
    if recipe.members:
        raise RecipeError(
            f"{recipe.name}: expected a recipe of one model, got an ensemble of "
            f"{', '.join(recipe.members)}. Compare its members."
        )
    settings = build_settings(with_absolute_paths(recipe), *choices)
    tune = (
        tune
        and len(settings) > 1
        and not any(parse_override(text)[0].endswith("optimizer.lr") for text in choices[2])
    )
    return ExperimentPlan(
        recipe.name, settings, validate_int(seeds, "seeds", 1, MAX_RUNS), successive_halving, tune
    )


def start_comparison(
    plan: ExperimentPlan,
    out: Path | None,
    workers: Workers,
    progress: Progress,
    *,
    feedback: Path | None,
    budget_s: float | None,
) -> Comparison:
    """Run a comparison in a new folder.

    Args:
        plan: Plan.
        out: New folder. None: ``runs/compare-<n>``.
        workers: How runs are executed.
        progress: Receives progress.
        feedback: Feedback file, of which the folder keeps a copy.
        budget_s: Time budget in seconds. None: no limit.

    Returns:
        The comparison.

    Raises:
        RecipeError: If a recipe does not fit the data.
        DataError: If the data or the feedback cannot be read.
        Stopped: After a signal, when everything is saved.
    """
    test = None if feedback is None else _read_feedback_test(plan, feedback, progress)
    with new_experiment_folder(plan, out, "compare", progress) as (folder, batches):
        if feedback is not None:
            storage.write_bytes(folder / FEEDBACK_FILE, storage.read_bytes(feedback))
        return _run(folder, plan, batches, workers, progress, test, budget_s)


def resume_comparison(
    folder: Path,
    seeds: int | None,
    workers: Workers,
    progress: Progress,
    *,
    feedback: Path | None,
    budget_s: float | None,
) -> Comparison:
    """Resume a comparison, with more seeds or other feedback if given.

    Args:
        folder: Folder of the comparison.
        seeds: Number of seeds. None: as planned.
        workers: How runs are executed.
        progress: Receives progress.
        feedback: Feedback file that replaces that of the folder. None: keep it.
        budget_s: Time budget in seconds. None: no limit.

    Returns:
        The comparison.

    Raises:
        RunError: If the folder is not a comparison, or a model that feedback needs was removed.
        Stopped: After a signal, when everything is saved.
    """
    plan = read_plan(folder, seeds, successive_halving=budget_s is not None, command="compare")
    for job in _jobs(folder, plan).values():
        # Runs of the same setting must have the same code.
        if os.path.exists(record := RunFolder(job.folder).environment):
            RunRecord.read(record).check_code(job.folder)
    batches = cache_setting_features(plan, progress)
    file = feedback or folder / FEEDBACK_FILE
    test = None
    if feedback is not None or os.path.exists(file):
        test = _read_feedback_test(plan, file, progress)
        finished = [read_outcome(job) for job in _jobs(folder, plan).values()]
        check_models_exist(
            outcome
            for outcome in finished
            if outcome is not None and not outcome.has_answers_for(test)
        )
        given = storage.read_bytes(file)
        copy = folder / FEEDBACK_FILE
        if os.path.exists(copy) and (before := storage.read_bytes(copy)) != given:
            lines = f"{len(before.splitlines()):,} lines before, {len(given.splitlines()):,} now"
            progress.message(f"{copy}: replaced by the given feedback ({lines}).")
        storage.write_bytes(copy, given)
    with finished_runs_kept(folder):
        return _run(folder, plan, batches, workers, progress, test, budget_s)


def finished_runs_kept(folder: Path) -> AbstractContextManager[None]:
    """Report that Ctrl-C in this block keeps the finished runs of a folder.

    Args:
        folder: Folder of the experiment.

    Returns:
        Context of the block.
    """
    return kept_if_stopped(lambda: "The finished runs are kept.", lambda: folder)


@contextmanager
def new_experiment_folder(
    plan: ExperimentPlan, out: Path | None, stem: str, progress: Progress
) -> Iterator[tuple[Path, dict[str, int]]]:
    """Create a folder, open the data of a plan, compute its features, and write the plan.

    Args:
        plan: Plan.
        out: New folder. None: ``runs/<stem>-<n>``.
        stem: Stem of the default name.
        progress: Receives progress.

    Yields:
        The folder, and the batches of an epoch by the name of the setting.
    """
    with storage.create_output_folder(out, Path("runs") / stem) as folder:
        batches = cache_setting_features(plan, progress)
        storage.write_json(folder / PLAN_FILE, asdict(plan))
        with finished_runs_kept(folder):
            yield folder, batches


def read_experiment_file(folder: Path, name: str, schema: type[T], command: str) -> T:
    """Read a file that every experiment of a command has.

    Args:
        folder: Folder of the experiment.
        name: Name of the file.
        schema: Type of its content.
        command: Command that writes such folders, for messages.

    Returns:
        The content.

    Raises:
        RunError: If there is no such file, or its content is invalid.
    """
    if not os.path.exists(folder / name):
        raise RunError(
            f"{folder}: expected {name} in it, found none. Pass a folder of visavis {command}."
        )
    return storage.read_json(folder / name, schema, error=RunError)


def read_plan(
    folder: Path, seeds: int | None, *, successive_halving: bool, command: str
) -> ExperimentPlan:
    """Read the plan of a folder, and save it with more seeds if given.

    Args:
        folder: Folder of the experiment.
        seeds: Number of seeds. None: as planned.
        successive_halving: Whether settings are dropped after each round.
        command: Command that writes such folders, for messages.

    Returns:
        The plan.

    Raises:
        RunError: If there is no plan, or if it has more seeds.
    """
    plan = read_experiment_file(folder, PLAN_FILE, ExperimentPlan, command)
    if seeds is not None and seeds < plan.seeds:
        raise RunError(
            f"seeds: expected at least {plan.seeds}, the seeds of {folder}, got {seeds}. Pass "
            f"--seeds {plan.seeds} or more."
        )
    updated = replace(
        plan,
        seeds=plan.seeds if seeds is None else validate_int(seeds, "seeds", 1, MAX_RUNS),
        successive_halving=plan.successive_halving or successive_halving,
    )
    if updated != plan:
        storage.write_json(folder / PLAN_FILE, asdict(updated))
    return updated


@contextmanager
def experiment_workers(
    folder: Path, plan: ExperimentPlan, workers: Workers, progress: Progress
) -> Iterator[JobRunner]:
    """Lock the folder of an experiment, and start its workers for this block.

    Args:
        folder: Folder of the experiment.
        plan: Plan.
        workers: How runs are executed.
        progress: Receives the progress of runs in this process.

    Yields:
        Function that runs jobs.

    Raises:
        Stopped: After a signal, when everything is saved.
    """
    threads = max(plan.recipe(setting, 1).training.threads for setting in plan.settings)
    with storage.folder_lock(folder / PLAN_FILE, wait=False, subject=folder):
        try:
            with workers.start(threads, progress) as run_jobs:
                yield run_jobs
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None


def train_runs(
    folder: Path,
    plan: ExperimentPlan,
    run_jobs: JobRunner,
    progress: Progress,
    budget_s: float | None = None,
) -> list[RunOutcome]:
    """Train the runs of a plan that are not finished.

    Args:
        folder: Folder of the experiment.
        plan: Plan.
        run_jobs: Runs jobs.
        progress: Receives progress.
        budget_s: Time budget in seconds. None: no limit.

    Returns:
        The outcomes of all finished runs.

    Raises:
        RunError: If no run succeeded.
        Stopped: After a signal, when everything is saved.
    """
    jobs = _jobs(folder, plan)
    finished = {
        key: outcome for key, job in jobs.items() if (outcome := read_outcome(job)) is not None
    }
    budget = TimeBudget(budget_s)
    rounds: Iterable[Round] = [all_runs(plan.settings, plan.seeds)]
    if plan.successive_halving:
        rounds = halving_rounds(plan.settings, plan.seeds, lambda: list(finished.values()))
    for runs in rounds:
        missing = [
            (setting, seed) for setting, seed in runs if (setting.name, seed) not in finished
        ]
        affordable = budget.runs_within_budget(missing)
        if affordable:
            progress.update("runs", len(finished), len(jobs), 0)
        for outcome in run_jobs([jobs[setting.name, seed] for setting, seed in affordable]):
            finished[outcome.setting, outcome.seed] = outcome
            budget.runs += 1
            result = (
                outcome.failure
                or f"validation RSUM {outcome.validation_rsum:.1f}  ({outcome.seconds:.0f} s)"
            )
            progress.message(f"{outcome.setting}, seed {outcome.seed}: {result}")
            progress.update("runs", len(finished), len(jobs), budget.runs / budget.elapsed)
        if skipped := len(missing) - len(affordable):
            progress.message(
                f"The time budget is used up after {budget.elapsed:.0f} s. Skipping {skipped} runs "
                "of this round."
            )
            break
    outcomes = list(finished.values())
    if all(run.failure for run in outcomes):
        reason = (
            f"got {len(outcomes)} failures. The first: {outcomes[0].failure}"
            if outcomes
            else "got no runs."
        )
        raise RunError(f"{folder}: expected a successful run, {reason}")
    return outcomes


def cache_setting_features(plan: ExperimentPlan, progress: Progress) -> dict[str, int]:
    """Open the data and compute the features of all settings before any run.

    Args:
        plan: Plan.
        progress: Receives progress.

    Returns:
        Batches of an epoch by the name of the setting.

    Raises:
        RecipeError: If a recipe does not fit the data, or the data set has no test split.
        DataError: If the data cannot be read.
    """
    # Settings that differ only in objectives share data and features.
    batches_of_inputs = dict[str, int]()
    batches = dict[str, int]()
    for setting in plan.settings:
        recipe = plan.recipe(setting, 1)
        training = recipe.training
        batching = [training.batch_size, training.captions_per_image, training.batches_per_epoch]
        inputs = repr(
            [recipe.data, recipe.visual, recipe.text, recipe.model, recipe.evaluation, batching]
        )
        if inputs in batches_of_inputs:
            batches[setting.name] = batches_of_inputs[inputs]
            continue
        data_module, _ = prepare_training(recipe, RunContext(progress))
        batches[setting.name] = batches_of_inputs[inputs] = data_module.loader(
            data_module.training_split
        ).num_batches
        if (name := data_module.recipe.evaluation.test) not in data_module.data.splits:
            raise RecipeError(
                f"evaluation.test: {data_module.data.name} has no split {name}, which a comparison "
                "measures on. Set evaluation.test=NAME."
            )
    return batches


def _run(
    folder: Path,
    plan: ExperimentPlan,
    batches: dict[str, int],
    workers: Workers,
    progress: Progress,
    test: FeedbackTest | None,
    budget_s: float | None,
) -> Comparison:
    """Select learning rates, train the missing runs, evaluate feedback, and write the results."""
    started = time.monotonic()
    with experiment_workers(folder, plan, workers, progress) as run_jobs:
        if plan.tune and not plan.rates:
            rates = tune_learning_rates(
                plan.settings, batches, plan.seeds, folder / "tuning", run_jobs, progress
            )
            # More seeds later keep the rates of the first ones, also if these had too few steps.
            plan = replace(plan, tune=bool(rates), rates=rates)
            storage.write_json(folder / PLAN_FILE, asdict(plan))
        # tuning is part of the budget
        left_s = None if budget_s is None else max(0.0, budget_s - (time.monotonic() - started))
        outcomes = train_runs(folder, plan, run_jobs, progress, left_s)
    if test is not None:
        for number, outcome in enumerate(outcomes):
            progress.update("judged text queries", number, len(outcomes), 0)
            outcomes[number] = with_feedback_answers(outcome, test)
    succeeded = {run.setting for run in outcomes if not run.failure}
    order = [setting.name for setting in plan.settings]
    comparison = Comparison(
        folder,
        plan.name,
        tuple(setting for setting in plan.settings if setting.name in succeeded),
        tuple(sorted(outcomes, key=lambda run: (order.index(run.setting), run.seed))),
        test,
        plan.rates,
    )
    storage.write_json(folder / "comparison.json", comparison.to_json())
    storage.write_text(folder / "table.md", comparison.markdown())
    storage.write_text(folder / "table.csv", comparison.csv())
    storage.write_text(folder / "table.tex", comparison.latex())
    return comparison


def _jobs(folder: Path, plan: ExperimentPlan) -> dict[tuple[str, int], Job]:
    """Jobs by setting and seed."""
    jobs = {}
    for setting, seed in all_runs(plan.settings, plan.seeds):
        path = (
            folder / "runs" / f"{plan.settings.index(setting) + 1:02d}-{setting.slug}-seed-{seed}"
        ).absolute()
        jobs[setting.name, seed] = Job(
            setting.name, seed, plan.recipe(setting, seed).to_dict(), path
        )
    return jobs


def _read_feedback_test(plan: ExperimentPlan, file: Path, progress: Progress) -> FeedbackTest:
    """Read the judged text queries of the test split."""
    for setting in plan.settings:
        if setting.recipe_values["text"]["features"]:
            raise RecipeError(
                f"{setting.name}: text.features: expected a text encoder, because feedback has "
                "text queries that are not captions, got stored "
                "features. Set text.encoder, or compare without --feedback."
            )
    recipe = plan.recipe(plan.settings[0], 1)
    data = open_data(recipe, progress)
    test = FeedbackTest.read(file, data, recipe.evaluation.test, progress)
    progress.message(f"{file}: {test}")
    return test


def parse_budget(text: str) -> float:
    """Parse a time.

    Args:
        text: Time such as "90s", "30m" or "1.5h".

    Returns:
        Seconds.

    Raises:
        VisavisError: If the text is not a time.

    Example:
        >>> parse_budget("30m")
        1800.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) == 0:
        raise VisavisError(
            f"budget: expected a time such as 90s, 30m or 1.5h, got {text!r}. Pass a number with a "
            "unit."
        )
    return float(match[1]) * _UNITS[match[2]]


def all_runs(settings: Sequence[Setting], seeds: int) -> Round:
    """List every setting with every seed.

    Args:
        settings: Settings.
        seeds: Number of seeds, from 1.

    Returns:
        The runs. The first seed of all settings comes first, so that an interrupted comparison is
        still a comparison.
    """
    return [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]


def halving_rounds(
    settings: Sequence[Setting], seeds: int, outcomes: Callable[[], Sequence[RunOutcome]]
) -> Iterator[Round]:
    """Generate the rounds of successive halving.

    Args:
        settings: Settings.
        seeds: Number of seeds of the last round.
        outcomes: Returns all outcomes so far.

    Yields:
        Runs of the next round.
    """
    trained_seeds, remaining = 0, list(settings)  # seeds of the remaining settings
    while trained_seeds < seeds:
        next_seeds = min(max(2 * trained_seeds, 1), seeds) if len(remaining) > 2 else seeds
        yield [
            (setting, seed)
            for seed in range(trained_seeds + 1, next_seeds + 1)
            for setting in remaining
        ]
        trained_seeds = next_seeds
        remaining = better_half(remaining, outcomes())


def better_half(settings: Sequence[Setting], outcomes: Sequence[RunOutcome]) -> list[Setting]:
    """Select the better half of the settings by mean validation RSUM over their common seeds.

    Args:
        settings: Settings.
        outcomes: Outcomes of runs.

    Returns:
        At least two settings. Settings without a successful run come last.
    """
    rsum_by_seed: dict[str, dict[int, float]] = {setting.name: {} for setting in settings}
    for run in outcomes:
        if run.setting in rsum_by_seed and not run.failure:
            rsum_by_seed[run.setting][run.seed] = run.validation_rsum
    seeds_of_settings = [set(by_seed) for by_seed in rsum_by_seed.values() if by_seed]
    # Settings with failed runs would otherwise be compared on other seeds.
    common_seeds = set.intersection(*seeds_of_settings) if seeds_of_settings else set()

    def mean_rsum(setting: Setting) -> float:
        values = [rsum for seed, rsum in rsum_by_seed[setting.name].items() if seed in common_seeds]
        return statistics.fmean(values) if values else float("-inf")

    best_first = sorted(settings, key=mean_rsum, reverse=True)
    selected = {setting.name for setting in best_first[: max(2, math.ceil(len(settings) / 2))]}
    return [setting for setting in settings if setting.name in selected]


class TimeBudget:
    """Time budget, with the duration of a run estimated from the runs so far.

    Attributes:
        seconds: Budget. None: no limit.
        started: Start time, of ``time.monotonic``.
        runs: Finished runs.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self.started = time.monotonic()
        self.runs = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def runs_within_budget(self, runs: Round) -> Round:
        """Select the seeds of a round that end within the budget.

        Args:
            runs: Runs of the round.

        Returns:
            Runs of the first seeds of the round, with all settings. Before the first run, all of
            them.
        """
        if self.seconds is None or not self.runs:
            return runs
        seconds_per_run = self.elapsed / self.runs  # of wall time, so parallel runs take less
        affordable = (self.seconds - self.elapsed) / seconds_per_run
        seeds = sorted({seed for _, seed in runs})
        runs_per_seed = len(runs) / len(seeds)
        return [
            (setting, seed)
            for setting, seed in runs
            if runs_per_seed * (1 + seeds.index(seed)) <= affordable
        ]
