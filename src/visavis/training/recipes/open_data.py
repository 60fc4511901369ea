"""Data that a recipe names: its data set, or the shards of its training."""

from __future__ import annotations

from visavis.core.errors import DataError, RecipeError
from visavis.core.progress import Progress
from visavis.data.data_paths import data_folder, path_exists
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.shard_stream import ShardStream
from visavis.training.recipes.recipe import Recipe
from visavis.training.supervision import PairSupervision


def open_data(recipe: Recipe, progress: Progress, *, skip_bad: bool | None = None) -> Dataset:
    """Open the data set of a recipe. Each image is decoded once, unless stored features replace the
    images.

    Args:
        recipe: Recipe.
        progress: Receives progress.
        skip_bad: Whether to skip broken items instead of stopping. None: ``data.skip_bad`` of the
            recipe.

    Returns:
        The data set.

    Raises:
        RecipeError: If the recipe names no data.
        DataError: If the data set does not exist or is broken.
    """
    if not recipe.data.path:
        raise RecipeError(
            "data.path: expected a data set, got none. Set data.path, or pass --data."
        )
    check_data_exists(recipe)
    return open_dataset(
        recipe.data.path,
        skip_bad=recipe.data.skip_bad if skip_bad is None else skip_bad,
        needs_files=not recipe.visual.item_vectors,
        decode_images=recipe.visual.granularity == "pixels" or not recipe.visual.features,
        frames_per_second=recipe.visual.frames_per_second,
        decode_all_frames=recipe.data.skip_bad,
        on_progress=lambda done, total: progress.update("checking images", done, total, 0.0),
    )


def open_stream(recipe: Recipe, progress: Progress) -> ShardStream | None:
    """Open the shards that a recipe trains on.

    Args:
        recipe: Recipe.
        progress: Receives progress.

    Returns:
        The stream. None if the recipe trains on a split of its data set.

    Raises:
        RecipeError: If a setting needs the whole training set.
        DataError: If the shards cannot be read.
    """
    data = recipe.data
    training = recipe.training
    if not data.stream:
        return None
    needs_all_items = {
        'visual.granularity = "pixels"': recipe.visual.granularity != "pixels",
        'text.granularity = "tokens"': recipe.text.granularity != "tokens",
        "no data.feedback": bool(data.feedback),
        "data.training_images = 0 and data.training_captions = 0": bool(
            data.training_images or data.training_captions
        ),
        "data.noise_ratio = 0": bool(data.noise_ratio),
        "no training.captions_per_image": training.captions_per_image is not None,
        "training.length_buckets = 0": bool(training.length_buckets),
        "PairSupervision in all phases": any(
            not isinstance(phase.supervision, PairSupervision) for phase in recipe.phases
        ),
    }
    if wrong := [setting for setting, is_wrong in needs_all_items.items() if is_wrong]:
        raise RecipeError(
            f"data.stream: expected {', '.join(wrong)}, because items of shards are read one after "
            "the other. Change these settings."
        )
    return ShardStream.open(
        data.stream,
        max_open=2 * data.interleave,
        skip_bad=data.skip_bad,
        on_progress=lambda done, total: progress.update("counting shards", done, total, 0.0),
    )


def check_data_exists(recipe: Recipe) -> None:
    """Check that the data of a recipe with ``data.requires`` exists.

    Args:
        recipe: Recipe.

    Raises:
        DataError: If it does not. The message describes the required files.
    """
    if recipe.data.requires and not path_exists(recipe.data.path):
        root = data_folder()
        variable = f"VISAVIS_DATA ({root})" if root else "VISAVIS_DATA, which is not set"
        raise DataError(
            f"{recipe.published or recipe.name}: expected {recipe.data.requires}, got no "
            f"{recipe.data.path} in the current folder or under "
            f"{variable}. Put it there, or name its folder with --data."
        )
