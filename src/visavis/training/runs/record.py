"""Run records: fingerprints of everything that a run depends on, so that it resumes with the same
inputs or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visavis.core import storage
from visavis.core.environment import git_hash, package_versions
from visavis.core.errors import RunError
from visavis.core.own_code import code_hashes
from visavis.core.progress import Progress
from visavis.data.dataset import ContentFingerprint
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.features.expert_store import ExpertStore, RegionFeatures
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.features.store import FeatureStore
from visavis.data.image_file import ByteRange
from visavis.data.noise import noise_index
from visavis.models.base import Matcher
from visavis.models.encoders.cnn_backbones import published_backbone_name
from visavis.models.encoders.pretrained_files import model_files, weights_checksum
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.initial_model import start_model_files
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.run_folder import RunFolder

ENCODER_INPUTS = ("image_encoder", "text_encoder")

# Keys of a run's recipe that may change: they do not affect a step, or their content has a
# fingerprint.
CHANGEABLE_KEYS = (
    "name", "about", "published", "memory", "start_from",
    "data.path", "data.stream", "data.requires", "data.feedback",
    "visual.features", "text.features",
    "training.threads", "training.device", "training.checkpoint_s", "training.workers", "training.track", "training.gradients_every",
    "evaluation.protocol", "evaluation.test", "evaluation.sections", "evaluation.extra_metrics", "evaluation.average_networks",
    "evaluation.forgetting",
)  # fmt: skip


def fingerprint_inputs(
    data_module: DataModule, progress: Progress, only: Container[str] | None = None
) -> dict[str, ContentFingerprint]:
    """Compute a fingerprint of each input of a training, or of the inputs in ``only``."""
    recipe = data_module.recipe
    data = data_module.data
    vocabulary = data_module.processor.vocabulary
    files: dict[str, dict[str, ByteRange]] = {}
    hashes: dict[str, str] = {}
    if data_module.feedback is not None:
        hashes["feedback"] = data_module.feedback.fingerprint
    if isinstance(data_module.visual, ItemVectors):
        if only is None or "stored_features" in only:
            # An index may grow. The vectors of the data set's images must stay.
            names = [image.name for image in data.images]
            hashes["stored_features"] = data_module.visual.content_hash(names)
    elif isinstance(data_module.visual, ExpertStore | RegionFeatures):
        hashes["stored_features"] = data_module.visual.sha256
    elif isinstance(data_module.visual, ArrayFeatures):
        files["stored_features"] = _numbered(data_module.visual.files)
    elif data.is_lazy:
        # Millions of files are not read before a training. The list has a hash.
        hashes["images"] = data.fingerprint
    else:
        files["images"] = {
            image.name: image.location for image in data.images if image.location is not None
        }
    if data_module.stream is not None:
        hashes["stream"] = data_module.stream.fingerprint
    if isinstance(data_module.text, ArrayFeatures):
        files["stored_caption_features"] = _numbered(data_module.text.files)
    sides = ((data_module.visual, recipe.visual.encoder), (data_module.text, recipe.text.encoder))
    for name, (features, encoder) in zip(ENCODER_INPUTS, sides, strict=True):
        if isinstance(features, FeatureStore):
            hashes[name] = features.description.weights_checksum
        elif features is None and (only is None or name in only):
            files[name] = _numbered(model_files(encoder))
    if vocabulary is not None:
        hashes["vocabulary"] = hashlib.sha256(json.dumps(vocabulary.words).encode()).hexdigest()[
            :32
        ]
    if only is None:
        files["start_model"] = _numbered(start_model_files(recipe))
        for number, phase in enumerate(recipe.phases):
            files[f"phases.{number}.supervision"] = _numbered(phase.supervision.files(data))

    def read(name: str, locations: Mapping[str, ByteRange]) -> ContentFingerprint:
        return ContentFingerprint.compute(
            locations, lambda done, total: progress.update(f"reading {name}", done, total, 0.0)
        )

    selected = [*files, *hashes] if only is None else only
    return {
        name: read(name, locations)
        for name, locations in files.items()
        if locations and name in selected
    } | {
        name: ContentFingerprint(1, content, content)
        for name, content in hashes.items()
        if name in selected
    }


def flatten_recipe(value: Any, key: str = "") -> dict[str, Any]:
    """Collect the values of a recipe by dotted key. A list is one value, except the list of phases."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {
        path: leaf
        for name, item in value.items()
        for path, leaf in flatten_recipe(item, f"{key}.{name}" if key else name).items()
    }


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything besides the code that a run depends on, as ``environment.json``.

    Attributes:
        threads: CPU threads.
        data_fingerprint: Fingerprint of the images' names and the captions.
        versions: Versions of the installed packages.
        git_commit: Commit of the code. None outside a repository.
        device: Device setting of the recipe.
        cuda: Name of the GPU: of the CUDA device, or "mps". None without one.
        seed: Seed of the run.
        data_skipped: Skipped parts of the data set.
        images: Number of images.
        captions: Number of captions.
        parameters: Number of parameters of the model.
        recipe: Resolved recipe as plain values.
        inputs: Fingerprints of the inputs, see ``fingerprint_inputs``.
        initial_weights_checksum: Checksum of the weights before the first step.
        noise_index: Hash of the assignment of training captions to images, see
            ``visavis.data.noise.noise_index``. "": without noise.
        code: SHA-256 of each source of own parts, by its file name or package.
        auto: Objectives with a value of "auto" by key, before the training measured it.
    """

    threads: int
    data_fingerprint: str
    versions: dict[str, str]
    git_commit: str | None
    device: str
    cuda: str | None
    seed: int
    data_skipped: list[str]
    images: int
    captions: int
    parameters: int
    recipe: dict[str, Any]
    inputs: dict[str, ContentFingerprint]
    initial_weights_checksum: str
    noise_index: str = ""
    code: dict[str, str] = field(default_factory=dict)
    auto: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_training(
        cls,
        data_module: DataModule,
        matcher: Matcher,
        progress: Progress,
        planned: Recipe | None = None,
    ) -> RunRecord:
        """Record a training before its first step. ``planned`` is its recipe before each "auto" was
        measured. None: nothing was.
        """
        recipe = data_module.recipe
        data = data_module.data
        return cls(
            threads=torch.get_num_threads(),
            data_fingerprint=data.fingerprint,
            versions=package_versions(),
            git_commit=git_hash(),
            device=recipe.training.device,
            cuda=_gpu_name(),
            seed=recipe.seed,
            data_skipped=list(data.skipped),
            images=len(data.images),
            captions=len(data.captions),
            parameters=sum(parameter.numel() for parameter in matcher.parameters()),
            recipe=recipe.to_dict(),
            inputs=fingerprint_inputs(data_module, progress),
            initial_weights_checksum=weights_checksum(matcher),
            noise_index="" if recipe.data.noise is None else noise_index(data),
            code=code_hashes(json.dumps(recipe.to_dict())),
            auto={
                f"phases.{number}.objective": repr(phase.objective)
                for number, phase in enumerate((planned or recipe).phases)
                if phase.objective.auto_fields
            },
        )

    @classmethod
    def read(cls, file: Path) -> RunRecord:
        """Read a record."""
        return storage.read_json(file, cls, error=RunError)

    def check_recipe(self, recipe: Recipe, folder: RunFolder) -> None:
        """Check that no key of a run's recipe changed that affects the training."""
        recorded = flatten_recipe(self.recipe)
        current = flatten_recipe(recipe.to_dict())
        for key in dict.fromkeys((*recorded, *current)):
            if recorded.get(key) != current.get(key) and key not in CHANGEABLE_KEYS:
                raise RunError(
                    f"{folder.recipe}: {key}: expected {_describe(recorded.get(key))} as at the "
                    "start of the run, got "
                    f"{_describe(current.get(key))}. Restore the value, or start a new run."
                )

    def check_code(self, path: Path, *, needed: bool = True) -> None:
        """Check that the user named the code of the run's own parts, and that it is unchanged. Not
        ``needed``: only the code that the user named is checked.
        """
        named = code_hashes()
        for source, recorded in self.code.items():
            if source not in named and needed:
                raise RunError(
                    f"{path}: expected its own code {source}, which a run never executes by itself. "
                    f"Name it again: visavis --code {source}, or visavis.allow_code({source!r})."
                )
            if named.get(source, recorded) != recorded:
                raise RunError(
                    f"{path}: {source} changed since the run began, or a module in its folder that "
                    "it imports. Restore it, or start a new run."
                )

    def check_initial_weights(self, matcher: Matcher, path: Path) -> None:
        """Check that a model has the initial weights of the run."""
        if weights_checksum(matcher) != self.initial_weights_checksum:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            raise RunError(
                f"{path}: initial weights could not be reproduced (checksum mismatch). Install "
                f"{versions}, restore the run or encoder that "
                "it starts from, and retry."
            )

    def check_data(self, data_module: DataModule, path: Path, progress: Progress) -> None:
        """Check that all inputs of a run are unchanged."""
        source = data_module.recipe.data.path
        if self.data_fingerprint != data_module.data.fingerprint:
            raise RunError(
                f"{path}: the data at {source} changed since the run began. Restore the data, or "
                "start a new run."
            )
        current = fingerprint_inputs(data_module, progress)
        for name in (*self.inputs, *current):
            before, now = (
                inputs[name].content_hash if name in inputs else None
                for inputs in (self.inputs, current)
            )
            if before != now:
                raise RunError(
                    f"{path}: {name} changed since the run began (data: {source}). Restore it, or "
                    "start a new run."
                )

    def check_encoders(self, data_module: DataModule, path: Path, progress: Progress) -> None:
        """Check that the encoders that are not part of the saved model equal the encoders of the training."""
        visual = data_module.recipe.visual
        processor = data_module.processor
        is_trained = visual.granularity == "pixels" and published_backbone_name(visual.encoder)
        is_saved = (is_trained or processor.visual_encoder_folder, processor.tokenizer_folder)
        external = [name for name, saved in zip(ENCODER_INPUTS, is_saved, strict=True) if not saved]
        for name, now in fingerprint_inputs(data_module, progress, external).items():
            if name in self.inputs and now.content_hash != self.inputs[name].content_hash:
                raise RunError(
                    f"{path}: {name} changed since the training. Restore its weights, or train "
                    "again."
                )

    def warn_about_environment(self, progress: Progress) -> None:
        """Warn about versions, devices and threads that changed, because they affect the last
        digits of results.
        """
        changed = [
            f"{name} {self.versions[name]} (now {version})"
            for name, version in package_versions().items()
            if self.versions.get(name, version) != version
        ]
        if changed:
            progress.message(
                f"This run began with {', '.join(changed)}. The result may differ from that of one "
                "version."
            )
        before, now = (name or "the CPU" for name in (self.cuda, _gpu_name()))
        if self.device != "cpu" and before != now:
            progress.message(
                f"This run began on {before} and resumes on {now}. The last digits of the result "
                "will differ."
            )
        if self.threads != torch.get_num_threads():
            progress.message(
                f"This run began with {self.threads} threads and resumes with "
                f"{torch.get_num_threads()}. The last digits of the result will "
                f"differ. Set training.threads or OMP_NUM_THREADS={self.threads} for an identical "
                "result."
            )


def _numbered(files: Iterable[Path]) -> dict[str, ByteRange]:
    """Files by number and name, so that their folder does not matter."""
    return {f"{number} {file.name}": ByteRange(file) for number, file in enumerate(files)}


def _gpu_name() -> str | None:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "mps" if torch.backends.mps.is_available() else None


def _describe(value: Any) -> str:
    return "no value" if value is None else repr(value)
