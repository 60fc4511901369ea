"""Data that a recipe names: its data set or the shards of its training, and the data module with
the features.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from visavis.core.errors import DataError, RecipeError, RunError
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.data.data_paths import data_folder, path_exists
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.features.standardization import Standardization
from visavis.data.feedback.sources import read_feedback
from visavis.data.feedback.training_pairs import FeedbackPairs
from visavis.data.image_validation import open_valid_dataset
from visavis.data.shard_stream import ShardStream
from visavis.evaluation.protocols import get_protocols
from visavis.models.base import get_vectors
from visavis.models.inference import equal_batches
from visavis.models.processor import Processor
from visavis.training.evaluation.ranked_split import select_captions
from visavis.training.recipes.data_module import IMAGES_PER_BATCH, DataModule
from visavis.training.recipes.features import (
    caption_rows,
    draw_validation,
    extra_text_features,
    image_rows,
    report_cut_captions,
    text_features,
    training_subset,
    visual_features,
)
from visavis.training.recipes.recipe import Recipe
from visavis.training.supervision import PairSupervision


def open_data(recipe: Recipe, progress: Progress, *, skip_bad: bool | None = None) -> Dataset:
    """Open the data set of a recipe. ``skip_bad`` None: as in the recipe."""
    if not recipe.data.path:
        raise RecipeError(
            "data.path: expected a data set, got none. Set data.path, or pass --data."
        )
    check_data_exists(recipe)
    skip_bad = recipe.data.skip_bad if skip_bad is None else skip_bad
    if recipe.visual.granularity != "pixels" and recipe.visual.features:
        # Stored features replace the images.
        return open_dataset(
            recipe.data.path, skip_bad=skip_bad, needs_files=not recipe.visual.item_vectors
        )
    return open_valid_dataset(
        recipe.data.path,
        skip_bad=skip_bad,
        needs_files=not recipe.visual.item_vectors,
        frames_per_second=recipe.visual.frames_per_second,
        decode_all_frames=recipe.data.skip_bad,
        on_progress=lambda done, total: progress.update("checking images", done, total, 0.0),
    )


def open_stream(recipe: Recipe, progress: Progress) -> ShardStream | None:
    """Open the shards that a recipe trains on. None: a split of its data set."""
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
        "no data.noise": data.noise is not None,
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


def read_feedback_pairs(source: str, data: Dataset, progress: Progress) -> FeedbackPairs | None:
    """Read the judged pairs of the training images from an index or a file. None without a source."""
    if not source:
        return None
    pairs = FeedbackPairs.from_records(read_feedback(source), data, "train", progress)
    if not pairs and pairs.skipped:
        raise DataError(
            f"{source}: expected judgments of text queries and training images of {data.name}, got "
            f"none. {pairs.skipped_summary} "
            "Pass the data set whose images were judged."
        )
    if not pairs:
        raise DataError(
            f"{source}: expected relevance judgments, got none in force. Collect some with visavis "
            "serve --votes, or train without --feedback."
        )
    progress.message(f"{source}: {pairs}")
    return pairs


def check_data_exists(recipe: Recipe) -> None:
    """Check that the data of a recipe with ``data.requires`` exists."""
    if recipe.data.requires and not path_exists(recipe.data.path):
        root = data_folder()
        variable = f"VISAVIS_DATA ({root})" if root else "VISAVIS_DATA, which is not set"
        raise DataError(
            f"{recipe.published or recipe.name}: expected {recipe.data.requires}, got no "
            f"{recipe.data.path} in the current folder or under "
            f"{variable}. Put it there, or name its folder with --data."
        )


def open_data_module(
    recipe: Recipe,
    context: RunContext | None = None,
    trained_processor: Processor | None = None,
    *,
    training: bool = False,
) -> DataModule:
    """Open the data and the features of a recipe, for a training or for a trained model."""
    context = context or RunContext()
    progress = context.progress
    with context.group.first_rank_first():  # the others find what it has checked and converted
        data = open_data(recipe, progress)
        feedback = (
            read_feedback_pairs(recipe.data.feedback, draw_validation(recipe, data), progress)
            if training
            else None
        )
        stream = open_stream(recipe, progress) if training else None
    extra_texts = _extra_texts(recipe, data) if training and stream is None else ()

    visual, visual_encoder = visual_features(recipe, data, context)
    if isinstance(visual, ItemVectors) and recipe.data.skip_bad:
        data = visual.keep_items(data)
    text, processor = text_features(
        recipe,
        data,
        context,
        trained_processor,
        visual_encoder,
        (*(feedback.queries if feedback else ()), *extra_texts),
        stream,
        new_words=training and recipe.visual.item_vectors,
    )
    if trained_processor:
        processor = replace(
            processor, visual_encoder_folder=trained_processor.visual_encoder_folder
        )
    if isinstance(visual, ItemVectors):
        visual.rows(image.name for image in data.images)  # raises if an image has no vector
        trained = None if training else trained_processor
        if trained is not None and trained.items != visual.fingerprint:
            raise RunError(
                f"{visual.path}: expected the item vectors {trained.items}, for which the model was "
                f"trained, got {visual.fingerprint}. Restore them, or train again."
            )
        processor = replace(processor, items=visual.fingerprint)

    for skipped in data.skipped:
        progress.message(f"Skipped: {skipped}")
    if training and data.unpaired:
        progress.message(
            f"{data.name}: {len(data.unpaired_images):,} images without captions are not trained "
            "on. The test split ranks its own as candidates."
        )
    data = training_subset(recipe, data)
    query_features = extra_text_features(
        feedback.queries if feedback else extra_texts, data, processor, context.group
    )
    module = DataModule(
        recipe,
        data,
        processor,
        visual,
        text,
        feedback,
        query_features,
        extra_texts,
        context,
        stream,
    )
    if recipe.visual.standardize:
        if trained_processor:
            standardization = trained_processor.standardization
        else:
            train = module.training_split
            batches = map(
                module.sources(train)[0].read,
                equal_batches(np.arange(len(train.images)), IMAGES_PER_BATCH),
            )
            # Without the padding of features of different lengths.
            vectors = (
                get_vectors(items) if items.mask is None else get_vectors(items)[items.mask]  # type: ignore[index]
                for items in batches
            )
            standardization = Standardization.fit(
                vectors, signed_sqrt=recipe.visual.standardize == "sqrt_zscore"
            )
        module = replace(module, processor=replace(processor, standardization=standardization))
    if training:
        report_cut_captions(recipe, module.processor, data, progress)
        _check_splits(module)
    return module


def _extra_texts(recipe: Recipe, data: Dataset) -> tuple[str, ...]:
    """Texts that the supervisions of the phases add to the batches, which all phases share."""
    if "train" not in data.splits:
        return ()
    split = training_subset(recipe, data).split("train")
    texts = dict.fromkeys(
        found for phase in recipe.phases if (found := tuple(phase.supervision.extra_texts(split)))
    )
    if len(texts) > 1:
        raise RecipeError(
            "phases: expected one supervision with extra texts, got several with different ones. "
            "Use one of them in all phases."
        )
    return next(iter(texts), ())


def _check_splits(data_module: DataModule) -> None:
    """Check before a training that all splits exist and have features, and that the protocols fit
    the test split.
    """
    data = data_module.data
    settings = data_module.recipe.evaluation
    used = [data_module.training_split, data_module.validation]
    if (num_images := len(used[0].images)) < 2:
        raise RecipeError(
            f"{data.name}: expected at least 2 training images, got {num_images}. Add images to "
            "the training split."
        )
    for protocol in (
        get_protocols(settings.protocol)
        if settings.test in data.splits or settings.test not in ("", "test")
        else ()
    ):
        test = select_captions(data.split(settings.test), [protocol])
        protocol.validate(torch.arange(len(test.images)), torch.from_numpy(test.image_of))
        used.append(test)
    for split in used:
        if data_module.visual is not None:
            image_rows(data_module.visual, split)
        if data_module.text is not None:
            caption_rows(data_module.text, split)
