"""Where the parts of a run lie in its folder; training writes them, everything else reads them here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from visavis import storage
from visavis.errors import RunError


class Times(TypedDict):
    """Of a row of the log: seconds of training so far, seconds of the validation, pairs a second."""

    training_s: float
    validation_s: float
    pairs_per_s: float | None


class LogRow(TypedDict):
    """What every row of the log holds, beside the metrics of the validation; rows of older runs have no health and no similarity.

    train, val: of the probed batches. similarity: of the whole validation split: its positives, and each query's hardest negative.
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
    time: Times
    health: NotRequired[dict[str, Any]]
    similarity: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class RunFiles:
    """The files of one run.

    recipe: resolved, as TOML. environment: what else the run depends on. log: a line of JSON for each validation. model: the
    folder of the best model so far. peer: that of the second network, where two were trained, as it was then. checkpoints: the
    folder to go on from. result: what the training ended with. ranks: those of all queries of its test, by protocol.
    """

    folder: Path

    @property
    def run(self) -> Path:
        """What a process that trains holds the lock of."""
        return self.folder / "run"

    @property
    def recipe(self) -> Path:
        return self.folder / "run.toml"

    @property
    def ensemble(self) -> Path:
        """What makes a folder that of an ensemble, instead of a run: its recipe, with members."""
        return self.folder / "ensemble.toml"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def log(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def peer(self) -> Path:
        return self.folder / "peer"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def ranks(self) -> Path:
        return self.folder / "ranks.safetensors"

    def remove(self) -> None:
        """Remove all that a training wrote, and nothing else."""
        for file in (self.recipe, self.environment, self.log, self.ranks, self.result):
            file.unlink(missing_ok=True)
        for folder in (self.model, self.peer, self.checkpoints):
            storage.remove_folder(folder)
        storage.remove_lock(self.run)

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of the log, oldest first. Raises RunError where there is none yet, or where one is not as it was written."""
        rows = storage.read_json_lines(self.log, LogRow, error=RunError) if self.log.exists() else []
        if not rows:
            raise RunError(f"{self.folder} has no {self.log.name} with a validation in it: its training has not come that far.")
        return rows
