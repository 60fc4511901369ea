"""Files of a run folder. Training writes them, and everything else reads them through this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from visavis.core import storage
from visavis.core.errors import RunError


class LogTimes(TypedDict):
    """Times of a row of the log.

    Attributes:
        training_s: Seconds of training so far.
        validation_s: Seconds of the validation.
        pairs_per_s: Training pairs per second.
        data_wait_s: Seconds of training since the validation before that were spent waiting for
            batches.
        data_wait_share: Their share of the training time since the validation before.
    """

    training_s: float
    validation_s: float
    pairs_per_s: float | None
    data_wait_s: NotRequired[float]
    data_wait_share: NotRequired[float]


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
        lr: Learning rate of each part of the model, in the last step. Absent before the first step.
        similarity: Similarities on the whole validation split. Absent for models that rank in two
            stages.
        gradients: Means of ``gradient_steps``.
        gradient_steps: Norms of the gradients of recorded steps since the validation before. Absent
            if there are none.
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
    lr: NotRequired[dict[str, float]]
    similarity: NotRequired[dict[str, float]]
    gradients: NotRequired[dict[str, float]]
    gradient_steps: NotRequired[list[dict[str, float]]]


class RunFolder:
    """Paths of the files of one run.

    Args:
        path: Folder of the run.

    Attributes:
        path: Folder of the run.
        lock: Path whose lock a training process holds.
        recipe: Resolved recipe, as TOML. It makes the folder a run.
        ensemble: Recipe of an ensemble, as TOML. It makes the folder an ensemble, with a run in a
            subfolder for each member.
        environment: Record of the inputs and of the environment.
        log: Log, one line of JSON per validation.
        model: Folder of the best model so far.
        peer: Folder of the second network, as it was at the best validation of the first.
        checkpoints: Folder of the checkpoints.
        result: Result of a finished training.
        ranks: Ranks of all test queries, by protocol.
        trackers: Ids of the runs of trackers, and the last step that each has.
        tensorboard: Folder of the event files of TensorBoard.
        wandb: Folder of the files of Weights & Biases.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lock = path / "run"
        self.recipe = path / "run.toml"
        self.ensemble = path / "ensemble.toml"
        self.environment = path / "environment.json"
        self.log = path / "metrics.jsonl"
        self.model = path / "model"
        self.peer = path / "peer"
        self.checkpoints = path / "checkpoint"
        self.result = path / "result.json"
        self.ranks = path / "ranks.safetensors"
        self.trackers = path / "trackers.json"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run or an ensemble."""
        return os.path.exists(self.recipe) or os.path.exists(self.ensemble)

    def remove_killed_start(self) -> None:
        """Remove the record that a training wrote before it was killed, if the folder has nothing
        else and is not a run yet. The next start then finds an empty folder.
        """
        lock = storage.lock_file(self.lock)
        # The lock shows that a training has begun here: the record of another program stays.
        if not os.path.exists(lock):
            return
        with storage.folder_lock(self.lock, wait=False, subject=self.path):
            if any(
                name not in (lock.name, self.environment.name) and not storage.name_of_part(name)
                for name in os.listdir(self.path)
            ):
                return
            storage.current_disk().unlink(self.environment)
        storage.remove_lock(self.lock)

    def remove(self) -> None:
        """Remove everything that a training writes, and nothing else."""
        for file in (
            self.recipe,
            self.environment,
            self.log,
            self.ranks,
            self.result,
            self.trackers,
        ):
            storage.current_disk().unlink(file)
        for folder in (self.model, self.peer, self.checkpoints, self.tensorboard, self.wandb):
            storage.remove_folder(folder)
        storage.remove_lock(self.lock)

    def read_log(self) -> list[dict[str, Any]]:
        """Read the rows of the log."""
        rows = (
            storage.read_json_lines(self.log, LogRow, error=RunError)
            if os.path.exists(self.log)
            else []
        )
        if not rows:
            raise RunError(
                f"{self.path}: expected a validation in {self.log.name}, found none. Resume the "
                f"training with --resume {self.path}."
            )
        return rows
