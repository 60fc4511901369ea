"""Files of a run folder. Training writes them, and everything else reads them through this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from visavis import storage
from visavis.errors import RunError


class LogTimes(TypedDict):
    """Times of a row of the log.

    Attributes:
        training_s: Seconds of training so far.
        validation_s: Seconds of the validation.
        pairs_per_s: Training pairs per second.
    """

    training_s: float
    validation_s: float
    pairs_per_s: float | None


class LogRow(TypedDict):
    """Row of the log: one validation, with its metrics as further keys.

    Attributes:
        phase: Phase, from 0.
        epoch: Epoch of the phase, from 0.
        step: Step of the run.
        objective: Objective of the phase.
        running_loss: Mean training loss since the validation before.
        train: Loss, similarities and gradients on a few training batches.
        val: The same on validation batches.
        rsum: Validation RSUM, in percent.
        time: Times.
        health: Health metrics and alerts.
        similarity: Similarities on the whole validation split. Absent for models that rank in two stages.
    """

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    phase: int
    epoch: int
    step: int
    objective: str
    running_loss: float | None
    train: dict[str, float | None]
    val: dict[str, float | None]
    rsum: float
    time: LogTimes
    health: dict[str, Any]
    similarity: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of one run.

    Attributes:
        path: Folder of the run.
    """

    path: Path

    @property
    def lock(self) -> Path:
        """Path whose lock a training process holds."""
        return self.path / "run"

    @property
    def recipe(self) -> Path:
        """Resolved recipe, as TOML. It makes the folder a run."""
        return self.path / "run.toml"

    @property
    def ensemble(self) -> Path:
        """Recipe of an ensemble, as TOML. It makes the folder an ensemble, with a run in a subfolder for each member."""
        return self.path / "ensemble.toml"

    @property
    def environment(self) -> Path:
        """Record of the inputs and of the environment."""
        return self.path / "environment.json"

    @property
    def log(self) -> Path:
        """Log, one line of JSON per validation."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """Folder of the best model so far."""
        return self.path / "model"

    @property
    def peer(self) -> Path:
        """Folder of the second network, as it was at the best validation of the first."""
        return self.path / "peer"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoint"

    @property
    def result(self) -> Path:
        """Result of a finished training."""
        return self.path / "result.json"

    @property
    def ranks(self) -> Path:
        """Ranks of all test queries, by protocol."""
        return self.path / "ranks.safetensors"

    def remove(self) -> None:
        """Remove everything that a training writes, and nothing else."""
        for file in (self.recipe, self.environment, self.log, self.ranks, self.result):
            file.unlink(missing_ok=True)
        for folder in (self.model, self.peer, self.checkpoints):
            storage.remove_folder(folder)
        storage.remove_lock(self.lock)

    def read_log(self) -> list[dict[str, Any]]:
        """Read the rows of the log.

        Returns:
            The rows, oldest first.

        Raises:
            RunError: If the log is empty, or a row is invalid.
        """
        rows = storage.read_json_lines(self.log, LogRow, error=RunError) if self.log.exists() else []
        if not rows:
            raise RunError(
                f"{self.path}: expected a validation in {self.log.name}, found none. Resume the training with --resume {self.path}."
            )
        return rows
