"""Search a run: encode the images of its data or of another collection, cached by content, and rank
them for a text query.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from visavis.core.errors import DataError, RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.spec import validate_int
from visavis.data import Dataset, Image, open_dataset
from visavis.data.formats.listing import ListedImage, Listing
from visavis.data.image_validation import validate_images
from visavis.data.item_sources import AnyFeatures, ItemSource, StoredFeatures
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.inference import consecutive_batches, encode_items, score_all_pairs
from visavis.models.retriever import Retriever
from visavis.retrieval.index_search import SearchResult, SearchResults, validate_text_query
from visavis.retrieval.items import IndexItem
from visavis.retrieval.source_files import list_readable_files
from visavis.training.recipes.features import check_feature_dims, open_data, visual_features
from visavis.training.runs.evaluate_runs import check_same_captions, read_run_recipes
from visavis.training.runs.open_run import expand_ensembles

BATCH_SIZE = 256


def search_images(
    runs: Sequence[Path],
    query: str,
    collection: Path | None,
    top: int,
    progress: Progress,
    memory: MemoryLimit = None,
) -> SearchResults:
    """Find the images of a collection with the highest mean score over the models of some runs.

    Args:
        runs: Run folders or pretrained models.
        query: Text query.
        collection: A data set or a folder of images. None: the data of the runs.
        top: Maximum number of results.
        progress: Receives progress and warnings.
        memory: Memory limit of blocks of scores.

    Returns:
        Results, best first. Equal scores are in the order of the collection.

    Raises:
        VisavisError: If the query is empty or ``top`` is below 1.
        DataError: If there are no images.
        RunError: If the runs have different data, or none.
    """
    validate_text_query(query)
    validate_int(top, "top", 1)
    runs = expand_ensembles(runs)
    models = {run: Retriever.load(run, memory=memory) for run in runs}
    if collection is not None:
        rates = [model.processor.frames_per_second for model in models.values()]
        dataset = open_image_collection(collection, max(rates) if all(rates) else 0.0)
        if dataset.other_files is not None:
            progress.message(f"Skipped: {dataset.other_files}.")
        return _top_images(
            [_query_scores(model, dataset, query, progress) for model in models.values()],
            dataset,
            top,
            progress,
        )
    scores, datasets = [], dict[Path, Dataset]()
    for run, recipe in read_run_recipes(runs, memory=memory).items():
        if not recipe.data.path:
            raise RunError(
                f"{run}: expected a run with data, got a pretrained model. Pass images with "
                "--collection."
            )
        models[run].memory = recipe.memory or None
        datasets[run] = open_data(recipe, progress, skip_bad=True)
        check_same_captions(datasets)
        features, _ = visual_features(recipe, datasets[run], progress)
        check_feature_dims(models[run].matcher.config, features, None, run)
        scores.append(_query_scores(models[run], datasets[run], query, progress, features))
    return _top_images(scores, datasets[runs[0]], top, progress)


def _query_scores(
    model: Retriever,
    dataset: Dataset,
    query: str,
    progress: Progress,
    features: AnyFeatures | None = None,
) -> Tensor:
    """Scores of all images for one text query, shape ``[V]``. ``features``: cached features of the
    images.
    """
    matcher, processor = model.matcher, model.processor
    warn_unknown_words(model, query, progress)
    source: ItemSource
    if matcher.config.visual_granularity == "pixels":
        source = processor.open_images(dataset.images)
    else:
        features = features or cache_features(
            dataset,
            processor.visual_spec,
            on_progress=lambda done, total, per_second: progress.update(
                "images", done, total, per_second
            ),
        )
        rows = features.rows(image.name for image in dataset.images)
        source = StoredFeatures(
            features,
            rows,
            processor.visual.crops if processor.visual else 1,
            processor.standardization,
        )
    visual = encode_items(
        matcher, "visual", source.read, consecutive_batches(len(dataset.images), BATCH_SIZE)
    )
    return score_all_pairs(matcher, visual, model.encode_text([query]), model.memory)[:, 0]


def warn_unknown_words(model: Retriever, text: str, progress: Progress) -> None:
    """Report the words of a query that are not in the vocabulary of a model.

    Args:
        model: The model.
        text: Text query.
        progress: Receives the message.

    Raises:
        VisavisError: If the vocabulary contains no word of the query.
    """
    if unknown := model.processor.unknown_words(text):
        progress.message(
            f"Words that are not in the vocabulary of this model: {', '.join(unknown)}"
        )


def _top_images(
    scores: Sequence[Tensor], dataset: Dataset, top: int, progress: Progress
) -> SearchResults:
    for problem in dataset.skipped:
        progress.message(f"Skipped: {problem}")
    mean = torch.stack(list(scores)).mean(0)
    order = torch.argsort(mean, descending=True, stable=True)[:top].tolist()
    return SearchResults(tuple(_result(dataset.images[i], mean[i].item()) for i in order))


def _result(image: Image, score: float) -> SearchResult:
    item = IndexItem(
        image.name,
        image.name,
        "video" if image.is_video else "image",
        content="",
        size=0,
        modified_ns=0,
    )
    return SearchResult(item, score, image=image)


def open_image_collection(path: Path, frames_per_second: float = 0.0) -> Dataset:
    """Open a data set, or any folder of images and clips. Files that are left out are listed in
    ``Dataset.skipped``.

    Of a folder, all files are read, also those that its list of captions leaves out.

    Args:
        path: Data set or folder.
        frames_per_second: Frame rate at which the models read clips. 0: they do not read clips.

    Returns:
        The images. The name of a folder's data set contains a hash of the sizes and times of its
        files, so that cached features of a changed folder are not reused.

    Raises:
        DataError: If there are no images.
    """
    read_clips = frames_per_second > 0
    try:
        dataset = open_dataset(
            path,
            skip_bad=True,
            decode_images=True,
            frames_per_second=frames_per_second,
            decode_all_frames=read_clips,
        )
    except DataError:
        if not os.path.isdir(path):
            raise
    else:
        if not (os.path.isdir(path) and dataset.unlisted_files):
            return dataset
    collection = list_readable_files(path)
    files = [file for file in collection.files if read_clips or not file.is_video]
    if not files:
        first = f" {collection.skipped[0]}" if collection.skipped else ""
        raise DataError(
            f"{path}: expected a data set or a folder of images, got no images. Pass a folder that "
            f"contains some.{first}"
        )
    listing = Listing(
        path, "images", [ListedImage(file.path, "all", location=file.location) for file in files]
    )
    validate_images(listing, frames_per_second=frames_per_second, decode_all_frames=read_clips)
    dataset = listing.dataset()
    num_videos = len(collection.files) - len(files)
    videos = (
        (f"{num_videos:,} videos: expected images, as the model reads no videos.",)
        if num_videos
        else ()
    )
    digest = hashlib.sha256(
        json.dumps([(file.path, file.size, file.modified_ns) for file in files]).encode()
    )
    return replace(
        dataset,
        name=f"{os.path.basename(os.path.realpath(path))}-{digest.hexdigest()[:8]}",
        skipped=(*videos, *collection.skipped, *dataset.skipped),
        other_files=collection.other_files,
    )
