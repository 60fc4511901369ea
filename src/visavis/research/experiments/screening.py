"""Choice of settings within a time: all candidates train briefly, the better ones longer, and the
best few are confirmed with fresh seeds.

1. **Speed.** One short training of each model measures how many trainings the time allows.
2. **Screening**, in 60 % of the time: three rounds of successive halving (Karnin et al. 2013,
   Jamieson and Talwalkar 2016), whose trainings have all of the steps of a run if the time allows, and
   at least a ninth, a third and all of them. The rounds also select the learning rate: three rates a
   factor of 4 apart, three a factor of 2 apart around the best, then the best of these and the next
   one on its better side. If the time is short, one rate, three a factor of 4 apart, and one between
   or beyond. After short trainings, two dropped candidates train in the last round, too. They show
   what short trainings can predict.
3. **Confirmation**, in the rest of the time: the finalists train as the runs of a comparison do, each
   at its rate, with seeds that no trial had. The better half of them gets more seeds, and so on,
   until two are left, or one of each model.

Validation decides everything. Each seed may have its own validation images, so only results of equal
seeds are compared. If the time allows, more candidates stay in each round, all trials have
more seeds, and more finalists are confirmed. If it is short, all trainings have fewer steps. What was
decided by the clock is recorded, so that an interrupted choice continues with the same decisions.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import Progress
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import MAX_RUNS, Job, JobRunner, RunOutcome
from visavis.research.experiments.tuning import (
    MIN_STEPS,
    Try,
    TunedRate,
    as_try,
    next_factor,
    shortened,
    with_rate,
)

SCREENING_FILE = "screening.json"
SCREENING_SHARE = 0.6
"""Share of the time for the screening."""
REPORT_SHARE = 0.03
"""Share of the time that is left for the tables and the report."""
NUM_ROUNDS = 3
SHORTEST_SHARE = 1 / 9
"""Least steps of a trial of the first round as a share of the steps of a run. The last round has all
steps, and the second one the geometric mean.
"""
MIN_TRIAL_STEPS = 30
"""Least steps of a trial, unless runs have fewer. Shorter trainings hardly rank learning rates, and
take little less time, because most of it is their start.
"""
MIN_LAST = 3
"""Candidates of the last round, so that their results can predict others."""
SPOT_CHECKS = 2
"""Dropped candidates in the last round: one of each earlier round, drawn at random."""
FIRST_FACTORS = (1 / 4, 1.0, 4.0)
"""Factors of the recipe's learning rate in the first round, or in the second one if the first one has
one rate.
"""
NEIGHBORS = (1 / 2, 1.0, 2.0)
"""Factors of the best rate of the first round in the second one."""
FINAL_RATES = 2
"""Rates of each setting in the last round: the best one, and the next one on its better side."""
MIN_KEPT = 1 / 3
"""Share of the candidates that stay after a round if the time is short. All stay if it is long."""
MAX_TRIAL_SEEDS = 3
MIN_FINALISTS, MAX_FINALISTS = 2, 8
MIN_SEEDS, AIMED_SEEDS, MAX_SEEDS = 3, 5, 30
"""Seeds of each finalist that a schedule must allow, that their number aims at as a mean, and at most.
"""
MIN_STAGE_SEEDS = 2
"""Seeds of each finalist after the first stage."""
LAST_SHARE = 0.9
"""Share of the affordable runs that the last stage trains, because they can become slower."""


@dataclass(frozen=True)
class Schedule:
    """Decisions that follow from the speed of the trainings.

    Attributes:
        run_share: Steps of a run as a share of the recipe's.
        kept: Share of the candidates that stay after each round.
        trial_seeds: Seeds of each trial.
        models: Number of models. The best candidate of each stays in all rounds.
        run_seconds: Time of a run on one worker, as it was expected without the test split.
        first_share: Steps of a trial of the first round as a share of the steps of a run.
        first_factors: Factors of the recipe's learning rate in the first round.
    """

    run_share: float
    kept: float
    trial_seeds: int
    models: int
    run_seconds: float
    first_share: float = SHORTEST_SHARE
    first_factors: tuple[float, ...] = FIRST_FACTORS

    @property
    def is_whole(self) -> bool:
        """Whether all trials are as long as runs. Then no rate of a candidate is tried twice."""
        return self.first_share == 1

    @property
    def round_shares(self) -> tuple[float, ...]:
        """Steps of a trial of each round as a share of the steps of a run."""
        return self.first_share, math.sqrt(self.first_share), 1.0

    def survivors(self, candidates: int, round_number: int) -> int:
        """Number of candidates of a round."""
        at_least = min(candidates, max(self.models, MIN_LAST))
        return max(at_least, math.ceil(candidates * self.kept**round_number))

    def trials(self, candidates: int, round_number: int, *, tune: bool) -> int:
        """Number of trainings of a round."""
        counts = (len(self.first_factors), len(NEIGHBORS), FINAL_RATES)
        rates = counts[round_number] if tune else 1
        trained = self.survivors(candidates, round_number)
        if self.is_whole and round_number > 0:
            # The best one is tried already.
            rates -= 1
        elif round_number > 0:
            trained = min(candidates, trained + SPOT_CHECKS)
        return trained * rates * self.trial_seeds

    def screening_seconds(
        self, candidates: int, speed: Speed, workers: int, *, tune: bool
    ) -> float:
        """Time of all trials. The next round waits for all trials of one."""
        return sum(
            math.ceil(self.trials(candidates, number, tune=tune) / workers)
            * speed.seconds(share * self.run_share)
            for number, share in enumerate(self.round_shares)
        )


@dataclass(frozen=True)
class Speed:
    """Time of trainings on one worker.

    Attributes:
        run_seconds: Seconds of the steps of a run of the recipe, as a mean over the candidates.
        start_seconds: Seconds of a training that do not depend on its steps.
        run_steps: Number of these steps, as a mean over the candidates.
    """

    run_seconds: float
    start_seconds: float
    run_steps: float

    def seconds(self, run_share: float) -> float:
        """Time of a training with a share of the steps."""
        return self.start_seconds + run_share * self.run_seconds


@dataclass(frozen=True)
class Trial:
    """One training of the screening.

    Attributes:
        setting: Name of the setting.
        round_number: Round, from 0.
        tried: Its learning rate, steps, seed and result.
    """

    setting: str
    round_number: int
    tried: Try


@dataclass(frozen=True)
class ScreenedRate:
    """A learning rate of a candidate after the screening.

    Attributes:
        factor: Factor of the recipe's learning rate.
        by_round: Mean validation RSUM of each round. None: it was not in this round. Minus infinity:
            a training failed.
    """

    factor: float
    by_round: tuple[float | None, ...]

    @property
    def last_round(self) -> int:
        """Last round that it was in, from 0."""
        return max(n for n, result in enumerate(self.by_round) if result is not None)


@dataclass(frozen=True)
class ScreenedSetting:
    """A candidate after the screening.

    Attributes:
        name: Name of the setting.
        model: Number of its model, in the order of the candidates.
        rates: Its learning rates, in the order of their trials.
        failure: First error message, if all trainings of a round failed.
    """

    name: str
    model: int
    rates: tuple[ScreenedRate, ...]
    failure: str = ""

    @property
    def best_by_round(self) -> tuple[float | None, ...]:
        """Best result over the rates of each round. None: it was not in this round."""
        results = ([rate.by_round[n] for rate in self.rates] for n in range(NUM_ROUNDS))
        return tuple(
            max((result for result in each if result is not None), default=None) for each in results
        )

    @property
    def last_round(self) -> int:
        """Last round that it was in, from 0."""
        return max(rate.last_round for rate in self.rates)

    @property
    def has_failed(self) -> bool:
        """Whether all trainings of a round failed."""
        return -math.inf in self.best_by_round


@dataclass(frozen=True)
class Stage:
    """A stage of the confirmation, which trains a part of the finalists with more seeds.

    Attributes:
        finalists: Names of its settings, best first.
        seeds: Seeds of each, with those of the stages before.
    """

    finalists: tuple[str, ...]
    seeds: int


SPEED_SEED = MAX_RUNS + 101
"""Seed of the trainings that measure the speed. No other training has it."""


@dataclass(frozen=True)
class ScreeningState:
    """Decisions that depend on the time, as they are stored.

    Attributes:
        stages: Stages of the confirmation so far.
        seconds: The whole time.
        elapsed_s: Time of the finished rounds.
        speed: Time of trainings. None before it is measured.
        schedule: Lengths of the trainings. None before their speed is known.
        screened: Results of all candidates. Empty before the end of the screening.
        is_complete: Whether all of them are trained.
    """

    stages: tuple[Stage, ...]
    seconds: float = 0.0
    elapsed_s: float = 0.0
    speed: Speed | None = None
    schedule: Schedule | None = None
    screened: tuple[ScreenedSetting, ...] = ()
    is_complete: bool = False

    @property
    def finalists(self) -> tuple[str, ...]:
        """Names of all confirmed settings. Empty before their number is known."""
        return self.stages[0].finalists if self.stages else ()

    @property
    def seeds(self) -> int:
        """Seeds of the settings of the last stage. 0 before they are known."""
        return self.stages[-1].seeds if self.stages else 0

    @property
    def has_most_seeds(self) -> bool:
        """Whether the number of seeds ended the choice, rather than the time."""
        return self.seeds == MAX_SEEDS


def possible_schedules(models: int, speed: Speed) -> list[Schedule]:
    """List schedules from the most thorough one to the shortest one."""

    def schedule(
        run_share: float,
        kept: float,
        first_share: float,
        trial_seeds: int = 1,
        first_factors: tuple[float, ...] = FIRST_FACTORS,
    ) -> Schedule:
        run_s = speed.seconds(run_share)
        return Schedule(run_share, kept, trial_seeds, models, run_s, first_share, first_factors)

    def shortest(run_share: float) -> float:
        steps = run_share * speed.run_steps
        return max(SHORTEST_SHARE, min(1.0, MIN_TRIAL_STEPS / steps))

    parts = [part / 8 for part in range(1, 9)]
    one_rate = (1.0,)
    return [
        *(schedule(1.0, 1.0, 1.0, trial_seeds) for trial_seeds in range(MAX_TRIAL_SEEDS, 0, -1)),
        *(schedule(1.0, MIN_KEPT**part, max(MIN_KEPT, shortest(1.0)) ** part) for part in parts),
        # A whole trial rather than three of a third of the steps, which favor fast learners.
        *(
            schedule(1.0, MIN_KEPT, shortest(1.0) ** part, first_factors=one_rate)
            for part in (0.0, *parts)
        ),
        *(
            schedule(percent / 100, MIN_KEPT, shortest(percent / 100), first_factors=one_rate)
            for percent in range(95, 0, -5)
        ),
    ]


class Screening:
    """Selects the finalists of a comparison within a time.

    Args:
        folder: Folder of the comparison.
        settings: Candidates.
        batches: Batches of an epoch by setting.
        seconds: The time.
        workers: Number of trainings at the same time.
        run_jobs: Runs trainings.
        progress: Receives the progress.
        started: Time at which this process began the comparison, of ``clock``.
        tune: Whether learning rates are selected.
        threads: Threads of a training.
        clock: Time in seconds.

    Attributes:
        state: Decisions that depend on the time.
        trials: Finished trials.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[Setting],
        batches: Mapping[str, int],
        seconds: float,
        workers: int,
        run_jobs: JobRunner,
        progress: Progress,
        *,
        started: float,
        tune: bool = True,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = folder
        self.settings = settings
        self.batches = batches
        self.seconds = seconds * (1 - REPORT_SHARE)
        self.workers = workers
        self.run_jobs = run_jobs
        self.progress = progress
        self.tune = tune
        self.threads = threads
        self.clock = clock
        self.state = read_state(folder)
        self.trials = list[Trial]()
        self._failures = dict[str, str]()
        self._started = started - self.state.elapsed_s
        self._numbers = {setting.name: number for number, setting in enumerate(settings)}

    @property
    def elapsed_s(self) -> float:
        """Time since the start, without interruptions."""
        return self.clock() - self._started

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return max(0.0, self.seconds - self.elapsed_s)

    def save(self, **changes: Any) -> None:
        """Store the decisions and the time so far."""
        self.state = replace(self.state, seconds=self.seconds, elapsed_s=self.elapsed_s, **changes)
        storage.write_json(self.folder / SCREENING_FILE, asdict(self.state))

    def finalists(self) -> tuple[tuple[Setting, ...], tuple[TunedRate, ...]]:
        """Train all rounds. Return the finalists, best first, with the steps of their runs, and
        their learning rates.
        """
        schedule = self.state.schedule or self._schedule()
        self.progress.message(self._describe(schedule))
        remaining = list(self.settings)
        dropped = list[list[Setting]]()
        last = NUM_ROUNDS - 1
        for number in range(NUM_ROUNDS):
            if number == last and not schedule.is_whole:
                checks = self._spot_checks(dropped)
                # The lines of the regret lead from round to round.
                without = [setting for setting in checks if not self._means(setting, last - 1)]
                self._train_round(last - 1, without, schedule)
                remaining += checks
            self._train_round(number, remaining, schedule)
            remaining.sort(key=lambda setting: -self._best(setting, number)[1])
            count = (
                schedule.survivors(len(self.settings), number + 1)
                if number < last
                else MAX_FINALISTS
            )
            kept = best_of_models(remaining, count)
            dropped.append([setting for setting in remaining if setting not in kept])
            remaining = kept
            self.save()
        if schedule.is_whole:
            # Then a dropped candidate is as well known as the others.
            every = sorted(self.settings, key=lambda setting: -self._last_best(setting)[1])
            remaining = best_of_models(every, MAX_FINALISTS)
        remaining = [setting for setting in remaining if self._last_best(setting)[1] > -math.inf]
        if not remaining:
            raise RunError(
                f"{self.folder}: expected a candidate that can be trained, got failures of all of "
                "them. Train one of them with visavis train to see its error."
            )
        self.save(screened=self._results())
        rates = tuple(self._rate(setting) for setting in remaining) if self.tune else ()
        runs = tuple(self._shortened(setting, schedule.run_share) for setting in remaining)
        return runs, rates

    def _spot_checks(self, dropped: Sequence[Sequence[Setting]]) -> list[Setting]:
        """Draw dropped candidates that train in the last round, from each earlier round in turn."""
        random = np.random.default_rng(0)
        drawn = list[Setting]()
        groups = [
            [group[i] for i in random.permutation(len(group)) if not self._has_failed(group[i])]
            for group in dropped
        ]
        for setting in chain.from_iterable(zip_longest(*groups)):
            if setting is not None and len(drawn) < SPOT_CHECKS:
                drawn.append(setting)
        return drawn

    def _results(self) -> tuple[ScreenedSetting, ...]:
        """Results of all candidates."""
        models = list(dict.fromkeys(map(model_key, self.settings)))
        return tuple(
            ScreenedSetting(
                setting.name,
                models.index(model_key(setting)),
                self._rates(setting),
                self._failures.get(setting.name, "") if self._has_failed(setting) else "",
            )
            for setting in self.settings
        )

    def _rates(self, setting: Setting) -> tuple[ScreenedRate, ...]:
        """Results of each learning rate of a setting."""
        rounds = [self._means(setting, number) for number in range(NUM_ROUNDS)]
        factors = dict.fromkeys(chain.from_iterable(rounds))
        return tuple(
            ScreenedRate(factor, tuple(means.get(factor) for means in rounds)) for factor in factors
        )

    def confirm(
        self,
        settings: Sequence[Setting],
        min_seeds: int,
        train: Callable[[Sequence[Setting], int], list[RunOutcome]],
    ) -> list[RunOutcome]:
        """Train as many of the finalists, best first, with as many seeds as the time allows, by a
        function of the settings and the number of seeds. Return the outcomes.
        """
        by_name = {setting.name: setting for setting in settings}
        outcomes = dict[tuple[str, int], RunOutcome]()

        def train_stage(stage: Stage) -> None:
            # A failed run has no outcome file, so that it would train in every stage.
            failed = {one.setting for one in outcomes.values() if one.failure}
            finalists = [by_name[name] for name in stage.finalists if name not in failed]
            if finalists:
                for outcome in train(finalists, stage.seeds):
                    outcomes[outcome.setting, outcome.seed] = outcome

        def affordable(settings: Sequence[Setting]) -> int:
            return self._affordable_runs(outcomes.values(), settings)

        has_more_time = self.seconds > self.state.seconds
        started = self.clock()
        for stage in self.state.stages:
            train_stage(stage)
        if self.state.is_complete and not has_more_time and min_seeds <= self.state.seeds:
            # Reading the results again takes none of the time.
            return [*outcomes.values()]
        if not self.state.is_complete and self.state.stages:
            # The time of the runs that finished before an interruption was not stored.
            before = self.state.stages[-2].seeds if len(self.state.stages) > 1 else 0
            new_s = [one.job_seconds for one in outcomes.values() if one.seed > before]
            self._started -= max(0.0, sum(new_s) / self.workers - (self.clock() - started))
        if not self.state.stages:
            # How long whole runs take, with their evaluation on the test split, is known from the
            # first ones.
            first = best_of_models(settings, MIN_FINALISTS)
            first_seeds = max(1, min(MIN_SEEDS, self.workers // len(first)))
            train_stage(Stage(_names(first), first_seeds))
            runs = len(outcomes) + affordable(settings)
            kept = best_of_models(settings, max(len(first), runs // AIMED_SEEDS))
            train_stage(self._add_stage(kept, runs, max(MIN_STAGE_SEEDS, first_seeds)))
        elif has_more_time:
            kept = [by_name[name] for name in self.state.stages[-1].finalists]
            train_stage(self._add_stage(kept, affordable(kept)))
        while len(kept := self._better_half(settings, outcomes.values())) < len(
            self.state.stages[-1].finalists
        ):
            train_stage(self._add_stage(kept, affordable(kept)))
        if min_seeds > self.state.seeds:
            stage = Stage(self.state.finalists, min_seeds)
            self.save(stages=(*self.state.stages, stage), is_complete=True)
            train_stage(stage)
        self.save(is_complete=True)
        return [*outcomes.values()]

    def _better_half(
        self, settings: Sequence[Setting], outcomes: Collection[RunOutcome]
    ) -> list[Setting]:
        """The better half on validation of the last stage, at least the first of every model."""
        results = {name: list[float]() for name in self.state.stages[-1].finalists}
        for one in outcomes:
            if one.setting in results:
                # As in the table, settings with failed runs come last.
                rsum = -math.inf if one.failure else one.validation_rsum
                results[one.setting].append(rsum)
        means = {name: statistics.fmean(each) for name, each in results.items()}
        best_first = sorted(
            (setting for setting in settings if setting.name in means),
            key=lambda setting: -means[setting.name],
        )
        return best_of_models(best_first, max(MIN_FINALISTS, math.ceil(len(means) / 2)))

    def _add_stage(self, kept: Sequence[Setting], runs: int, min_seeds: int = 0) -> Stage:
        """Store and return the next stage, which has its part of a number of runs. Equal parts are for
        the stages to come.
        """
        last_count = max(MIN_FINALISTS, len({model_key(setting) for setting in kept}))
        stages = 1 + max(0, math.ceil(math.log2(len(kept) / last_count)))
        share = 1 / stages if stages > 1 else LAST_SHARE
        before = self.state.seeds
        seeds = max(min_seeds, before + int(share * runs / len(kept)))
        stage = Stage(_names(kept), max(before, min(seeds, MAX_SEEDS)))
        self.save(stages=(*self.state.stages, stage), is_complete=False)
        return stage

    def _affordable_runs(
        self, outcomes: Collection[RunOutcome], settings: Sequence[Setting]
    ) -> int:
        """Number of whole runs of some settings in the time that is left, from finished runs."""
        assert self.state.schedule is not None
        steps = {setting.name: self._steps(setting) for setting in self.settings}
        step_s = [one.job_seconds / steps[one.setting] for one in outcomes if not one.failure]
        run_s = (
            statistics.fmean(step_s) * statistics.fmean(steps[one.name] for one in settings)
            if step_s
            else self.state.schedule.run_seconds
        )
        return int(self.left_s / run_s) * self.workers

    def _schedule(self) -> Schedule:
        """Plan the trainings, the most thorough ones that fit into the time."""
        speed = self.state.speed
        if speed is None:
            speed = self._measure_speed()
            self.save(speed=speed)
        count = len(self.settings)
        models = len({model_key(setting) for setting in self.settings})
        finalists = min(count, max(models, MIN_FINALISTS))
        for schedule in possible_schedules(models, speed):
            screening_s = schedule.screening_seconds(count, speed, self.workers, tune=self.tune)
            rounds = math.ceil(MIN_SEEDS * finalists / self.workers)
            confirmation_s = rounds * schedule.run_seconds
            # Seconds of both parts together, if each has its share of them.
            needed_s = max(screening_s / SCREENING_SHARE, confirmation_s / (1 - SCREENING_SHARE))
            if needed_s <= self.left_s:
                self.save(schedule=schedule)
                return schedule
        needed_s += self.elapsed_s
        raise RunError(
            f"minutes: expected at least about {math.ceil(needed_s / 60 / (1 - REPORT_SHARE))} for "
            f"{count} candidates, whose runs take about {speed.seconds(1.0):.0f} s each, got "
            f"{self.seconds / 60 / (1 - REPORT_SHARE):g}. Pass more, name fewer candidates with "
            f"--objective, or use fewer epochs. Continue with: visavis compare --resume "
            f"{self.folder} --minutes NUMBER"
        )

    def _measure_speed(self) -> Speed:
        """Train each model once, and expect the time of all settings from their steps."""
        groups = dict[str, list[Setting]]()
        for setting in self.settings:
            groups.setdefault(step_key(setting), []).append(setting)
        self.progress.message(
            f"Measuring the speed of {len(groups)} "
            f"{'model' if len(groups) == 1 else 'models'} for {len(self.settings)} candidates."
        )
        # A worker that has just started is slower.
        first = self.settings[0]
        warm_up = [self._job(first, 1.0, 0.0, SPEED_SEED + 1 + i) for i in range(self.workers)]
        list(self.run_jobs(warm_up))
        step_s = dict[str, float]()
        start_s = list[float]()
        failure = ""
        # If the first setting of a model fails, the next one is measured.
        for number in range(max(map(len, groups.values()))):
            jobs = {
                key: self._job(settings[number], 1.0, SHORTEST_SHARE, SPEED_SEED)
                for key, settings in groups.items()
                if key not in step_s and number < len(settings)
            }
            if not jobs:
                break
            outcomes = {one.folder: one for one in self.run_jobs(list(jobs.values()))}
            for key, job in jobs.items():
                outcome = outcomes[job.folder]
                failure = failure or outcome.failure
                if not outcome.failure:
                    step_s[key] = outcome.seconds / _num_steps(job.recipe_values)
                    start_s.append(outcome.job_seconds - outcome.seconds)
        if not step_s:
            raise RunError(f"{self.folder}: expected a model that can be trained, got {failure}")
        measured = [setting for setting in self.settings if step_key(setting) in step_s]
        return Speed(
            statistics.fmean(step_s[step_key(one)] * self._steps(one) for one in measured),
            statistics.fmean(start_s),
            statistics.fmean(map(self._steps, measured)),
        )

    def _describe(self, schedule: Schedule) -> str:
        counts = [schedule.survivors(len(self.settings), number) for number in range(NUM_ROUNDS)]
        length = (
            "all steps of the recipe"
            if schedule.run_share == 1
            else f"{schedule.run_share:.0%} of the recipe's steps"
        )
        return (
            f"Screening {', '.join(map(str, counts[:-1]))} and {counts[-1]} candidates, then "
            f"confirming the best. A run has {length} and takes about "
            f"{schedule.run_seconds:.0f} s, a trial of the first round "
            f"{schedule.first_share:.0%} of its steps."
        )

    def _train_round(self, number: int, settings: Sequence[Setting], schedule: Schedule) -> None:
        """Train the trials of a round that are not finished, and keep their results."""
        share = schedule.round_shares[number] * schedule.run_share
        # Whole trials of all rounds are compared, and a seed has its own validation images.
        first_seed = MAX_RUNS + 1 + (0 if schedule.is_whole else number * MAX_TRIAL_SEEDS)
        new = list[tuple[Setting, float]]()
        for setting in settings:
            for factor in self._factors(setting, number, schedule):
                known = self._known(setting, factor) if schedule.is_whole else []
                self.trials += [replace(trial, round_number=number) for trial in known]
                if not known:
                    new.append((setting, factor))
        jobs = list[Job]()
        tries = dict[Path, Try]()
        for seed in range(first_seed, first_seed + schedule.trial_seeds):
            for setting, factor in new:
                job = self._job(setting, factor, share, seed)
                jobs.append(job)
                tries[job.folder] = Try(factor, _num_steps(job.recipe_values), seed, None)
        for done, outcome in enumerate(self.run_jobs(jobs), 1):
            failed = outcome.failure or math.isnan(outcome.validation_rsum)
            if failed:
                reason = outcome.failure or "the validation RSUM is not a number."
                self._failures.setdefault(outcome.setting, reason)
            rsum = None if failed else outcome.validation_rsum
            tried = replace(tries[outcome.folder], validation_rsum=rsum)
            self.trials.append(Trial(outcome.setting, number, tried))
            self.progress.update(f"screening, round {number + 1}", done, len(jobs), 0)

    def _known(self, setting: Setting, factor: float) -> list[Trial]:
        """Trials of a learning rate in the last round that it was in."""
        trials = [
            one for one in self.trials if (one.setting, one.tried.factor) == (setting.name, factor)
        ]
        return [one for one in trials if one.round_number == trials[-1].round_number]

    def _factors(self, setting: Setting, number: int, schedule: Schedule) -> list[float]:
        """Factors of the recipe's learning rate that a setting tries in a round."""
        if not self.tune:
            return [1.0]
        if number == 0:
            return list(schedule.first_factors)
        means = next(filter(None, (self._means(setting, n) for n in range(number - 1, -1, -1))))
        # Of equal rates, those closer to the recipe first.
        best_first = sorted(means, key=lambda one: (-means[one], abs(math.log(one))))
        best = best_first[0]
        is_coarse = len(schedule.first_factors) == 1
        if number == 1:
            return [best * factor for factor in (FIRST_FACTORS if is_coarse else NEIGHBORS)]
        if not is_coarse or best in (min(means), max(means)):
            # Short trainings prefer smaller rates than whole ones, so the climb continues.
            return [best, next_factor(best_first)]
        # The middle of the best two, which are a factor of 4 apart.
        return [best, math.sqrt(math.prod(best_first[:2]))]

    def _means(self, setting: Setting, number: int) -> dict[float, float]:
        """Mean validation RSUM of each factor in a round. A failure is minus infinity."""
        values = dict[float, list[float]]()
        for trial in self.trials:
            if trial.setting == setting.name and trial.round_number == number:
                rsum = trial.tried.validation_rsum
                values.setdefault(trial.tried.factor, []).append(
                    -math.inf if rsum is None else rsum
                )
        return {factor: sum(each) / len(each) for factor, each in values.items()}

    def _best(self, setting: Setting, number: int) -> tuple[float, float]:
        """Best factor of a setting in a round, and its mean validation RSUM."""
        means = self._means(setting, number)
        return max(means.items(), key=lambda item: (item[1], -abs(math.log(item[0]))))

    def _last_best(self, setting: Setting) -> tuple[float, float]:
        """Best factor of a setting in its last round, and its mean validation RSUM."""
        numbers = (trial.round_number for trial in self.trials if trial.setting == setting.name)
        return self._best(setting, max(numbers))

    def _has_failed(self, setting: Setting) -> bool:
        """Whether all trainings of a setting in a round failed."""
        return any(
            max(means.values()) == -math.inf
            for number in range(NUM_ROUNDS)
            if (means := self._means(setting, number))
        )

    def _rate(self, setting: Setting) -> TunedRate:
        factor, _ = self._last_best(setting)
        learning_rate = setting.recipe_values["phases"][0]["optimizer"]["lr"] * factor
        # Whole trials stand in several rounds.
        tries = dict.fromkeys(one.tried for one in self.trials if one.setting == setting.name)
        return TunedRate(setting.name, factor, learning_rate, tuple(tries))

    def _job(self, setting: Setting, factor: float, share: float, seed: int) -> Job:
        """One training with a share of the recipe's steps."""
        steps = self._steps(setting)
        batches = self.batches[setting.name]
        values = shortened(setting.recipe_values, batches, min(1.0, max(share, MIN_STEPS / steps)))
        rated = with_rate(replace(setting, recipe_values=values), factor)
        values = as_try(rated.recipe_values, seed, self.threads)
        number = self._numbers[setting.name] + 1
        name = f"{number:02d}-{setting.slug}-{factor:g}-steps-{_num_steps(values)}-seed-{seed}"
        folder = self.folder.absolute() / "tuning" / name
        return Job(setting.name, seed, values, folder, keeps_model=False)

    def _shortened(self, setting: Setting, share: float) -> Setting:
        if share == 1:
            return setting
        values = shortened(setting.recipe_values, self.batches[setting.name], share)
        return replace(setting, recipe_values=values)

    def _steps(self, setting: Setting) -> int:
        """Steps of a run of the recipe."""
        phases = setting.recipe_values["phases"]
        return self.batches[setting.name] * sum(phase["epochs"] for phase in phases)


def model_key(setting: Setting) -> str:
    """Key of a setting's encoders and model, which is equal for settings of one cost."""
    values = setting.recipe_values
    return repr([values["visual"], values["text"], values["model"]])


def step_key(setting: Setting) -> str:
    """Key of everything that the time of a step depends on, but for the objective."""
    training = setting.recipe_values["training"]
    return repr([model_key(setting), training["batch_size"], training.get("captions_per_image")])


def best_of_models(best_first: Sequence[Setting], count: int) -> list[Setting]:
    """Take a number of settings: the first one of every model, so that models of different cost can
    be compared, and then the first ones of all.
    """
    first_of_model = {model_key(setting): setting.name for setting in reversed(best_first)}
    kept = set(first_of_model.values())
    for setting in best_first:
        if len(kept) < count:
            kept.add(setting.name)
    return [setting for setting in best_first if setting.name in kept]


def _names(settings: Sequence[Setting]) -> tuple[str, ...]:
    return tuple(setting.name for setting in settings)


def _num_steps(values: Mapping[str, Any]) -> int:
    epochs = sum(phase["epochs"] for phase in values["phases"])
    return int(epochs * values["training"]["batches_per_epoch"])


def read_state(folder: Path) -> ScreeningState:
    """Read the decisions of an interrupted screening, or return those of a new one."""
    if not os.path.exists(folder / SCREENING_FILE):
        return ScreeningState(())
    return storage.read_json(folder / SCREENING_FILE, ScreeningState, error=RunError)
