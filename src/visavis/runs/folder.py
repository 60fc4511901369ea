"""A run folder: what describes a run, and the way back from it to its data and its best model."""

from __future__ import annotations

from pathlib import Path

import torch

from visavis import storage
from visavis.data.precomp import feature_files
from visavis.data.reading import find_source, is_there
from visavis.errors import RunError
from visavis.memory import Memory, parse_memory
from visavis.models.base import Matcher
from visavis.models.encoding import device_of
from visavis.models.retriever import Retriever
from visavis.progress import Progress
from visavis.runs.record import Record
from visavis.runs.zero_shot import zero_shot_recipe
from visavis.training.data_module import DataModule, open_data_module
from visavis.training.inputs import PRECOMP, check_widths
from visavis.training.recipe import Recipe, build_recipe
from visavis.training.run_files import RunFiles


def open_run(folder: Path, recipe: Recipe, progress: Progress) -> tuple[DataModule, Matcher]:
    """The data of a recipe, and the best model of a run on the recipe's device. Raises RunError if there is no model or no data.

    A run that was trained on CUDA is opened on the CPU where there is none, and says so.
    """
    if not recipe.data.path:
        raise RunError(f"{folder} is a model that was not trained here and brings no data: name a data set with --data.")
    set_threads(recipe)
    if recipe.phases and not (RunFiles(folder).model / "model.safetensors").exists():
        raise RunError(f"{folder} holds no model yet: its training has not come to the first validation.")
    device = recipe.training.device
    if device == "cuda" and not torch.cuda.is_available():
        progress.say(f"{folder} was trained on cuda, which is not here: it goes on on the CPU.")
        device = "cpu"
    model = Retriever.load(folder, device=device)
    data_module = open_data_module(recipe, progress, model.processor)
    check_widths(model.matcher.config, data_module.visual, data_module.text, folder)
    if (environment := RunFiles(folder).environment).exists():
        Record.read(environment).check_encoders(data_module, folder, progress)
    return data_module, model.matcher


def open_peer(folder: Path, first: Matcher) -> Matcher:
    """The second network of a run, where its first one computes. Raises RunError if the run trained one network."""
    peer = RunFiles(folder).peer
    if not (peer / "model.safetensors").exists():
        raise RunError(f"{folder} has no {peer.name}: it trained one network, and there is no second one to average its scores with.")
    return Retriever.load(peer, device=device_of(first)).matcher


def refuse_ensemble(folder: Path) -> None:
    """Raise RunError for the folder of an ensemble, where one run is meant."""
    if RunFiles(folder).ensemble.exists():
        names = sorted(place.name for place in folder.iterdir() if RunFiles(place).recipe.exists())
        raise RunError(
            f"{folder} is an ensemble of {' and '.join(names)}: name one of these runs, such as {folder / names[0] if names else folder}."
        )


def recipe_of(folder: Path, data: str | None = None, memory: Memory = None) -> Recipe:
    """The resolved recipe of a run, or one without phases for a CLIP or SigLIP model.

    data: another data set than its own. memory: another setting than its own. Raises RunError if the folder is none of both, and for other
    data where the run reads features that were stored of its own pictures.
    """
    refuse_ensemble(folder)
    file = RunFiles(folder).recipe
    recipe = build_recipe(storage.read_toml(file), {}, str(file)) if file.exists() else zero_shot_recipe(folder)
    if recipe is None:
        raise RunError(
            f"{folder} is no run folder: expected {file.name} in it, as visavis train writes it, or a CLIP or SigLIP model of transformers."
        )
    if memory is not None:
        recipe = recipe.model_copy(update={"memory": str(parse_memory(memory))})
    if data is None:
        return recipe
    return build_recipe(recipe.to_dict(), {"data.path": data, "visual.features": _features_on(data, recipe, folder)}, str(folder))


def _features_on(data: str, recipe: Recipe, folder: Path) -> str:
    """What a run's ``visual.features`` are on a data set that may be another than its own; "" where its encoder reads the pictures."""
    visual, own = recipe.visual, recipe.data.path
    if visual.view == "experts" or not visual.features:  # a store of experts knows its items by name
        return visual.features
    source = find_source(data)
    if visual.features == PRECOMP:
        return PRECOMP if feature_files(source) or not visual.tower else ""
    if is_there(own) and source.samefile(find_source(own)):
        return visual.features
    if visual.tower:
        return ""
    raise RunError(
        f"{folder} reads features that were stored of the images of {own} ({visual.features}), and none of those of {data}: name its own data "
        '(data.path of its run.toml), or train with visual.tower or visual.features = "precomp", which read others, too.'
    )


def with_whole_paths(recipe: Recipe) -> Recipe:
    """The recipe with its relative paths as absolute ones, so that its run can be used from any folder."""

    def whole(name: str, exists: bool) -> str:
        return str(Path(name).resolve()) if name and exists else name

    data, visual, text, evaluation = recipe.data, recipe.visual, recipe.text, recipe.evaluation
    features = whole(visual.features, visual.features != PRECOMP and Path(visual.features).exists())
    towers = [whole(side.tower, (Path(side.tower) / "config.json").is_file() or side.tower.endswith(".pth")) for side in (visual, text)]
    return recipe.model_copy(
        update={
            "start_from": whole(recipe.start_from, Path(recipe.start_from).exists()),
            "data": data.model_copy(
                update={
                    "path": whole(data.path, Path(data.path).exists()),
                    "judgements": whole(data.judgements, Path(data.judgements).exists()),
                }
            ),
            "visual": visual.model_copy(update={"features": features, "tower": towers[0]}),
            "text": text.model_copy(update={"tower": towers[1], "features": whole(text.features, Path(text.features).is_dir())}),
            "model": {key: whole(value, Path(value).is_file()) if key == "pretrained" else value for key, value in recipe.model.items()},
            "evaluation": evaluation.model_copy(update={"forgetting": whole(evaluation.forgetting, Path(evaluation.forgetting).exists())}),
        }
    )


def set_threads(recipe: Recipe) -> None:
    """Use as many threads as the recipe says."""
    if recipe.training.threads:
        torch.set_num_threads(recipe.training.threads)
