"""What a recipe's model reads: the data set, features of its images and captions, and how new pictures and sentences are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.captions import Vocabulary
from visavis.data.dataset import Dataset
from visavis.data.experts import ExpertStore
from visavis.data.features import FeatureStore
from visavis.data.finite import first_broken_row
from visavis.data.loader import Features
from visavis.data.own_features import ArrayFeatures, PrecompFeatures
from visavis.data.reading import data_folder, find_file, find_source, is_there, open_dataset
from visavis.data.region_features import RegionFeatures
from visavis.errors import DataError, RecipeError, RunError
from visavis.models.base import MatcherConfig, vectors
from visavis.models.caching import cache_features
from visavis.models.processor import Processor
from visavis.models.towers import TowerSpec
from visavis.progress import Progress
from visavis.training.recipe import Recipe
from visavis.training.settings import VisualSettings

PRECOMP = "precomp"
"""``visual.features`` of this name: those that the data set itself stores, in the layout of the VSE++ family, or as a store of experts."""


def open_data(recipe: Recipe, progress: Progress, *, skip_bad: bool) -> Dataset:
    """The data set of a recipe, every image looked at once unless stored features stand for the images."""
    if not recipe.data.path:
        raise RecipeError("the recipe names no data: give data.path, or --data on the command line.")
    pixels = recipe.visual.view == "pixels" or not recipe.visual.features
    check_data_there(recipe)
    return open_dataset(
        recipe.data.path,
        skip_bad=skip_bad,
        pixels=pixels,
        rate=recipe.visual.frames_per_second,
        whole=recipe.data.skip_bad,
        on_progress=lambda done, total: progress.work("checking images", done, total, 0.0),
    )


def as_trained_on(recipe: Recipe, data: Dataset) -> Dataset:
    """The data set with as few training images and captions as the recipe learns from, and as many of them in the wrong place."""
    data = data.fewer(recipe.data.training_images, recipe.data.training_captions, recipe.seed)
    return data.misplaced(recipe.data.misplaced, recipe.seed) if recipe.data.misplaced else data


def check_data_there(recipe: Recipe) -> None:
    """Refuse, with a DataError, a recipe that says which files it needs where there is nothing of their name."""
    if recipe.data.needs and not is_there(recipe.data.path):
        root = data_folder()
        raise DataError(
            f"{recipe.published or recipe.name} needs {recipe.data.needs}; there is no {recipe.data.path}, neither here nor "
            + (f"under VISAVIS_DATA ({root})" if root else "under VISAVIS_DATA, which is not set")
            + ": put it there, or name where it is with --data."
        )


def visual_features(recipe: Recipe, data: Dataset, progress: Progress) -> tuple[Features | None, TowerSpec | None]:
    """The features of a data set's images (None: the model reads pixels) and their tower (None: only stored ones are known)."""
    visual = recipe.visual
    if visual.view == "experts":
        folder = experts_beside(recipe.data.path) if visual.features == PRECOMP else _stored("visual.features", visual.features)
        store = ExpertStore.open(folder, visual.experts, longest=visual.longest)
        store.refuse_shared(image.name for image in data.images)
        return store, None
    if not visual.tower and (visual.view == "pixels" or not visual.features):
        raise RecipeError("visual.tower is empty: name the encoder of the images, or stored features in visual.features.")
    view: Any = "grid" if visual.view == "pixels" else visual.view
    details = (visual.crops, visual.frames_per_second, visual.size, visual.random_crops)
    tower = TowerSpec("visual", visual.tower, view, *details) if visual.tower else None
    if visual.view == "pixels":
        return None, tower
    if visual.features == PRECOMP:
        return _fitting(PrecompFeatures(find_source(recipe.data.path)), visual), tower
    if visual.features:
        stored = _stored("visual.features", visual.features)
        return _regions(visual, stored, progress) if _by_ids(stored) else _fitting(ArrayFeatures.open(stored, data), visual), tower
    assert tower is not None
    return cache_features(data, tower, on_progress=_told(progress, "image features")), tower


def experts_beside(path: str) -> Path:
    """The store of experts that a data set brings: the folder ``experts`` in its own."""
    source = find_source(path)
    return (source if source.is_dir() else source.parent) / "experts"


def _stored(key: str, name: str) -> Path:
    """Where stored features lie. Raises DataError with the key that says so."""
    try:
        return find_file(name)
    except DataError as error:
        raise DataError(f"{key} names what is not here: say where it lies with {key}=PATH, or in the run.toml of a run; {error}") from None


def _by_ids(path: Path) -> bool:
    """Whether features stand by the ids of images, not by rows."""
    return path.is_dir() or ".tsv" in path.suffixes


def _regions(visual: VisualSettings, path: Path, progress: Progress) -> RegionFeatures:
    """Features of regions by the ids of images. Raises RecipeError if the recipe does not read them as such."""
    if visual.view != "grid" or visual.crops > 1:
        raise RecipeError(f'{visual.features} holds regions by the ids of images: set visual.view = "grid", and no visual.crops.')
    stored = RegionFeatures.open(path, lambda done, total: progress.work("converting features of regions", done, total, 0.0))
    if visual.standardize and stored.ragged:
        raise RecipeError(
            f"{visual.features} holds regions of unequal number an image, which visual.standardize does not count: leave it out."
        )
    return stored


def _fitting(stored: ArrayFeatures | PrecompFeatures, visual: VisualSettings) -> Features:
    """Stored features, if an image's have the axes that the recipe's view and crops say. Raises RecipeError."""
    axes = [*(["crops"] if visual.crops > 1 else []), *(["regions"] if visual.view == "grid" else []), "width"]
    shape = list(vectors(stored.read(np.arange(1))).shape[1:])
    if len(shape) != len(axes):
        raise RecipeError(f"{visual.features} holds features of shape {shape} an image, expected {' x '.join(axes)}: see visual.view.")
    if (row := first_broken_row(stored)) is not None:
        raise RecipeError(f"{stored.place(row)} holds features that are not finite: compute them again.")
    return stored


def text_features(
    recipe: Recipe, data: Dataset, progress: Progress, trained: Processor | None, visual: TowerSpec | None, sentences: Sequence[str] = ()
) -> tuple[Features | None, Processor]:
    """The features of a data set's captions (None: the model reads tokens), and how new pictures and sentences are read.

    sentences: further ones whose words are learned.
    """
    text = recipe.text
    if text.features:
        store = FeatureStore.open(_stored("text.features", text.features))
        if (store.description.side, store.description.view) != ("text", text.view):
            kind = f"{store.description.view} of the {store.description.side} side"
            raise RecipeError(f"{text.features} holds {kind}, expected {text.view} of captions: see text.view.")
        return store, Processor(visual, None, None, stored_texts=True)
    if text.tower == "vocabulary":
        return None, Processor(
            visual,
            None,
            (trained and trained.vocabulary) or _vocabulary(as_trained_on(recipe, data).split("train"), sentences, text.min_count),
        )
    if text.view == "tokens":
        return None, Processor(visual, None, None, text.tower, tokenizer_folder=trained.tokenizer_folder if trained else None)
    tower = TowerSpec("text", text.tower, text.view)
    return cache_features(data, tower, on_progress=_told(progress, "caption features")), Processor(visual, tower, None)


def check_widths(config: MatcherConfig, visual: Features | None, text: Features | None, model: Path) -> None:
    """Raise RunError unless features are as wide as those that a model was trained on."""
    for what, store, width in (("images", visual, config.visual_width), ("captions", text, config.text_width)):
        own = getattr(config, "experts", None) if isinstance(store, ExpertStore) else {"features": width}
        here = store.widths if isinstance(store, ExpertStore) else store and {"features": store.width}
        if here and here != own:
            before, now = (", ".join(f"{name} ({wide})" for name, wide in (widths or {}).items()) for widths in (own, here))
            raise RunError(f"{model} was trained on {before} of {what}, and here are {now}: name those that it was trained on.")


def _vocabulary(train: Dataset, sentences: Sequence[str], min_count: int) -> Vocabulary:
    """The words of the training captions and of further sentences. Raises RecipeError if there are none, where all captions would read the same."""
    vocabulary = Vocabulary.of([*train.captions, *sentences], min_count)
    if len(vocabulary) == len(Vocabulary.of([])):
        raise RecipeError(
            f"no word occurs {min_count} times or more in the {len(train.captions):,} training captions of {train.name}, "
            "so that all would read the same: lower text.min_count."
        )
    return vocabulary


def _told(progress: Progress, what: str) -> Callable[[int, int, float], None]:
    return lambda done, total, per_s: progress.work(what, done, total, per_s)
