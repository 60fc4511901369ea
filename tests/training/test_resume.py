"""A run that is stopped anywhere resumes to exactly the same result."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tests.platforms import posix

import visavis
from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress
from visavis.models.device import has_native_bfloat16
from visavis.training.stop_signals import STOP_SIGNALS, Stopped, StopRequest
from visavis.training.trainer import Trainer


def test_uninterrupted_run_covers_every_checkpoint_state(uninterrupted, outcome):
    """The run has two phases and validates within epochs, and its models differ."""
    log = outcome(uninterrupted(False))["log"]
    assert {row["phase"] for row in log} == {0, 1}
    assert len({row["rsum"] for row in log}) > 2
    assert outcome(uninterrupted(False))["model"] == outcome(uninterrupted(False))["model"]


def killed_again_and_again(training, recipe, scenes, run, moments, *overrides):
    """Train with a SIGKILL at each given moment and return the number of kills before the end."""
    process = training(run, recipe, *overrides, "--data", scenes, "--out", run)
    kills = 0
    for moment in moments:
        if not process.kill(moment):
            break
        kills += 1
        process = training(run, "--resume", run)
    assert process.wait(120) == 0, process.output_text
    return kills


def at_step(step):
    """Return a condition: the checkpoint of a step was just written."""
    return lambda process: process.step >= step


def while_writing(step):
    """Return a condition: a checkpoint after a step is being written."""
    return lambda process: process.step >= step and process.writing


@pytest.mark.slow
def test_killed_run_resumes_exactly(training, recipe, scenes, uninterrupted, outcome, tmp_path):
    """Kills before the first checkpoint, during a write, twice at the same step, and in the second
    phase.
    """
    run = tmp_path / "run"
    last = outcome(uninterrupted(False))["state"]["step"]
    moments = [
        lambda process: (run / "run.toml").exists(),
        while_writing(8),
        at_step(8),
        at_step(last - 2),
    ]
    assert killed_again_and_again(training, recipe, scenes, run, moments) == len(moments)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.long
@pytest.mark.parametrize("autocast", [False, True])
def test_ten_random_kills_resume_exactly(
    training, recipe, scenes, uninterrupted, outcome, tmp_path, autocast
):
    run, chance = tmp_path / "run", random.Random(autocast)
    last = outcome(uninterrupted(autocast))["state"]["step"]
    steps = sorted(chance.sample(range(last - 1), 10))
    moments = [
        while_writing(step) if number in (3, 7) else at_step(step)
        for number, step in enumerate(steps)
    ]
    assert (
        killed_again_and_again(
            training, recipe, scenes, run, moments, f"training.autocast={autocast}"
        )
        == 10
    )
    assert outcome(run) == outcome(uninterrupted(autocast))


@posix
@pytest.mark.slow
@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_signals_save_and_report_how_to_resume(
    training, recipe, scenes, uninterrupted, outcome, tmp_path, stop, default_sighup
):
    """SIGINT, SIGTERM and SIGHUP end with the exit code of the shell's convention."""
    run = tmp_path / "run"
    process = training(run, recipe, "--data", scenes, "--out", run)
    assert process.end(stop, at_step(4)) == 128 + stop
    assert re.search(rf"visavis train --resume {re.escape(str(run))}\n", process.output_text)
    assert "Traceback" not in process.output_text
    visavis.train(resume=run)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("autocast", "longest"), [pytest.param(False, 4, marks=pytest.mark.long), (True, 8)]
)
def test_run_stopped_every_few_steps_resumes_exactly(
    recipe, scenes, uninterrupted, outcome, in_pieces, tmp_path, autocast, longest
):
    """Stops are also within accumulation groups, right after validations, and between phases."""
    run = tmp_path / "run"
    overrides = {"training.autocast": autocast, "training.checkpoint_s": 1e6}
    stops = in_pieces(recipe, run, longest=longest, data=scenes, overrides=overrides)
    assert stops >= outcome(uninterrupted(autocast))["state"]["step"] // longest - 1
    assert outcome(run) == outcome(uninterrupted(autocast))


def test_run_with_ranger_resumes_exactly(recipe, scenes, outcome, stop_at, tmp_path):
    """Stops are between two moves of the slow weights, in both phases."""
    overrides = {
        "training.accumulation_steps": 1,
        "training.checkpoint_s": 1e6,
        "phases.1.epochs": 1,
    }
    overrides |= {f"phases.{phase}.optimizer.name": "Ranger" for phase in (0, 1)}
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=overrides)
    with pytest.raises(Stopped):
        visavis.train(
            recipe, data=scenes, out=tmp_path / "run", overrides=overrides, progress=stop_at(8)
        )
    with pytest.raises(Stopped):
        visavis.train(resume=tmp_path / "run", progress=stop_at(9))
    visavis.train(resume=tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert any(name.endswith(".slow") for name in outcome(tmp_path / "run")["optimizer"])


def test_finished_run_returns_result_without_training(uninterrupted, outcome, listener):
    run, progress = uninterrupted(False), listener
    before = outcome(run)
    trained = visavis.train(resume=run, progress=progress)
    assert progress.steps == 0
    assert outcome(run) == before
    assert trained.test.metrics["rsum"] == before["result"]["rsum"]


def test_resume_reports_changed_number_of_threads(uninterrupted, tmp_path, listener):
    run, progress = tmp_path / "run", listener
    shutil.copytree(uninterrupted(False), run)
    recorded = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**recorded, "threads": 3}))
    visavis.train(resume=run, progress=progress)
    assert any(
        "began with 3 threads and resumes with 1" in sentence for sentence in progress.messages
    )


def test_run_is_locked_to_one_process(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted(False), run)
    with storage.folder_lock(run / "run", wait=False), pytest.raises(RunError) as refusal:
        visavis.train(resume=run)
    assert (
        str(refusal.value)
        == f"{run} is locked by another process. Wait until it ends, or stop it first."
    )
    visavis.train(resume=run)


def test_resume_rejects_changed_data(uninterrupted, scenes, tmp_path):
    run, data = tmp_path / "run", tmp_path / "scenes"
    shutil.copytree(uninterrupted(False), run)
    shutil.copytree(scenes, data)
    (run / "run.toml").write_text((run / "run.toml").read_text().replace(str(scenes), str(data)))
    text = (data / "captions.jsonl").read_text()
    (data / "captions.jsonl").write_text(text.replace("the ", "a ", 1))
    with pytest.raises(RunError, match=r"the data at .* changed since the run began"):
        visavis.train(resume=run)


def test_run_resumes_from_another_folder(
    recipe, scenes, outcome, stop_at, tmp_path, monkeypatch, uninterrupted
):
    monkeypatch.chdir(scenes.parent)
    with pytest.raises(Stopped):
        visavis.train(recipe, data="scenes", out=tmp_path / "run", progress=stop_at(3))
    monkeypatch.chdir(tmp_path)
    visavis.train(resume="run")
    assert outcome(tmp_path / "run") == outcome(uninterrupted(False))


@pytest.mark.parametrize(
    "given", [{"overrides": ["seed=3"]}, {"data": "elsewhere"}, {"out": "elsewhere"}]
)
def test_resume_rejects_new_settings(uninterrupted, given):
    with pytest.raises(RunError, match="--resume: expected the run folder alone"):
        visavis.train(resume=uninterrupted(False), **given)


def test_resume_needs_run_and_train_never_overwrites(uninterrupted, recipe, scenes, tmp_path):
    with pytest.raises(RunError, match=r"expected a run folder with run\.toml"):
        visavis.train(resume=tmp_path)
    with pytest.raises(
        RunError, match=r"expected a new folder, got an existing run. Resume it with --resume"
    ):
        visavis.train(recipe, data=scenes, out=uninterrupted(False))


@posix
@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "openpty") or not hasattr(signal, "SIGHUP"),
    reason="a closed terminal sends no signal here",
)
def test_closed_terminal_saves_run(recipe, scenes, tmp_path, default_sighup):
    """Messages cannot be printed, but the run is saved and the exit code is that of SIGHUP."""
    run, (terminal, inside) = tmp_path / "run", os.openpty()
    program = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from visavis.cli import main; main()"
    command = [sys.executable, "-c", program, "train", recipe, "--data", scenes, "--out", run]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    ) as training:
        os.close(inside)
        while len(list((run / "checkpoint").glob("step-*"))) < 2:
            os.read(terminal, 1024)
        os.close(terminal)
        assert training.wait(60) == 128 + signal.SIGHUP
    assert not (run / "result.json").exists()
    visavis.train(resume=run)


@posix
def test_ignored_signal_stays_ignored():
    """For example SIGHUP under nohup."""
    before, request = signal.signal(signal.SIGTERM, signal.SIG_IGN), StopRequest()
    try:
        with request.install_signal_handlers():
            signal.raise_signal(signal.SIGTERM)
            assert request.signal is None
            assert signal.getsignal(signal.SIGINT) != before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_second_signal_calls_previous_handler(stop):
    received, request = [], StopRequest()
    before = signal.signal(stop, lambda number, _: received.append(number))
    try:
        with request.install_signal_handlers():
            signal.raise_signal(stop)
            assert (request.signal, received) == (stop, [])
            signal.raise_signal(stop)
            assert received == [stop]
    finally:
        signal.signal(stop, before)


@posix
def test_a_signal_that_torchrun_repeats_does_not_end_the_process(monkeypatch):
    """SLURM sends SIGTERM to torchrun and to its processes, and torchrun passes it on. Another
    signal ends the process.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    received, request = [], StopRequest()
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with request.install_signal_handlers():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert (request.signal, received) == (signal.SIGTERM, [])
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_second_ctrl_c_stops_immediately(recipe, scenes, tmp_path):
    class Impatient(NoProgress):
        def training_step(self, step):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        visavis.train(recipe, data=scenes, out=tmp_path / "run", progress=Impatient())
    assert signal.getsignal(signal.SIGINT) is before


def test_nonfinite_loss_stops_training(recipe, scenes, tmp_path, monkeypatch):
    """The last checkpoint is kept, so that the run can be inspected."""
    step = Trainer._step

    def poisoned(self, batch, steps):
        if self.state.step == 5:
            with torch.no_grad():
                next(self.matcher.parameters()).fill_(float("nan"))
        step(self, batch, steps)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(
        RunError, match=r"expected a finite loss, got nan at step 5. Lower the learning rate"
    ):
        visavis.train(recipe, data=scenes, out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "step-00000004").is_dir()


@pytest.mark.slow
def test_automatic_autocast_follows_bfloat16_support(uninterrupted, outcome):
    on, off, auto = (outcome(uninterrupted(setting)) for setting in (True, False, "auto"))
    assert on != off
    assert auto == (on if has_native_bfloat16(torch.device("cpu")) else off)
