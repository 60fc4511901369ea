"""Choices within a time: the best setting is found, the time is kept, an interruption changes nothing,
and the regret follows from the differences.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict, replace

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
from visavis.research.experiments.jobs import RunOutcome
from visavis.research.experiments.model_costs import CostLimits, ModelCost
from visavis.research.experiments.regret import estimate_regret
from visavis.research.experiments.screening import (
    FIRST_FACTORS,
    MAX_SEEDS,
    MIN_KEPT,
    MIN_TRIAL_STEPS,
    SCREENING_FILE,
    SPOT_CHECKS,
    ScreenedSetting,
    Screening,
    Speed,
    possible_schedules,
)
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

    def run(self, jobs):
        for job in jobs:
            if job.folder not in self.finished:
                if len(self.finished) >= self.stop_after:
                    raise KeyboardInterrupt
                training = job.recipe_values["training"]
                epochs = sum(phase["epochs"] for phase in job.recipe_values["phases"])
                seconds = self.step_s * epochs * (training["batches_per_epoch"] or 58)
                # A single training uses one worker.
                self.now += (self.start_s + seconds) / min(self.workers, len(jobs))
                self.finished[job.folder] = RunOutcome(
                    job.setting, job.seed, job.folder, self.rsum_of(job), seconds=seconds
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
    assert 2 <= len(settings) < len(SETTINGS) or minutes == 30


@pytest.mark.parametrize("step_s", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("start_s", [0.1, 1.0])
@pytest.mark.parametrize("minutes", [5, 30, 120])
def test_time_is_kept_within_ten_percent(step_s, start_s, minutes, tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s, start_s)
    screening = simulated.screening(tmp_path, minutes)
    settings, _ = screening.finalists()
    assert simulated.now <= 0.6 * 60 * minutes
    screening.confirm(len(settings), 1, lambda seeds: confirm(simulated, settings, seeds))
    assert simulated.now <= 1.1 * 60 * minutes
    assert screening.state.seeds >= 3
    # Only more seeds than are worth it leave time.
    assert simulated.now >= 0.85 * 60 * minutes or screening.state.seeds == MAX_SEEDS


def test_too_little_time_is_refused_before_the_screening(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0]), step_s=3.0)
    message = r"minutes: expected at least about \d+ for 8 candidates, .* got 5\."
    with pytest.raises(RunError, match=message) as error:
        simulated.screening(tmp_path, 5).finalists()
    needed = int(re.search(r"about (\d+)", str(error.value))[1])
    SimulatedJobs(quality(OBJECTIVES[0]), step_s=3.0).screening(tmp_path, needed + 1).finalists()


def confirm(simulated, settings, seeds):
    """Outcomes of the runs of finalists, which take the time of all steps."""
    jobs = [(setting, seed) for seed in range(1, seeds + 1) for setting in settings]
    for setting, seed in jobs:
        if (setting.name, seed) not in simulated.finished:
            training = setting.recipe_values["training"]
            epochs = sum(phase["epochs"] for phase in setting.recipe_values["phases"])
            steps = epochs * (training["batches_per_epoch"] or 58)
            simulated.now += (simulated.start_s + simulated.step_s * steps) / simulated.workers
            simulated.finished[setting.name, seed] = RunOutcome(
                setting.name, seed, setting.name, 300.0
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


def test_more_time_trains_more_seeds(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[2]), step_s=0.05)
    screening = simulated.screening(tmp_path, 30)
    settings, _ = screening.finalists()

    def train(seeds):
        return confirm(simulated, settings, seeds)

    screening.confirm(len(settings), 1, train)
    first = screening.state.seeds
    again = simulated.screening(tmp_path, 30)
    again.confirm(len(settings), first, train)
    assert again.state.seeds == first
    longer = simulated.screening(tmp_path, 60)
    longer.confirm(len(settings), first, train)
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
    schedules = possible_schedules(16, 1, speed, 3600.0)
    times = [each.screening_seconds(16, speed, tune=True) for each in schedules]
    assert (times[0], times[-1]) == (max(times), min(times))
    assert schedules[0].first_factors == FIRST_FACTORS


def test_short_runs_are_screened_with_whole_trainings():
    shares = {
        steps: {
            schedule.first_share
            for schedule in possible_schedules(16, 1, Speed(20.0, 1.0, steps), 3600.0)
            if schedule.run_share == 1 and schedule.kept > MIN_KEPT
        }
        for steps in (MIN_TRIAL_STEPS, 2 * MIN_TRIAL_STEPS, 10**4)
    }
    assert shares[MIN_TRIAL_STEPS] == {1.0}
    assert min(shares[2 * MIN_TRIAL_STEPS]) > 1 / 2
    assert min(shares[10**4]) < 1 / 6


def test_spot_checks_train_in_the_last_round(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[0], 2.0), step_s=0.1)
    screening = simulated.screening(tmp_path, 20)
    finalists, _ = screening.finalists()
    schedule = screening.state.schedule
    trained = [one for one in screening.state.screened if one.best_by_round[-1] is not None]
    survivors = schedule.survivors(len(SETTINGS), 2)
    assert survivors < len(trained) == survivors + SPOT_CHECKS < len(SETTINGS)
    # One was dropped after the first round, and its result there is kept.
    assert any(one.best_by_round[1] is None for one in trained)
    assert all(one.best_by_round[0] is not None for one in trained)
    assert finalists[0].choice == OBJECTIVES[0]


def test_spot_check_that_is_better_becomes_a_finalist(tmp_path):
    def rsum_of(job):
        steps = job.recipe_values["training"]["batches_per_epoch"]
        epochs = sum(phase["epochs"] for phase in job.recipe_values["phases"])
        # Every candidate but the first three is best only after all steps.
        late = OBJECTIVES.index(job.setting) >= 3 and epochs * steps >= BATCHES[job.setting] * 9
        return 500.0 if late else 300.0 - OBJECTIVES.index(job.setting)

    simulated = SimulatedJobs(rsum_of, step_s=0.1)
    finalists, _ = simulated.screening(tmp_path, 20).finalists()
    assert OBJECTIVES.index(finalists[0].choice) >= 3


def test_reading_a_finished_choice_again_takes_none_of_its_time(tmp_path):
    simulated = SimulatedJobs(quality(OBJECTIVES[2]), step_s=0.05)
    screening = simulated.screening(tmp_path, 30)
    settings, _ = screening.finalists()
    screening.confirm(len(settings), 1, lambda seeds: confirm(simulated, settings, seeds))
    elapsed_s = screening.state.elapsed_s
    simulated.now += 1000
    again = simulated.screening(tmp_path, 30)
    simulated.now += 1000
    again.confirm(len(settings), 1, lambda seeds: confirm(simulated, settings, seeds))
    assert again.state.elapsed_s == elapsed_s


def test_candidates_need_only_captions():
    names = {objective.__name__ for objective in CATALOG}
    need_more = {"NCR", "AOQ", "Ladder", "GradedVLC", "Distillation"}
    assert {name.removesuffix("()") for name in candidate_objectives()} == names - need_more


SCREENED = (
    ScreenedSetting("a", 0, (100.0, 200.0, 300.0)),
    ScreenedSetting("b", 0, (90.0, 190.0, 290.0)),
    ScreenedSetting("c", 0, (10.0, 110.0, None)),
    ScreenedSetting("d", 0, (-100.0, None, None)),
    # Spot checks.
    ScreenedSetting("e", 0, (20.0, 121.0, 219.0)),
    ScreenedSetting("f", 0, (-50.0, None, 150.0)),
    ScreenedSetting("g", 0, (40.0, 139.0, 241.0)),
)
VALIDATION = {"a": 300.0, "b": 290.0}


def test_regret_of_a_settled_choice_is_small():
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 290.0, 2: 291.0, 3: 292.0}}
    regret = estimate_regret(test, "a", SCREENED, VALIDATION)
    assert regret.interval.high == 0.0
    assert regret.expected == pytest.approx(0.0, abs=0.1)
    assert regret.by_candidate["b"] == 0.0


def dropped_at(result, spread=0.0):
    """Candidates of a model whose whole result is 200 above a third of the first one, and one that was
    dropped with another first result.
    """
    known = [
        ScreenedSetting(name, 0, (x, None, 200 + x / 3 + spread * sign))
        for name, x, sign in (
            ("a", 300.0, 1), ("b", 240.0, -1), ("c", 180.0, -1), ("d", 120.0, 1), ("e", 60.0, 0)
        )
    ]  # fmt: skip
    return (*known, ScreenedSetting("late", 0, (result, None, None)))


def regret_of_dropped(result, spread=0.0):
    validation = {"a": 300.0, "b": 280.0}
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 280.0, 2: 281.0, 3: 282.0}}
    return estimate_regret(test, "a", dropped_at(result, spread), validation)


def test_dropped_candidate_is_predicted_by_a_line():
    # A line without errors: the candidate is better by a third of its distance.
    assert regret_of_dropped(330.0).expected == pytest.approx(10.0, abs=0.1)
    assert regret_of_dropped(270.0).expected == pytest.approx(0.0, abs=0.1)


def test_errors_of_the_line_widen_the_regret():
    exact, noisy, noisier = (regret_of_dropped(297.0, spread) for spread in (0.0, 2.0, 8.0))
    assert exact.expected < noisy.expected < noisier.expected
    assert exact.interval.high < noisy.interval.high < noisier.interval.high
    assert noisier.by_candidate["late"] > 5


def test_dropped_candidate_far_below_is_excluded():
    assert regret_of_dropped(-300.0, spread=3.0).by_candidate["late"] < 1.0


def test_regret_interval_contains_simulated_regrets():
    random = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        true = random.normal(300, 10, 12)
        first = 3 * (true - 200) + random.normal(0, 12, 12)
        order = np.argsort(-first)
        # Four stay, two of the others are checked, and the best two of these six are confirmed.
        trained = [*order[:4], *random.choice(order[4:], 2, replace=False)]
        last = {i: true[i] + random.normal(0, 2) for i in trained}
        finalists = sorted(trained, key=lambda i: -last[i])[:2]
        validation = {str(i): true[i] + random.normal(0, 1) for i in finalists}
        test = {
            str(i): {seed: true[i] + random.normal(0, 2) for seed in range(4)} for i in finalists
        }
        screened = [
            ScreenedSetting(str(i), 0, (first[i], None, last.get(i))) for i in range(len(true))
        ]
        choice = max(validation, key=validation.get)
        regret = estimate_regret(test, choice, screened, validation)
        covered.append(max(true) - true[int(choice)] in regret.interval)
    assert np.mean(covered) >= 0.9


def test_dropped_candidate_is_compared_within_its_model():
    slow = tuple(
        ScreenedSetting(f"slow {x}", 1, (x, None, 260 + x / 3)) for x in (0.0, 30.0, 60.0, 90.0)
    )
    late = ScreenedSetting("late of slow", 1, (150.0, None, None))
    screened = (*dropped_at(100.0), *slow, late)
    validation = {"a": 300.0, "b": 280.0}
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 280.0, 2: 281.0, 3: 282.0}}
    regret = estimate_regret(test, "a", screened, validation)
    assert regret.expected == pytest.approx(10.0, abs=0.1)
    assert regret.by_candidate["late of slow"] > 95


def test_model_without_known_candidates_is_predicted():
    lost = ScreenedSetting("other model", 1, (330.0, None, None))
    screened = (*dropped_at(100.0, spread=2.0), lost)
    validation = {"a": 300.0, "b": 280.0}
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 280.0, 2: 281.0, 3: 282.0}}
    regret = estimate_regret(test, "a", screened, validation)
    assert 50 < regret.by_candidate["other model"] < 100


def test_spread_of_one_finalist_is_the_spread_of_its_seeds():
    screened = (
        ScreenedSetting("a", 0, (100.0, 200.0, 320.0)),
        ScreenedSetting("b", 0, (90.0, 190.0, 319.0)),
    )
    test = {"a": {1: 310.0, 2: 320.0, 3: 330.0}}
    regret = estimate_regret(test, "a", screened, {"a": 320.0})
    assert regret.interval.high > 10
    assert 30 < regret.by_candidate["b"] < 50
    assert estimate_regret({"a": {1: 310.0}}, "a", screened, {"a": 320.0}) is None


def test_regret_is_the_known_difference_without_spread():
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 304.0, 2: 305.0, 3: 306.0}}
    regret = estimate_regret(test, "a", SCREENED, VALIDATION)
    assert regret.expected == pytest.approx(4.0, abs=0.2)
    assert regret.by_candidate["b"] > 99


def test_regret_of_equal_settings_falls_with_more_seeds():
    noise = {"a": {1: 300.0, 2: 310.0, 3: 305.0}, "b": {1: 306.0, 2: 303.0, 3: 306.0}}
    regret = estimate_regret(noise, "a", SCREENED, VALIDATION)
    assert 0 < regret.with_twice_the_seeds < regret.expected < regret.interval.high
    many = {name: {**by_seed, 4: 305.0, 5: 305.0, 6: 305.0} for name, by_seed in noise.items()}
    assert estimate_regret(many, "a", SCREENED, VALIDATION).expected < regret.expected


def test_limits_leave_out_costly_models():
    cost = ModelCost(parameters=10, query_ms=2.0, item_bytes=1024.0, images=10)
    assert CostLimits().allow(cost)
    assert CostLimits(2.0, 1024.0).allow(cost)
    assert not CostLimits(max_query_ms=1.9).allow(cost)
    assert not CostLimits(max_item_bytes=1023).allow(cost)


def test_regret_is_unknown_with_one_seed():
    test = {"a": {1: 300.0}, "b": {1: 299.0}}
    assert estimate_regret(test, "a", SCREENED, VALIDATION) is None


def test_regret_is_unknown_if_too_few_trained_in_whole():
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 290.0, 2: 291.0, 3: 292.0}}
    assert estimate_regret(test, "a", SCREENED[:4], VALIDATION) is None


def test_regret_is_finite_after_failed_rounds():
    screened = (*SCREENED, ScreenedSetting("late", 0, (-math.inf, 250.0, None)))
    test = {"a": {1: 300.0, 2: 301.0, 3: 302.0}, "b": {1: 290.0, 2: 291.0, 3: 292.0}}
    regret = estimate_regret(test, "a", screened, VALIDATION)
    assert regret.expected == pytest.approx(0.0, abs=0.1)
    failed_once = (ScreenedSetting("a", 0, (-math.inf, 200.0, 300.0)), *SCREENED[1:])
    assert math.isfinite(estimate_regret(test, "a", failed_once, VALIDATION).expected)


def test_time_is_kept_with_many_models_of_one_objective(tmp_path):
    models = [f"Heads(embedding_dim={dim})" for dim in range(32, 352, 32)]
    settings = build_settings(HEADS, OBJECTIVES[:1], models, [])
    BATCHES.update(dict.fromkeys([setting.name for setting in settings], 58))
    simulated = SimulatedJobs(lambda job: 100.0)
    screening = simulated.screening(tmp_path, 8, settings)
    finalists, _ = screening.finalists()
    assert len(finalists) == 10
    screening.confirm(10, 1, lambda seeds: confirm(simulated, finalists, seeds))
    assert simulated.now <= 1.1 * 60 * 8


def test_time_is_kept_with_runs_of_different_length(tmp_path):
    settings = build_settings(HEADS, OBJECTIVES[:1], [], ["phases.0.epochs=[2, 40]"])
    BATCHES.update(dict.fromkeys([setting.name for setting in settings], 58))
    simulated = SimulatedJobs(lambda job: 100.0)
    screening = simulated.screening(tmp_path, 10, settings)
    finalists, _ = screening.finalists()
    screening.confirm(len(finalists), 1, lambda seeds: confirm(simulated, finalists, seeds))
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
    candidates = build_settings(read_recipe(recipe), objectives, [], [])
    costs = {one.name: next(iter(plan["costs"].values())) for one in candidates}
    plan |= {"settings": list(map(asdict, candidates)), "rates": [], "seeds": 0}
    plan |= {"is_screened": False, "costs": costs}
    storage.write_json(killed / "plan.json", plan)
    storage.write_json(killed / SCREENING_FILE, asdict(state))
    trainings = len(list(whole.folder.rglob("outcome.json")))
    for number in range(1, 11):
        process = FORKED.Process(
            target=visavis.compare, kwargs={"resume": killed, "workers": 1}, daemon=True
        )
        process.start()
        while (
            process.is_alive() and len(list(killed.rglob("outcome.json"))) < number * trainings / 11
        ):
            time.sleep(0.01)
        process.kill()
        process.join()
    result = visavis.compare(resume=killed, workers=1)
    assert result.results.to_json() == whole.results.to_json()
    assert result.rates == whole.rates
    assert result.regret == whole.regret
