"""A small drawn world and a recipe on it with everything a checkpoint must hold: dropout, phases, accumulation, patience."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.processes import Command

import visavis
from visavis.data.scenes import write_scenes
from visavis.progress import Silent, TrainingStep
from visavis.training.stopping import Stopped

RECIPE = """
name = "tiny"
seed = 9
visual = { tower = "scenes", view = "grid" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 16, word_width = 8, dropout = 0.2, region_pool = "mean" }

[training]
batch_size = 16
accumulate = 2
evaluate_every = 7
patience = 4
checkpoint_s = 0
probe_batches = 1
threads = 1

[[phases]]
epochs = 2
objective = "Triplet()"
optimizer = { name = "AdamW", lr = 0.01, weight_decay = 1e-4 }
schedule = { kind = "cosine", warmup = 0.1 }

[[phases]]
epochs = 3
objective = "Unified(gamma=20)"
trainable = ["text"]
optimizer = { lr = 0.02, lr_multipliers = { text = 0.5 } }
schedule = { kind = "step", milestones = [1] }
start_from = "best"
keep_optimizer = true
"""


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """60 + 12 + 12 drawn images with 3 captions each; their features are cached before any test."""
    folder = write_scenes(
        tmp_path_factory.mktemp("world") / "scenes", num_train=60, num_val=12, num_test=12, captions_per_image=3, size=48, seed=1
    )
    visavis.features(folder, visual="scenes", view="grid")
    return folder


@pytest.fixture(scope="session")
def few_scenes(tmp_path_factory) -> Path:
    """16 + 4 + 4 small images with 2 captions each, for what looks at pixels."""
    return write_scenes(tmp_path_factory.mktemp("few") / "scenes", num_train=16, num_val=4, num_test=4, captions_per_image=2, size=32)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


class Training(Command):
    """A training in a process of its own, to be killed at a moment of one's choice."""

    def __init__(self, folder: Path, *arguments: object):
        self.folder = folder
        super().__init__(folder.with_name(f"{folder.name}.output"), "train", *arguments)

    @property
    def step(self) -> int:
        """The step of the newest complete checkpoint; -1 before the first."""
        return max((int(path.name[5:13]) for path in (self.folder / "checkpoint").glob("step-*")), default=-1)

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        return any((self.folder / "checkpoint").glob(".step-*.part"))

    def end(self, signal_number: int, when: Callable[[Training], bool]) -> int:
        """Wait for a moment, send a signal, give the exit code; nothing is sent to a process that ended before."""
        while not self.ended and not when(self):
            time.sleep(0.0005)
        self.send(signal_number)
        return self.wait(60)

    def kill(self, when: Callable[[Training], bool]) -> bool:
        """Whether SIGKILL came before the end of the training."""
        code = self.end(signal.SIGKILL, when)
        assert code in (0, -signal.SIGKILL), self.said
        return code != 0


@pytest.fixture
def training() -> type[Training]:
    return Training


def _outcome(run: Path) -> dict[str, object]:
    """All that a run ended with, its seconds left out."""
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
            part: {name: tensor.tolist() for name, tensor in load_file(last / f"{part}.safetensors").items()}
            for part in ("weights", "best", "optimizer", "supervision")
        },
        "state": {key: value for key, value in state.items() if key != "seconds"},
        "log": [{key: value for key, value in row.items() if key != "time"} for row in log],
        "result": {key: value for key, value in result.items() if key not in ("run", "seconds", "cache_seconds")},
        "left over": [path.name for path in run.rglob(".*.part")],
    }


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, object]]:
    return _outcome


@pytest.fixture(scope="session")
def uninterrupted(scenes, recipe, tmp_path_factory):
    """A finished run without any stop, by precision of the towers."""
    done = {}

    def run(autocast):
        if autocast not in done:
            done[autocast] = tmp_path_factory.mktemp("runs") / f"whole-{autocast}"
            visavis.train(recipe, data=scenes, out=done[autocast], overrides={"training.autocast": autocast})
        return done[autocast]

    return run


class Listener(Silent):
    """Hears what a training says, and counts its steps."""

    def __init__(self):
        self.said: list[str] = []
        self.steps = 0

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, step: TrainingStep) -> None:
        self.steps += 1


@pytest.fixture
def listener() -> Listener:
    return Listener()


class StopAt(Silent):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, last: int):
        self.last, self.steps = last, 0

    def step(self, step: TrainingStep) -> None:
        self.steps += 1
        if self.steps == self.last:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def stopped(recipe, scenes, stop_at, tmp_path) -> Path:
    """A run that was stopped after a few steps, with two checkpoints."""
    with pytest.raises(Stopped):
        visavis.train(recipe, data=scenes, out=tmp_path / "run", progress=stop_at(6))
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 2
    return tmp_path / "run"


@pytest.fixture
def stop_at() -> type[StopAt]:
    return StopAt


def _in_pieces(recipe: Path, run: Path, **given: object) -> int:
    """A run that is stopped after every one to four steps and resumed, to its end; how often it was stopped."""
    with pytest.raises(Stopped, match=re.escape(str(run))):
        visavis.train(recipe, out=run, progress=StopAt(1), **given)
    stops = 0
    while not (run / "result.json").exists():
        stops += 1
        with contextlib.suppress(Stopped):
            visavis.train(resume=run, progress=StopAt(stops % 4 + 1))
    return stops


@pytest.fixture
def in_pieces() -> Callable[..., int]:
    return _in_pieces
