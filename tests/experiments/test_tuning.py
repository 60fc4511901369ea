"""Tuning of learning rates: the same tries for each setting, on validation only, bounded by the
runs of the comparison.
"""

from __future__ import annotations

import json

import pytest
from tests.fixtures.recipes import recipe_text

from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.experiments.grid import build_settings
from visavis.research.experiments.jobs import MAX_RUNS, RunOutcome, Workers
from visavis.research.experiments.run_comparison import (
    plan_comparison,
    resume_comparison,
    start_comparison,
)
from visavis.research.experiments.tuning import (
    COARSE_FACTORS,
    FINALISTS,
    LONGER_TRIES,
    Try,
    TunedRate,
    next_factor,
    shortened,
    tune_learning_rates,
    with_rate,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import build_recipe

HEADS = read_recipe("heads-flickr8k")
NUM_TRIES = len(COARSE_FACTORS) + LONGER_TRIES + FINALISTS
SETTINGS = build_settings(HEADS, ["VLC()", "TripletHN()"], [], [])


def runner(rsum_of):
    """Run jobs without training: the validation RSUM is a function of a job."""

    def run_jobs(jobs):
        runner.jobs += jobs
        yield from (
            RunOutcome(job.setting, job.seed, job.folder, rsum_of(job)) for job in reversed(jobs)
        )

    runner.jobs = []
    return run_jobs


def rate_of(job):
    return job.recipe_values["phases"][0]["optimizer"]["lr"]


def tuned(rsum_of, tmp_path, batches=58, seeds=5):
    return tune_learning_rates(
        SETTINGS,
        dict.fromkeys([s.name for s in SETTINGS], batches),
        seeds,
        tmp_path,
        runner(rsum_of),
        NoProgress(),
    )


def closeness(target):
    return lambda job: (
        -abs(rate_of(job) / target[job.setting] - 1)
        if rate_of(job) < target[job.setting]
        else -(rate_of(job) / target[job.setting] - 1)
    )


@pytest.mark.parametrize("factor", [2.0**power for power in range(-6, 7)])
def test_tuning_finds_each_power_of_two_that_it_covers(factor, tmp_path):
    target = {"VLC()": 7e-4 * factor, "TripletHN()": 7e-4 / factor}
    rates = tuned(closeness(target), tmp_path)
    assert {rate.setting: rate.learning_rate for rate in rates} == pytest.approx(target)
    assert [len(rate.tries) for rate in rates] == [NUM_TRIES] * 2
    assert [bool(rate.edge) for rate in rates] == [factor in (2.0**6, 2.0**-6)] * 2


def test_tuning_uses_other_seeds_and_fewer_steps(tmp_path):
    tuned(lambda job: job.seed, tmp_path)
    own_steps = 2 * 5 * 9 * 58
    steps = sum(
        job.recipe_values["training"]["batches_per_epoch"]
        * job.recipe_values["phases"][0]["epochs"]
        for job in runner.jobs
    )
    assert 0.9 * own_steps < steps < 1.0 * own_steps
    assert min(job.seed for job in runner.jobs) > MAX_RUNS
    assert {job.recipe_values["evaluation"]["test"] for job in runner.jobs} == {""}
    assert not any(job.keeps_model for job in runner.jobs)
    assert len({job.folder for job in runner.jobs}) == len(runner.jobs) == 2 * NUM_TRIES


def test_tuning_skips_diverged_rates(tmp_path):
    diverges = tuned(
        lambda job: float("nan") if rate_of(job) > 8e-4 else -abs(rate_of(job) - 7e-4), tmp_path
    )
    assert [rate.factor for rate in diverges] == [1.0, 1.0]
    assert [rate.factor for rate in tuned(lambda _: 0.0, tmp_path)] == [1.0, 1.0]


def test_tuning_with_more_seeds_has_other_tries(tmp_path):
    folders = []
    for seeds in (5, 8):
        tuned(lambda _: 0.0, tmp_path, seeds=seeds)
        folders.append({job.folder for job in runner.jobs})
    assert all(f"steps-{9 * 58}-" in folder.name for folder in set.intersection(*folders)), (
        "only whole runs may be shared"
    )


def test_tuning_of_short_runs_is_skipped(tmp_path):
    assert [len(rate.tries) for rate in tuned(lambda _: 0.0, tmp_path, batches=3, seeds=5)] == [
        NUM_TRIES
    ] * 2
    assert tuned(lambda _: 0.0, tmp_path, batches=2, seeds=5) == ()


@pytest.mark.parametrize("best", range(5))
def test_a_climb_reaches_the_best_of_neighboring_rates(best):
    tried = [2.0, 1.0, 0.5]
    while 2.0**best not in tried:
        tried.append(next_factor(sorted(tried, key=lambda factor: abs(factor - 2.0**best))))
    assert max(tried) == max(2.0, 2.0**best)
    assert next_factor([1.0, 2.0, 0.5]) == 4.0


def test_shortened_recipe_keeps_the_shape_of_its_schedule():
    recipe = read_recipe(
        "heads-flickr8k",
        {"phases.0.epochs": 30, "phases.0.schedule": {"kind": "step", "milestones": [10, 20]}},
    )
    for share in (0.02, 0.1, 0.5, 1.0):
        short = build_recipe(shortened(recipe.to_dict(), 58, share), {}, "short")
        (phase,) = short.phases
        steps = phase.epochs * short.training.batches_per_epoch
        assert steps == pytest.approx(share * 30 * 58, rel=0.2)
        assert phase.schedule.milestones == (
            max(1, round(phase.epochs / 3)),
            max(1, round(2 * phase.epochs / 3)),
        )
    assert (
        with_rate(SETTINGS[0], 4.0).recipe_values["phases"][0]["optimizer"]["lr"]
        == 4 * HEADS.phases[0].optimizer.lr
    )


LINEAR = recipe_text(
    {"epochs": 8, "objective": "VLC(gamma=20)", "optimizer": {"name": "SGD", "lr": 0.001}},
    name="linear",
    text={"encoder": "minilm", "granularity": "pooled", "min_count": None},
    model={"kind": "Heads", "embedding_dim": 32, "hidden_layers": 0, "word_dim": None},
    training={"batch_size": 32, "clip_norm": 0.0, "threads": None},
)
PAIR = ["VLC(gamma=20, reduction='sum')", "VLC(gamma=20, reduction='mean')"]
"""Two objectives whose gradients differ by a factor of about 32, the batch size, and in nothing
else.
"""


@pytest.mark.slow
def test_compare_equates_objectives_that_differ_by_a_factor(tmp_path):
    scenes = write_synthetic_scenes(
        tmp_path / "scenes",
        num_train=120,
        num_val=40,
        num_test=40,
        captions_per_image=2,
        size=48,
        seed=1,
    )
    (tmp_path / "linear.toml").write_text(LINEAR)
    recipe = read_recipe(tmp_path / "linear.toml", {"data.path": str(scenes)})
    options = {
        "workers": Workers(num_workers=1),
        "progress": NoProgress(),
        "feedback": None,
    }

    def compare(name, *, tune):
        plan = plan_comparison(recipe, (PAIR, [], []), 3, tune=tune)
        return start_comparison(plan, tmp_path / name, **options)

    fixed, fair = compare("fixed", tune=False), compare("fair", tune=True)
    assert fixed.findings[0].startswith("At the recipe's learning rate, not tuned. ")
    assert abs(fixed.rsum_tests[0].difference) > 50
    assert fixed.rsum_tests[0].verdict != "not distinguishable"
    assert fair.rsum_tests[0].verdict == "not distinguishable"
    summed, averaged = fair.rates
    assert 8 <= averaged.learning_rate / summed.learning_rate <= 128
    assert all(
        f"{rate.setting} {rate.learning_rate:.3g}" in fair.findings[0] for rate in fair.rates
    )
    assert fair.tuning in fair.results.caption()
    assert (
        fair.selected_values(fair.settings[0])
        == f"learning rate {summed.learning_rate:.3g}, the best of {summed.rates}"
    )
    written = json.loads((fair.folder / "comparison.json").read_text())
    assert [entry["factor"] for entry in written["tuning"]] == [summed.factor, averaged.factor]
    tuning = fair.folder / "tuning"
    assert not list(tuning.rglob("*.safetensors"))
    tries = {path: path.stat().st_mtime_ns for path in tuning.rglob("*.json")}
    more = resume_comparison(fair.folder, 4, **options)
    assert more.rates == fair.rates
    assert {path: path.stat().st_mtime_ns for path in tuning.rglob("*.json")} == tries


def test_single_rate_is_at_no_edge_of_a_range():
    def rate(*factors):
        tries = tuple(Try(factor, 10, 1001, 100.0) for factor in factors)
        return TunedRate("a", 1.0, 1e-3, tries)

    assert rate(1.0).edge == ""
    assert rate(1.0, 2.0).edge == "smallest"
    assert rate(0.5, 1.0).edge == "largest"
