"""Comparisons: each run is that of ``visavis train``, no run is made twice, and who makes them does not matter."""

from __future__ import annotations

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import visavis
from visavis.comparison.jobs import Job, Outcome
from visavis.comparison.race import Clock, better_half, everything, parse_budget, rounds
from visavis.comparison.settings import Setting, settings_of
from visavis.errors import RecipeError, RunError, SpecError, VisavisError
from visavis.evaluation import Evaluation
from visavis.objectives import Goal
from visavis.runs.begin import Trained
from visavis.runs.published import published_rows
from visavis.training.recipe_files import read_recipe

HEADS = read_recipe("heads-flickr8k")
TWO = ["Unified(gamma=20)", "TripletHN()"]  # of the comparison ``plain``


def numbers(comparison) -> dict:
    return {(one.setting, one.seed): (one.validation_rsum, one.metrics) for one in comparison.outcomes}


def times(comparison) -> dict:
    """When the results of the runs were written."""
    return {one.folder: (one.folder / "result.json").stat().st_mtime_ns for one in comparison.outcomes}


def test_a_run_is_that_of_train_with_the_same_seed(plain, recipe, tmp_path):
    alone = visavis.train(recipe, out=tmp_path / "alone", overrides={"objective": TWO[1], "seed": 2, "training.threads": 1})
    run = next(one for one in plain.outcomes if (one.setting, one.seed) == (TWO[1], 2))
    assert run.metrics == alone.test.metrics
    assert run.validation_rsum == alone.validation_rsum


def test_the_table_holds_the_runs_and_validation_chooses(plain):
    assert [row.name for row in plain.table.rows] == TWO
    for row, setting in zip(plain.table.rows, plain.settings, strict=True):
        runs = plain.runs(setting)
        assert [one.seed for one in runs] == [1, 2]
        assert row.mean("rsum") == pytest.approx(sum(one.metrics["rsum"] for one in runs) / 2)
    validation = {s.name: sum(one.validation_rsum for one in plain.runs(s)) / 2 for s in plain.settings}
    assert plain.best.name == max(validation, key=validation.get)
    [pair] = plain.behind.values()
    rsum = {(one.setting, one.seed): one.metrics["rsum"] for one in plain.outcomes}
    assert pair.difference == pytest.approx(sum(rsum[pair.a, seed] - rsum[pair.b, seed] for seed in (1, 2)) / 2)
    drawn = plain.over_images.difference(pair.a, pair.b)
    assert drawn.value == pytest.approx(pair.difference)
    assert drawn.units == 12
    assert (plain.folder / "table.md").read_text().count("\n| ") >= 3
    assert json.loads((plain.folder / "comparison.json").read_text())["best"] == plain.best.name


def test_going_on_makes_no_run_anew_and_more_seeds_only_the_missing_ones(plain):
    before = times(plain)
    again = visavis.compare(resume=plain.folder, workers=1)
    assert numbers(again) == numbers(plain)
    assert times(again) == before
    more = visavis.compare(resume=plain.folder, seeds=3, workers=1)
    assert {one.seed for one in more.outcomes} == {1, 2, 3}
    assert times(more).items() >= before.items()
    with pytest.raises(RunError, match="3 seeds, which cannot become 2: give --seeds 3 or more"):
        visavis.compare(resume=plain.folder, seeds=2)


def test_the_lists_for_other_programs_say_what_the_table_says(plain):
    visavis.compare(resume=plain.folder, trec=True, workers=1)
    for setting in plain.settings:
        best = max(plain.runs(setting), key=lambda one: one.validation_rsum)
        right = {tuple(line.split()[::2]) for line in (plain.folder / "trec" / "t2i.qrels").read_text().splitlines()}
        lists = [line.split() for line in (plain.folder / "trec" / f"{best.folder.name}.t2i.run").read_text().splitlines()]
        first = {query: candidate for query, _, candidate, place, *_ in lists if place == "1"}
        recall = 100 * sum((query, candidate) in right for query, candidate in first.items()) / len(first)
        assert recall == pytest.approx(best.metrics["t2i_r1"])


def test_the_report_tells_everything_without_a_network(plain):
    now = visavis.compare(resume=plain.folder, workers=1)
    page = (plain.folder / "report.html").read_text()
    for told in (now.best.name, *now.sentences, "Its hardest queries", "Why: what still moves each model", "What they do not understand"):
        assert html.escape(told) in page
    assert not re.search(r"(src|href)=.http", page)
    assert all((plain.folder / name).stat().st_size for name in ("curves.png", "differences.png", "table.csv", "table.tex"))


@pytest.mark.long
def test_two_processes_give_the_numbers_of_one(plain, recipe, tmp_path):
    two = visavis.compare(recipe, objective=TWO, seeds=2, out=tmp_path / "two", workers=2)
    assert numbers(two) == {key: value for key, value in numbers(plain).items() if key[1] <= 2}


@pytest.mark.long
def test_ray_gives_the_numbers_of_one(plain, recipe, tmp_path):
    pytest.importorskip("ray")
    two = visavis.compare(recipe, objective=TWO, seeds=2, out=tmp_path / "ray", workers=2, engine="ray")
    assert numbers(two) == {key: value for key, value in numbers(plain).items() if key[1] <= 2}


ENDED_FROM_OUTSIDE = "a process of the comparison was ended from outside"


@pytest.mark.parametrize(
    ("engine", "whom", "number", "code", "sentence"),
    [
        ("local", "comparison", signal.SIGKILL, -9, ""),
        ("local", "comparison", signal.SIGINT, 130, "visavis compare --resume {out}"),
        pytest.param("local", "worker", signal.SIGKILL, 1, ENDED_FROM_OUTSIDE, marks=pytest.mark.long),
        pytest.param("ray", "comparison", signal.SIGKILL, -9, "", marks=pytest.mark.long),
        pytest.param("ray", "comparison", signal.SIGINT, 130, "visavis compare --resume {out}", marks=pytest.mark.long),
        pytest.param("ray", "every worker", signal.SIGKILL, 1, ENDED_FROM_OUTSIDE, marks=pytest.mark.long),
    ],
)
def test_a_comparison_that_is_ended_goes_on_without_losing_a_finished_run(plain, recipe, tmp_path, engine, whom, number, code, sentence):
    if engine == "ray":
        pytest.importorskip("ray")
    out = tmp_path / "ended"
    options = {"--seeds": 2, "--workers": 2, "--engine": engine, "--out": out}
    command = [sys.executable, "-m", "visavis", "compare", str(recipe), *(str(part) for option in options.items() for part in option)]
    process = subprocess.Popen([*command, *(part for spec in TWO for part in ("--objective", spec))], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (finished := list(out.glob("runs/*/outcome.json"))) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    if whom == "comparison":
        os.kill(process.pid, number)
    else:
        _end_workers(process, out, number, each=whom == "every worker")
    told = process.communicate(timeout=120)[1]
    assert process.returncode == code
    assert sentence.format(out=out) in told
    written = {file: file.stat().st_mtime_ns for file in finished}
    while _at_work(out) and time.monotonic() < until:  # the workers of a dead comparison end by themselves
        time.sleep(0.1)
    assert not _at_work(out)
    after = visavis.compare(resume=out, workers=1)
    assert numbers(after) == {key: value for key, value in numbers(plain).items() if key[1] <= 2}
    assert {file: file.stat().st_mtime_ns for file in finished} == written


def _end_workers(process: subprocess.Popen, out: Path, number: int, *, each: bool) -> None:
    """End a process that works for a comparison, or each that does until it is over: Ray tries a lost run again."""
    while process.poll() is None:
        workers = [pid for pid in _at_work(out) if pid != process.pid]
        for pid in workers if each else workers[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if workers and not each:
            return
        time.sleep(0.02)


def _at_work(out: Path) -> list[int]:
    """The processes, other than this one, that were started to work on a comparison: their environment or command names its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if int(process.name) != os.getpid() and any(str(out) in file for file in files):
            found.append(int(process.name))
    return found


def test_a_grid_is_chosen_from_by_validation(recipe, tmp_path):
    grid = visavis.compare(recipe, grid="phases.0.optimizer.lr=[1e-6, 1e-2]", seeds=1, out=tmp_path / "grid", workers=1)
    assert len(grid.settings) == 2
    assert [setting.point for setting in grid.chosen] == ["phases.0.optimizer.lr=0.01"]
    assert len(grid.table.rows) == 1


def test_a_race_drops_by_validation_and_leaves_equal_seeds(recipe, tmp_path):
    grid = "phases.0.optimizer.lr=[1e-7, 1e-6, 1e-3, 1e-2]"
    raced = visavis.compare(recipe, grid=grid, seeds=2, budget="1h", out=tmp_path / "race", workers=1)
    seeds = {setting.point: len(raced.runs(setting)) for setting in raced.settings}
    first = {setting.name: raced.runs(setting)[0].validation_rsum for setting in raced.settings}
    assert sorted(seeds.values()) == [1, 1, 2, 2]
    kept = {setting.name for setting in raced.settings if len(raced.runs(setting)) == 2}
    assert kept == set(sorted(first, key=first.get, reverse=True)[:2])


def test_a_run_that_fails_is_told_and_the_others_stand(recipe, tmp_path):
    some = visavis.compare(recipe, objective=["VLC()", "Ladder()"], seeds=1, out=tmp_path / "fails", workers=1)
    [failed] = some.failures
    assert (failed.setting, [setting.name for setting in some.settings]) == ("Ladder()", ["VLC()"])
    assert any(failed.failure in sentence for sentence in some.sentences)
    with pytest.raises(RunError, match=r"no run of .* succeeded; the first one: phase 0: Ladder"):
        visavis.compare(recipe, objective="Ladder()", seeds=1, out=tmp_path / "all", workers=1)


def test_settings_are_every_choice_at_every_point():
    grid = ["phases.0.optimizer.lr=[0.1, 0.2]", "training.batch_size=[4, 8]"]
    settings = settings_of(HEADS, ["VLC()", "Goal.all()"], ["VSE++(width=8)"], grid)
    assert len(settings) == 16 * 1 * 4
    assert settings[0].name == "VLC(), VSE++(width=8), phases.0.optimizer.lr=0.1, training.batch_size=4"
    content = settings[-1].content
    assert (content["phases"][0]["objective"], content["phases"][0]["optimizer"]["lr"]) == (repr(Goal()), 0.2)
    assert (content["model"], content["training"]["batch_size"]) == ({"kind": "VSE++", "width": 8}, 8)
    [alone] = settings_of(HEADS, [], [], [])
    assert (alone.name, alone.content) == ("the recipe as it is", HEADS.to_dict())


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ((["VLC()", "VLC(gamma=50)"], [], []), RecipeError, "is to be compared with itself"),
        (([], [], ["training.batch_size=64"]), RecipeError, "expected several values"),
        (([], [], ["training.batch_size"]), RecipeError, "is not of the form key=value"),
        ((["Unifid()"], [], []), SpecError, "did you mean Unified"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        settings_of(HEADS, *given)


def test_a_comparison_refuses_before_any_work_what_cannot_be(recipe, tmp_path):
    for arguments, sentence in (
        ({"grid": "training.batchsize=[1, 2]"}, "batchsize is not a key of recipes"),
        ({"seeds": 0}, "seeds is 0, expected a whole number from 1 up"),
        ({"workers": 0}, "workers is 0, expected a whole number from 1 up"),
        ({"engine": "spark"}, 'expected "local" or "ray"'),
        ({"budget": "soon"}, "expected a time such as 90s"),
        ({"overrides": ["evaluation.test=dev"]}, "has no split dev"),
    ):
        with pytest.raises(VisavisError, match=sentence):
            visavis.compare(recipe, out=tmp_path / "refused", **arguments)
        assert not (tmp_path / "refused").exists()
    with pytest.raises(RunError, match="is no comparison"):
        visavis.compare(resume=tmp_path)
    with pytest.raises(RunError, match="give --resume with"):
        visavis.compare(recipe, resume=tmp_path)


def outcome(name: str, seed: int, rsum: float) -> Outcome:
    return Outcome(name, seed, Path(), rsum)


def test_rounds_double_the_seeds_of_the_better_half():
    settings, known = [Setting(str(number)) for number in range(8)], list[Outcome]()
    told = []
    for runs in rounds(settings, 5, known.copy):
        known.extend(outcome(setting.choice, seed, float(setting.choice)) for setting, seed in runs)
        told.append((sorted({setting.choice for setting, _ in runs}), sorted({seed for _, seed in runs})))
    assert told == [(list("01234567"), [1]), (list("4567"), [2]), (list("67"), [3, 4, 5])]


def test_the_better_half_is_judged_by_the_seeds_that_all_have():
    settings = [Setting(name) for name in "abc"]
    known = [outcome("a", 1, 10.0), outcome("a", 2, 90.0), outcome("b", 1, 20.0), outcome("c", 1, 30.0)]
    assert [setting.choice for setting in better_half(settings, known)] == ["b", "c"]


def test_a_setting_that_failed_drops_out_of_a_race():
    settings = [Setting(name) for name in "abcd"]
    known = [replace(outcome("a", 1, math.nan), failure="the loss is nan"), *(outcome(name, 1, 10.0) for name in "bcd")]
    assert "a" not in [setting.choice for setting in better_half(settings, known)]
    assert len(better_half(settings[:1] + settings[2:], known[:1] + known[2:])) == 2


def test_metrics_and_rules_are_of_one_protocol():
    nothing, row = np.empty(0), published_rows()["goal/3/r152-con-con"]
    inner = Evaluation("coco-5k", 5000, 25000, 5.0, "pessimistic", {"rsum": 1.0}, nothing, nothing)
    tested = Evaluation("coco-1k-5fold", 1000, 5000, 5.0, "pessimistic", {"rsum": 2.0}, nothing, nothing, others=(inner,), published=row)
    trained = Trained(Path(), "VLC()", "ids", 1, 3.0, 12, tested, 1.0, 0.0)
    one = Outcome.of(Job("a", 1, {}, Path()), trained)
    assert (one.numbers["rsum"], one.rules.protocol, one.rules.num_images) == (1.0, "coco-5k", 5000)


def test_a_clock_lets_through_whole_seeds_that_fit():
    clock, runs = Clock(100.0), everything([Setting("a"), Setting("b")], 3)
    assert clock.fitting(runs) == runs  # nothing is known yet
    clock.began, clock.runs = time.monotonic() - 40, 2  # 20 s a run, 60 s left: three runs, so one seed of both
    assert {seed for _, seed in clock.fitting(runs)} == {1}
    assert Clock(None).fitting(runs) == runs


def test_budgets():
    assert [parse_budget(text) for text in ("90s", "30m", "1.5 h")] == [90, 1800, 5400]
    for text in ("0s", "m", "-1h", "30"):
        with pytest.raises(VisavisError, match="expected a time such as"):
            parse_budget(text)


def test_a_worker_that_is_told_to_end_when_its_training_is_over_ends():
    code = (
        "import multiprocessing, time\n"
        "from visavis.comparison import workers\n"
        "def trained(job, progress):\n"
        "    with workers.StopRequest().heard():\n"  # a training that looks no more whether it was asked
        "        held.close()\n"
        "        time.sleep(3 * workers.POLL_S)\n"
        "workers.done = trained\n"
        "kept, held = multiprocessing.Pipe(duplex=False)\n"
        "workers._begin_worker(kept)\n"
        "workers._done_by_worker(None)\n"
        "time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 128 + signal.SIGTERM
