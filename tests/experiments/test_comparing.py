"""Comparisons: runs equal those of ``visavis train``, finished runs are reused, and the engine does
not change results.
"""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.platforms import posix
from tests.processes import FORKED, Command

import visavis
from visavis.core.errors import RecipeError, RunError, SpecError, VisavisError
from visavis.evaluation import Evaluation
from visavis.objectives import Goal
from visavis.research.experiments import jobs
from visavis.research.experiments.grid import build_settings
from visavis.research.experiments.jobs import Job, RunOutcome
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.published_tables import published_results
from visavis.training.training_run import TrainingResult

HEADS = read_recipe("heads-flickr8k")
OBJECTIVES = ["Unified(gamma=20)", "TripletHN()"]  # objectives of the fixture ``plain``


def metrics_by_run(comparison) -> dict:
    return {
        (one.setting, one.seed): (one.validation_rsum, one.metrics) for one in comparison.outcomes
    }


def result_mtimes(comparison) -> dict:
    """Modification time of each result file, in nanoseconds."""
    return {
        one.folder: (one.folder / "result.json").stat().st_mtime_ns for one in comparison.outcomes
    }


def test_compare_run_equals_train_with_same_seed(plain, recipe, tmp_path):
    alone = visavis.train(
        recipe,
        out=tmp_path / "alone",
        overrides={"objective": OBJECTIVES[1], "seed": 2, "training.threads": 1},
    )
    run = next(one for one in plain.outcomes if (one.setting, one.seed) == (OBJECTIVES[1], 2))
    assert run.metrics == alone.test.metrics
    assert run.validation_rsum == alone.validation_rsum


def test_compare_table_and_selection_by_validation(plain):
    assert [row.name for row in plain.results.rows] == OBJECTIVES
    for row, setting in zip(plain.results.rows, plain.settings, strict=True):
        runs = plain.runs(setting)
        assert [one.seed for one in runs] == [1, 2]
        assert row.mean("rsum") == pytest.approx(sum(one.metrics["rsum"] for one in runs) / 2)
    validation = {
        s.name: sum(one.validation_rsum for one in plain.runs(s)) / 2 for s in plain.settings
    }
    assert plain.best.name == max(validation, key=validation.get)
    [pair] = plain.differences_from_best.values()
    rsum = {(one.setting, one.seed): one.metrics["rsum"] for one in plain.outcomes}
    assert pair.difference == pytest.approx(
        sum(rsum[pair.a, seed] - rsum[pair.b, seed] for seed in (1, 2)) / 2
    )
    resampled = plain.image_bootstrap.difference(pair.a, pair.b)
    assert resampled.value == pytest.approx(pair.difference)
    assert resampled.num_units == 12
    assert (plain.folder / "table.md").read_text().count("\n| ") >= 3
    assert json.loads((plain.folder / "comparison.json").read_text())["best"] == plain.best.name


@pytest.mark.slow
def test_compare_resume_trains_only_missing_seeds(plain):
    before = result_mtimes(plain)
    again = visavis.compare(resume=plain.folder, workers=1)
    assert metrics_by_run(again) == metrics_by_run(plain)
    assert result_mtimes(again) == before
    check_report(again)
    more = visavis.compare(resume=plain.folder, seeds=3, workers=1)
    assert {one.seed for one in more.outcomes} == {1, 2, 3}
    assert result_mtimes(more).items() >= before.items()
    with pytest.raises(
        RunError, match=r"seeds: expected at least 3, .*, got 2\. Pass --seeds 3 or more"
    ):
        visavis.compare(resume=plain.folder, seeds=2)


def check_report(plain):
    """The report is complete and needs no network."""
    page = (plain.folder / "report.html").read_text()
    for text in (
        plain.best.name,
        *plain.findings,
        "Hardest queries",
        "Contributing samples",
        "Capability tests",
        "Gradients during training",
    ):
        assert html.escape(text).replace("&#x27;", "&#39;") in page
    assert not re.search(r"(src|href)=.http", page)
    assert all(
        (plain.folder / name).stat().st_size
        for name in ("curves.png", "differences.png", "gradients.png", "table.csv", "table.tex")
    )


@pytest.mark.long
def test_compare_is_identical_with_two_workers(plain, recipe, tmp_path):
    two = visavis.compare(recipe, objective=OBJECTIVES, seeds=2, out=tmp_path / "two", workers=2)
    assert metrics_by_run(two) == {
        key: value for key, value in metrics_by_run(plain).items() if key[1] <= 2
    }


@pytest.mark.long
def test_compare_is_identical_with_ray(plain, recipe, tmp_path):
    pytest.importorskip("ray")
    two = visavis.compare(
        recipe, objective=OBJECTIVES, seeds=2, out=tmp_path / "ray", workers="ray:2"
    )
    assert metrics_by_run(two) == {
        key: value for key, value in metrics_by_run(plain).items() if key[1] <= 2
    }


WORKER_KILLED = "workers: a process was killed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "target", "number", "code", "message"),
    [
        pytest.param("local", "comparison", signal.SIGKILL, -9, "", marks=pytest.mark.long),
        ("local", "comparison", signal.SIGINT, 130, "visavis compare --resume {out}"),
        pytest.param("local", "worker", signal.SIGKILL, 1, WORKER_KILLED, marks=pytest.mark.long),
        pytest.param("ray", "comparison", signal.SIGKILL, -9, "", marks=pytest.mark.long),
        pytest.param(
            "ray",
            "comparison",
            signal.SIGINT,
            130,
            "visavis compare --resume {out}",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "ray", "every worker", signal.SIGKILL, 1, WORKER_KILLED, marks=pytest.mark.long
        ),
    ],
)
def test_compare_resumes_after_signals_without_losing_runs(
    plain, recipe, tmp_path, engine, target, number, code, message
):
    if engine == "ray":
        pytest.importorskip("ray")
    out = tmp_path / "ended"
    workers = {"local": "2", "ray": "ray:2"}[engine]
    # A run takes 0.1 s. The others must last until the signal arrives on a busy machine.
    options = {"--seeds": 10, "--workers": workers, "--out": out}
    objectives = (part for spec in OBJECTIVES for part in ("--objective", spec))
    process = Command(
        tmp_path / "output",
        "compare",
        recipe,
        "training.checkpoint_s=0",
        *(part for option in options.items() for part in option),
        *objectives,
    )
    deadline = time.monotonic() + 120
    while not (finished := list(out.glob("runs/*/outcome.json"))) and time.monotonic() < deadline:
        assert not process.ended, process.output_text
        time.sleep(0.02)
    if target == "comparison":
        process.send(number)
    else:
        _end_workers(process, out, number, each=target == "every worker")
    assert process.wait(120) == code
    assert message.format(out=out) in process.output_text
    written = {file: file.stat().st_mtime_ns for file in finished}
    while (
        _worker_pids(out) and time.monotonic() < deadline
    ):  # workers end automatically when their comparison has died
        time.sleep(0.1)
    assert not _worker_pids(out)
    after = visavis.compare(resume=out, workers=1)
    assert {one.seed for one in after.outcomes} == {*range(1, 11)}
    first_seeds, expected = (
        {key: value for key, value in metrics_by_run(one).items() if key[1] <= 2}
        for one in (after, plain)
    )
    assert first_seeds == expected
    assert {file: file.stat().st_mtime_ns for file in finished} == written


def _end_workers(process: Command, out: Path, number: int, *, each: bool) -> None:
    """Signal one worker of a comparison, or every worker until it ends, because Ray retries a lost
    run.
    """
    while not process.ended:
        workers = [pid for pid in _worker_pids(out) if pid != process.process.pid]
        for pid in workers if each else workers[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if workers and not each:
            return
        time.sleep(0.02)


def _worker_pids(out: Path) -> list[int]:
    """Ids of the other processes that hold a file of the comparison open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if int(process.name) != os.getpid() and any(str(out) in file for file in files):
            found.append(int(process.name))
    return found


def test_compare_selects_grid_point_by_validation(recipe, tmp_path):
    grid = visavis.compare(
        recipe, grid="phases.0.optimizer.lr=[1e-6, 1e-2]", seeds=1, out=tmp_path / "grid", workers=1
    )
    assert len(grid.settings) == 2
    assert grid.selected == (
        max(grid.settings, key=lambda setting: grid.runs(setting)[0].validation_rsum),
    )
    assert len(grid.results.rows) == 1


def test_compare_reports_failed_run_and_keeps_others(recipe, tmp_path):
    some = visavis.compare(
        recipe, objective=["VLC()", "Ladder()"], seeds=1, out=tmp_path / "fails", workers=1
    )
    [failed] = some.failures
    assert (failed.setting, [setting.name for setting in some.settings]) == ("Ladder()", ["VLC()"])
    assert any(failed.failure in message for message in some.findings)
    with pytest.raises(
        RunError, match=r"expected a successful run, got 1 failures\. The first: phases\.0: Ladder"
    ):
        visavis.compare(recipe, objective="Ladder()", seeds=1, out=tmp_path / "all", workers=1)


def test_build_settings_crosses_choices_and_grid_points():
    grid = ["phases.0.optimizer.lr=[0.1, 0.2]", "training.batch_size=[4, 8]"]
    settings = build_settings(HEADS, ["VLC()", "Goal.all()"], ["VSE++(embedding_dim=8)"], grid)
    assert len(settings) == 16 * 1 * 4
    assert (
        settings[0].name
        == "VLC(), VSE++(embedding_dim=8), phases.0.optimizer.lr=0.1, training.batch_size=4"
    )
    content = settings[-1].recipe_values
    assert (content["phases"][0]["objective"], content["phases"][0]["optimizer"]["lr"]) == (
        repr(Goal()),
        0.2,
    )
    assert (content["model"], content["training"]["batch_size"]) == (
        {"kind": "VSE++", "embedding_dim": 8},
        8,
    )
    [alone] = build_settings(HEADS, [], [], [])
    assert (alone.name, alone.recipe_values) == ("unchanged recipe", HEADS.to_dict())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((["VLC()", "VLC(gamma=50)"], [], []), RecipeError, "expected different settings"),
        (([], [], ["training.batch_size=64"]), RecipeError, "expected a key with a list of values"),
        (([], [], ["training.batch_size"]), RecipeError, "expected key=value"),
        ((["Unifid()"], [], []), SpecError, "did you mean Unified"),
    ],
)
def test_build_settings_rejects_invalid_choices(given, error, message):
    with pytest.raises(error, match=message):
        build_settings(HEADS, *given)


def test_compare_rejects_invalid_arguments_before_training(recipe, tmp_path):
    for arguments, message in (
        ({"grid": "training.batchsize=[1, 2]"}, "batchsize is not a key of recipes"),
        ({"seeds": 0}, "seeds: expected an integer from 1 to 1,000, got 0"),
        ({"workers": 0}, "workers: expected an integer from 1 to 1,000, got 0"),
        ({"seeds": "many"}, "seeds: expected an integer from 1 to 1,000, got 'many'"),
        ({"minutes": 0}, "minutes: expected a number above 0"),
        ({"minutes": 1, "seeds": 3}, "--seeds, --minutes: expected one of them, got both"),
        ({"max_query_ms": 5.0}, "expected --minutes with them, got none"),
        ({"minutes": 1, "max_item_bytes": 0.0}, "max_item_bytes: expected a positive number"),
        ({"workers": "many"}, "workers: expected a number of processes such as 4"),
        ({"grid": "model=VSE++()"}, "grid: expected a list of models"),
        (
            {"overrides": ["evaluation.test=dev"]},
            r"scenes: expected one of its splits \(.*\), got dev\. Use one of them\.$",
        ),
    ):
        with pytest.raises(VisavisError, match=message):
            visavis.compare(recipe, out=tmp_path / "rejected", **arguments)
        assert not (tmp_path / "rejected").exists()
    with pytest.raises(
        RunError, match=r"expected plan\.json in it, found none\. Pass a folder of visavis compare"
    ):
        visavis.compare(resume=tmp_path)
    with pytest.raises(RunError, match="--resume: expected only --seeds"):
        visavis.compare(recipe, resume=tmp_path)


def test_run_outcome_metrics_and_conditions_share_protocol():
    nothing, row = np.empty(0), published_results()["goal/3/r152-con-con"]
    inner = Evaluation("coco-5k", 5000, 25000, 5.0, "pessimistic", {"rsum": 1.0}, nothing, nothing)
    tested = Evaluation(
        "coco-1k-5fold",
        1000,
        5000,
        5.0,
        "pessimistic",
        {"rsum": 2.0},
        nothing,
        nothing,
        other_protocols=(inner,),
        published=row,
    )
    trained = TrainingResult(
        run=Path(),
        objective="VLC()",
        positives_by="ids",
        supervision="PairSupervision(by='ids')",
        best_step=1,
        validation_rsum=3.0,
        validation_images=12,
        test=tested,
        seconds=1.0,
        cache_seconds=0.0,
    )
    one = RunOutcome.from_result(Job("a", 1, {}, Path()), trained)
    assert (one.measured_metrics["rsum"], one.conditions.protocol, one.conditions.num_images) == (
        1.0,
        "coco-5k",
        5000,
    )


def run_stopped_worker():
    def run_job(job, progress):
        # A training that has stopped polling for stop requests.
        with jobs.StopRequest().install_signal_handlers():
            sender.close()
            time.sleep(3 * jobs.POLL_SECONDS)

    jobs.run_job = run_job
    receiver, sender = FORKED.Pipe(duplex=False)
    jobs._start_worker(receiver)
    jobs._run_in_worker(None)
    time.sleep(60)


@pytest.mark.slow
@posix
def test_worker_ends_when_stopped_after_training(tmp_path):
    assert Command(tmp_path / "output", program=run_stopped_worker).wait(50) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_script_without_main_guard_starts_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from visavis.research.experiments.jobs import process_pool\n"
        "print(__name__, flush=True)\n"
        "with process_pool(1) as pool:\n"
        "    print(*pool.map(abs, [-1, -2]), __file__[-9:])\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout.splitlines() == ["__main__", "1 2 script.py"], done.stderr
