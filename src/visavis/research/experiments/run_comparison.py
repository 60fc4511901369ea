"""Comparison of settings over seeds, with a fixed number of seeds, or within a time that first
selects the settings worth comparing (``screening``).

Files of a comparison: ``plan.json`` (recipe, settings and their learning rates), ``screening.json``
(what a time decided), ``feedback.jsonl`` (a copy of the feedback, if any), ``tuning/`` with a folder
for each try of a learning rate, ``runs/`` with a folder for each run, and the results
``comparison.json``, ``table.md``, ``table.csv`` and ``table.tex``.

All settings have the same seeds, so that they are compared in pairs. The test split decides nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from visavis.core import storage
from visavis.core.errors import RecipeError, RunError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.core.stopping import kept_if_stopped
from visavis.data.feedback.records import FeedbackRecord
from visavis.data.feedback.sources import read_feedback, write_feedback
from visavis.models.base import Matcher
from visavis.research.experiments.comparison_result import Comparison, TimedChoice
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
from visavis.research.experiments.model_costs import CostLimits, ModelCost, measure_cost
from visavis.research.experiments.screening import Screening
from visavis.research.experiments.tuning import TunedRate, tune_learning_rates, with_rate
from visavis.training.recipes.open_data import open_data
from visavis.training.recipes.recipe import Recipe, build_recipe, parse_override
from visavis.training.runs.open_run import with_absolute_paths
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.train_step import check_phase
from visavis.training.training_run import prepare_training

T = TypeVar("T")
ANY_COST = CostLimits()
PLAN_FILE, FEEDBACK_FILE = "plan.json", "feedback.jsonl"


@dataclass(frozen=True)
class ExperimentPlan:
    """Runs of an experiment.

    Attributes:
        name: Name of the recipe or table.
        settings: Settings.
        seeds: Seeds of each setting: 1, 2, ... 0 before the time decided them.
        minutes: Time of the comparison. 0: not limited.
        tune: Whether the learning rate of each setting is selected before its runs.
        rates: The selected learning rates, which ``recipe`` uses. Empty before they are selected,
            and without tuning.
        limits: Limits of the models that a time may choose.
        costs: Cost of each setting's model at search time, by name. Only with a time.
        is_screened: Whether the settings are those that a screening selected.
    """

    name: str
    settings: tuple[Setting, ...]
    seeds: int
    minutes: float = 0.0
    tune: bool = False
    rates: tuple[TunedRate, ...] = ()
    limits: CostLimits = ANY_COST
    costs: dict[str, ModelCost] = field(default_factory=dict)
    is_screened: bool = False

    @property
    def threads(self) -> int:
        """Largest number of threads of a run."""
        return max(self.recipe(setting, 1).training.threads for setting in self.settings)

    def recipe(self, setting: Setting, seed: int) -> Recipe:
        """Build the recipe of one run."""
        factor = next((rate.factor for rate in self.rates if rate.setting == setting.name), 1.0)
        setting = with_rate(setting, factor)
        # One thread by default, so that results do not depend on the number of runs at the same
        # time.
        threads = setting.recipe_values["training"]["threads"] or 1
        return build_recipe(
            setting.recipe_values, {"seed": seed, "training.threads": threads}, setting.name
        )


def plan_comparison(
    recipe: Recipe,
    choices: Choices,
    seeds: int,
    *,
    minutes: float = 0.0,
    limits: CostLimits = ANY_COST,
    tune: bool = False,
) -> ExperimentPlan:
    """Plan a comparison."""
    if recipe.members:
        raise RecipeError(
            f"{recipe.name}: expected a recipe of one model, got an ensemble of "
            f"{', '.join(recipe.members)}. Compare its members."
        )
    settings = build_settings(with_absolute_paths(recipe), *choices)
    if minutes:
        settings = tuple(map(_with_random_validation, settings))
    # A grid of learning rates replaces the tuning.
    tune = tune and not any(parse_override(text)[0].endswith("optimizer.lr") for text in choices[2])
    seeds = 0 if minutes else validate_int(seeds, "seeds", 1, MAX_RUNS)
    return ExperimentPlan(recipe.name, settings, seeds, minutes, tune, limits=limits)


def _with_random_validation(setting: Setting) -> Setting:
    """Let each seed draw its validation images, unless the recipe decides it or does not allow it."""
    values = setting.recipe_values
    recipe = build_recipe(values, {}, setting.name)
    evaluation = recipe.evaluation
    sources = [recipe.data.noise, *(phase.supervision for phase in recipe.phases)]
    if (
        evaluation.random_validation is not None
        or recipe.data.stream
        or recipe.start_from  # it was trained on images that would be drawn
        # Files that list captions of the training split, such as mined negatives.
        or any("file" in source.path_fields for source in sources if source is not None)
        or evaluation.validation == evaluation.test
    ):
        return setting
    drawn = values["evaluation"] | {"random_validation": True}
    return replace(setting, recipe_values=values | {"evaluation": drawn})


def join_plans(plans: Sequence[ExperimentPlan]) -> ExperimentPlan:
    """Join plans of several recipes, whose names become a part of the names of their settings."""
    if len(plans) == 1:
        return plans[0]
    settings = [
        replace(setting, choice=f"{setting.choice}, {plan.name}")
        for plan in plans
        for setting in plan.settings
    ]
    name = ", ".join(plan.name for plan in plans)
    return replace(plans[0], name=name, settings=tuple(settings))


def start_comparison(
    plan: ExperimentPlan,
    out: Path | None,
    workers: Workers,
    progress: Progress,
    *,
    feedback: Path | None,
) -> Comparison:
    """Run a comparison in a new folder, which keeps a copy of the feedback."""
    started = time.monotonic()
    test = None
    # Once, because people may be voting.
    records = None if feedback is None else read_feedback(feedback)
    if records is not None:
        test = _make_feedback_test(plan, records, feedback, progress)
    with new_experiment_folder(plan, out, "compare", progress) as (folder, prepared):
        if records is not None:
            write_feedback(folder / FEEDBACK_FILE, records)
        return _run(folder, plan, prepared, workers, progress, test, started)


def resume_comparison(
    folder: Path,
    seeds: int | None,
    workers: Workers,
    progress: Progress,
    *,
    feedback: Path | None,
    minutes: float = 0.0,
) -> Comparison:
    """Resume a comparison, with more seeds, more time or other feedback if given. Finished runs are
    kept.
    """
    started = time.monotonic()
    plan = read_plan(folder, seeds, minutes=minutes, command="compare")
    for job in _jobs(folder, plan).values():
        # Runs of the same setting must have the same code.
        if os.path.exists(record := RunFolder(job.folder).environment):
            RunRecord.read(record).check_code(job.folder)
    prepared = prepare_settings(plan, progress)
    file = feedback or folder / FEEDBACK_FILE
    test = None
    if feedback is not None or os.path.exists(file):
        given = read_feedback(file)
        test = _make_feedback_test(plan, given, file, progress)
        finished = [read_outcome(job) for job in _jobs(folder, plan).values()]
        check_models_exist(
            outcome
            for outcome in finished
            if outcome is not None and not outcome.has_answers_for(test)
        )
        copy = folder / FEEDBACK_FILE
        if os.path.exists(copy) and (before := read_feedback(copy)) != given:
            counts = f"{len(before):,} records before, {len(given):,} now"
            progress.message(f"{copy}: replaced by the given feedback ({counts}).")
        write_feedback(copy, given)
    with finished_runs_kept(folder):
        return _run(folder, plan, prepared, workers, progress, test, started)


def finished_runs_kept(folder: Path) -> AbstractContextManager[None]:
    """Report that Ctrl-C in this block keeps the finished runs of a folder."""
    return kept_if_stopped(lambda: "The finished runs are kept.", lambda: folder)


@contextmanager
def new_experiment_folder(
    plan: ExperimentPlan, out: Path | None, stem: str, progress: Progress
) -> Iterator[tuple[Path, dict[str, PreparedSetting]]]:
    """Create a folder, by default ``runs/<stem>-<n>``, prepare the settings of a plan, and write the
    plan. Yield the folder and the prepared settings.
    """
    with storage.create_output_folder(out, Path("runs") / stem) as folder:
        prepared = prepare_settings(plan, progress)
        storage.write_json(folder / PLAN_FILE, asdict(plan))
        with finished_runs_kept(folder):
            yield folder, prepared


def read_experiment_file(folder: Path, name: str, schema: type[T], command: str) -> T:
    """Read a file that every experiment of a command, which messages name, has."""
    if not os.path.exists(folder / name):
        raise RunError(
            f"{folder}: expected {name} in it, found none. Pass a folder of visavis {command}."
        )
    return storage.read_json(folder / name, schema, error=RunError)


def read_plan(
    folder: Path, seeds: int | None, *, minutes: float = 0.0, command: str
) -> ExperimentPlan:
    """Read the plan of a folder, and save it with more seeds or more time if given."""
    plan = read_experiment_file(folder, PLAN_FILE, ExperimentPlan, command)
    if (minutes and minutes <= plan.minutes) or (minutes and not plan.minutes):
        given = (
            f"more than {plan.minutes:g}, the time" if plan.minutes else "no time, but the seeds"
        )
        raise RunError(
            f"minutes: expected {given} of {folder}, got {minutes:g}. Pass "
            f"{'more' if plan.minutes else '--seeds with a larger number'}, or leave it out."
        )
    if seeds is not None and seeds < plan.seeds:
        raise RunError(
            f"seeds: expected at least {plan.seeds}, the seeds of {folder}, got {seeds}. Pass "
            f"--seeds {plan.seeds} or more."
        )
    updated = replace(
        plan,
        seeds=plan.seeds if seeds is None else validate_int(seeds, "seeds", 1, MAX_RUNS),
        minutes=minutes or plan.minutes,
    )
    if updated != plan:
        storage.write_json(folder / PLAN_FILE, asdict(updated))
    return updated


@contextmanager
def experiment_workers(
    folder: Path, plan: ExperimentPlan, workers: Workers, progress: Progress
) -> Iterator[JobRunner]:
    """Lock the folder of an experiment, and start its workers for this block."""
    with storage.folder_lock(folder / PLAN_FILE, wait=False, subject=folder):
        try:
            with workers.start(plan.threads, progress) as run_jobs:
                yield run_jobs
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.signal) from None


def train_runs(
    folder: Path,
    plan: ExperimentPlan,
    run_jobs: JobRunner,
    progress: Progress,
    settings: Sequence[Setting] | None = None,
) -> list[RunOutcome]:
    """Train the runs of a plan, or of some of its settings, that are not finished, and return the
    outcomes of all of them.
    """
    names = {setting.name for setting in settings or plan.settings}
    jobs = {key: job for key, job in _jobs(folder, plan).items() if key[0] in names}
    finished = {
        key: outcome for key, job in jobs.items() if (outcome := read_outcome(job)) is not None
    }
    missing = [job for key, job in jobs.items() if key not in finished]
    if missing:
        progress.update("runs", len(finished), len(jobs), 0)
    started = time.monotonic()
    for done, outcome in enumerate(run_jobs(missing), 1):
        finished[outcome.setting, outcome.seed] = outcome
        result = (
            outcome.failure
            or f"validation RSUM {outcome.validation_rsum:.1f}  ({outcome.seconds:.0f} s)"
        )
        progress.message(f"{outcome.setting}, seed {outcome.seed}: {result}")
        progress.update("runs", len(finished), len(jobs), done / (time.monotonic() - started))
    return list(finished.values())


def check_any_succeeded(folder: Path, outcomes: Sequence[RunOutcome]) -> None:
    """Raise RunError if all runs of an experiment failed."""
    if all(run.failure for run in outcomes):
        reason = (
            f"got {len(outcomes)} failures. The first: {outcomes[0].failure}"
            if outcomes
            else "got no runs."
        )
        raise RunError(f"{folder}: expected a successful run, {reason}")


@dataclass(frozen=True)
class PreparedSetting:
    """What a comparison knows of a setting before any run.

    Attributes:
        batches: Batches of an epoch.
        cost: Cost of its model at search time. None without a time.
        problem: Reason why its model cannot be trained so. Empty: it can.
    """

    batches: int
    cost: ModelCost | None = None
    problem: str = ""


def prepare_settings(plan: ExperimentPlan, progress: Progress) -> dict[str, PreparedSetting]:
    """Open the data and compute the features of all settings before any run. With a time, measure
    the costs of their models, too.
    """
    # Settings that differ only in objectives share data and features.
    prepared_inputs = dict[str, tuple[PreparedSetting, Matcher]]()
    prepared = dict[str, PreparedSetting]()
    for setting in plan.settings:
        recipe = plan.recipe(setting, 1)
        training = recipe.training
        batching = [training.batch_size, training.captions_per_image, training.batches_per_epoch]
        inputs = repr(
            [recipe.data, recipe.visual, recipe.text, recipe.model, recipe.evaluation, batching]
        )
        if inputs in prepared_inputs:
            first, matcher = prepared_inputs[inputs]
            prepared[setting.name] = replace(first, problem=_problem(matcher, recipe))
            continue
        data_module, matcher = prepare_training(recipe, RunContext(progress))
        batches = data_module.loader(data_module.training_split).num_batches
        if (name := data_module.recipe.evaluation.test) not in data_module.data.splits:
            raise RecipeError(
                f"evaluation.test: {data_module.data.name} has no split {name}, which a comparison "
                "measures on. Set evaluation.test=NAME."
            )
        cost = plan.costs.get(setting.name)
        if plan.minutes and cost is None:
            cost = measure_cost(data_module, matcher)
        first = PreparedSetting(batches, cost)
        prepared_inputs[inputs] = first, matcher
        prepared[setting.name] = replace(first, problem=_problem(matcher, recipe))
    return prepared


def _problem(matcher: Matcher, recipe: Recipe) -> str:
    """The reason why a phase of a recipe cannot train a model, or an empty text."""
    try:
        for phase in recipe.phases:
            check_phase(matcher, phase)
    except VisavisError as error:
        return str(error)
    return ""


def _within_limits(
    plan: ExperimentPlan,
    prepared: Mapping[str, PreparedSetting],
    progress: Progress,
) -> ExperimentPlan:
    """Leave out the settings that their models cannot train with, or whose models cost more than the
    limits, and keep the costs.
    """
    problems = {name: one.problem for name, one in prepared.items() if one.problem}
    if problems:
        reason = next(iter(problems.values()))
        progress.message(
            f"Left out {len(problems)} candidates that cannot be trained: {', '.join(problems)}. The "
            f"first: {reason}"
        )
    costs = {name: one.cost for name, one in prepared.items() if one.cost is not None}
    trainable = [setting for setting in plan.settings if setting.name not in problems]
    if not trainable:
        raise RunError(f"objective: expected one that can be trained, got none. {reason}")
    settings = tuple(setting for setting in trainable if plan.limits.allow(costs[setting.name]))
    if not settings:
        cheapest = min(costs, key=lambda name: costs[name].query_ms)
        raise RunError(
            f"max_query_ms, max_item_bytes: expected a model within the limits, got none. {cheapest} "
            f"takes {costs[cheapest].query_ms:.2f} ms for a query and "
            f"{costs[cheapest].item_bytes:,.0f} bytes for an item. Raise the limits, or add a "
            "smaller model with --grid."
        )
    if left_out := len(trainable) - len(settings):
        progress.message(f"Left out {left_out} candidates, whose models exceed the limits.")
    return replace(plan, settings=settings, costs={one.name: costs[one.name] for one in settings})


def _run(
    folder: Path,
    plan: ExperimentPlan,
    prepared: Mapping[str, PreparedSetting],
    workers: Workers,
    progress: Progress,
    test: FeedbackTest | None,
    started: float,
) -> Comparison:
    """Select learning rates, train the missing runs, evaluate feedback, and write the results."""
    batches = {name: one.batches for name, one in prepared.items()}
    choice = None
    if plan.minutes and not plan.costs:
        plan = _within_limits(plan, prepared, progress)
        storage.write_json(folder / PLAN_FILE, asdict(plan))
    with experiment_workers(folder, plan, workers, progress) as run_jobs:
        if plan.minutes:
            screening = Screening(
                folder,
                plan.settings,
                batches,
                60 * plan.minutes,
                workers.count(plan.threads),
                run_jobs,
                progress,
                started=started,
                tune=plan.tune and len(plan.settings) > 1,
                threads=plan.threads,
            )
            plan, outcomes = _run_within_time(folder, plan, screening, run_jobs, progress)
            choice = TimedChoice(plan.minutes, screening.state, plan.costs)
        else:
            # A single setting has nothing to compare.
            if plan.tune and len(plan.settings) > 1 and not plan.rates:
                rates = tune_learning_rates(
                    plan.settings, batches, plan.seeds, folder / "tuning", run_jobs, progress
                )
                # More seeds later keep the rates of the first ones, also if these had too few
                # steps.
                plan = replace(plan, tune=bool(rates), rates=rates)
                storage.write_json(folder / PLAN_FILE, asdict(plan))
            outcomes = train_runs(folder, plan, run_jobs, progress)
        check_any_succeeded(folder, outcomes)
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
        tuple(rate for rate in plan.rates if rate.setting in succeeded),
        choice,
    )
    storage.write_json(folder / "comparison.json", comparison.to_json())
    storage.write_text(folder / "table.md", comparison.markdown())
    storage.write_text(folder / "table.csv", comparison.csv())
    storage.write_text(folder / "table.tex", comparison.latex())
    return comparison


def _run_within_time(
    folder: Path,
    plan: ExperimentPlan,
    screening: Screening,
    run_jobs: JobRunner,
    progress: Progress,
) -> tuple[ExperimentPlan, list[RunOutcome]]:
    """Screen the candidates and confirm the finalists. Return the plan of their runs, and the
    outcomes.
    """
    if not plan.is_screened:
        settings, rates = screening.finalists()
        plan = replace(plan, settings=settings, rates=rates, is_screened=True)
        storage.write_json(folder / PLAN_FILE, asdict(plan))

    def train(settings: Sequence[Setting], seeds: int) -> list[RunOutcome]:
        return train_runs(folder, replace(plan, seeds=seeds), run_jobs, progress, settings)

    outcomes = screening.confirm(plan.settings, max(plan.seeds, 1), train)
    plan = replace(plan, seeds=screening.state.seeds)
    storage.write_json(folder / PLAN_FILE, asdict(plan))
    return plan, outcomes


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


def _make_feedback_test(
    plan: ExperimentPlan, records: Sequence[FeedbackRecord], source: Path | None, progress: Progress
) -> FeedbackTest:
    """Make a test of the judged text queries of the test split."""
    for setting in plan.settings:
        if setting.recipe_values["text"]["features"]:
            raise RecipeError(
                f"{setting.name}: text.features: expected a text encoder, because feedback has "
                "text queries that are not captions, got stored "
                "features. Set text.encoder, or compare without --feedback."
            )
    recipe = plan.recipe(plan.settings[0], 1)
    data = open_data(recipe, progress)
    test = FeedbackTest.from_records(records, source, data, recipe.evaluation.test, progress)
    progress.message(f"{source}: {test}")
    return test


def all_runs(settings: Sequence[Setting], seeds: int) -> list[tuple[Setting, int]]:
    """List every setting with every seed, from 1."""
    # The first seed of all settings comes first, so that an interrupted comparison still compares
    # all of them.
    return [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]
