"""Choices within a time: the best setting is found, the time is kept, an interruption changes nothing,
and the regret follows from the differences.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.fixtures.recipes import recipe_text
from tests.processes import FORKED

import visavis
from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress
from visavis.losses.objectives import CATALOG
from visavis.research.experiments import screening as screening_module
from visavis.research.experiments.candidates import candidate_objectives
from visavis.research.experiments.grid import build_settings
from visavis.research.experiments.jobs import MAX_RUNS, Job, RunOutcome
from visavis.research.experiments.model_costs import CostLimits, ModelCost
from visavis.research.experiments.regret import Finalist, estimate_regret
from visavis.research.experiments.run_comparison import plan_comparison
from visavis.research.experiments.screening import (
    FIRST_FACTORS,
    MAX_SEEDS,
    MIN_KEPT,
    MIN_TRIAL_STEPS,
    SCREENING_FILE,
    SPOT_CHECKS,
    Schedule,
    ScreenedRate,
    ScreenedSetting,
    Screening,
    Speed,
    possible_schedules,
)
from visavis.research.experiments.tuning import with_rate
from visavis.training.recipes.files import read_recipe

HEADS = read_recipe("heads-flickr8k")
OBJECTIVES = [f"VLC(gamma={gamma})" for gamma in range(10, 90, 10)]
SETTINGS = build_settings(HEADS, OBJECTIVES, [], [])
BATCHES = dict.fromkeys([setting.name for setting in SETTINGS], 58)
BASE_RATE = HEADS.phases[0].optimizer.lr


class SimulatedJobs:
    """Results and times of trainings, as functions of their recipe. Finished jobs are kept, as the
    outcome files of real jobs are.
    """

    def __init__(self, rsum_of, step_s=0.01, start_s=0.5, workers=2, stop_after=math.inf):
        self.rsum_of = rsum_of
        self.step_s = step_s
        self.start_s = start_s
        self.workers = workers
        self.stop_after = stop_after
        self.now = 0.0
        self.finished = {}

    def clock(self):
        return self.now

    def worker_times(self):
        """Times at which the workers end their jobs."""
        return [self.now] * self.workers

    def wait(self, free_at, seconds):
        """Let the first free worker run a job."""
        heapq.heappush(free_at, end := heapq.heappop(free_at) + seconds)
        self.now = max(self.now, end)

    def run(self, jobs):
        free_at = self.worker_times()
        for job in jobs:
            if job.folder not in self.finished:
                if len(self.finished) >= self.stop_after:
                    raise KeyboardInterrupt
                training = job.recipe_values["training"]
                epochs = sum(phase["epochs"] for phase in job.recipe_values["phases"])
                seconds = self.step_s * epochs * (training["batches_per_epoch"] or 58)
                self.wait(free_at, self.start_s + seconds)
                self.finished[job.folder] = RunOutcome(
                    job.setting,
                    job.seed,
                    job.folder,
                    self.rsum_of(job),
                    seconds=seconds,
                    job_seconds=self.start_s + seconds,
                )
            yield self.finished[job.folder]

    def screening(self, folder, minutes=30, settings=SETTINGS, **options):
        return Screening(
            folder,
            settings,
            BATCHES,
            60 * minutes,
            self.workers,
            self.run,
            NoProgress(),
            started=self.now,
            clock=self.clock,
            **options,
        )


def quality(target, factor=1.0):
    """RSUM that is highest for one setting at one factor of the recipe's rate."""

    def rsum_of(job):
        rate = job.recipe_values["phases"][0]["optimizer"]["lr"] / BASE_RATE
        distance = abs(OBJECTIVES.index(job.setting) - OBJECTIVES.index(target))
        return 300 - 5 * distance - 10 * abs(math.log2(rate / factor))

    return rsum_of


@pytest.mark.parametrize("factor", [2.0**power for power in range(-3, 4)])
@pytest.mark.parametrize("minutes", [2, 30])
def test_screening_finds_the_best_setting_and_its_rate(factor, minutes, tmp_path):
    target = OBJECTIVES[5]
    simulated = SimulatedJobs(quality(target, factor))
    settings, rates = simulated.screening(tmp_path, minutes).finalists()
    assert settings[0].choice == target
    assert (rates[0].setting, rates[0].factor) == (target, factor)


@pytest.mark.parametrize("step_s", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("start_s", [0.1, 1.0])
@pytest.mark.parametrize("minutes", [5, 30, 120])
def test_time_is_kept_within_ten_percent(step_s, start_s, minutes, tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s, start_s)
    screening = simulated.screening(tmp_path, minutes)
    settings, _ = screening.finalists()
    assert simulated.now <= 0.6 * 60 * minutes
    screening.confirm(settings, 1, partial(confirm, simulated))
    assert simulated.now <= 1.1 * 60 * minutes
    assert screening.state.seeds >= 3
    # Only more seeds than are worth it leave time.
    assert simulated.now >= 0.85 * 60 * minutes or screening.state.seeds == MAX_SEEDS


@pytest.mark.parametrize("workers", [1, 3, 8, 16])
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("step_s", [0.02, 0.05])
def test_time_is_kept_with_any_number_of_workers(workers, count, step_s, tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s, workers=workers)
    screening = simulated.screening(tmp_path, 8, SETTINGS[:count])
    settings, _ = screening.finalists()
    screening.confirm(settings, 1, partial(confirm, simulated, test_s=2.0))
    assert simulated.now <= 1.1 * 60 * 8
    assert screening.state.seeds >= 3


def test_confirmation_goes_on_after_failures_of_the_best(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s=0.02)
    screening = simulated.screening(tmp_path, 10)
    settings, _ = screening.finalists()

    def train(settings, seeds):
        outcomes = confirm(simulated, settings, seeds)
        failing = OBJECTIVES[:2]
        return [
            replace(one, failure="not a number", job_seconds=0.0) if one.setting in failing else one
            for one in outcomes
        ]

    outcomes = screening.confirm(settings, 1, train)
    assert {one.setting for one in outcomes if not one.failure}
    assert simulated.now <= 1.1 * 60 * 10


def test_more_seeds_after_a_stop_keep_the_rest_of_the_time(tmp_path):
    def seeds(name, min_seeds):
        simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s=0.05)
        screening = simulated.screening(tmp_path / name)
        settings, _ = screening.finalists()

        def stopping(settings, seeds):
            if seeds > 1:
                raise KeyboardInterrupt
            return confirm(simulated, settings, seeds)

        with pytest.raises(KeyboardInterrupt):
            screening.confirm(settings, 1, stopping)
        again = simulated.screening(tmp_path / name)
        again.confirm(settings, min_seeds(again.state.seeds), partial(confirm, simulated))
        return again.state.seeds

    assert seeds("more", lambda planned: planned + 1) >= seeds("same", lambda planned: planned)


def test_too_little_time_is_refused_before_the_screening(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s=3.0)
    message = r"minutes: expected at least about \d+ for 8 candidates, .* got 5\."
    with pytest.raises(RunError, match=message) as error:
        simulated.screening(tmp_path, 5).finalists()
    needed = int(re.search(r"about (\d+)", str(error.value))[1])
    SimulatedJobs(quality(OBJECTIVES[0]), step_s=3.0).screening(tmp_path, needed + 1).finalists()


def confirm(simulated, settings, seeds, *, test_s=0.0):
    """Outcomes of the runs of finalists, which take the time of all steps and of the test split."""
    jobs = [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]
    free_at = simulated.worker_times()
    for setting, seed in jobs:
        if (setting.name, seed) not in simulated.finished:
            training = setting.recipe_values["training"]
            epochs = sum(phase["epochs"] for phase in setting.recipe_values["phases"])
            steps = epochs * (training["batches_per_epoch"] or 58)
            seconds = simulated.start_s + simulated.step_s * steps + test_s
            simulated.wait(free_at, seconds)
            job = Job(setting.name, seed, setting.recipe_values, Path(setting.name))
            simulated.finished[setting.name, seed] = RunOutcome(
                setting.name, seed, setting.name, simulated.rsum_of(job), job_seconds=seconds
            )
    return [simulated.finished[setting.name, seed] for setting, seed in jobs]


def test_interrupted_screening_decides_as_an_undisturbed_one(tmp_path):
    whole = SimulatedJobs(quality(OBJECTIVES[2], 2.0))
    expected = whole.screening(tmp_path / "whole").finalists()
    stopped = SimulatedJobs(quality(OBJECTIVES[2], 2.0))
    for stop_after in range(0, len(whole.finished), 7):
        stopped.stop_after = stop_after
        with pytest.raises(KeyboardInterrupt):
            stopped.screening(tmp_path / "stopped").finalists()
    stopped.stop_after = math.inf
    settings, rates = stopped.screening(tmp_path / "stopped").finalists()
    assert (settings, rates) == expected
    states = [
        json.loads((tmp_path / name / SCREENING_FILE).read_text()) for name in ("whole", "stopped")
    ]
    assert states[0]["schedule"] == states[1]["schedule"]
    assert states[0]["screened"] == states[1]["screened"]


def test_the_better_half_of_the_finalists_gets_more_seeds(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    screening = simulated.screening(tmp_path, 2)
    settings, _ = screening.finalists()
    outcomes = screening.confirm(settings, 1, partial(confirm, simulated))
    stages = screening.state.stages
    assert len(stages) > 1
    for stage, following in itertools.pairwise(stages):
        assert {*following.finalists} < {*stage.finalists}
        assert len(following.finalists) == max(2, math.ceil(len(stage.finalists) / 2))
        assert following.seeds >= stage.seeds >= 2
    assert OBJECTIVES[3] in stages[-1].finalists
    seeds = Counter(one.setting for one in outcomes)
    assert seeds == {
        name: max(stage.seeds for stage in stages if name in stage.finalists)
        for name in screening.state.finalists
    }


@pytest.mark.parametrize("workers", [2, 8])
def test_finalists_of_a_stage_have_the_same_seeds(workers, tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]), workers=workers)
    screening = simulated.screening(tmp_path, 1)
    settings, _ = screening.finalists()
    trained = []

    def train(settings, seeds):
        trained.append(({one.name for one in settings}, seeds))
        return confirm(simulated, settings, seeds)

    screening.confirm(settings, 1, train)
    (first, first_seeds), (finalists, seeds), *_ = trained
    assert first <= finalists
    assert seeds >= first_seeds


def test_more_seeds_train_all_finalists(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    screening = simulated.screening(tmp_path, 2)
    settings, _ = screening.finalists()
    screening.confirm(settings, 1, partial(confirm, simulated))
    more = screening.state.seeds + 2
    again = simulated.screening(tmp_path, 2)
    outcomes = again.confirm(settings, more, partial(confirm, simulated))
    assert Counter(one.setting for one in outcomes) == dict.fromkeys(
        screening.state.finalists, more
    )


def test_more_time_after_a_stop_within_a_stage_is_used(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    screening = simulated.screening(tmp_path, 2)
    settings, _ = screening.finalists()
    calls = []

    def stopping(settings, seeds):
        calls.append(seeds)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return confirm(simulated, settings, seeds)

    with pytest.raises(KeyboardInterrupt):
        screening.confirm(settings, 1, stopping)
    simulated.screening(tmp_path, 4).confirm(settings, 1, partial(confirm, simulated))
    assert 0.85 * 240 <= simulated.now <= 1.1 * 240


@pytest.mark.parametrize("stops", [1, 3])
def test_time_of_runs_before_a_stop_counts(stops, tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    settings, _ = simulated.screening(tmp_path, 2).finalists()
    for number in range(stops):

        def stopping(settings, seeds, number=number):
            outcomes = confirm(simulated, settings, seeds)
            if seeds > 2 * number + 1:
                raise KeyboardInterrupt
            return outcomes

        with pytest.raises(KeyboardInterrupt):
            simulated.screening(tmp_path, 2).confirm(settings, 1, stopping)
    simulated.screening(tmp_path, 2).confirm(settings, 1, partial(confirm, simulated))
    assert simulated.now <= 1.1 * 120


def test_failed_runs_train_once(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    screening = simulated.screening(tmp_path, 2)
    settings, _ = screening.finalists()
    trained = Counter()

    def train(settings, seeds):
        outcomes = confirm(simulated, settings, seeds)
        for number, one in enumerate(outcomes):
            if one.setting == OBJECTIVES[3]:
                trained[one.seed] += 1
                outcomes[number] = replace(one, failure="cannot be trained")
        return outcomes

    outcomes = screening.confirm(settings, 1, train)
    assert trained and set(trained.values()) == {1}
    assert OBJECTIVES[3] not in screening.state.stages[-1].finalists
    assert OBJECTIVES[3] in {one.setting for one in outcomes if one.failure}


def test_stop_after_more_seeds_changes_nothing(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[3]))
    screening = simulated.screening(tmp_path, 2)
    settings, _ = screening.finalists()
    screening.confirm(settings, 1, partial(confirm, simulated))
    more = screening.state.seeds + 2

    def stopping(settings, seeds):
        if seeds == more:
            raise KeyboardInterrupt
        return confirm(simulated, settings, seeds)

    with pytest.raises(KeyboardInterrupt):
        simulated.screening(tmp_path, 2).confirm(settings, more, stopping)
    again = simulated.screening(tmp_path, 2)
    outcomes = again.confirm(settings, more, partial(confirm, simulated))
    assert again.state.seeds == more
    assert Counter(one.setting for one in outcomes) == dict.fromkeys(
        screening.state.finalists, more
    )


def test_state_of_an_older_version_is_refused(tmp_path):
    storage.write_json(
        tmp_path / SCREENING_FILE, {"seconds": 120.0, "finalists": ["a"], "seeds": 5}
    )
    with pytest.raises(RunError, match="stages"):
        SimulatedJobs(quality(OBJECTIVES[3])).screening(tmp_path)


def test_more_time_trains_more_seeds(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[2]), step_s=0.05)
    screening = simulated.screening(tmp_path, 30)
    settings, _ = screening.finalists()

    train = partial(confirm, simulated)
    screening.confirm(settings, 1, train)
    first = screening.state.seeds
    again = simulated.screening(tmp_path, 30)
    again.confirm(settings, first, train)
    assert again.state.seeds == first
    longer = simulated.screening(tmp_path, 60)
    longer.confirm(settings, first, train)
    assert longer.state.seeds > first


def test_trials_read_no_test_split_and_share_no_seed_with_runs(tmp_path):
    jobs = []
    simulated = SimulatedJobs(lambda job: jobs.append(job) or 100.0)
    simulated.screening(tmp_path).finalists()
    assert {job.recipe_values["evaluation"]["test"] for job in jobs} == {""}
    assert min(job.seed for job in jobs) > MAX_SEEDS
    assert not any(job.keeps_model for job in jobs)


def test_failed_candidates_are_dropped(tmp_path):
    def rsum_of(job):
        return math.nan if job.setting == OBJECTIVES[0] else quality(OBJECTIVES[0])(job)

    simulated = SimulatedJobs(rsum_of)
    settings, _ = simulated.screening(tmp_path).finalists()
    assert OBJECTIVES[0] not in {setting.choice for setting in settings}
    with pytest.raises(RunError, match="expected a candidate that can be trained"):
        SimulatedJobs(lambda job: math.nan).screening(tmp_path / "none").finalists()


def test_every_model_has_a_finalist(tmp_path):
    models = ["Heads(embedding_dim=64)", "Heads(embedding_dim=128)", "Heads(embedding_dim=256)"]
    settings = build_settings(HEADS, OBJECTIVES[:4], models, [])
    BATCHES.update(dict.fromkeys([setting.name for setting in settings], 58))
    simulated = SimulatedJobs(lambda job: 100.0 + ("=256" in job.setting))
    finalists, _ = simulated.screening(tmp_path, 6, settings).finalists()
    assert {setting.recipe_values["model"]["embedding_dim"] for setting in finalists} == {
        64,
        128,
        256,
    }


def test_without_tuning_the_rate_of_the_recipe_stays(tmp_path):
    jobs = []
    simulated = SimulatedJobs(lambda job: jobs.append(job) or 100.0)
    _, rates = simulated.screening(tmp_path, tune=False).finalists()
    assert rates == ()
    assert {job.recipe_values["phases"][0]["optimizer"]["lr"] for job in jobs} == {BASE_RATE}


def test_schedules_become_shorter():
    speed = Speed(run_seconds=20.0, start_seconds=1.0, run_steps=1000.0)
    schedules = possible_schedules(1, speed)
    times = [each.screening_seconds(16, speed, 1, tune=True) for each in schedules]
    assert (times[0], times[-1]) == (max(times), min(times))
    assert schedules[0].first_factors == FIRST_FACTORS


def test_short_runs_are_screened_with_whole_trainings():
    shares = {
        steps: {
            schedule.first_share
            for schedule in possible_schedules(1, Speed(20.0, 1.0, steps))
            if schedule.run_share == 1
        }
        for steps in (MIN_TRIAL_STEPS, 2 * MIN_TRIAL_STEPS, 10**4)
    }
    assert shares[MIN_TRIAL_STEPS] == {1.0}
    assert min(shares[2 * MIN_TRIAL_STEPS]) >= 1 / 2
    assert min(shares[10**4]) < 1 / 6


def test_spot_checks_train_in_the_last_round(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0], 2.0), step_s=0.1)
    screening = simulated.screening(tmp_path, 13)
    finalists, _ = screening.finalists()
    schedule = screening.state.schedule
    trained = [one for one in screening.state.screened if one.best_by_round[-1] is not None]
    survivors = schedule.survivors(len(SETTINGS), 2)
    assert survivors < len(trained) == survivors + SPOT_CHECKS < len(SETTINGS)
    # One was dropped after the first round. It trains in the second one, too, because the lines of the
    # regret lead from round to round.
    assert all(None not in one.best_by_round for one in trained)
    assert finalists[0].choice == OBJECTIVES[0]


def test_whole_trials_try_no_rate_twice(tmp_path):
    jobs = []
    simulated = SimulatedJobs(lambda job: jobs.append(job) or quality(OBJECTIVES[0], 4.0)(job))
    screening = simulated.screening(tmp_path, 60)
    _, rates = screening.finalists()
    assert screening.state.schedule.is_whole
    trials = [job for job in jobs if MAX_RUNS + 1 <= job.seed <= MAX_RUNS + 9]
    tried = {(job.setting, repr(job.recipe_values["phases"]), job.seed) for job in trials}
    assert len(trials) == len(tried)
    seeds = screening.state.schedule.trial_seeds
    for one in screening.state.screened:
        assert len({job.seed for job in trials if job.setting == one.name}) <= 3 * seeds
        assert len(one.rates) * seeds == sum(job.setting == one.name for job in trials)
    assert rates[0].factor == 4.0


def test_dropped_candidate_becomes_a_finalist_after_whole_trials(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s=0.1)
    screening = simulated.screening(tmp_path, 16)
    finalists, rates = screening.finalists()
    assert screening.state.schedule.is_whole
    assert screening.state.schedule.survivors(len(SETTINGS), 2) < len(finalists)
    assert [one.choice for one in finalists] == OBJECTIVES
    assert {rate.factor for rate in rates} == {1.0}


def test_spot_check_that_is_better_becomes_a_finalist(tmp_path):
    def rsum_of(job):
        steps = job.recipe_values["training"]["batches_per_epoch"]
        epochs = sum(phase["epochs"] for phase in job.recipe_values["phases"])
        # Every candidate but the first three is best only after all steps.
        late = OBJECTIVES.index(job.setting) >= 3 and epochs * steps >= BATCHES[job.setting] * 9
        return 500.0 if late else 300.0 - OBJECTIVES.index(job.setting)

    simulated = SimulatedJobs(rsum_of, step_s=0.1)
    finalists, _ = simulated.screening(tmp_path, 13).finalists()
    assert OBJECTIVES.index(finalists[0].choice) >= 3


def test_reading_a_finished_choice_again_takes_none_of_its_time(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[2]), step_s=0.05)
    screening = simulated.screening(tmp_path, 30)
    settings, _ = screening.finalists()
    screening.confirm(settings, 1, partial(confirm, simulated))
    elapsed_s = screening.state.elapsed_s
    simulated.now += 1000
    again = simulated.screening(tmp_path, 30)
    simulated.now += 1000
    again.confirm(settings, 1, partial(confirm, simulated))
    assert again.state.elapsed_s == elapsed_s


def test_candidates_need_only_captions():
    names = {objective.__name__ for objective in CATALOG}
    need_more = {"NCR", "AOQ", "Ladder", "GradedVLC", "Distillation"}
    assert {name.removesuffix("()") for name in candidate_objectives()} == names - need_more


SHORT_TRIALS = Schedule(1.0, MIN_KEPT, 1, 1, 20.0, 1 / 9)


def at_one_rate(name, model, *by_round):
    return ScreenedSetting(name, model, (ScreenedRate(1.0, by_round),))


def estimate(test, choice, screened):
    """Regret of finalists whose validation is their test."""
    finalists = {name: Finalist(1.0, by_seed, by_seed) for name, by_seed in test.items()}
    return estimate_regret(finalists, choice, screened, SHORT_TRIALS)


def around(mean, half_range=1.0):
    return {1: mean - half_range, 2: mean, 3: mean + half_range}


SCREENED = (
    at_one_rate("a", 0, 100.0, 200.0, 300.0),
    at_one_rate("b", 0, 90.0, 190.0, 290.0),
    at_one_rate("c", 0, 10.0, 110.0, None),
    at_one_rate("d", 0, -100.0, None, None),
    # Spot checks.
    at_one_rate("e", 0, 20.0, 121.0, 219.0),
    at_one_rate("f", 0, -50.0, 48.0, 150.0),
    at_one_rate("g", 0, 40.0, 139.0, 241.0),
)


def test_regret_of_a_settled_choice_is_small():
    test = {"a": around(301.0), "b": around(291.0)}
    regret = estimate(test, "a", SCREENED)
    assert regret.interval.high == 0.0
    assert regret.expected == pytest.approx(0.0, abs=0.1)
    assert regret.by_candidate["b"] < 0.1


def dropped_at(result, spread=0.0):
    """Candidates of a model whose results rise by 50 from round to round, and one that was dropped with
    another first result.
    """
    known = [
        at_one_rate(name, 0, x, x + 50, x + 100 + spread * sign)
        for name, x, sign in (
            ("a", 200.0, 1), ("b", 180.0, -1), ("c", 160.0, -1), ("d", 140.0, 1), ("e", 120.0, 0)
        )
    ]  # fmt: skip
    return (*known, at_one_rate("late", 0, result, None, None))


def regret_of_dropped(result, spread=0.0):
    test = {"a": around(300.0, 0.1), "b": around(280.0, 0.1)}
    return estimate(test, "a", dropped_at(result, spread))


def test_dropped_candidate_is_predicted_by_a_chain_of_lines():
    assert regret_of_dropped(210.0).expected == pytest.approx(10.0, abs=0.2)
    assert regret_of_dropped(190.0).expected == pytest.approx(0.0, abs=0.1)


def test_slope_of_the_lines_is_that_of_many_candidates():
    known = [at_one_rate(f"{x}", 0, x, 0.5 * x, 0.25 * x) for x in range(0, 400, 5)]
    late = at_one_rate("late", 0, 480.0, None, None)
    choice = {"395": around(0.25 * 395, 0.1)}
    assert estimate(choice, "395", (*known, late)).expected == pytest.approx(85 / 4, abs=2)


def test_errors_of_the_line_widen_the_regret():
    exact, noisy, noisier = (regret_of_dropped(197.0, spread) for spread in (0.0, 2.0, 8.0))
    assert exact.expected < noisy.expected < noisier.expected
    assert exact.interval.high < noisy.interval.high < noisier.interval.high
    assert noisier.by_candidate["late"] > 5


def test_dropped_candidate_far_below_is_excluded():
    assert regret_of_dropped(0.0, spread=3.0).by_candidate["late"] < 1.0


def test_other_learning_rate_of_the_choice_counts():
    def regret(result):
        rates = (ScreenedRate(1.0, (200.0, 250.0, 300.0)), ScreenedRate(2.0, (None, 250.0, result)))
        screened = (ScreenedSetting("a", 0, rates), *dropped_at(0.0)[1:])
        test = {"a": around(300.0, 2.0), "b": around(280.0, 0.0)}
        return estimate(test, "a", screened)

    assert regret(310.0).expected > 5
    assert regret(310.0).by_candidate["a"] > 80
    assert 0.1 < regret(300.0).expected < 3
    assert regret(250.0).by_candidate["a"] < 5


def test_dropped_learning_rate_is_predicted():
    rates = (ScreenedRate(1.0, (200.0, 250.0, 300.0)), ScreenedRate(4.0, (210.0, None, None)))
    screened = (ScreenedSetting("a", 0, rates), *dropped_at(0.0)[1:])
    test = {"a": around(300.0, 0.1), "b": around(280.0, 0.1)}
    assert estimate(test, "a", screened).expected == pytest.approx(10.0, abs=0.2)


def test_one_unstable_finalist_hardly_widens_the_regret():
    def regret(half_range):
        names = "abcd"
        test = {name: around(300.0 - 5 * number) for number, name in enumerate(names[:3])}
        test["d"] = around(250.0, half_range)
        screened = [at_one_rate(name, 0, 0.0, 0.0, max(test[name].values())) for name in names]
        rest = [at_one_rate(f"{number}", 0, 0.0, 0.0, 290.0) for number in range(6)]
        return estimate(test, "a", (*screened, *rest))

    assert regret(40.0).expected < regret(1.0).expected + 0.5
    assert regret(40.0).interval.high < 5


def test_luck_of_the_best_of_equal_trials_is_taken_off():
    # The settings are equal, so their trials differ by the seeds alone.
    random = np.random.default_rng(0)
    seeds = range(5)
    stated = []
    for _ in range(30):
        names = [f"{i}" for i in range(20)]
        screened = [at_one_rate(name, 0, 0.0, 0.0, random.normal(300, 3)) for name in names]
        test = {name: {seed: random.normal(300, 3) for seed in seeds} for name in names[:2]}
        regret = estimate(test, max(test, key=lambda name: sum(test[name].values())), screened)
        stated.append(regret.expected)
    # Without it, the best of 18 trials is 5 above the mean.
    assert np.mean(stated) < 4


def test_regret_interval_contains_simulated_regrets(tmp_path):
    random = np.random.default_rng(0)
    # Test RSUM at 300 of validation, and its change for each RSUM: of an equal gallery, and of a large
    # one, whose slope is not quite the expected one.
    scales = (300.0, 1.0), (88.0, 0.6)
    true, stated, covered = ([[] for _ in scales] for _ in range(3))
    for number in range(60):
        best_rsum = dict(zip(OBJECTIVES, random.normal(300, 6, len(OBJECTIVES)), strict=True))
        best_log2 = dict(zip(OBJECTIVES, random.normal(0, 1, len(OBJECTIVES)), strict=True))
        slowness = dict(zip(OBJECTIVES, random.normal(30, 8, len(OBJECTIVES)), strict=True))

        def luck_of_images(seed, number=number):
            # Each seed has validation images of its own.
            return np.random.default_rng([number, seed]).normal(0, 15)

        def mean_rsum(name, factor, best_rsum=best_rsum, best_log2=best_log2):
            return best_rsum[name] - 4 * (math.log2(factor) - best_log2[name]) ** 2

        def rsum_of(job, mean_rsum=mean_rsum, slowness=slowness, luck_of_images=luck_of_images):
            training = job.recipe_values["training"]
            epochs = sum(phase["epochs"] for phase in job.recipe_values["phases"])
            steps = epochs * (training["batches_per_epoch"] or 58)
            factor = job.recipe_values["phases"][0]["optimizer"]["lr"] / BASE_RATE
            loss = slowness[job.setting] * (math.sqrt(58 * HEADS.phases[0].epochs / steps) - 1)
            luck = luck_of_images(job.seed) + random.normal(0, 2)
            return mean_rsum(job.setting, factor) - loss + luck

        simulated = SimulatedJobs(rsum_of, step_s=0.05)
        screening = simulated.screening(tmp_path / f"{number}", 20)
        settings, rates = screening.finalists()
        factors = {rate.setting: rate.factor for rate in rates}

        def train(settings, seeds, simulated=simulated, factors=factors):
            return confirm(
                simulated, [with_rate(one, factors[one.name]) for one in settings], seeds
            )

        outcomes = screening.confirm(settings, 1, train)
        state = screening.state
        validation, gap = defaultdict(dict), defaultdict(dict)
        for one in outcomes:
            validation[one.setting][one.seed] = one.validation_rsum
            own_luck = (
                one.validation_rsum
                - luck_of_images(one.seed)
                - mean_rsum(one.setting, factors[one.setting])
            )
            # Validation and test share half of the variance.
            gap[one.setting][one.seed] = (own_luck + random.normal(0, 2)) / math.sqrt(2)
        choice = max(
            state.stages[-1].finalists,
            key=lambda name: statistics.fmean(validation[name].values()),
        )
        tried = [mean_rsum(name, 2.0**power) for name in OBJECTIVES for power in range(-4, 5)]
        for scale, (level, slope) in enumerate(scales):
            finalists = {}
            for name in state.finalists:
                mean = mean_rsum(name, factors[name])
                test = {
                    seed: level + slope * (mean - 300 + luck) for seed, luck in gap[name].items()
                }
                finalists[name] = Finalist(factors[name], validation[name], test)
            regret = estimate_regret(finalists, choice, state.screened, state.schedule)
            true[scale].append(slope * (max(tried) - mean_rsum(choice, factors[choice])))
            stated[scale].append(regret.expected)
            covered[scale].append(true[scale][-1] in regret.interval)
    assert (np.mean(covered, axis=1) >= 0.9).all()
    mean_true, mean_stated = np.mean(true, axis=1), np.mean(stated, axis=1)
    assert (mean_true < mean_stated).all() and (mean_stated < mean_true + 2).all()


def test_regret_is_in_rsum_of_the_test():
    def regret(rsum_of_test):
        validation = {name: around(300.0 - 20 * number) for number, name in enumerate("abcdefgh")}
        finalists = {
            name: Finalist(
                1.0, by_seed, {seed: rsum_of_test(rsum) for seed, rsum in by_seed.items()}
            )
            for name, by_seed in validation.items()
        }
        screened = [at_one_rate(name, 0, 0.0, 0.0, each[2]) for name, each in validation.items()]
        better = at_one_rate("better", 0, 0.0, 0.0, 310.0)
        return estimate_regret(finalists, "a", (*screened, better), SHORT_TRIALS)

    equal = regret(lambda rsum: rsum)
    smaller = regret(lambda rsum: 88 + 0.5 * (rsum - 300))
    assert equal.expected == pytest.approx(10, abs=0.5)
    assert smaller.expected == pytest.approx(5, abs=0.5)
    assert smaller.interval.high < 10


def test_finalists_far_below_are_excluded_with_few_seeds():
    test = {
        "a": {seed: 300.0 + (-1) ** seed for seed in range(20)},
        "close": around(299.0, 4.0),
        "far": around(260.0, 4.0),
    }
    screened = [at_one_rate(name, 0, 0.0, 0.0, each[1]) for name, each in test.items()]
    rest = [at_one_rate(f"{number}", 0, 0.0, 0.0, 250.0) for number in range(4)]
    assert estimate(test, "a", (*screened, *rest)).excluded == ("far",)


def test_dropped_candidate_is_compared_within_its_model():
    slow = tuple(at_one_rate(f"slow {x}", 1, x, x + 80, x + 160) for x in (0.0, 30.0, 60.0, 90.0))
    late = at_one_rate("late of slow", 1, 150.0, None, None)
    screened = (*dropped_at(100.0), *slow, late)
    test = {"a": around(300.0, 0.1), "b": around(280.0, 0.1)}
    regret = estimate(test, "a", screened)
    assert regret.expected == pytest.approx(10.0, abs=0.2)
    assert regret.by_candidate["late of slow"] > 95


def test_model_without_known_candidates_is_predicted():
    lost = at_one_rate("other model", 1, 210.0, None, None)
    screened = (*dropped_at(100.0, spread=2.0), lost)
    test = {"a": around(300.0), "b": around(280.0)}
    regret = estimate(test, "a", screened)
    assert 50 < regret.by_candidate["other model"] < 100


def test_spread_of_one_finalist_is_the_spread_of_its_seeds():
    screened = (
        at_one_rate("a", 0, 100.0, 200.0, 320.0),
        at_one_rate("b", 0, 90.0, 190.0, 319.0),
        at_one_rate("c", 0, 80.0, 180.0, 270.0),
    )
    test = {"a": around(320.0, 10.0)}
    regret = estimate(test, "a", screened)
    assert regret.interval.high > 10
    assert 30 < regret.by_candidate["b"] < 60
    assert estimate({"a": {1: 310.0}}, "a", screened) is None


def test_regret_is_the_known_difference_without_spread():
    test = {"a": around(301.0), "b": around(305.0)}
    regret = estimate(test, "a", SCREENED)
    assert regret.expected == pytest.approx(4.0, abs=0.2)
    assert regret.by_candidate["b"] > 99


def test_regret_of_equal_settings_falls_with_more_seeds():
    noise = {"a": {1: 300.0, 2: 310.0, 3: 305.0}, "b": {1: 306.0, 2: 303.0, 3: 306.0}}
    regret = estimate(noise, "a", SCREENED)
    assert 0 < regret.with_twice_the_seeds < regret.expected < regret.interval.high
    many = {name: {**by_seed, 4: 305.0, 5: 305.0, 6: 305.0} for name, by_seed in noise.items()}
    assert estimate(many, "a", SCREENED).expected < regret.expected


def test_limits_leave_out_costly_models():
    cost = ModelCost(parameters=10, query_ms=2.0, item_bytes=1024.0, images=10)
    assert CostLimits().allow(cost)
    assert CostLimits(2.0, 1024.0).allow(cost)
    assert not CostLimits(max_query_ms=1.9).allow(cost)
    assert not CostLimits(max_item_bytes=1023).allow(cost)


def test_regret_is_unknown_with_one_seed():
    assert estimate({"a": {1: 300.0}, "b": {1: 299.0}}, "a", SCREENED) is None


def test_regret_is_unknown_if_the_finalists_share_one_seed():
    test = {"a": around(300.0), "b": {3: 301.0}}
    assert estimate(test, "a", SCREENED) is None


def test_regret_is_unknown_if_too_few_trained_in_whole():
    assert estimate({"a": around(301.0), "b": around(291.0)}, "a", SCREENED[:4]) is None


def test_regret_is_finite_after_failed_rounds():
    screened = (*SCREENED, at_one_rate("late", 0, -math.inf, 250.0, None))
    test = {"a": around(301.0), "b": around(291.0)}
    assert estimate(test, "a", screened).expected == pytest.approx(0.0, abs=0.1)
    failed_once = (at_one_rate("a", 0, -math.inf, 200.0, 300.0), *SCREENED[1:])
    assert math.isfinite(estimate(test, "a", failed_once).expected)


def test_time_is_kept_with_many_models_of_one_objective(tmp_path):
    models = [f"Heads(embedding_dim={dim})" for dim in range(32, 352, 32)]
    settings = build_settings(HEADS, OBJECTIVES[:1], models, [])
    BATCHES.update(dict.fromkeys([setting.name for setting in settings], 58))
    simulated = SimulatedJobs(lambda job: 100.0)
    screening = simulated.screening(tmp_path, 8, settings)
    finalists, _ = screening.finalists()
    assert len(finalists) == 10
    screening.confirm(finalists, 1, partial(confirm, simulated))
    assert simulated.now <= 1.1 * 60 * 8


def test_time_is_kept_with_runs_of_different_length(tmp_path):
    settings = build_settings(HEADS, OBJECTIVES[:1], [], ["phases.0.epochs=[2, 40]"])
    BATCHES.update(dict.fromkeys([setting.name for setting in settings], 58))
    simulated = SimulatedJobs(lambda job: 100.0)
    screening = simulated.screening(tmp_path, 10, settings)
    finalists, _ = screening.finalists()
    screening.confirm(finalists, 1, partial(confirm, simulated))
    assert simulated.now <= 1.1 * 60 * 10


def test_speed_is_measured_with_a_setting_that_can_be_trained(tmp_path):
    def rsum_of(job):
        return 100.0

    simulated = SimulatedJobs(rsum_of)
    run = simulated.run

    def failing(jobs):
        for job, outcome in zip(jobs, run(jobs), strict=True):
            failure = "cannot be trained" if job.setting == OBJECTIVES[0] else ""
            yield replace(outcome, failure=failure)

    simulated.run = failing
    screening = simulated.screening(tmp_path)
    settings, _ = screening.finalists()
    assert OBJECTIVES[0] not in {setting.choice for setting in settings}
    [failed] = [one for one in screening.state.screened if one.failure]
    assert (failed.name, failed.failure) == (OBJECTIVES[0], "cannot be trained")


def test_seeds_draw_their_validation_only_within_a_time():
    def random_validation(minutes, **evaluation):
        overrides = {f"evaluation.{name}": value for name, value in evaluation.items()}
        recipe = read_recipe("heads-flickr8k", overrides)
        plan = plan_comparison(recipe, (OBJECTIVES, [], []), 0 if minutes else 3, minutes=minutes)
        return {plan.recipe(one, 1).evaluation.random_validation for one in plan.settings}

    assert random_validation(5) == {True}
    assert random_validation(5, random_validation=False) == {False}
    assert random_validation(5, validation="test") == {None}
    assert random_validation(0) == {None}


@pytest.mark.parametrize(
    "overrides",
    [
        {"start_from": "runs/first"},
        {"data.noise": "NoiseIndex(file='index.npy')"},
        {"phases.0.supervision": "MinedNegativeSupervision(file='mined.parquet')"},
    ],
)
def test_validation_is_not_drawn_where_training_images_are_fixed(overrides):
    recipe = read_recipe("heads-flickr8k", overrides)
    [setting] = plan_comparison(recipe, ([], [], []), 0, minutes=5).settings
    assert "random_validation" not in setting.recipe_values["evaluation"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compare_within_a_time(scenes, tmp_path, monkeypatch):
    # The number of trainings ends the choice, however slow the machine is.
    for name, value in (("MAX_TRIAL_SEEDS", 1), ("MAX_FINALISTS", 2), ("MAX_SEEDS", 3)):
        monkeypatch.setattr(screening_module, name, value)
    visavis.features(scenes, visual="scenes", granularity="pooled")
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(recipe_text({"epochs": 4}, data={"path": str(scenes)}))
    arguments = {
        "objective": ["VLC(gamma=20)", "Unified(gamma=20)", "TripletHN()"],
        "grid": "model=['VSE++(embedding_dim=8, word_dim=4)', 'VSE++(embedding_dim=16, word_dim=4)']",
        "workers": 1,
    }
    result = visavis.compare(recipe, minutes=30, tune=False, out=tmp_path / "timed", **arguments)
    state = result.choice.state
    assert len(state.screened) == 6
    assert all(
        {run.seed for run in result.runs(one)} == {*range(1, state.seeds + 1)}
        for one in result.settings
    )
    assert result.regret.interval.low <= result.regret.expected <= result.regret.interval.high
    assert any("candidates screened" in sentence for sentence in result.findings)
    assert any("More than 3 seeds are not trained." in one for one in result.findings)
    assert [row[0] for row in result.frontier.rows] == [row.name for row in result.results.rows]
    assert {cost.item_bytes for cost in result.choice.costs.values()} == {32.0, 64.0}
    page = (result.folder / "report.html").read_text()
    assert "Candidates" in page and "bytes per item" in page
    again = visavis.compare(resume=result.folder, workers=1)
    assert again.markdown() == result.markdown()
    small = visavis.compare(
        recipe, minutes=30, tune=False, max_item_bytes=32, out=tmp_path / "small", **arguments
    )
    assert all("embedding_dim=8" in one.name for one in small.settings)
    with pytest.raises(RunError, match="expected a model within the limits, got none"):
        visavis.compare(recipe, minutes=1, max_item_bytes=4, out=tmp_path / "none", **arguments)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_choice_killed_ten_times_ends_with_the_same_table(scenes, tmp_path):
    visavis.features(scenes, visual="scenes", granularity="pooled")
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(recipe_text({"epochs": 4}, data={"path": str(scenes)}))
    objectives = ["VLC(gamma=20)", "Unified(gamma=20)", "TripletHN()", "InfoNCE()"]
    whole = visavis.compare(
        recipe, objective=objectives, minutes=4, out=tmp_path / "whole", workers=1
    )
    # Another process may be faster or slower, so that the clock would decide otherwise.
    state = replace(whole.choice.state, screened=(), elapsed_s=0.0)
    killed = tmp_path / "killed"
    killed.mkdir()
    plan = json.loads((whole.folder / "plan.json").read_text())
    candidates = plan_comparison(
        read_recipe(recipe), (objectives, [], []), 0, minutes=4, tune=True
    ).settings
    costs = {one.name: next(iter(plan["costs"].values())) for one in candidates}
    plan |= {"settings": list(map(asdict, candidates)), "rates": [], "seeds": 0}
    plan |= {"is_screened": False, "costs": costs}
    storage.write_json(killed / "plan.json", plan)
    storage.write_json(killed / SCREENING_FILE, asdict(state))
    trainings = len(list(whole.folder.glob("*/*/outcome.json")))
    for number in range(1, 11):
        process = FORKED.Process(
            target=visavis.compare, kwargs={"resume": killed, "workers": 1}, daemon=True
        )
        process.start()
        while (
            process.is_alive()
            and len(list(killed.glob("*/*/outcome.json"))) < number * trainings / 11
        ):
            time.sleep(0.01)
        process.kill()
        process.join()
    result = visavis.compare(resume=killed, workers=1)
    assert result.results.to_json() == whole.results.to_json()
    assert result.rates == whole.rates
    assert result.regret == whole.regret
