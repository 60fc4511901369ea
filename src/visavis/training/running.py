"""A run from its recipe to its result, and back from its folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visavis import spec, storage, supervision
from visavis.environment import git_hash, versions
from visavis.errors import RunError, VisavisError
from visavis.evaluation import Evaluation
from visavis.models.base import Matcher
from visavis.models.retriever import Retriever
from visavis.training.checkpoint import Checkpoint
from visavis.training.material import Material, open_material, prepare
from visavis.training.recipe import Recipe, build_recipe, read_recipe
from visavis.training.schedule import make_optimizer
from visavis.training.trainer import Trainer
from visavis.watch import Watch


@dataclass(frozen=True)
class Trained:
    """What a training ended with. targets: how positives are told ("ids", "position"). test: None without a test split.

    seconds: of training steps and validations in all; cache_seconds: of opening data and computing features before.
    """

    folder: Path
    objective: str
    targets: str
    best_step: int
    validation_rsum: float
    test: Evaluation | None
    seconds: float
    cache_seconds: float

    def to_json(self) -> dict[str, Any]:
        """One flat object; the test metrics by their keys."""
        facts = {name: getattr(self, name) for name in ("objective", "targets", "best_step", "validation_rsum", "seconds", "cache_seconds")}
        return {"run": str(self.folder), **facts, **({} if self.test is None else self.test.to_json())}


def begin_run(name: str | Path, overrides: dict[str, Any], out: str | Path | None, watch: Watch) -> Trained:
    """A new run in a new folder; one that fails before its first checkpoint leaves no folder behind."""
    recipe = with_whole_paths(read_recipe(name, overrides))
    if out is not None and (Path(out) / "run.toml").exists():
        raise RunError(f"{out} holds a run already: go on with it by --resume {out}, or name another folder.")
    threads(recipe)
    started = time.perf_counter()
    material, matcher = prepare(recipe, watch)
    for phase in recipe.phases:
        make_optimizer(matcher, phase)  # raises for a part that the model does not have, also in the last phase
    cache_seconds = time.perf_counter() - started
    folder = storage.numbered_folder(Path("runs") / recipe.name) if out is None else storage.new_folder(out)
    with storage.replacing_folder(folder) as part:
        storage.write_toml(part / "run.toml", recipe.to_dict())
        storage.write_json(part / "environment.json", environment(material, matcher))
    try:
        with storage.alone(folder / "run", wait=False):
            return finish(material, matcher, folder, cache_seconds, watch)
    except VisavisError:
        if Checkpoint.latest(folder) is None:
            storage.remove_folder(folder)
        raise


def continue_run(folder: Path, watch: Watch) -> Trained:
    """Go on with a stopped run. Raises RunError if the folder is no run, or if its data have changed."""
    recipe = recipe_of(folder)
    with storage.alone(folder / "run", wait=False):
        storage.remove_parts(folder)
        recorded = storage.read_json(folder / "environment.json")
        if not isinstance(recorded, dict) or not {"threads", "data_fingerprint"} <= recorded.keys():
            raise RunError(f"{folder / 'environment.json'} is damaged: start a new run, or bring the old file back.")
        threads(recipe)
        if recorded["threads"] != torch.get_num_threads():
            watch.say(
                f"this run was trained with {recorded['threads']} threads and goes on with {torch.get_num_threads()}: "
                f"the result will differ in the last digits; set training.threads or OMP_NUM_THREADS={recorded['threads']} for the very same."
            )
        started = time.perf_counter()
        material, matcher = prepare(recipe, watch)
        if recorded["data_fingerprint"] != material.data.fingerprint:
            raise RunError(
                f"the data at {recipe.data.path} have changed since {folder} began: start a new run, or bring the old data back."
            )
        return finish(material, matcher, folder, time.perf_counter() - started, watch)


def finish(material: Material, matcher: Matcher, folder: Path, cache_seconds: float, watch: Watch) -> Trained:
    """Train to the end, evaluate the best weights on the test split, write ``result.json``."""
    recipe = material.recipe
    trainer = Trainer(material, matcher, folder, watch)
    watch.say(
        f"{folder}: {recipe.phases[0].objective}, positives by {targets_of(recipe)}, {len(trainer.train.data.captions):,} training captions"
    )
    place = trainer.run()
    matcher.load_state_dict(trainer.best)
    test = None
    if recipe.evaluation.test in material.data.splits:
        test = material.evaluate(matcher, recipe.evaluation.test, recipe.evaluation.protocol, recipe.evaluation.degrees)
    seconds = place.seconds + sum(row["time"]["validation_s"] for row in trainer.log)
    trained = Trained(
        folder,
        recipe.phases[-1].objective,
        targets_of(recipe),
        place.best_step,
        place.best_rsum,
        test,
        round(seconds, 1),
        round(cache_seconds, 1),
    )
    storage.write_json(folder / "result.json", trained.to_json())
    return trained


def evaluate_run(
    folder: Path,
    protocol: str | None,
    split: str | None,
    data: str | None,
    watch: Watch,
    degrees: str | None = None,
    semantics: str = "reference",
) -> Evaluation:
    """The best model of a run on a split, of its own data or of others."""
    recipe = recipe_of(folder)
    degrees = recipe.evaluation.degrees if degrees is None else degrees
    if data is not None:
        recipe = build_recipe(recipe.to_dict(), {"data.path": data, "vision.features": ""}, str(folder))
    own = data is None and split in (None, recipe.evaluation.test)
    material, matcher = open_run(folder, recipe, watch)
    protocol = protocol or (recipe.evaluation.protocol if own else "plain")
    return material.evaluate(matcher, split or recipe.evaluation.test, protocol, degrees, semantics)


def open_run(folder: Path, recipe: Recipe, watch: Watch) -> tuple[Material, Matcher]:
    """The material of a recipe and the best weights of a run. Raises RunError if it has none yet."""
    threads(recipe)
    if not (folder / "model" / "model.safetensors").exists():
        raise RunError(f"{folder} holds no model yet: its training has not come to the first validation.")
    model = Retriever.load(folder)
    return open_material(recipe, watch, model.front.vocabulary), model.matcher


def recipe_of(folder: Path) -> Recipe:
    """The resolved recipe of a run. Raises RunError if the folder is none."""
    if not (folder / "run.toml").exists():
        raise RunError(f"{folder} is no run folder: expected run.toml in it, as visavis train writes it.")
    return build_recipe(storage.read_toml(folder / "run.toml"), {}, str(folder / "run.toml"))


def with_whole_paths(recipe: Recipe) -> Recipe:
    """The recipe with its relative paths as absolute ones, so that its run can be used from any folder."""

    def whole(name: str, found: bool) -> str:
        return str(Path(name).resolve()) if name and found else name

    data, vision, text = recipe.data, recipe.vision, recipe.text
    features = whole(vision.features, Path(vision.features).is_file())
    towers = [whole(side.tower, (Path(side.tower) / "config.json").is_file()) for side in (vision, text)]
    return recipe.model_copy(
        update={
            "data": data.model_copy(update={"path": whole(data.path, Path(data.path).exists())}),
            "vision": vision.model_copy(update={"features": features, "tower": towers[0]}),
            "text": text.model_copy(update={"tower": towers[1]}),
        }
    )


def targets_of(recipe: Recipe) -> str:
    """How positives are told in a recipe's phases: "ids" or "position", or both."""
    kinds = dict.fromkeys(getattr(spec.parse(phase.supervision, supervision.CATALOG), "by", "its own rule") for phase in recipe.phases)
    return " then ".join(kinds)


def threads(recipe: Recipe) -> None:
    """Use as many threads as the recipe says."""
    if recipe.training.threads:
        torch.set_num_threads(recipe.training.threads)


def environment(material: Material, matcher: Matcher) -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    return {
        "versions": versions(),
        "git": git_hash(),
        "threads": torch.get_num_threads(),
        "device": material.recipe.training.device,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": material.recipe.seed,
        "data_fingerprint": material.data.fingerprint,
        "data_skipped": list(material.data.skipped),
        "images": len(material.data.images),
        "captions": len(material.data.captions),
        "parameters": sum(parameter.numel() for parameter in matcher.parameters()),
    }
