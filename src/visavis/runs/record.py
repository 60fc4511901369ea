"""What a run was begun with, so that it goes on with the very same or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visavis import storage
from visavis.data.contents import Contents
from visavis.environment import git_hash, versions
from visavis.errors import RunError
from visavis.models.base import Matcher
from visavis.models.pretrained import weights_checksum
from visavis.models.published_files import published_name
from visavis.progress import Progress
from visavis.runs.inputs import ENCODERS, inputs_of
from visavis.training.data_module import DataModule
from visavis.training.recipe import Recipe, build_recipe
from visavis.training.run_files import RunFiles

FREE = (
    "name", "about", "published", "memory", "start_from", "data.path", "data.judgements",
    "visual.features", "text.features", "training.threads", "training.device",
    "training.checkpoint_s",
    "evaluation.protocol", "evaluation.test", "evaluation.degrees", "evaluation.report", "evaluation.average", "evaluation.forgetting", "data.needs",
)  # fmt: skip
"""Keys that may be changed in the recipe of a run: what they change is no step of the training, or is told by its content."""


@dataclass(frozen=True)
class Record:
    """What a run depends on besides the code; older runs recorded less.

    recipe: resolved. inputs: what is read, by what it is. start: a checksum of the weights before the first step. The rest: the machine and the
    installation, and what the data were like.
    """

    threads: int
    data_fingerprint: str
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None
    device: str = ""
    cuda: str | None = None
    seed: int = 0
    data_skipped: list[str] = field(default_factory=list)
    images: int = 0
    captions: int = 0
    parameters: int = 0
    recipe: dict[str, Any] | None = None
    inputs: dict[str, Contents] = field(default_factory=dict)
    start: str = ""

    @classmethod
    def of(cls, data_module: DataModule, matcher: Matcher, progress: Progress) -> Record:
        """Of a run that begins."""
        recipe, data = data_module.recipe, data_module.data
        return cls(
            threads=torch.get_num_threads(),
            data_fingerprint=data.fingerprint,
            versions=versions(),
            git=git_hash(),
            device=recipe.training.device,
            cuda=_cuda(),
            seed=recipe.seed,
            data_skipped=list(data.skipped),
            images=len(data.images),
            captions=len(data.captions),
            parameters=sum(parameter.numel() for parameter in matcher.parameters()),
            recipe=recipe.to_dict(),
            inputs=inputs_of(data_module, {}, progress),
            start=weights_checksum(matcher),
        )

    @classmethod
    def read(cls, file: Path) -> Record:
        """Raises RunError for a file that holds none."""
        return storage.read_json(file, cls, error=RunError)

    def check_recipe(self, recipe: Recipe, files: RunFiles) -> None:
        """Raise RunError naming the first key of a run's recipe that is no longer what it was, and matters."""
        if self.recipe is None:
            return
        before = dict(_flat(build_recipe(self.recipe, {}, f"{files.environment}, recipe").to_dict()))
        now = dict(_flat(recipe.to_dict()))
        for key in dict.fromkeys((*before, *now)):
            if before.get(key) != now.get(key) and key not in FREE:
                raise RunError(
                    f"{files.recipe}: {key} is {_told(now.get(key))}, and was {_told(before.get(key))} when the run began: a run keeps its recipe; "
                    "write it as it was, or start a new run."
                )

    def check_start(self, matcher: Matcher, folder: Path, progress: Progress) -> None:
        """Raise RunError if a matcher's weights are not those that the run began with."""
        if not self.start:
            progress.say(f"{folder} was begun when runs did not record their first weights: those of its seed are taken, unchecked.")
        elif weights_checksum(matcher) != self.start:
            made_with = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            raise RunError(
                f"{folder}: what its training began with cannot be made anew, its recipe gives other weights here: bring back {made_with}, and "
                "the run or encoder that it starts from."
            )

    def check_data(self, data_module: DataModule, folder: Path, progress: Progress) -> None:
        """Raise RunError if what the run reads is no longer what it read."""
        path = data_module.recipe.data.path
        if self.data_fingerprint != data_module.data.fingerprint:
            raise RunError(f"the data at {path} have changed since {folder} began: start a new run, or bring the old data back.")
        if not self.inputs:
            return
        now = inputs_of(data_module, self.inputs, progress)
        for what in (*self.inputs, *now):
            contents = [inputs[what].content if what in inputs else None for inputs in (self.inputs, now)]
            if contents[0] != contents[1]:
                raise RunError(f"{what} changed since {folder} began (data: {path}): start a new run, or bring back what was read then.")

    def check_encoders(self, data_module: DataModule, folder: Path, progress: Progress) -> None:
        """Raise RunError if an encoder is no longer the one through which the model learned to read."""
        visual, processor = data_module.recipe.visual, data_module.processor
        trained = visual.view == "pixels" and published_name(visual.tower)
        with_the_model = (trained or processor.tower_folder, processor.tokenizer_folder)
        among = [encoder for encoder, kept in zip(ENCODERS, with_the_model, strict=True) if not kept]
        for what, now in inputs_of(data_module, self.inputs, progress, among).items():
            if what in self.inputs and now.content != self.inputs[what].content:
                raise RunError(f"{what} is not the one that {folder} was trained with: bring its old weights back, or train anew.")

    def say_differences(self, progress: Progress) -> None:
        """Say what the results depend on in their last digits and is no longer the same."""
        others = [
            f"{name} {self.versions[name]} (now {version})"
            for name, version in versions().items()
            if self.versions.get(name, version) != version
        ]
        if others:
            progress.say(f"this run was begun with {', '.join(others)}: the result may differ from that of one version.")
        devices = [name or "the CPU" for name in (self.cuda, _cuda())]
        if self.versions and self.device != "cpu" and devices[0] != devices[1]:
            progress.say(f"this run was trained on {devices[0]} and goes on on {devices[1]}: the result will differ in the last digits.")
        if self.threads != torch.get_num_threads():
            progress.say(
                f"this run was trained with {self.threads} threads and goes on with {torch.get_num_threads()}: "
                f"the result will differ in the last digits; set training.threads or OMP_NUM_THREADS={self.threads} for the very same."
            )


def _cuda() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a recipe with their values; a list is a value, but for that of phases."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


def _told(value: Any) -> str:
    return "not set" if value is None else repr(value)
