"""Trackers: one class for each package, such as TensorBoard, that shows the metrics of a training."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image

from visavis.runs.run_folder import RunFolder

PROJECT = "visavis"
ALERT_TITLE = "Training alert"
NO_WAIT_S = 0.001  # W&B drops a second alert of the same title within this time
Examples = Mapping[str, tuple[str, Image]]


@dataclass(frozen=True)
class Entry:
    """Content of a validation for a tracker.

    Attributes:
        step: Step of the run.
        metrics: Finite numbers by name, such as ``validation/rsum``.
        alerts: New alerts.
        examples: Images by name, each with its caption.
    """

    step: int
    metrics: Mapping[str, float]
    alerts: Sequence[str]
    examples: Examples


class Tracker(ABC):
    """Run of a tracker, which is started at once.

    Args:
        folder: Folder of the training.
        run_id: Id of the run. A run with this id is continued.
        settings: Recipe as plain values.
    """

    def __init__(self, folder: RunFolder, run_id: str, settings: dict[str, Any]):
        self.folder, self.run_id, self.settings = folder, run_id, settings
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Import the package, and start or continue the run."""

    @abstractmethod
    def log(self, entry: Entry) -> None:
        """Log a validation.

        Args:
            entry: The validation.
        """

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Write everything and end the run.

        Args:
            finished: Whether the training is complete. False if it was stopped or has failed.
        """


class TensorBoardTracker(Tracker):
    """Event files in the run folder."""

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(self.folder.tensorboard)

    def log(self, entry: Entry) -> None:
        for name, value in entry.metrics.items():
            self.writer.add_scalar(name, value, entry.step)
        for name, (caption, image) in entry.examples.items():
            self.writer.add_image(name, np.asarray(image), entry.step, dataformats="HWC")
            self.writer.add_text(name, caption, entry.step)
        if entry.alerts:
            self.writer.add_text("alerts", "\n\n".join(entry.alerts), entry.step)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class WandbTracker(Tracker):
    """Run of Weights & Biases. Its files are in the run folder, unless ``WANDB_DIR`` is set."""

    def start(self) -> None:
        import wandb

        self.wandb: Any = wandb
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", self.folder.path),
            id=self.run_id,
            name=self.folder.path.name,
            config=self.settings,
            resume="allow",
            reinit="create_new",
            settings=self.wandb.Settings(console="off"),  # it would copy the output of the program
        )

    def log(self, entry: Entry) -> None:
        images = {name: self.wandb.Image(image, caption=caption) for name, (caption, image) in entry.examples.items()}
        self.run.log({**entry.metrics, **images}, step=entry.step)
        for alert in entry.alerts:
            self.run.alert(ALERT_TITLE, alert, level="WARN", wait_duration=NO_WAIT_S)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MlflowTracker(Tracker):
    """Run of MLflow, in the store that ``MLFLOW_TRACKING_URI`` names."""

    def start(self) -> None:
        from mlflow import MlflowClient

        self.client: Any = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        # MLflow chooses its ids, so a tag identifies the run.
        runs = self.client.search_runs([experiment_id], f"tags.visavis_run = '{self.run_id}'")
        if runs:
            self.mlflow_id = runs[0].info.run_id
            self.client.update_run(self.mlflow_id, status="RUNNING")
        else:
            run = self.client.create_run(experiment_id, tags={"visavis_run": self.run_id}, run_name=self.folder.path.name)
            self.mlflow_id = run.info.run_id
            self.client.log_dict(self.mlflow_id, self.settings, "recipe.json")

    def log(self, entry: Entry) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.mlflow_id, metrics=[Metric(name, value, now, entry.step) for name, value in entry.metrics.items()])
        for name, (_, image) in entry.examples.items():
            self.client.log_image(self.mlflow_id, image, key=name, step=entry.step)
        if entry.alerts:
            self.client.log_text(self.mlflow_id, "\n".join(entry.alerts), f"alerts/step-{entry.step:08d}.txt")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.mlflow_id, status="FINISHED" if finished else "KILLED")


class TrackioTracker(Tracker):
    """Run of trackio, in the folder that ``TRACKIO_DIR`` names."""

    def start(self) -> None:
        import trackio

        self.trackio: Any = trackio
        name = f"{self.folder.path.name}-{self.run_id}"  # trackio resumes a run by its name
        self.run = self.trackio.init(PROJECT, name=name, config=self.settings, resume="allow", auto_log_gpu=False, auto_log_cpu=False)

    def log(self, entry: Entry) -> None:
        images = {name: self.trackio.Image(image, caption=caption) for name, (caption, image) in entry.examples.items()}
        self.run.log({**entry.metrics, **images}, step=entry.step)
        for alert in entry.alerts:
            self.run.alert(ALERT_TITLE, alert, step=entry.step)

    def close(self, finished: bool) -> None:
        # Otherwise trackio finishes again when Python exits, with its output.
        self.trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""Trackers by the name of their package, which is also the extra that installs it."""
