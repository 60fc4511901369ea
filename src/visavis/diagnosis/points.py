"""The points of a training at which its model can be looked at: its best, its last, its start, and every checkpoint that is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from visavis.errors import RunError
from visavis.models import Matcher
from visavis.progress import Progress
from visavis.runs.record import Record
from visavis.training.checkpoint import Checkpoint, complete
from visavis.training.data_module import DataModule, initial_matcher
from visavis.training.recipe import Recipe
from visavis.training.run_files import RunFiles
from visavis.training.settings import Phase
from visavis.training.starting import open_start


@dataclass(frozen=True)
class Point:
    """phase: whose objective and supervision stand there. supervision: the state of the latter, as far as it is kept."""

    phase: Phase
    step: int
    supervision: dict[str, Tensor]


def go_to(run: Path, at: str, data_module: DataModule, matcher: Matcher, progress: Progress) -> Point:
    """Give the best model of a run the weights of another point of it.

    at: "best" (as it is), "last", "start" (before the first step), or the step of a checkpoint that is kept. The start is made anew from
    the recipe by the very function that training begins with, and is compared with the checksum that was recorded then.
    Raises RunError for a point that is not kept, or a start that came out otherwise.
    """
    files, recipe = RunFiles(run), data_module.recipe
    if at == "best":
        phase, step = best_phase(run, recipe)
        return Point(phase, step, _supervision(Checkpoint.latest(files.checkpoints), phase, recipe))
    if at == "start":
        matcher.load_state_dict(initial_matcher(data_module, open_start(recipe)).state_dict())
        Record.read(files.environment).check_start(matcher, run, progress)
        return Point(recipe.phases[0], 0, {})
    kept = {int(path.name[len("step-") :].partition("-")[0]): path for path in complete(files.checkpoints)}
    checkpoint = None
    if at == "last":
        checkpoint = Checkpoint.latest(files.checkpoints, progress, matcher.state_dict())
    elif at.isdecimal() and int(at) in kept:
        checkpoint = Checkpoint.read(kept[int(at)], matcher.state_dict())
    if checkpoint is None:
        steps = ", ".join(map(str, kept)) or "none"
        raise RunError(f"{run} has no point {at!r}: expected best, last, start, or the step of a checkpoint that is kept: {steps}.")
    matcher.load_state_dict(checkpoint.weights)
    phase = recipe.phases[checkpoint.state.phase]
    return Point(phase, checkpoint.state.step, checkpoint.supervision)


def best_phase(run: Path, recipe: Recipe) -> tuple[Phase, int]:
    """The phase whose training made the run's best model, and the step. Raises RunError without a log, or for one of another recipe."""
    files = RunFiles(run)
    best = max(files.read_log(), key=lambda row: row["rsum"])  # the first of equals, as the trainer keeps
    if not 0 <= best["phase"] < len(recipe.phases):
        raise RunError(f"{files.log}: the best validation is in phase {best['phase']} of {len(recipe.phases)}, the first of which is 0.")
    return recipe.phases[best["phase"]], best["step"]


def _supervision(checkpoint: Checkpoint | None, phase: Phase, recipe: Recipe) -> dict[str, Tensor]:
    """What a checkpoint holds of the supervision of a phase; nothing where it stands in another."""
    if checkpoint is None or recipe.phases[checkpoint.state.phase :][:1] != (phase,):
        return {}
    return checkpoint.supervision
