"""Synthetic scenes, and a recipe with everything a checkpoint stores: dropout, phases,
accumulation, patience.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.fixtures.recipes import write_recipe
from tests.processes import Command

import visavis
from visavis import cli
from visavis.core.progress import NoProgress, TrainingStep
from visavis.training.stop_signals import Stopped


@pytest.fixture(scope="session")
def scenes(scenes: Path) -> Path:
    """The shared scenes with cached features."""
    visavis.features(scenes, visual="scenes", granularity="regions")
    return scenes


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    """A recipe with everything that a checkpoint stores."""
    return write_recipe(
        tmp_path_factory.mktemp("recipe") / "tiny.toml",
        {
            "objective": "Triplet()",
            "optimizer": {"name": "AdamW", "lr": 0.01, "weight_decay": 1e-4},
            "schedule": {"kind": "cosine", "warmup": 0.1},
        },
        {
            "epochs": 2,
            "objective": "Unified(gamma=20)",
            "trainable": ["text"],
            "optimizer": {"lr": 0.02, "lr_multipliers": {"text": 0.5}},
            "schedule": {"kind": "step", "milestones": [1]},
            "initial_weights": "best",
            "keep_optimizer": True,
        },
        seed=9,
        visual={"granularity": "regions"},
        model={"embedding_dim": 16, "word_dim": 8, "dropout": 0.2, "region_pool": "mean"},
        training={
            "batch_size": 16,
            "accumulation_steps": 2,
            "evaluate_every": 7,
            "patience": 4,
            "checkpoint_s": 0,
        },
    )


class Training(Command):
    """Training in a separate process that a test can kill at a chosen moment."""

    def __init__(self, folder: Path, *arguments: object):
        self.folder = folder
        super().__init__(folder.with_name(f"{folder.name}.output"), "train", *arguments)

    @property
    def step(self) -> int:
        """The step of the newest complete checkpoint, -1 before the first."""
        return max(
            (int(path.name[5:13]) for path in (self.folder / "checkpoint").glob("step-*")),
            default=-1,
        )

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        return any((self.folder / "checkpoint").glob(".step-*.part"))

    def end(self, signal_number: int, when: Callable[[Training], bool]) -> int:
        """Wait for a condition, send a signal unless the process has ended, and return the exit
        code.
        """
        while not self.ended and not when(self):
            time.sleep(0.0005)
        self.send(signal_number)
        return self.wait(60)

    def kill(self, when: Callable[[Training], bool]) -> bool:
        """Send SIGKILL and return whether it arrived before the end of training."""
        code = self.end(signal.SIGKILL, when)
        assert code in (0, -signal.SIGKILL), self.output_text
        return code != 0


@pytest.fixture
def training() -> type[Training]:
    return Training


def _outcome(run: Path) -> dict[str, object]:
    """Return all results of a run except its seconds."""
    last = max((run / "checkpoint").glob("step-*"))
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((last / "state.json").read_text())
    result = json.loads((run / "result.json").read_text())
    return {
        "model": (run / "model" / "model.safetensors").read_bytes(),
        "config": (run / "model" / "config.json").read_bytes(),
        "ranks": (run / "ranks.safetensors").read_bytes(),
        "peer": [path.read_bytes() for path in sorted(run.glob("peer/*"))],
        **{
            part: {
                name: tensor.tolist()
                for name, tensor in load_file(last / f"{part}.safetensors").items()
            }
            for part in ("weights", "best_weights", "optimizer", "supervision")
        },
        "state": {key: value for key, value in state.items() if key != "seconds"},
        "log": [{key: value for key, value in row.items() if key != "time"} for row in log],
        "result": {
            key: value
            for key, value in result.items()
            if key not in ("run", "seconds", "cache_seconds")
        },
        "left over": [path.name for path in run.rglob(".*.part")],
    }


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, object]]:
    return _outcome


@pytest.fixture(scope="session")
def uninterrupted(scenes, recipe, tmp_path_factory):
    """Finished runs without any stop, by precision of the encoders."""
    done = {}

    def run(autocast):
        if autocast not in done:
            done[autocast] = tmp_path_factory.mktemp("runs") / f"whole-{autocast}"
            visavis.train(
                recipe, data=scenes, out=done[autocast], overrides={"training.autocast": autocast}
            )
        return done[autocast]

    return run


class Listener(NoProgress):
    """Collects the messages of a training and counts its steps."""

    def __init__(self):
        self.messages: list[str] = []
        self.steps = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def training_step(self, step: TrainingStep) -> None:
        self.steps += 1


@pytest.fixture
def listener() -> Listener:
    return Listener()


class StopAt(NoProgress):
    """Presses Ctrl-C after the given number of steps."""

    def __init__(self, last: int):
        self.last, self.steps = last, 0

    def training_step(self, step: TrainingStep) -> None:
        self.steps += 1
        if self.steps == self.last:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="session")
def stopped_run(recipe, scenes, tmp_path_factory) -> Path:
    """A run that was stopped after a few steps, with two checkpoints."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        visavis.train(recipe, data=scenes, out=run, progress=StopAt(6))
    assert len(list((run / "checkpoint").iterdir())) == 2
    return run


@pytest.fixture
def stopped(stopped_run, tmp_path) -> Path:
    """A copy of the stopped run, which a test may damage and resume."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


@pytest.fixture
def stop_at() -> type[StopAt]:
    return StopAt


def _in_pieces(recipe: Path, run: Path, longest: int = 8, **given: object) -> int:
    """Train a run that is stopped after one step, then every two to ``longest`` steps, and resumed.
    Return the number of stops.
    """
    with pytest.raises(Stopped, match=re.escape(str(run))):
        visavis.train(recipe, out=run, progress=StopAt(1), **given)
    stops = 0
    while not (run / "result.json").exists():
        stops += 1
        with contextlib.suppress(Stopped):
            visavis.train(resume=run, progress=StopAt(stops % longest + 1))
    return stops


@pytest.fixture
def in_pieces() -> Callable[..., int]:
    return _in_pieces


@pytest.fixture
def command_line(monkeypatch, capfd, tmp_path):
    """``visavis ARGUMENTS``: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return call
