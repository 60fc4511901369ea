"""Operations on runs and comparisons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.crashes.crash_states import read_tree, write_tree
from tests.crashes.operations import OPERATIONS, Operation
from tests.crashes.recording import temporary_folder
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress, TrainingStep
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.experiments.jobs import Workers
from visavis.research.experiments.run_comparison import (
    PLAN_FILE,
    plan_comparison,
    resume_comparison,
)
from visavis.research.experiments.screening import SCREENING_FILE, Schedule, ScreeningState
from visavis.training.recipes.files import read_recipe
from visavis.training.stop_signals import Stopped
from visavis.training.trainer import Trainer

View = dict[str, Any]
OBJECTIVES = ("VLC()", "NTXent()")


@cache
def inputs() -> Path:
    """Make a data set and recipes, once for each process."""
    root = temporary_folder() / "run-inputs"
    root.mkdir()
    sizes = {"num_train": 12, "num_val": 4, "num_test": 8}
    write_synthetic_scenes(root / "scenes", **sizes, captions_per_image=2, size=32)
    phase = {"epochs": 2, "optimizer": {"lr": 0.02}}
    training = {"batch_size": 12, "checkpoint_s": 0}
    data = {"path": str(root / "scenes")}
    shared: dict[str, Any] = {"training": training, "data": data}
    write_recipe(root / "tiny.toml", phase, **shared)
    # The second network is written next to the model.
    noisy = {"objective": "NCR()", "supervision": "NoisySupervision()", "epochs": 2}
    write_recipe(root / "two-networks.toml", noisy, **shared)
    members = {"a": {"seed": 1}, "b": {"seed": 2}}
    write_recipe(root / "ensemble.toml", phase | {"epochs": 1}, **shared, members=members)
    tuned = phase | {"epochs": 9}
    write_recipe(root / "tuned.toml", tuned, training={"batch_size": 2}, data=data)
    pixels = {"encoder": "small-cnn", "granularity": "pixels"}
    write_recipe(root / "pixels.toml", phase, **shared, visual=pixels)
    write_recipe(root / "compared.toml", phase, training={"batch_size": 24}, data=data)
    return root


@cache
def stored_index() -> Path:
    """Make an index of the images of the data set."""
    base, index = inputs() / "base", inputs() / "index"
    visavis.train(inputs() / "compared.toml", out=base)
    visavis.index(base, inputs() / "scenes", out=index)
    return index


def view_run(run: Path) -> View:
    """Everything that a run or an ensemble holds, except for times and paths."""
    if (run / "ensemble.toml").exists():
        members = sorted(path.parent.name for path in run.glob("*/run.toml"))
        return {
            "result": _result(run),
            "ranks": _content(run / "ranks.safetensors"),
            **{name: view_run(run / name) for name in members},
        }
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = max((run / "checkpoint").glob("step-*"))
    return {
        "result": _result(run),
        "log": [{key: value for key, value in row.items() if key != "time"} for row in log],
        **{
            name: _content(run / name)
            for name in (
                "ranks.safetensors",
                "model/config.json",
                "model/model.safetensors",
                "peer/model.safetensors",
            )
        },
        "weights": _content(last / "weights.safetensors"),
        "optimizer": _content(last / "optimizer.safetensors"),
    }


def _result(run: Path) -> View:
    content = json.loads((run / "result.json").read_text())
    content.pop("members", None)
    return {name: value for name, value in content.items() if name not in _UNSTABLE}


_UNSTABLE = ("run", "seconds", "cache_seconds")


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def differences(left: View, right: View) -> str:
    """Names of the parts in which two views differ."""
    return ", ".join(
        name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)
    )


class StopAt(NoProgress):
    """Stops a training after some steps, as Ctrl-C does."""

    def __init__(self, last: int):
        self.last = last

    def training_step(self, step: TrainingStep) -> None:
        self.last -= 1
        if not self.last:
            raise Stopped("", 2)


@dataclass
class TrainingCase:
    """A training, and what may be seen after a stop.

    Attributes:
        recipe: Name of the recipe.
        stopped_after: Steps of the run before the command, which resumes it. 0: a new run.
        module: Module that runs ``visavis`` with the arguments. Empty: the command itself.
        overrides: Overrides of the recipe.
        is_exact: Whether a resumed run equals the undisturbed one bit by bit.
        with_index: Whether the vectors of an index stand for the images.
    """

    recipe: str
    stopped_after: int = 0
    module: str = ""
    overrides: Sequence[str] = ()
    is_exact: bool = True
    with_index: bool = False
    new: View = field(default_factory=dict, init=False)
    models: set[bytes] = field(default_factory=set, init=False)

    def prepare(self, folder: Path) -> None:
        """Train the undisturbed run, and the first steps of one that the command resumes."""
        with _collected_models(self.models):
            self._start(folder / "run")
        self.new = view_run(folder / "run")
        shutil.rmtree(folder / "run")
        if self.stopped_after:
            with suppress(Stopped):
                self._start(folder / "run", StopAt(self.stopped_after))
            assert not (folder / "run" / "result.json").exists()
        else:
            shutil.rmtree(folder / "cache")

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder."""
        program = ["python", "-m", self.module] if self.module else ["visavis"]
        if self.stopped_after:
            return [*program, "train", "--resume", str(folder / "run")]
        recipe = str(inputs() / f"{self.recipe}.toml")
        index = ["--index", str(stored_index())] if self.with_index else []
        return [*program, "train", recipe, *self.overrides, *index, "--out", str(folder / "run")]

    def _start(self, run: Path, progress: NoProgress | None = None) -> None:
        torch.set_num_threads(1)
        recipe = inputs() / f"{self.recipe}.toml"
        index = stored_index() if self.with_index else None
        visavis.train(recipe, index=index, overrides=self.overrides, out=run, progress=progress)

    def check(self, folder: Path, acknowledged: str) -> None:
        """Open the best model, then train to the end."""
        run = folder / "run"
        is_done = "Run folder" in acknowledged
        is_finished = (run / "result.json").exists()
        if is_done:
            self._check_finished(run, "acknowledged")
        self._check_best_model(run)
        if (run / "run.toml").exists() or (run / "ensemble.toml").exists():
            visavis.train(resume=run)
        else:
            assert not self.stopped_after, "the run is lost"
            self._start(run)
        self._check_finished(run, "resumed")
        left = [path.name for path in run.rglob("*.part")]
        assert is_finished or not left, f"files of the stopped command stay: {left}"

    def _check_finished(self, run: Path, when: str) -> None:
        seen = view_run(run)
        if self.is_exact:
            assert seen == self.new, f"{when}: other {differences(seen, self.new)}"
        else:
            steps = [[row["step"] for row in view["log"]] for view in (seen, self.new)]
            assert steps[0] == steps[1], when
        assert visavis.evaluate(run).metrics["rsum"] == seen["result"]["rsum"], when

    def _check_best_model(self, run: Path) -> None:
        """A run has a best model of a step, or an error states how to get one."""
        if not (run / "run.toml").exists():
            return
        try:
            model = visavis.load(run)
        except RunError as error:
            if self.stopped_after or "--resume" not in str(error):
                raise
            return
        assert model.encode_texts(["a red circle"]).isfinite().all()
        if self.is_exact:
            assert _content(run / "model" / "model.safetensors") in self.models, "no best model"


class _collected_models:  # noqa: N801 - a context manager
    """Collects the content of each best model of the trainings in this block."""

    def __init__(self, models: set[bytes]):
        self.models = models

    def __enter__(self) -> None:
        self.save = save = Trainer._save_best

        def save_and_collect(trainer: Trainer) -> None:
            save(trainer)
            self.models.add(_content(trainer.folder.model / "model.safetensors"))

        Trainer._save_best = save_and_collect  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Trainer._save_best = self.save  # type: ignore[method-assign]


@dataclass
class ComparisonCase:
    """A comparison, and what may be seen after a stop.

    Attributes:
        recipe: Name of the recipe.
        arguments: Further arguments of the command.
        options: The same for ``visavis.compare``.
        within_time: Whether the command resumes a comparison within a time, whose decisions that
            depend on the clock are made.
    """

    recipe: str
    arguments: Sequence[str]
    options: dict[str, Any]
    within_time: bool = False
    new: View = field(default_factory=dict, init=False)

    def prepare(self, folder: Path) -> None:
        """Compare without a stop."""
        out = folder / "compared"
        if self.within_time:
            _plan_within_time(self.recipe, out)
            before = read_tree(out)
            visavis.compare(resume=out, workers=1)
        else:
            self._compare(out)
        self.new = self._view(out)
        shutil.rmtree(out)
        if self.within_time:
            write_tree(before, out)

    def command(self, folder: Path) -> Sequence[str]:
        """The command on a folder. Its messages are acknowledgments, too."""
        program = ["python", "-m", "tests.crashes.acknowledged_messages", "compare"]
        if self.within_time:
            return [*program, "--resume", str(folder / "compared"), "--workers", "1"]
        objectives = [part for text in OBJECTIVES for part in ("--objective", text)]
        return [
            *program,
            *(str(inputs() / f"{self.recipe}.toml"), *objectives, "--workers", "1"),
            *(*self.arguments, "--out", str(folder / "compared")),
        ]

    def _compare(self, out: Path) -> None:
        torch.set_num_threads(1)
        recipe = inputs() / f"{self.recipe}.toml"
        visavis.compare(recipe, objective=OBJECTIVES, workers=1, out=out, **self.options)

    def _view(self, folder: Path) -> View:
        comparison = json.loads((folder / "comparison.json").read_text())
        return {
            "metrics": {
                f"{run['setting']} {run['seed']}": run["metrics"] for run in comparison["runs"]
            },
            # The lines below it state times.
            "table": _content(folder / "table.md").partition(b"\n\n")[0],
            "rates": comparison.get("learning_rates"),
        }

    def check(self, folder: Path, acknowledged: str) -> None:
        """Read the outcomes, then compare to the end."""
        out = folder / "compared"
        done = {
            path: path.stat().st_mtime_ns
            for path in out.glob("runs/*/outcome.json")
            if storage.read_checksummed_json(path, dict[str, Any]) is not None
        }
        promised = acknowledged.count(": validation RSUM ")
        assert len(done) >= promised, f"{promised - len(done)} runs are lost"
        if "\nReport: " in acknowledged:
            seen = self._view(out)
            assert seen == self.new, differences(seen, self.new)
        if (out / "comparison.json").exists():
            visavis.compare(resume=out, workers=1)
        elif (out / "plan.json").exists():
            # Without the report, which takes most of the time.
            resume_comparison(out, None, Workers("local", 1), NoProgress(), feedback=None)
        else:
            assert not promised and not self.within_time, "the plan is lost"
            self._compare(out)
        changed = [path for path, time in done.items() if path.stat().st_mtime_ns != time]
        assert not changed, f"finished runs were trained again: {changed}"
        seen = self._view(out)
        assert seen == self.new, f"resumed: other {differences(seen, self.new)}"
        left = [
            str(path)
            for path in out.rglob("*.part")
            if not any(outcome.parent in path.parents for outcome in done)
        ]
        assert not left, f"files of the stopped command stay: {left}"


def _plan_within_time(recipe: str, out: Path) -> None:
    """Write a comparison that begins, with its decisions."""
    minutes = 30.0
    choices = (OBJECTIVES, [], [])
    plan = plan_comparison(
        read_recipe(str(inputs() / f"{recipe}.toml")), choices, 0, minutes=minutes, tune=False
    )
    schedule = Schedule(run_share=1.0, kept=1.0, trial_seeds=1, models=1, run_seconds=1.0)
    decided = ScreeningState(
        seconds=60 * minutes,
        schedule=schedule,
        finalists=tuple(setting.name for setting in plan.settings),
        seeds=1,
        has_all_seeds=True,
    )
    out.mkdir()
    storage.write_json(out / PLAN_FILE, asdict(plan))
    storage.write_json(out / SCREENING_FILE, asdict(decided))


def add(name: str, case: TrainingCase | ComparisonCase, **options: Any) -> None:
    """Register an operation."""
    OPERATIONS.append(Operation(name, case.prepare, case.command, case.check, **options))


add("run: new", TrainingCase("tiny"))
add("run: resume", TrainingCase("tiny", stopped_after=2))
add("run: two networks", TrainingCase("two-networks"), is_long=True)
add("run: ensemble", TrainingCase("ensemble"), is_long=True)
add("run: vectors of an index", TrainingCase("tiny", with_index=True), is_long=True)
for _strategy in ("ddp", "fsdp"):
    add(
        f"run: two ranks with {_strategy}",
        TrainingCase(
            "pixels" if _strategy == "fsdp" else "tiny",
            module="tests.crashes.two_ranks",
            overrides=(f"training.strategy={_strategy}",),
            is_exact=False,
        ),
        is_long=True,
        limit=60,
    )
add(
    "compare: jobs",
    ComparisonCase("compared", ["--seeds", "1", "--no-tune"], {"seeds": 1, "tune": False}),
    is_long=True,
    limit=300,
)
add(
    "compare: tuning",
    ComparisonCase("tuned", ["--seeds", "1"], {"seeds": 1}),
    is_long=True,
    limit=60,
)
add(
    "compare: within a time",
    ComparisonCase("compared", [], {}, within_time=True),
    is_long=True,
    limit=60,
)
