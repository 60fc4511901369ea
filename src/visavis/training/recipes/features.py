"""Features of images and captions that a recipe names, and preprocessing of new items."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core.errors import DataError, RecipeError, RunError
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import Progress
from visavis.core.run_context import RunContext
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.features.arrays import ArrayFeatures, first_nonfinite_row
from visavis.data.features.expert_store import ExpertStore, RegionFeatures
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.features.store import FeatureStore
from visavis.data.item_sources import FeatureReader
from visavis.data.noise import add_noise
from visavis.data.sequences import read_items
from visavis.data.shard_stream import ShardStream
from visavis.data.vocabulary import MULTILINGUAL_ADVICE, Vocabulary
from visavis.data.words import has_unspaced_script
from visavis.models import find_model
from visavis.models.base import MatcherConfig
from visavis.models.encoders.encoder_spec import EncoderSpec, image_size_note
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.encoders.pretrained_files import can_be_extended
from visavis.models.processor import Processor
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import VisualSettings

# Value of ``visual.features`` for features that the data set has: arrays of the VSE++ family, or a
# store of experts.
PRECOMP = "precomp"
# Captions of a stream whose words are in the vocabulary.
VOCABULARY_CAPTIONS = 100_000
# Captions that are searched for scripts without spaces.
_SAMPLED_CAPTIONS = 1_000


def draw_validation(recipe: Recipe, data: Dataset) -> Dataset:
    """Draw the validation images, as the recipe has it. Not before features are computed: the cache
    has features of a whole data set, and other splits make it another data set.
    """
    if not recipe.evaluation.random_validation:
        return data
    return data.redraw(("train", recipe.evaluation.validation), recipe.seed)


def training_subset(recipe: Recipe, data: Dataset) -> Dataset:
    """Draw the validation, reduce the training split, and move captions to wrong images, as the recipe
    has it.
    """
    data = draw_validation(recipe, data)
    data = data.subsample(recipe.data.training_images, recipe.data.training_captions, recipe.seed)
    return data if recipe.data.noise is None else add_noise(data, recipe.data.noise, recipe.seed)


def visual_features(
    recipe: Recipe, data: Dataset, context: RunContext
) -> tuple[FeatureReader | None, EncoderSpec | None]:
    """Open or compute the features of the images. Without features the model reads pixels, and
    without an encoder it reads stored features.
    """
    visual = recipe.visual
    progress = context.progress
    group = context.group
    # 1. Features of experts, or item vectors: no encoder.
    if visual.granularity == "experts":
        if visual.features == PRECOMP:
            source = _source_of(data)
            folder = (source if os.path.isdir(source) else source.parent) / "experts"
        else:
            folder = _resolve("visual.features", visual.features)
        with group.first_rank_first():
            store = ExpertStore.open(folder, visual.experts, max_length=visual.max_length)
        store.check_distinct_rows(image.name for image in data.images)
        return store, None
    if visual.item_vectors:
        path = _resolve("visual.features", visual.features)
        with group.first_rank_first():
            items = ItemVectors.open_items(path, data)
            _check_axes(items, visual)
        return items, None
    if not visual.encoder and (visual.granularity == "pixels" or not visual.features):
        raise RecipeError(
            "visual.encoder: expected an image encoder, got none. Set visual.encoder, or stored "
            "features in visual.features."
        )
    # 2. Pixels, which the model reads.
    granularity: Any = "regions" if visual.granularity == "pixels" else visual.granularity
    options = (
        visual.crops,
        visual.frames_per_second,
        visual.image_size,
        visual.random_crops,
        visual.full_decoding,
        visual.max_num_patches,
    )
    encoder = (
        EncoderSpec("visual", visual.encoder, granularity, *options) if visual.encoder else None
    )
    if encoder and not visual.features and (note := image_size_note(encoder)):
        progress.message(note)
    if visual.granularity == "pixels":
        return None, encoder
    # 3. Stored features: of the data set, or by a path.
    if visual.features == PRECOMP:
        return _check_axes(ArrayFeatures.open_precomp(_source_of(data)), visual), encoder
    if visual.features:
        path = _resolve("visual.features", visual.features)
        # Features by the ids of images, not by rows.
        has_ids = os.path.isdir(path) or ".tsv" in path.suffixes
        with group.first_rank_first():
            if has_ids:
                return _open_regions(visual, path, progress), encoder
            return _check_axes(ArrayFeatures.open(path, data), visual), encoder
    # 4. Features that the encoder computes once, into the cache.
    assert encoder is not None
    workers = None if recipe.training.workers < 0 else recipe.training.workers
    return cache_features(
        data,
        encoder,
        workers=workers,
        group=group,
        on_progress=partial(progress.update, "image features"),
    ), encoder


def text_features(
    recipe: Recipe,
    data: Dataset,
    context: RunContext,
    trained_processor: Processor | None,
    visual_encoder: EncoderSpec | None,
    extra_captions: Sequence[str] = (),
    stream: ShardStream | None = None,
    *,
    new_words: bool = False,
) -> tuple[FeatureReader | None, Processor]:
    """Open or compute the features of the captions, and build the processor of new images and
    texts. Without features the model reads tokens.
    """
    text = recipe.text
    progress = context.progress
    group = context.group
    # 1. Stored features, as an array by row or as a store by caption.
    if text.features:
        path = _resolve("text.features", text.features)
        if path.suffix == ".npy":
            if text.granularity != "pooled":
                raise RecipeError(
                    f'text.granularity: expected "pooled", because {text.features} holds one '
                    f'vector per caption, got "{text.granularity}". Set it.'
                )
            vectors = ArrayFeatures.open(path, data, "caption")
            if len(vectors.shape) != 1:
                raise RecipeError(
                    f"{text.features}: expected one vector per caption, got shape "
                    f"{list(vectors.shape)} per caption."
                )
            _check_finite(vectors)
            return vectors, Processor(visual_encoder, None, None, stored_text_features=True)
        with group.first_rank_first():
            store = FeatureStore.open(path)
        modality = store.description.modality
        granularity = store.description.granularity
        if (modality, granularity) != ("text", text.granularity):
            raise RecipeError(
                f"text.features: expected {text.granularity} features of captions, got "
                f"{granularity} features of the {modality} side in "
                f"{text.features}. Set text.granularity, or another folder."
            )
        return store, Processor(visual_encoder, None, None, stored_text_features=True)
    # 2. Words, whose embeddings the model learns.
    if text.encoder == "vocabulary":
        # The words of a trained model, which the training captions extend with `new_words`.
        known = trained_processor.vocabulary if trained_processor else None
        if known and not new_words:
            return None, Processor(visual_encoder, None, known)
        # Of a stream, its first captions.
        train = (
            training_subset(recipe, data).split("train")
            if stream is None
            else stream.dataset.take(np.arange(len(stream))[:VOCABULARY_CAPTIONS])
        )
        if any(
            map(
                has_unspaced_script,
                read_items(train.captions, np.arange(len(train.captions))[:_SAMPLED_CAPTIONS]),
            )
        ):
            progress.message(f"{data.name}: {MULTILINGUAL_ADVICE}.")
        captions = [*train.captions, *extra_captions] if extra_captions else train.captions
        vocabulary = Vocabulary.from_captions(captions, text.min_count)
        # Without any word, all captions would be equal.
        if len(vocabulary) == len(Vocabulary.from_captions([])):
            raise RecipeError(
                f"text.min_count: expected a word that occurs {text.min_count} times or more in "
                f"the {len(train.captions):,} training captions of {train.name}, found none. Lower "
                "text.min_count."
            )
        vocabulary = known.extended_by(vocabulary) if known else vocabulary
        return None, Processor(visual_encoder, None, vocabulary)
    # 3. Tokens of an encoder that is trained.
    if text.granularity == "tokens":
        tokenizer_folder = trained_processor.tokenizer_folder if trained_processor else None
        processor = Processor(
            visual_encoder, None, None, text.encoder, tokenizer_folder=tokenizer_folder
        )
        kind = find_model(recipe.model["kind"])
        assert kind is not None
        return None, kind.adapt_processor(processor, recipe.model, trained_processor)
    # 4. Features that a frozen encoder computes once, into the cache.
    encoder = EncoderSpec("text", text.encoder, text.granularity)
    features = cache_features(
        data, encoder, group=group, on_progress=partial(progress.update, "caption features")
    )
    return features, Processor(visual_encoder, encoder, None)


def image_rows(features: FeatureReader, split: Dataset) -> np.ndarray:
    """Look up the rows of the images of a split."""
    if isinstance(features, ArrayFeatures) and features.has_rows_of_dataset:
        return split.image_rows
    return features.rows(image.name for image in split.images)


def caption_rows(features: FeatureReader, split: Dataset) -> np.ndarray:
    """Look up the rows of the captions of a split."""
    return (
        split.caption_rows if isinstance(features, ArrayFeatures) else features.rows(split.captions)
    )


def extra_text_features(
    texts: Sequence[str],
    data: Dataset,
    processor: Processor,
    group: ProcessGroup = ONE_PROCESS,
) -> FeatureReader | None:
    """Compute the features of texts that are not captions: judged queries, or edited captions. None:
    there are no such texts, or the model reads tokens.
    """
    if not texts or processor.vocabulary is not None or processor.tokenizer is not None:
        return None
    if processor.text is None:
        raise RecipeError(
            "text.features: expected a text encoder, because feedback or the supervision has texts "
            "that are not captions, got stored features. "
            "Set text.encoder, or remove data.feedback or the supervision."
        )
    queries = Dataset(f"{data.name}-texts", (), tuple(texts), np.zeros(len(texts), np.int64))
    return cache_features(queries, processor.text, group=group)


def check_feature_dims(
    config: MatcherConfig, visual: FeatureReader | None, text: FeatureReader | None, model: Path
) -> None:
    """Check that features have the dimensions that a model was trained on."""
    for items, store, dim in (
        ("images", visual, config.visual_input_dim),
        ("captions", text, config.text_input_dim),
    ):
        expected = (
            getattr(config, "experts", None)
            if isinstance(store, ExpertStore)
            else {"features": dim}
        )
        actual = (
            store.embedding_dims
            if isinstance(store, ExpertStore)
            else store and {"features": store.embedding_dim}
        )
        if actual and actual != expected:
            before, now = (
                ", ".join(f"{name} ({dim})" for name, dim in (dims or {}).items())
                for dims in (expected, actual)
            )
            raise RunError(
                f"{model}: expected {before} of {items}, as in its training, got {now}. Name the "
                "features of its training."
            )


def _source_of(data: Dataset) -> Path:
    """The list or folder next to which the features of a data set lie."""
    assert data.source is not None
    return data.source


def _resolve(key: str, name: str) -> Path:
    """The path of stored features."""
    try:
        return resolve_path(name)
    except DataError as error:
        raise DataError(
            f"{key}: {error} Set {key}=PATH, or edit it in the run.toml of a run."
        ) from None


def _open_regions(visual: VisualSettings, path: Path, progress: Progress) -> RegionFeatures:
    """Open features of regions by the ids of images."""
    if visual.granularity != "regions" or visual.crops > 1:
        raise RecipeError(
            f'visual.granularity: expected "regions" without visual.crops, because {visual.features} holds regions by the ids of images, got '
            f'"{visual.granularity}". Set granularity = "regions".'
        )
    stored = RegionFeatures.open(
        path,
        lambda done, total: progress.update("converting features of regions", done, total, 0.0),
    )
    if visual.standardize and stored.has_variable_length:
        raise RecipeError(
            "visual.standardize: expected the same number of regions per image, got different "
            f"ones in {visual.features}. Remove it."
        )
    return stored


def _check_axes(stored: ArrayFeatures, visual: VisualSettings) -> FeatureReader:
    """Check the axes of stored features, and that they are finite."""
    axes = [
        *(["crops"] if visual.crops > 1 else []),
        *(["regions"] if visual.granularity == "regions" else []),
        "dimensions",
    ]
    shape = list(stored.shape)
    if len(shape) != len(axes):
        raise RecipeError(
            f"{visual.features}: expected features {' x '.join(axes)} per image, got shape "
            f"{shape}. Set visual.granularity."
        )
    _check_finite(stored)
    return stored


def _check_finite(stored: ArrayFeatures) -> None:
    if (row := first_nonfinite_row(stored)) is not None:
        raise RecipeError(
            f"{stored.describe_row(row)}: expected finite features, got NaN or infinity. Compute "
            "them again."
        )


CAPTIONS_TO_COUNT = 1000
"""Number of the longest captions whose tokens are counted before a training."""
LONG_CLIP_LENGTH = 248
"""Tokens that Long-CLIP reads: the positions from the 20th on are used four times."""


def report_cut_captions(
    recipe: Recipe, processor: Processor, data: Dataset, progress: Progress
) -> None:
    """Report captions that have more tokens than the trained text encoder reads. The longest
    captions are counted.
    """
    tokenizer = processor.pretrained_tokenizer
    if tokenizer is None:
        return
    size = min(CAPTIONS_TO_COUNT, len(data.captions))
    longest = np.argpartition(data.caption_lengths, -size)[-size:]
    counts = tokenizer.count_tokens(read_items(data.captions, longest))
    if cut := int((counts > tokenizer.max_length).sum()):
        more = "at least " if cut == size < len(data.captions) else ""
        is_extensible = recipe.model["kind"] == "CLIP" and can_be_extended(str(processor.tokenizer))
        command = f"visavis papers convert {processor.tokenizer} --max-length {min(int(counts.max()), LONG_CLIP_LENGTH)} --out FOLDER"
        progress.message(
            f"{data.name}: {more}{cut:,} of {len(data.captions):,} captions are cut after "
            f"{tokenizer.max_length} tokens. The longest has "
            f"{counts.max():,} tokens."
            + (f" Extend the model with: {command}" if is_extensible else "")
        )
