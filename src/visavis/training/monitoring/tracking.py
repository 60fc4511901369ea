"""Tracking of a training: metrics, alerts and retrieved images of each validation, sent to the trackers of the recipe.

A tracker that fails never ends a training. A resumed training continues the run of each tracker.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any
from uuid import uuid4

from typing_extensions import TypedDict

from visavis import storage
from visavis.errors import MissingExtra, RunError
from visavis.progress import Progress
from visavis.recipes.recipe import Recipe
from visavis.runs.run_folder import RunFolder
from visavis.training.monitoring.alerts import LogValues
from visavis.training.monitoring.trackers import TRACKERS, Entry, Examples, Tracker


class TrackerRun(TypedDict):
    """Run of a tracker, in ``trackers.json`` of the run folder.

    Attributes:
        id: Id that a resumed training continues.
        step: Step of the last validation that was logged, -1 before the first.
    """

    id: str
    step: int


def check_trackers(recipe: Recipe) -> None:
    """Check that the packages of all trackers of a recipe are installed.

    Args:
        recipe: The recipe.

    Raises:
        MissingExtra: If a package is not installed.
    """
    for name in recipe.training.track:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # a folder of this name, such as the one that wandb writes, has no origin
            raise MissingExtra(name, name, f'training.track = ["{name}"]')


class Tracking:
    """All trackers of a training.

    Args:
        recipe: Recipe of the run.
        folder: Folder of the run.
        progress: Receives one message for each tracker that fails.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: Progress):
        self.settings, self.folder, self.progress = recipe.to_dict(), folder, progress
        self.trackers, self.runs = dict[str, Tracker](), dict[str, TrackerRun]()
        self.failed = set[str]()

    @contextmanager
    def open(self, names: Sequence[str], log: Sequence[LogValues]) -> Iterator[None]:
        """Open trackers, and log the validations that they do not have yet, such as those after a lost connection.

        Args:
            names: Names of the trackers.
            log: Rows of the log so far.

        Yields:
            Nothing. At the end, all trackers are closed.
        """
        runs = self._call("trackers", self._read_runs)
        self.runs = runs or {}
        for name in names if runs is not None else ():
            run = self.runs.setdefault(name, {"id": uuid4().hex[:12], "step": -1})
            tracker = self._call(name, partial(TRACKERS[name], self.folder, run["id"], self.settings))
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

    def _read_runs(self) -> dict[str, TrackerRun]:
        path = self.folder.trackers
        return storage.read_json(path, dict[str, TrackerRun], error=RunError) if os.path.exists(path) else {}

    def log(self, row: LogValues, alerts: Sequence[str] = (), make_examples: Callable[[], Examples] = dict) -> None:
        """Log a validation, unless a tracker has logged its step before.

        Args:
            row: Row of the log.
            alerts: New alerts.
            make_examples: Makes images of retrieved examples.
        """
        new = [name for name in self.trackers if name not in self.failed and self.runs[name]["step"] < row["step"]]
        if not new:
            return
        entry = Entry(row["step"], _numbers(row), alerts, self._call("retrieved images", make_examples) or {})
        for name in new:
            self.runs[name]["step"] = row["step"]
        # Before the trackers: a training that is killed between both may lose a step, and never logs one twice.
        self._call("trackers", partial(storage.write_json, self.folder.trackers, self.runs))
        for name in new:
            self._call(name, partial(self.trackers[name].log, entry))

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a tracker that has not failed before, without its output, because stdout is for our results."""
        if name in self.failed:
            return None
        try:
            with redirect_stdout(StringIO()):
                return call()
        except Exception as error:  # noqa: BLE001 - a package for tracking can raise anything, also without a connection
            self.failed.add(name)
            self.progress.message(f"training.track: {name} has failed and is not called again. The training continues. {error}")
        return None


def _numbers(row: LogValues) -> dict[str, float]:
    """Finite numbers of a row by ``<group>/<name>``. What is in no group belongs to ``validation``."""
    groups = {key: value for key, value in row.items() if isinstance(value, dict)}
    groups["validation"] = {key: value for key, value in row.items() if key not in groups}
    return {
        f"{group}/{name}": value
        for group, values in groups.items()
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
