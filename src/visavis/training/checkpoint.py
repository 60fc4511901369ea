"""Stop anywhere, go on exactly: everything a run needs to continue, in one folder that appears whole or not at all.

A checkpoint holds the state in the run, the weights, the best weights so far, the optimizer's and the supervision's
state, and the log up to here. Older ones are removed only after a newer one is complete; a process killed while one is
written leaves the one before it. Random numbers need no state: every step draws from a seed of (run, step).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis import storage
from visavis.errors import RunError

STATE_FILES = ("state.json", "place.json")
"""The file that makes a checkpoint complete, and its name in older runs."""


@dataclass
class TrainerState:
    """Where a run is. phase, epoch (of the phase), batch (the next one of the epoch), step (of the run), phase_step.

    best_rsum, best_step: the best validation so far. stale: validations since then. seconds, pairs: of training so far.
    loss_sum, loss_steps: of the steps since the last validation. done: nothing is left to train.
    """

    phase: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    phase_step: int = 0
    best_rsum: float = -1.0
    best_step: int = -1
    stale: int = 0
    seconds: float = 0.0
    pairs: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """All of a run at one time; tensors by name."""

    state: TrainerState
    weights: dict[str, Tensor]
    best: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    supervision: dict[str, Tensor]
    log: list[dict[str, Any]]

    def write(self, folder: Path) -> None:
        """Write as ``step-<n>`` into the folder of a run's checkpoints, then remove the older ones."""
        newest = _free(folder / f"step-{self.state.step:08d}")
        with storage.replacing_folder(newest) as part:
            for name in ("weights", "best", "optimizer", "supervision"):
                storage.write_tensors(part / f"{name}.safetensors", getattr(self, name))
            storage.write_json_lines(part / "metrics.jsonl", self.log)
            storage.write_json(part / STATE_FILES[0], asdict(self.state))
        for older in set(folder.glob("step-*")) - {newest}:
            storage.remove_folder(older)

    @classmethod
    def latest(cls, folder: Path) -> Checkpoint | None:
        """The newest complete checkpoint of a run's; None if there is none yet."""
        complete = _complete(folder)
        if not complete:
            return None
        newest = complete[-1]
        state = storage.read_json(next(file for name in STATE_FILES if (file := newest / name).exists()), TrainerState, error=RunError)
        tensors = {
            name: storage.read_tensors(newest / f"{name}.safetensors", error=RunError)
            for name in ("weights", "best", "optimizer", "supervision")
        }
        return cls(state, log=storage.read_json_lines(newest / "metrics.jsonl", dict[str, Any], error=RunError), **tensors)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer as tensors by ``<parameter's name>.<name>``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{parameter}.{name}": torch.as_tensor(value)
        for index, parameter in enumerate(_parameter_names(optimizer))
        for name, value in state.get(index, {}).items()
        if value is not None
    }


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer what ``optimizer_tensors`` took of it, or of one over other parts: each parameter finds its own."""
    places = {parameter: index for index, parameter in enumerate(_parameter_names(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, name = key.rsplit(".", 1)
        if parameter in places:
            state.setdefault(places[parameter], {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameter_names(optimizer: Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if any((path / name).exists() for name in STATE_FILES))


def _free(target: Path) -> Path:
    """``target``, or after others of the same step ``target-b``, ``target-c``: the newest is the last by name."""
    last = max((path.name for path in target.parent.glob(f"{target.name}*")), default="")
    if not last:
        return target
    return target.with_name(f"{target.name}-{'b' if last == target.name else chr(ord(last[-1]) + 1)}")
