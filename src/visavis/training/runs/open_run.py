"""Opening runs: the recipe, the data and the best model of a run folder or of a pretrained model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.memory_budget import MemoryLimit, parse_memory
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.data.data_paths import path_exists
from visavis.data.dataset_reader import find_source
from visavis.data.features.item_vectors import holds_item_vectors
from visavis.data.formats.published_lists import find_precomp_files
from visavis.data.noise import Noise
from visavis.losses.objectives import Objective
from visavis.models.base import Matcher
from visavis.models.batch_encoding import device_of
from visavis.models.clip.model import CLIP
from visavis.models.encoders.pretrained_files import (
    find_dual_encoder,
    find_embedding_model,
    is_model_folder,
    model_folder,
)
from visavis.models.processor import SavedModelConfig, missing_model, unsupported_content
from visavis.models.retriever import Retriever
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.features import PRECOMP, check_feature_dims
from visavis.training.recipes.open_data import open_data_module
from visavis.training.recipes.recipe import Recipe, build_recipe
from visavis.training.recipes.settings import TextSettings, VisualSettings
from visavis.training.runs.record import RunRecord, flatten_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.supervision import Supervision

# Keys of recipes that may hold a path, and the check that distinguishes a path from a name.
PATH_KEYS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(
        ("start_from", "data.path", "data.feedback", "evaluation.forgetting"), os.path.exists
    ),
    **dict.fromkeys(
        ("visual.encoder", "text.encoder"),
        lambda name: name.endswith(".pth") or is_model_folder(Path(name)),
    ),
    "data.stream": lambda name: (
        "://" not in name and os.path.exists(os.path.dirname(re.split(r"[{*?[]", name)[0]) or name)
    ),
    "visual.features": lambda name: name != PRECOMP and os.path.exists(name),
    "text.features": os.path.exists,
    "model.pretrained": os.path.isfile,
}


def read_run_recipe(folder: Path, data: str | None = None, memory: MemoryLimit = None) -> Recipe:
    """Read the resolved recipe of a run, or build one without phases for a pretrained model."""
    check_single_run(folder)
    file = RunFolder(folder).recipe
    recipe = (
        build_recipe(storage.read_toml(file), {}, str(file))
        if os.path.exists(file)
        else pretrained_recipe(folder)
    )
    if recipe is None:
        raise RunError(
            f"{folder}: expected a run folder with {file.name}, or a dual encoder such as CLIP or "
            f"SigLIP, got {unsupported_content(folder) or 'neither'}. "
            "Pass a folder that visavis train wrote."
        )
    if memory is not None:
        recipe = recipe.model_copy(update={"memory": str(parse_memory(memory))})
    if data is None:
        return recipe
    # Noise and drawn validation images belong to the data of the training.
    overrides: dict[str, Any] = {
        "data.path": data,
        "data.noise": "",
        "visual.features": _features_on(data, recipe, folder),
    }
    if os.path.realpath(data) != os.path.realpath(recipe.data.path):
        overrides["evaluation.random_validation"] = False
    return build_recipe(recipe.to_dict(), overrides, str(folder))


def read_ensemble_recipe(folder: Path) -> Recipe | None:
    """Read the recipe of an ensemble folder. None: another folder."""
    file = RunFolder(folder).ensemble
    return build_recipe(storage.read_toml(file), {}, str(file)) if os.path.exists(file) else None


def expand_ensembles(folders: Sequence[Path]) -> list[Path]:
    """Replace each ensemble folder by the run folders of its members."""
    recipes = {folder: read_ensemble_recipe(folder) for folder in folders}
    return [
        run
        for folder, recipe in recipes.items()
        for run in ([folder / name for name in recipe.members] if recipe else [folder])
    ]


def check_single_run(folder: Path) -> None:
    """Refuse an ensemble folder where one run is expected."""
    if os.path.exists(RunFolder(folder).ensemble):
        names = sorted(
            child.name for child in folder.iterdir() if os.path.exists(RunFolder(child).recipe)
        )
        raise RunError(
            f"{folder}: expected one run, got an ensemble of {' and '.join(names)}. "
            f"Name one of these runs, such as {folder / names[0] if names else folder}."
        )


def pretrained_recipe(name: str | Path) -> Recipe | None:
    """Build a recipe for a pretrained model, without data and without phases. None: there is no such
    model, or it reads stored features only.
    """
    if os.path.isfile(file := Path(name) / "model" / "config.json"):
        config = storage.read_json(file, SavedModelConfig, error=RunError)
        if config.visual is None or config.stored_text_features:
            return None
        architecture = config.architecture
        shared = (
            "crops",
            "image_size",
            "max_num_patches",
            "random_crops",
            "full_decoding",
            "frames_per_second",
        )
        values: dict[str, Any] = {key: getattr(config.visual, key) for key in shared}
        reads_pixels = architecture["visual_granularity"] == "pixels"
        values["granularity"] = "pixels" if reads_pixels else config.visual.granularity
        if config.standardization:
            values["standardize"] = "zscore"  # any value: the model brings its own standardization
        text = config.text.name if config.text else config.tokenizer or "vocabulary"
        return Recipe(
            name=os.path.basename(os.path.realpath(name)),
            visual=VisualSettings(encoder=config.visual.name, **values),
            text=TextSettings(encoder=text, granularity=architecture["text_granularity"]),
            model={"kind": config.kind, **architecture},
            phases=(),
        )
    kind = CLIP.name
    backbone = find_dual_encoder(name)
    if backbone is None:
        kind = "EmbeddingModel"
        backbone = find_embedding_model(name)
    if backbone is None:
        return None
    return Recipe(
        name=Path(backbone).name,
        visual=VisualSettings(encoder=backbone, granularity="pixels"),
        text=TextSettings(encoder=backbone, granularity="tokens"),
        model={"kind": kind, "backbone": backbone},
        phases=(),
    )


def pretrained_dual_encoder(recipe: Recipe) -> str | None:
    """Return the CLIP or SigLIP model that a recipe fine-tunes on both sides. None: it does not."""
    encoder = recipe.visual.encoder
    return (
        encoder
        if encoder and recipe.text.encoder == encoder and find_dual_encoder(model_folder(encoder))
        else None
    )


def open_run(
    folder: Path, recipe: Recipe, progress: Progress, group: ProcessGroup = ONE_PROCESS
) -> tuple[DataModule, Matcher]:
    """Open the data of a recipe and the best model of a run."""
    if not recipe.data.path:
        raise RunError(
            f"{folder}: expected a data set, but the model was not trained here and has none. Name "
            "one with --data."
        )
    set_threads(recipe)
    # The config of a model is written last. Its weights may have been removed.
    if recipe.phases and not (
        os.path.exists(RunFolder(folder).model / "config.json")
        and any(RunFolder(folder).model.rglob("*.safetensors"))
    ):
        raise missing_model(folder)
    # A run that was trained on a GPU is opened on the CPU if this machine has no such GPU.
    device = recipe.training.device
    is_missing = {
        "cuda": not torch.cuda.is_available(),
        "mps": not torch.backends.mps.is_available(),
    }
    if is_missing.get(device):
        name = {"cuda": "CUDA", "mps": "the GPU of an Apple computer"}[device]
        progress.message(f"{folder} was trained on {name}, which is not available. Using the CPU.")
        device = "cpu"
    model = Retriever.load(folder, device=device)
    data_module = open_data_module(recipe, RunContext(progress, group), model.processor)
    check_feature_dims(model.matcher.config, data_module.visual, data_module.text, folder)
    if os.path.exists(environment := RunFolder(folder).environment):
        record = RunRecord.read(environment)
        record.check_code(folder, needed=False)
        record.check_encoders(data_module, folder, progress)
    return data_module, model.matcher


def open_peer_network(folder: Path, first: Matcher) -> Matcher:
    """Open the second network of a run, on the device of the first."""
    peer = RunFolder(folder).peer
    if not os.path.exists(peer / "model.safetensors"):
        raise RunError(
            f"{folder}: expected a second network in {peer.name}, found none. Evaluate this run "
            "without averaging two networks."
        )
    return Retriever.load(peer, device=device_of(first)).matcher


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the existing relative paths of a recipe absolute, so that its run can be used from any
    folder. Features that are vectors with ids become item vectors.
    """
    values = flatten_recipe(recipe.to_dict())
    paths: dict[str, Any] = {
        key: os.path.realpath(values[key])
        for key, is_path in PATH_KEYS.items()
        if values.get(key) and is_path(values[key])
    }
    if recipe.visual.granularity == "pooled" and holds_item_vectors(recipe.visual.features):
        paths["visual.item_vectors"] = True
    sources: dict[str, Supervision | Noise | None] = {
        f"phases.{number}.supervision": phase.supervision
        for number, phase in enumerate(recipe.phases)
    }
    for key, source in (sources | {"data.noise": recipe.data.noise}).items():
        found = {
            name: os.path.realpath(value)
            for name in ([] if source is None else source.path_fields)
            if (value := getattr(source, name)) and os.path.exists(value)
        }
        if found:
            paths[key] = repr(replace(source, **found))  # type: ignore[type-var]
    return build_recipe(recipe.to_dict(), paths, recipe.name)


def set_threads(recipe: Recipe) -> None:
    """Set the number of CPU threads of a recipe."""
    if recipe.training.threads:
        torch.set_num_threads(recipe.training.threads)


def _features_on(data: str, recipe: Recipe, folder: Path) -> str:
    """Return ``visual.features`` of a run for a data set. "" if the encoder reads the images."""
    visual = recipe.visual
    trained_on = recipe.data.path
    if (
        visual.granularity == "experts"
        or holds_item_vectors(visual.features)
        or not visual.features
    ):  # these have their items by name
        return visual.features
    source = find_source(data)
    if visual.features == PRECOMP:
        return PRECOMP if find_precomp_files(source) or not visual.encoder else ""
    if path_exists(trained_on) and os.path.realpath(source) == os.path.realpath(
        find_source(trained_on)
    ):
        return visual.features
    if visual.encoder:
        return ""
    raise RunError(
        f"{folder}: expected the data set {trained_on}, whose stored features the run reads "
        f"({visual.features}), got {data}. Use the data "
        'of the run (data.path of run.toml), or train with visual.encoder or visual.features = "precomp".'
    )


def at_learned_scale(objective: Objective, matcher: Matcher) -> Objective:
    """Set the scale and the bias of an objective to those that a model has learned."""
    if matcher.scale is not None:
        objective = objective.with_scale(matcher.scale().item()) or objective
    if matcher.logit_bias is not None:
        objective = objective.with_bias(matcher.logit_bias.item()) or objective
    return objective
