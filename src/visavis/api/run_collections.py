"""Runs as search uses them: their data for the calibration of an index, and their images as a
collection.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.core.errors import RunError
from visavis.core.progress import Progress

if TYPE_CHECKING:
    from visavis.retrieval.run_data import RunData
    from visavis.retrieval.run_images import RunImages


def open_run_data(model: Path) -> RunData | None:
    """Open the data of a run for an index, which reads them when it needs them. None: no run."""
    if not os.path.isfile(model / "run.toml"):
        return None
    # An update without changes needs no training code.
    from visavis.training.runs.run_splits import RunSplits

    return RunSplits(model)


def open_run_images(
    runs: Sequence[Path],
    collection: Path | None,
    progress: Progress,
) -> RunImages:
    """Open a collection for runs. None: the images of their own data."""
    from visavis.core.run_context import RunContext
    from visavis.data.dataset import Dataset
    from visavis.data.item_sources import FeatureReader
    from visavis.models.retriever import Retriever
    from visavis.retrieval.run_images import RunImages, open_image_collection
    from visavis.training.recipes.features import check_feature_dims, visual_features
    from visavis.training.recipes.open_data import open_data
    from visavis.training.runs.evaluate_runs import check_same_captions, read_run_recipes
    from visavis.training.runs.open_run import expand_ensembles

    runs = expand_ensembles(runs)
    models = {run: Retriever.load(run) for run in runs}
    if collection is not None:
        # All models must read clips, or their scores would cover different items.
        rates = [model.processor.frames_per_second for model in models.values()]
        dataset = open_image_collection(collection, max(rates) if all(rates) else 0.0)
        if dataset.other_files is not None:
            progress.message(f"Skipped: {dataset.other_files}.")
        return RunImages(collection, list(models.values()), dataset, [None] * len(models), progress)
    features = list[FeatureReader | None]()
    datasets = dict[Path, Dataset]()
    for run, recipe in read_run_recipes(runs).items():
        if not recipe.data.path:
            raise RunError(
                f"{run}: expected a run with data, got a pretrained model. Pass images with "
                "--collection."
            )
        models[run].memory = recipe.memory or None
        datasets[run] = open_data(recipe, progress, skip_bad=True)
        check_same_captions(datasets)
        features.append(visual_features(recipe, datasets[run], RunContext(progress))[0])
        check_feature_dims(models[run].matcher.config, features[-1], None, run)
    root = Path(recipe.data.path)
    return RunImages(root, list(models.values()), datasets[runs[0]], features, progress)
