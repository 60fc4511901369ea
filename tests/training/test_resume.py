"""Stopped anywhere, a run goes on to the very same end."""

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

import visavis
from visavis import storage
from visavis.errors import RunError
from visavis.models.device import multiplies_bfloat16
from visavis.progress import Silent
from visavis.training.stopping import SIGNALS, Stopped, StopRequest
from visavis.training.trainer import Trainer


def test_the_uninterrupted_run_is_worth_interrupting(uninterrupted, outcome):
    """It has two phases and validates within epochs, where its models differ."""
    log = outcome(uninterrupted(False))["log"]
    assert {row["phase"] for row in log} == {0, 1}
    assert len({row["rsum"] for row in log}) > 2
    assert outcome(uninterrupted(False))["model"] == outcome(uninterrupted(False))["model"]


def killed_again_and_again(training, recipe, scenes, run, moments, *overrides):
    """Train with a SIGKILL at each step; the number of kills that came in time."""
    process = training(run, recipe, *overrides, "--data", scenes, "--out", run)
    kills = 0
    for moment in moments:
        if not process.kill(moment):
            break
        kills += 1
        process = training(run, "--resume", run)
    assert process.wait(120) == 0, process.said
    return kills


def at_step(step):
    """Just after the checkpoint of a step."""
    return lambda process: process.step >= step


def while_writing(step):
    """While a checkpoint after a step is being written."""
    return lambda process: process.step >= step and process.writing


def test_a_killed_run_ends_as_the_uninterrupted_one(training, recipe, scenes, uninterrupted, outcome, tmp_path):
    """Killed before the first checkpoint, while one is written, at the same step again, and in the second phase."""
    run = tmp_path / "run"
    moments = [lambda process: (run / "run.toml").exists(), while_writing(8), at_step(8), at_step(30)]
    assert killed_again_and_again(training, recipe, scenes, run, moments) == len(moments)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.long
@pytest.mark.parametrize("autocast", [False, True])
def test_ten_kills_at_random_moments_change_nothing(training, recipe, scenes, uninterrupted, outcome, tmp_path, autocast):
    run, chance = tmp_path / "run", random.Random(autocast)
    last = outcome(uninterrupted(autocast))["state"]["step"]
    steps = sorted(chance.sample(range(last - 1), 10))
    moments = [while_writing(step) if number in (3, 7) else at_step(step) for number, step in enumerate(steps)]
    assert killed_again_and_again(training, recipe, scenes, run, moments, f"training.autocast={autocast}") == 10
    assert outcome(run) == outcome(uninterrupted(autocast))


@pytest.mark.parametrize("stop", SIGNALS)
def test_signals_save_and_say_how_to_go_on(training, recipe, scenes, uninterrupted, outcome, tmp_path, stop, hangups_heard):
    """Ctrl-C, the end that another program asks for, and a closed terminal; the exit code is the shell's."""
    run = tmp_path / "run"
    process = training(run, recipe, "--data", scenes, "--out", run)
    assert process.end(stop, at_step(4)) == 128 + stop
    assert re.search(rf"Stopped; everything is saved\. Go on with: \S*visavis train --resume {re.escape(str(run))}\n", process.said)
    assert "Traceback" not in process.said
    visavis.train(resume=run)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_run_stopped_after_every_few_steps_ends_as_the_uninterrupted_one(
    recipe, scenes, uninterrupted, outcome, in_pieces, tmp_path, autocast
):
    """Also within groups of accumulated batches, right after validations, and at the change of phases."""
    run = tmp_path / "run"
    assert in_pieces(recipe, run, data=scenes, overrides={"training.autocast": autocast, "training.checkpoint_s": 1e6}) > 10
    assert outcome(run) == outcome(uninterrupted(autocast))


def test_a_finished_run_gives_its_result_without_training(uninterrupted, outcome, listener):
    run, progress = uninterrupted(False), listener
    before = outcome(run)
    trained = visavis.train(resume=run, progress=progress)
    assert progress.steps == 0
    assert outcome(run) == before
    assert trained.test.metrics["rsum"] == before["result"]["rsum"]


def test_another_number_of_threads_is_said(uninterrupted, tmp_path, listener):
    run, progress = tmp_path / "run", listener
    shutil.copytree(uninterrupted(False), run)
    recorded = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**recorded, "threads": 3}))
    visavis.train(resume=run, progress=progress)
    assert any("trained with 3 threads and goes on with 1" in sentence for sentence in progress.said)


def test_one_process_at_a_time(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted(False), run)
    with storage.alone(run / "run", wait=False), pytest.raises(RunError, match="another process is at work on"):
        visavis.train(resume=run)
    visavis.train(resume=run)


def test_changed_data_are_refused(uninterrupted, scenes, tmp_path):
    run, data = tmp_path / "run", tmp_path / "scenes"
    shutil.copytree(uninterrupted(False), run)
    shutil.copytree(scenes, data)
    (run / "run.toml").write_text((run / "run.toml").read_text().replace(str(scenes), str(data)))
    text = (data / "captions.jsonl").read_text()
    (data / "captions.jsonl").write_text(text.replace("the ", "a ", 1))
    with pytest.raises(RunError, match=r"the data at .* have changed"):
        visavis.train(resume=run)


def test_a_run_can_be_resumed_from_another_folder(recipe, scenes, outcome, stop_at, tmp_path, monkeypatch, uninterrupted):
    monkeypatch.chdir(scenes.parent)
    with pytest.raises(Stopped):
        visavis.train(recipe, data="scenes", out=tmp_path / "run", progress=stop_at(3))
    monkeypatch.chdir(tmp_path)
    visavis.train(resume="run")
    assert outcome(tmp_path / "run") == outcome(uninterrupted(False))


@pytest.mark.parametrize("given", [{"overrides": ["seed=3"]}, {"data": "elsewhere"}, {"out": "elsewhere"}])
def test_a_resumed_run_keeps_what_it_is(uninterrupted, given):
    with pytest.raises(RunError, match="give --resume with the run folder alone"):
        visavis.train(resume=uninterrupted(False), **given)


def test_only_a_run_can_be_resumed_and_none_is_overwritten(uninterrupted, recipe, scenes, tmp_path):
    with pytest.raises(RunError, match=r"is no run folder: expected run\.toml"):
        visavis.train(resume=tmp_path)
    with pytest.raises(RunError, match="holds a run already: go on with it by --resume"):
        visavis.train(recipe, data=scenes, out=uninterrupted(False))


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no such terminals here")
def test_a_closed_terminal_is_survived(recipe, scenes, tmp_path, hangups_heard):
    """Nobody hears a sentence then; all is saved, and the exit code is that of SIGHUP."""
    run, (terminal, inside) = tmp_path / "run", os.openpty()
    program = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from visavis.cli import main; main()"
    command = [sys.executable, "-c", program, "train", recipe, "--data", scenes, "--out", run]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True) as training:
        os.close(inside)
        while len(list((run / "checkpoint").glob("step-*"))) < 2:
            os.read(terminal, 1024)
        os.close(terminal)
        assert training.wait(60) == 128 + signal.SIGHUP
    assert not (run / "result.json").exists()
    visavis.train(resume=run)


def test_a_signal_that_is_ignored_stays_so():
    """As SIGHUP under nohup."""
    before, request = signal.signal(signal.SIGTERM, signal.SIG_IGN), StopRequest()
    try:
        with request.heard():
            signal.raise_signal(signal.SIGTERM)
            assert request.asked is None
            assert signal.getsignal(signal.SIGINT) != before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stop", SIGNALS)
def test_a_second_signal_does_what_it_would_without_a_training(stop):
    heard, request = [], StopRequest()
    before = signal.signal(stop, lambda number, _: heard.append(number))
    try:
        with request.heard():
            signal.raise_signal(stop)
            assert (request.asked, heard) == (stop, [])
            signal.raise_signal(stop)
            assert heard == [stop]
    finally:
        signal.signal(stop, before)


def test_a_second_ctrl_c_ends_at_once(recipe, scenes, tmp_path):
    class Impatient(Silent):
        def step(self, step):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        visavis.train(recipe, data=scenes, out=tmp_path / "run", progress=Impatient())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loss_that_is_no_number_stops_with_a_sentence(recipe, scenes, tmp_path, monkeypatch):
    """The last checkpoint stays, so that the run can be looked at."""
    step = Trainer._step

    def poisoned(self, batch, steps):
        if self.state.step == 5:
            with torch.no_grad():
                next(self.matcher.parameters()).fill_(float("nan"))
        step(self, batch, steps)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(RunError, match="the loss is nan at step 5: lower the learning rate"):
        visavis.train(recipe, data=scenes, out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "step-00000004").is_dir()


def test_autocast_by_itself_is_on_exactly_where_the_processor_multiplies_bfloat16(uninterrupted, outcome):
    on, off, auto = (outcome(uninterrupted(setting)) for setting in (True, False, "auto"))
    assert on != off
    assert auto == (on if multiplies_bfloat16(torch.device("cpu")) else off)
