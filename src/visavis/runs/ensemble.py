"""Several runs used together: what they must share so that the mean of their scores means something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.errors import RunError, shown
from visavis.memory import Memory
from visavis.runs.folder import recipe_of
from visavis.training.recipe import Recipe, build_recipe
from visavis.training.run_files import RunFiles

OPTIONS = {"evaluation.test": "split", "evaluation.protocol": "protocol", "evaluation.degrees": "degrees"}
"""Keys of recipes that an evaluation may be given otherwise, and how."""


def ensemble_of(folder: Path) -> Recipe | None:
    """The recipe of an ensemble; None for any other folder."""
    file = RunFiles(folder).ensemble
    return build_recipe(storage.read_toml(file), {}, str(file)) if file.exists() else None


def members_of(folders: Sequence[Path]) -> list[Path]:
    """Runs, with the members of an ensemble instead of its folder."""
    named = {folder: ensemble_of(folder) for folder in folders}
    return [run for folder, recipe in named.items() for run in ([folder / name for name in recipe.members] if recipe else [folder])]


def recipes_of(folders: Sequence[Path], data: str | None = None, memory: Memory = None) -> dict[Path, Recipe]:
    """The recipes of runs, those of the members of an ensemble; a CLIP or SigLIP model among them reads the data of the first that was trained here.

    data, memory: instead of their own. Raises RunError for a folder that is neither, and if there is none.
    """
    if not folders:
        raise RunError("there is no run: name at least one run folder.")
    recipes = {folder: recipe_of(folder, data, memory) for folder in members_of(folders)}
    known = next((recipe.data.path for recipe in recipes.values() if recipe.data.path), None)
    return {folder: recipe if recipe.data.path else recipe_of(folder, known, memory) for folder, recipe in recipes.items()}


def agreed(recipes: Mapping[Path, Recipe], key: str, given: Any) -> Any:
    """What an evaluation goes by: as given, or as the recipes of all trained runs say. Raises RunError where they differ."""
    if given is not None:
        return given
    trained = {folder: recipe for folder, recipe in recipes.items() if recipe.phases} or recipes
    said = {folder: reduce(getattr, key.split("."), recipe) for folder, recipe in trained.items()}
    (first, value), *others = said.items()
    for folder, other in others:
        if other != value:
            raise RunError(f"{key} is {value!r} in {first} and {other!r} in {folder}: choose one with --{OPTIONS[key]}.")
    return value


def check_same_captions(splits: Mapping[Path, Dataset]) -> None:
    """Raise RunError unless what each run is evaluated on has the same captions in the same order, of the same images by number.

    Names of images are not compared: they differ between layouts of the same data.
    """
    (first, known), *others = splits.items()
    for folder, split in others:
        if split.captions == known.captions and np.array_equal(split.image_of, known.image_of):
            continue
        raise RunError(
            f"{folder} is evaluated on other data than {first}, {_difference(split, known)}: the scores of several runs are averaged over the "
            "same images and captions; name runs on the same data and split, or one data set for all with --data."
        )


def _difference(split: Dataset, known: Dataset) -> str:
    sizes = [f"{len(part.images):,} images with {len(part.captions):,} captions" for part in (split, known)]
    if sizes[0] != sizes[1]:
        return f"{sizes[0]} instead of {sizes[1]}"
    differs = zip(split.captions, known.captions, split.image_of, known.image_of, strict=True)
    number, own, other = next((i, one, two) for i, (one, two, *images) in enumerate(differs) if one != two or images[0] != images[1])
    return (
        f"where caption {number} is {shown(own)} instead of {shown(other)}"
        if own != other
        else f"where caption {number} is of another image"
    )
