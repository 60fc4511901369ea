"""Comparison of settings over seeds, with a fixed number of seeds or with successive halving under a time budget.

With successive halving (Karnin et al. 2013, Jamieson and Talwalkar 2016) all settings start with one seed. After each round
the better half by mean validation RSUM continues with twice as many seeds, until two settings are left or the time is over.
All remaining settings have the same seeds, so that they are compared in pairs. The test split decides nothing.

Files of a comparison: ``plan.json`` (recipe and settings), ``feedback.jsonl`` (a copy of the feedback, if any), ``runs/`` with
a folder for each run, and the results ``comparison.json``, ``table.md``, ``table.csv`` and ``table.tex``.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from visavis import storage
from visavis.errors import RecipeError, RunError, VisavisError
from visavis.experiments.comparison_result import Comparison
from visavis.experiments.grid import Choices, Setting, build_settings
from visavis.experiments.jobs import MAX_RUNS, Job, JobRunner, RunOutcome, Workers, check_models_exist, read_outcome, with_feedback_answers
from visavis.feedback.evaluate_feedback import FeedbackTest
from visavis.progress import Progress
from visavis.recipes.data_module import prepare_training
from visavis.recipes.features import open_data
from visavis.recipes.recipe import Recipe, build_recipe
from visavis.runs.open_run import with_absolute_paths
from visavis.spec import validate_int
from visavis.training.stop_signals import Stopped

Round = list[tuple[Setting, int]]
"""Settings and seeds to train."""
PLAN_FILE, FEEDBACK_FILE = "plan.json", "feedback.jsonl"
_UNITS = {"s": 1, "m": 60, "h": 3600}


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
        raise VisavisError(f"budget: expected a time such as 90s, 30m or 1.5h, got {text!r}. Pass a number with a unit.")
    return float(match[1]) * _UNITS[match[2]]


def all_runs(settings: Sequence[Setting], seeds: int) -> Round:
    """List every setting with every seed.

    Args:
        settings: Settings.
        seeds: Number of seeds, from 1.

    Returns:
        The runs. The first seed of all settings comes first, so that an interrupted comparison is still a comparison.
    """
    return [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]


def halving_rounds(settings: Sequence[Setting], seeds: int, outcomes: Callable[[], Sequence[RunOutcome]]) -> Iterator[Round]:
    """Generate the rounds of successive halving.

    Args:
        settings: Settings.
        seeds: Number of seeds of the last round.
        outcomes: Returns all outcomes so far.

    Yields:
        Runs of the next round.
    """
    done, remaining = 0, list(settings)
    while done < seeds:
        last = min(max(2 * done, 1), seeds) if len(remaining) > 2 else seeds
        yield [(setting, seed) for seed in range(done + 1, last + 1) for setting in remaining]
        done = last
        remaining = better_half(remaining, outcomes())


def better_half(settings: Sequence[Setting], outcomes: Sequence[RunOutcome]) -> list[Setting]:
    """Select the better half of the settings by mean validation RSUM over their common seeds.

    Args:
        settings: Settings.
        outcomes: Outcomes of runs.

    Returns:
        At least two settings. Settings without a successful run come last.
    """
    runs: dict[str, dict[int, float]] = {setting.name: {} for setting in settings}
    for one in outcomes:
        if one.setting in runs and not one.failure:
            runs[one.setting][one.seed] = one.validation_rsum
    common = set.intersection(*map(set, (seeds for seeds in runs.values() if seeds))) if any(runs.values()) else set()

    def mean(setting: Setting) -> float:
        values = [value for seed, value in runs[setting.name].items() if seed in common]
        return statistics.fmean(values) if values else float("-inf")

    selected = [setting.name for setting in sorted(settings, key=mean, reverse=True)[: max(2, -(-len(settings) // 2))]]
    return [setting for setting in settings if setting.name in selected]


class TimeBudget:
    """Time budget, with the duration of a run estimated from the runs so far.

    Attributes:
        seconds: Budget. None: no limit.
        began: Start time.
        runs: Finished runs.
    """

    def __init__(self, seconds: float | None):
        self.seconds, self.began, self.runs = seconds, time.monotonic(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def runs_within_budget(self, runs: Round) -> Round:
        """Select the seeds of a round that end within the budget.

        Args:
            runs: Runs of the round.

        Returns:
            Whole seeds of the round. Before the first run, all of them.
        """
        if self.seconds is None or not self.runs:
            return runs
        affordable = (self.seconds - self.elapsed) / (self.elapsed / self.runs)
        seeds = sorted({seed for _, seed in runs})
        runs_per_seed = len(runs) / len(seeds)
        return [(setting, seed) for setting, seed in runs if runs_per_seed * (1 + seeds.index(seed)) <= affordable]


@dataclass(frozen=True)
class ExperimentPlan:
    """Runs of an experiment.

    Attributes:
        name: Name of the recipe or table.
        settings: Settings.
        seeds: Seeds of each setting: 1, 2, ...
        successive_halving: Whether settings are dropped after each round.
    """

    name: str
    settings: tuple[Setting, ...]
    seeds: int
    successive_halving: bool = False

    def recipe(self, setting: Setting, seed: int) -> Recipe:
        """Build the recipe of one run.

        Args:
            setting: Setting.
            seed: Seed.

        Returns:
            The recipe.
        """
        # One thread by default, so that results do not depend on the number of runs at the same time.
        threads = setting.recipe_values["training"]["threads"] or 1
        return build_recipe(setting.recipe_values, {"seed": seed, "training.threads": threads}, setting.name)


def plan_comparison(recipe: Recipe, choices: Choices, seeds: int, *, successive_halving: bool) -> ExperimentPlan:
    """Plan a comparison.

    Args:
        recipe: Recipe that the settings change.
        choices: Objectives, models and grid, as texts.
        seeds: Number of seeds.
        successive_halving: Whether settings are dropped after each round.

    Returns:
        The plan.

    Raises:
        RecipeError: If the recipe is an ensemble, or a setting is not a valid recipe.
        SpecError: If an objective or a model cannot be parsed.
    """
    if recipe.members:
        raise RecipeError(
            f"{recipe.name}: expected a recipe of one model, got an ensemble of {', '.join(recipe.members)}. Compare its members."
        )
    settings = build_settings(with_absolute_paths(recipe), *choices)
    return ExperimentPlan(recipe.name, settings, validate_int(seeds, "seeds", 1, MAX_RUNS), successive_halving)


def start_comparison(
    plan: ExperimentPlan, out: Path | None, workers: Workers, progress: Progress, *, feedback: Path | None, budget_s: float | None
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
    with new_experiment_folder(plan, out, "compare", progress) as folder:
        if feedback is not None:
            storage.write_bytes(folder / FEEDBACK_FILE, storage.read_bytes(feedback))
        return _run(folder, plan, workers, progress, test, budget_s)


def resume_comparison(
    folder: Path, seeds: int | None, workers: Workers, progress: Progress, *, feedback: Path | None, budget_s: float | None
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
    cache_setting_features(plan, progress)
    file, test = feedback or folder / FEEDBACK_FILE, None
    if feedback is not None or os.path.exists(file):
        test = _read_feedback_test(plan, file, progress)
        finished = [read_outcome(job) for job in _jobs(folder, plan).values()]
        check_models_exist(outcome for outcome in finished if outcome is not None and not outcome.has_answers_for(test))
        _copy_feedback(folder, storage.read_bytes(file), progress)
    return _run(folder, plan, workers, progress, test, budget_s)


@contextmanager
def new_experiment_folder(plan: ExperimentPlan, out: Path | None, stem: str, progress: Progress) -> Iterator[Path]:
    """Create a folder, open the data of a plan, compute its features, and write the plan.

    Args:
        plan: Plan.
        out: New folder. None: ``runs/<stem>-<n>``.
        stem: Stem of the default name.
        progress: Receives progress.

    Yields:
        The folder.
    """
    with storage.create_output_folder(out, Path("runs") / stem) as folder:
        cache_setting_features(plan, progress)
        storage.write_json(folder / PLAN_FILE, asdict(plan))
        yield folder


def read_plan(folder: Path, seeds: int | None, *, successive_halving: bool, command: str) -> ExperimentPlan:
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
    if not os.path.exists(folder / PLAN_FILE):
        raise RunError(f"{folder}: expected {PLAN_FILE} in it, found none. Pass a folder of visavis {command}.")
    plan: ExperimentPlan = storage.read_json(folder / PLAN_FILE, ExperimentPlan, error=RunError)
    if seeds is not None and seeds < plan.seeds:
        raise RunError(f"seeds: expected at least {plan.seeds}, the seeds of {folder}, got {seeds}. Pass --seeds {plan.seeds} or more.")
    updated = replace(
        plan,
        seeds=plan.seeds if seeds is None else validate_int(seeds, "seeds", 1, MAX_RUNS),
        successive_halving=plan.successive_halving or successive_halving,
    )
    if updated != plan:
        storage.write_json(folder / PLAN_FILE, asdict(updated))
    return updated


def train_runs(folder: Path, plan: ExperimentPlan, workers: Workers, progress: Progress, budget_s: float | None = None) -> list[RunOutcome]:
    """Train the runs of a plan that are not finished.

    Args:
        folder: Folder of the experiment.
        plan: Plan.
        workers: How runs are executed.
        progress: Receives progress.
        budget_s: Time budget in seconds. None: no limit.

    Returns:
        The outcomes of all finished runs.

    Raises:
        RunError: If no run succeeded.
        Stopped: After a signal, when everything is saved.
    """
    jobs = _jobs(folder, plan)
    done = {key: outcome for key, job in jobs.items() if (outcome := read_outcome(job)) is not None}
    budget = TimeBudget(budget_s)
    threads = max(job.recipe_values["training"]["threads"] for job in jobs.values())
    rounds: Iterable[Round] = [all_runs(plan.settings, plan.seeds)]
    if plan.successive_halving:
        rounds = halving_rounds(plan.settings, plan.seeds, lambda: list(done.values()))
    with storage.folder_lock(folder / PLAN_FILE, wait=False):
        try:
            with workers.start(threads, progress) as run_jobs:
                for runs in rounds:
                    missing = [(setting, seed) for setting, seed in runs if (setting.name, seed) not in done]
                    affordable = budget.runs_within_budget(missing)
                    _run_jobs(run_jobs, [jobs[setting.name, seed] for setting, seed in affordable], done, budget, len(jobs), progress)
                    if len(affordable) < len(missing):
                        skipped = len(missing) - len(affordable)
                        progress.message(f"The time budget is used up after {budget.elapsed:.0f} s. Skipping {skipped} runs of this round.")
                        break
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None
    outcomes = list(done.values())
    if all(one.failure for one in outcomes):
        reason = f"got {len(outcomes)} failures. The first: {outcomes[0].failure}" if outcomes else "got no runs."
        raise RunError(f"{folder}: expected a successful run, {reason}")
    return outcomes


def cache_setting_features(plan: ExperimentPlan, progress: Progress) -> None:
    """Open the data and compute the features of all settings before any run.

    Args:
        plan: Plan.
        progress: Receives progress.

    Raises:
        RecipeError: If a recipe does not fit the data, or the data set has no test split.
        DataError: If the data cannot be read.
    """
    cached = set[str]()
    for setting in plan.settings:
        recipe = plan.recipe(setting, 1)
        inputs = repr([recipe.data, recipe.visual, recipe.text, recipe.model, recipe.evaluation])
        if inputs in cached:
            continue
        cached.add(inputs)
        data_module, _ = prepare_training(recipe, progress)
        if (name := data_module.recipe.evaluation.test) not in data_module.data.splits:
            raise RecipeError(
                f"evaluation.test: {data_module.data.name} has no split {name}, which a comparison measures on. Set evaluation.test=NAME."
            )


def _run(
    folder: Path, plan: ExperimentPlan, workers: Workers, progress: Progress, test: FeedbackTest | None, budget_s: float | None
) -> Comparison:
    """Train the missing runs, evaluate feedback, and write the results."""
    outcomes = train_runs(folder, plan, workers, progress, budget_s)
    if test is not None:
        for number, outcome in enumerate(outcomes):
            progress.update("judged text queries", number, len(outcomes), 0)
            outcomes[number] = with_feedback_answers(outcome, test)
    succeeded, order = {one.setting for one in outcomes if not one.failure}, [setting.name for setting in plan.settings]
    comparison = Comparison(
        folder,
        plan.name,
        tuple(setting for setting in plan.settings if setting.name in succeeded),
        tuple(sorted(outcomes, key=lambda one: (order.index(one.setting), one.seed))),
        test,
    )
    storage.write_json(folder / "comparison.json", comparison.to_json())
    for name, text in (("table.md", comparison.markdown()), ("table.csv", comparison.csv()), ("table.tex", comparison.latex())):
        storage.write_text(folder / name, text)
    return comparison


def _run_jobs(
    run_jobs: JobRunner, jobs: Sequence[Job], done: dict[tuple[str, int], RunOutcome], budget: TimeBudget, total: int, progress: Progress
) -> None:
    for outcome in run_jobs(jobs):
        done[outcome.setting, outcome.seed] = outcome
        budget.runs += 1
        result = outcome.failure or f"validation RSUM {outcome.validation_rsum:.1f}  ({outcome.seconds:.0f} s)"
        progress.message(f"{outcome.setting}, seed {outcome.seed}: {result}")
        progress.update("runs", len(done), total, budget.runs / budget.elapsed)


def _jobs(folder: Path, plan: ExperimentPlan) -> dict[tuple[str, int], Job]:
    """Jobs by setting and seed."""
    jobs = {}
    for setting, seed in all_runs(plan.settings, plan.seeds):
        path = (folder / "runs" / f"{plan.settings.index(setting) + 1:02d}-{setting.slug}-seed-{seed}").absolute()
        jobs[setting.name, seed] = Job(setting.name, seed, plan.recipe(setting, seed).to_dict(), path)
    return jobs


def _read_feedback_test(plan: ExperimentPlan, file: Path, progress: Progress) -> FeedbackTest:
    """Read the judged text queries of the test split."""
    for setting in plan.settings:
        if setting.recipe_values["text"]["features"]:
            raise RecipeError(
                f"{setting.name}: text.features: expected a text encoder, because feedback has text queries that are not captions, got stored "
                "features. Set text.encoder, or compare without --feedback."
            )
    recipe = plan.recipe(plan.settings[0], 1)
    data = open_data(recipe, progress)
    test = FeedbackTest.read(file, data, recipe.evaluation.test, progress)
    progress.message(f"{file}: {test}")
    return test


def _copy_feedback(folder: Path, feedback: bytes, progress: Progress) -> None:
    """Copy a feedback file into the folder, and report if it replaces another one."""
    file = folder / FEEDBACK_FILE
    if os.path.exists(file) and (before := storage.read_bytes(file)) != feedback:
        lines = f"{len(before.splitlines()):,} lines before, {len(feedback.splitlines()):,} now"
        progress.message(f"{file}: replaced by the given feedback ({lines}).")
    storage.write_bytes(file, feedback)
