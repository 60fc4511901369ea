"""Tracking of a training: metrics, alerts and retrieved images of each validation, sent to the
trackers of the recipe.

A tracker that fails never ends a training. A resumed training continues the run of each tracker.
"""

from __future__ import annotations

import importlib.util
import math
import os
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from PIL import ImageDraw, ImageFont, ImageOps
from PIL.Image import Image
from PIL.Image import new as new_image
from typing_extensions import TypedDict

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import MissingExtra, RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.losses.scoring import score_matrix, select_items
from visavis.models import Matcher
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.inference import device_score
from visavis.training.monitoring.alerts import LogValues
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.run_folder import RunFolder

PROJECT = "visavis"
ALERT_TITLE = "Training alert"
NO_WAIT_S = 0.001  # W&B drops a second alert of the same title within this time
Examples = Mapping[str, tuple[str, Image]]


class Tracker(ABC):
    """Run of a tracker, which is started at once.

    Args:
        folder: Folder of the training.
        run_id: Id of the run. A run with this id is continued.
        settings: Recipe as plain values.
    """

    def __init__(self, folder: RunFolder, run_id: str, settings: dict[str, Any]):
        self.folder = folder
        self.run_id = run_id
        self.settings = settings
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Import the package, and start or continue the run."""

    @abstractmethod
    def log(
        self, step: int, metrics: Mapping[str, float], alerts: Sequence[str], examples: Examples
    ) -> None:
        """Log a validation."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Write everything and end the run."""


class TensorBoardTracker(Tracker):
    """Event files in the run folder."""

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(self.folder.tensorboard)

    def log(
        self, step: int, metrics: Mapping[str, float], alerts: Sequence[str], examples: Examples
    ) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for name, (caption, image) in examples.items():
            self.writer.add_image(name, np.asarray(image), step, dataformats="HWC")
            self.writer.add_text(name, caption, step)
        if alerts:
            self.writer.add_text("alerts", "\n\n".join(alerts), step)
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

    def log(
        self, step: int, metrics: Mapping[str, float], alerts: Sequence[str], examples: Examples
    ) -> None:
        images = {
            name: self.wandb.Image(image, caption=caption)
            for name, (caption, image) in examples.items()
        }
        self.run.log({**metrics, **images}, step=step)
        for alert in alerts:
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
        experiment_id = (
            self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        # MLflow chooses its ids, so a tag identifies the run.
        runs = self.client.search_runs([experiment_id], f"tags.visavis_run = '{self.run_id}'")
        if runs:
            self.mlflow_id = runs[0].info.run_id
            self.client.update_run(self.mlflow_id, status="RUNNING")
        else:
            run = self.client.create_run(
                experiment_id, tags={"visavis_run": self.run_id}, run_name=self.folder.path.name
            )
            self.mlflow_id = run.info.run_id
            self.client.log_dict(self.mlflow_id, self.settings, "recipe.json")

    def log(
        self, step: int, metrics: Mapping[str, float], alerts: Sequence[str], examples: Examples
    ) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(
            self.mlflow_id,
            metrics=[Metric(name, value, now, step) for name, value in metrics.items()],
        )
        for name, (_, image) in examples.items():
            self.client.log_image(self.mlflow_id, image, key=name, step=step)
        if alerts:
            self.client.log_text(self.mlflow_id, "\n".join(alerts), f"alerts/step-{step:08d}.txt")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.mlflow_id, status="FINISHED" if finished else "KILLED")


class TrackioTracker(Tracker):
    """Run of trackio, in the folder that ``TRACKIO_DIR`` names."""

    def start(self) -> None:
        import trackio

        self.trackio: Any = trackio
        name = f"{self.folder.path.name}-{self.run_id}"  # trackio resumes a run by its name
        self.run = self.trackio.init(
            PROJECT,
            name=name,
            config=self.settings,
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(
        self, step: int, metrics: Mapping[str, float], alerts: Sequence[str], examples: Examples
    ) -> None:
        images = {
            name: self.trackio.Image(image, caption=caption)
            for name, (caption, image) in examples.items()
        }
        self.run.log({**metrics, **images}, step=step)
        for alert in alerts:
            self.run.alert(ALERT_TITLE, alert, step=step)

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


class TrackerRun(TypedDict):
    """Run of a tracker, in ``trackers.json`` of the run folder.

    Attributes:
        id: Id that a resumed training continues.
        step: Step of the last validation that was logged, -1 before the first.
    """

    id: str
    step: int


def check_trackers(recipe: Recipe) -> None:
    """Check that the packages of all trackers of a recipe are installed."""
    for name in recipe.training.track:
        package = importlib.util.find_spec(name)
        # A folder of this name, such as the one that wandb writes, has no origin.
        if package is None or package.origin is None:
            raise MissingExtra(name, name, f'training.track = ["{name}"]')


class Tracking:
    """All trackers of a training.

    Args:
        recipe: Recipe of the run.
        folder: Folder of the run.
        progress: Receives one message for each tracker that fails.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: Progress):
        self.settings = recipe.to_dict()
        self.folder = folder
        self.progress = progress
        self.trackers = dict[str, Tracker]()
        self.runs = dict[str, TrackerRun]()
        self.failed = set[str]()

    @contextmanager
    def open(self, names: Sequence[str], log: Sequence[LogValues]) -> Iterator[None]:
        """Open trackers, and log the validations that they do not have yet, such as those after a
        lost connection.
        """
        path = self.folder.trackers
        # None if the file cannot be read: then no tracker is opened.
        runs = self._call(
            "trackers",
            lambda: (
                storage.read_json(path, dict[str, TrackerRun], error=RunError)
                if os.path.exists(path)
                else {}
            ),
        )
        self.runs = runs or {}
        for name in names if runs is not None else ():
            run = self.runs.setdefault(name, {"id": uuid4().hex[:12], "step": -1})
            tracker = self._call(
                name, partial(TRACKERS[name], self.folder, run["id"], self.settings)
            )
            if tracker is not None:
                self.trackers[name] = tracker
        finished = False
        try:
            for row in log:
                self.log(row)
            yield
            finished = True
        finally:
            for name, tracker in self.trackers.items():
                self._call(name, partial(tracker.close, finished))

    def log(
        self,
        row: LogValues,
        alerts: Sequence[str] = (),
        make_examples: Callable[[], Examples] = dict,
    ) -> None:
        """Log a validation, unless a tracker has logged its step before."""
        new = [
            name
            for name in self.trackers
            if name not in self.failed and self.runs[name]["step"] < row["step"]
        ]
        if not new:
            return
        # Finite numbers by `<group>/<name>`. A number that is in no group belongs to `validation`.
        groups = {key: value for key, value in row.items() if isinstance(value, dict)}
        groups["validation"] = {key: value for key, value in row.items() if key not in groups}
        numbers = {
            f"{group}/{name}": value
            for group, values in groups.items()
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        examples = self._call("retrieved images", make_examples) or {}
        previous = {name: self.runs[name]["step"] for name in new}
        step: int = row["step"]
        self._write_steps(dict.fromkeys(new, step))
        for name in new:
            self._call(
                name, partial(self.trackers[name].log, row["step"], numbers, alerts, examples)
            )
        # A resumed training sends the validation at which a tracker has failed.
        if missed := {name: previous[name] for name in new if name in self.failed}:
            self._write_steps(missed)

    def _write_steps(self, steps: Mapping[str, int]) -> None:
        """Store the last step of trackers. This comes before they log it: a training that is killed
        between both may lose a step, and never logs one twice.
        """
        for name, step in steps.items():
            self.runs[name]["step"] = step
        self._call("trackers", partial(storage.write_json, self.folder.trackers, self.runs))

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a tracker that has not failed before, without its output, because stdout is for our
        results.
        """
        if name in self.failed:
            return None
        try:
            with redirect_stdout(StringIO()):
                return call()
        except Exception as error:  # noqa: BLE001 - a package for tracking can raise anything, also without a connection
            self.failed.add(name)
            self.progress.message(
                f"training.track: {name} has failed and is not called again. The training "
                f"continues. {error}"
            )
        return None


NUM_CAPTIONS, NUM_IMAGES = 3, 4
IMAGE_SIDE, TEXT_HEIGHT, BORDER = 160, 40, 4  # pixels
RELEVANT, OTHER = "#2a9d4a", "white"  # border


def retrieved_images(
    matcher: Matcher, visual: Encoded, text: Encoded, data: Dataset, memory: MemoryLimit = None
) -> dict[str, tuple[str, Image]]:
    """Draw the best-scored images of three captions, the best one first. The border of a relevant
    image is green. {} if the data have no image files.
    """
    if any(image.location is None or image.is_video for image in data.images):
        return {}
    captions = torch.linspace(0, len(data.captions) - 1, NUM_CAPTIONS).long().unique()
    # Of a model that ranks in two stages, the first stage is shown.
    with evaluation_mode(matcher):
        scores = score_matrix(device_score(matcher), visual, select_items(text, captions), memory)
    top = scores.float().topk(min(NUM_IMAGES, len(data.images)), dim=0).indices.T
    examples: dict[str, tuple[str, Image]] = {}
    side = IMAGE_SIDE - 2 * BORDER
    for caption, images in zip(captions.tolist(), top.tolist(), strict=True):
        canvas = new_image("RGB", (NUM_IMAGES * IMAGE_SIDE, TEXT_HEIGHT + IMAGE_SIDE), "white")
        text_of_caption = data.captions[caption]
        lines = textwrap.wrap(text_of_caption, 80, max_lines=2, placeholder=" ...")
        ImageDraw.Draw(canvas).multiline_text(
            (BORDER, BORDER), "\n".join(lines), fill="black", font=ImageFont.load_default(14)
        )
        for position, number in enumerate(images):
            image = ImageOps.pad(data.images[number].open(), (side, side), color="white")
            border = RELEVANT if number == data.image_of[caption] else OTHER
            place = (position * IMAGE_SIDE, TEXT_HEIGHT)
            canvas.paste(ImageOps.expand(image, BORDER, border), place)
        examples[f"retrieved/caption_{len(examples) + 1}"] = (text_of_caption, canvas)
    return examples
