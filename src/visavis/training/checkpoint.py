"""Checkpoints: everything that a run needs to resume exactly, in one folder that is written
atomically.

A checkpoint holds the position in the run, the weights, the best weights so far, the average of the
weights, the states of the optimizer and of the supervision, and the log, each with a hash. The last two are kept: if one is
corrupted, the run resumes from the one before. Random states are not stored, because every step
draws from a seed of (run, step).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress, Progress
from visavis.training.runs.run_folder import LogRow

NUM_KEPT_CHECKPOINTS = 2
STATE = "state.json"
LOG = "metrics.jsonl"
HASHES = "hashes.json"
# Files of tensors hold their own hash. ``HASHES`` has those of the other files.
TENSOR_FILES = ("weights", "best_weights", "averaged_weights", "optimizer", "supervision")

Count = Annotated[int, Field(ge=0)]


@dataclass
class TrainerState:
    """Position of a run.

    Attributes:
        phase: Current phase, from 0.
        epoch: Epoch of the phase, from 0.
        batch: Next batch of the epoch, from 0.
        step: Batches of the run so far.
        phase_step: Batches of the phase so far.
        best_rsum: Best validation RSUM so far, in percent.
        best_step: Step of the best validation.
        validations_without_improvement: Validations since the best one in this phase.
        seconds: Time of training steps so far.
        pairs: Pairs trained on so far.
        loss_sum: Sum of the losses since the last validation.
        loss_steps: Number of these losses.
        gradient_norm_sum: Sum of the gradient norms of the optimizer steps since the last
            validation, before clipping.
        gradient_norm_max: Largest of these norms.
        gradient_norm_steps: Number of these norms.
        gradients: Norms of gradients that were recorded since the last validation.
        average_updates: Updates of the average of the weights in this phase.
        scaler: State of the gradient scaler of float16. Empty without it.
        done: Whether the training is complete.
    """

    phase: Count = 0
    epoch: Count = 0
    batch: Count = 0
    step: Count = 0
    phase_step: Count = 0
    best_rsum: float = -1.0
    best_step: int = -1
    validations_without_improvement: Count = 0
    seconds: float = 0.0
    pairs: Count = 0
    loss_sum: float = 0.0
    loss_steps: Count = 0
    gradient_norm_sum: float = 0.0
    gradient_norm_max: float = 0.0
    gradient_norm_steps: Count = 0
    gradients: list[dict[str, float]] = field(default_factory=list)
    average_updates: Count = 0
    scaler: dict[str, float] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """State of a run at one step.

    Attributes:
        state: Position of the run.
        weights: Current weights, by name.
        best_weights: Weights of the best validation, by name.
        optimizer: State of the optimizer, by name.
        supervision: State of the supervision, by name.
        log: Rows of the log so far.
        averaged_weights: Average of the weights, by name. Empty without ``training.ema_decay``.
        folder: Folder that the checkpoint was read from.
    """

    state: TrainerState
    weights: dict[str, Tensor]
    best_weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    supervision: dict[str, Tensor]
    log: list[dict[str, Any]]
    averaged_weights: dict[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None

    def write(self, folder: Path) -> None:
        """Write as ``step-<n>``, then remove all but the last two checkpoints."""
        name = f"step-{self.state.step:08d}"
        # Further checkpoints of the same step are called `step-<n>-b`, `step-<n>-c`, ...
        if last := max((path.name for path in folder.glob(f"{name}*")), default=""):
            name += "-b" if last == name else f"-{chr(ord(last[-1]) + 1)}"
        newest = folder / name
        with storage.atomic_folder(newest) as part:
            for tensors in TENSOR_FILES:
                storage.write_tensors(part / f"{tensors}.safetensors", getattr(self, tensors))
            storage.write_json_lines(part / LOG, self.log)
            storage.write_json(part / STATE, asdict(self.state))
            storage.write_json(
                part / HASHES, {file: storage.content_hash(part / file) for file in (LOG, STATE)}
            )
        for older in set(folder.glob("step-*")) - set(
            complete_checkpoints(folder)[-NUM_KEPT_CHECKPOINTS:]
        ):
            storage.remove_folder(older)

    @classmethod
    def read(cls, folder: Path, expected: Mapping[str, Tensor] | None = None) -> Checkpoint:
        """Read the checkpoint in a folder. Names, shapes and types of its weights must match
        ``expected``.
        """
        for name, expected_hash in storage.read_json(
            folder / HASHES, dict[str, str], error=RunError
        ).items():
            if (
                storage.content_hash(folder / name, limit=storage.MAX_BYTES, error=RunError)
                != expected_hash
            ):
                raise RunError(
                    f"{folder / name}: expected the recorded content, got a corrupted file (hash "
                    "mismatch)."
                )
        reference = {"weights": expected, "best_weights": expected}
        tensors = {
            name: storage.read_tensors(
                folder / f"{name}.safetensors", reference.get(name), error=RunError
            )
            for name in TENSOR_FILES
        }
        state = storage.read_json(folder / STATE, TrainerState, error=RunError)
        return cls(
            state,
            **tensors,
            log=storage.read_json_lines(folder / LOG, LogRow, error=RunError),
            folder=folder,
        )

    @classmethod
    def latest(
        cls,
        folder: Path,
        progress: Progress | None = None,
        expected: Mapping[str, Tensor] | None = None,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> Checkpoint | None:
        """Read the newest usable checkpoint of a run, and report each one that is skipped. None: the
        run has none yet.
        """
        errors: list[RunError] = []
        for path in reversed(complete_checkpoints(folder)):
            try:
                checkpoint = cls.read(path, expected)
                if check is not None:
                    check(checkpoint)
            except RunError as error:
                errors.append(error)
            else:
                for reason in errors:
                    (progress or NoProgress()).message(
                        f"{reason} Falling back to checkpoint {path.name}."
                    )
                return checkpoint
        if errors:
            raise RunError(
                f"{errors[0]} No checkpoint of {folder} is usable. Restore one from a backup, or "
                "train again in a new folder."
            )
        return None

    @property
    def name_matches_step(self) -> bool:
        """Whether the name of the folder has the step of the state."""
        return self.folder is not None and self.folder.name.startswith(
            f"step-{self.state.step:08d}"
        )

    def remove_newer(self) -> None:
        """Remove the newer checkpoints that were skipped for this one."""
        assert self.folder is not None
        for path in complete_checkpoints(self.folder.parent):
            if path > self.folder:
                storage.remove_folder(path)


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if os.path.exists(path / STATE))
