"""Data and model of a recipe, ready for a training, which may start from the model of another run."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import torch

from visavis.core.errors import RecipeError, RunError, VisavisError, suggest_name
from visavis.core.run_context import RunContext
from visavis.core.spec import build_object
from visavis.data.features.expert_store import ExpertStore
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.features.standardization import Standardization
from visavis.data.feedback.training_pairs import (
    read_feedback_pairs,
)
from visavis.evaluation.protocols import get_protocols
from visavis.models import Matcher, find_model, suggest_model
from visavis.models.base import get_vectors
from visavis.models.encoders.frozen_encoders import (
    EmbeddingImageEncoder,
    VisualEncoder,
    open_encoder,
)
from visavis.models.inference import (
    encode_items,
    equal_batches,
)
from visavis.models.layers import Whitening
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_side import text_side
from visavis.training.evaluation.ranked_split import select_captions
from visavis.training.recipes.data_module import IMAGES_PER_BATCH, DataModule
from visavis.training.recipes.features import (
    caption_rows,
    feedback_query_features,
    image_rows,
    report_cut_captions,
    sample_features,
    text_features,
    training_subset,
    visual_features,
)
from visavis.training.recipes.learned_scale import start_scale_and_bias
from visavis.training.recipes.open_data import open_data, open_stream
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.start_model import copy_start_weights, load_start_model
from visavis.training.supervision import OfflineNegativeSupervision


def prepare_training(
    recipe: Recipe, context: RunContext | None = None
) -> tuple[DataModule, Matcher]:
    """Open the data, compute or open the features, and build the model with its initial weights.

    Args:
        recipe: Recipe.
        context: Progress, and the processes that compute features together.

    Returns:
        The data and the model.

    Raises:
        RecipeError: If the model does not fit the data.
        DataError: If the data cannot be read.
    """
    context = context or RunContext()
    check_model_fields(recipe)
    with context.group.first_rank_first():
        start = load_start_model(recipe)
    data_module = open_data_module(
        recipe, context, start.processor if start else None, training=True
    )
    report_cut_captions(recipe, data_module.processor, data_module.data, context.progress)
    _check_splits(data_module)
    matcher = initial_matcher(data_module, start)
    matcher.matryoshka_dims = _resolve_matryoshka_dims(data_module, matcher)
    return data_module, matcher


def open_data_module(
    recipe: Recipe,
    context: RunContext | None = None,
    trained_processor: Processor | None = None,
    *,
    training: bool = False,
) -> DataModule:
    """Open the data and the features of a recipe.

    Args:
        recipe: Recipe.
        context: Progress, and the processes that compute features together.
        trained_processor: Processor of a trained model. None: it is built from the training split.
        training: Whether to read the feedback file.

    Returns:
        The data module.

    Raises:
        RecipeError: If the recipe does not fit the data.
        DataError: If the data cannot be read.
        RunError: If the features are other item vectors than those of the trained model.
    """
    context = context or RunContext()
    progress = context.progress
    with context.group.first_rank_first():  # the others find what it has checked and converted
        data = open_data(recipe, progress)
        feedback = read_feedback_pairs(recipe.data.feedback, data, progress) if training else None
        stream = open_stream(recipe, progress) if training else None
    visual, visual_encoder = visual_features(recipe, data, context)
    if isinstance(visual, ItemVectors) and recipe.data.skip_bad:
        data = visual.keep_items(data)
    queries = feedback.queries if feedback else ()
    text, processor = text_features(
        recipe,
        data,
        context,
        trained_processor,
        visual_encoder,
        queries,
        stream,
        new_words=training and recipe.visual.item_vectors,
    )
    if trained_processor:
        processor = replace(
            processor, visual_encoder_folder=trained_processor.visual_encoder_folder
        )
    if isinstance(visual, ItemVectors):
        visual.rows(image.name for image in data.images)
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
    query_features = feedback_query_features(feedback, data, processor, context.group)
    data_module = DataModule(
        recipe, data, processor, visual, text, feedback, query_features, context, stream
    )
    if not recipe.visual.standardize:
        return data_module
    standardization = (
        trained_processor.standardization
        if trained_processor
        else _fit_standardization(data_module)
    )
    return replace(data_module, processor=replace(processor, standardization=standardization))


def initial_matcher(data_module: DataModule, start: Retriever | None) -> Matcher:
    """Build the model with the weights that a training starts with.

    Args:
        data_module: Data of the recipe.
        start: Model of ``start_from``. None: new weights by the seed of the recipe.

    Returns:
        The model.

    Raises:
        RecipeError: If the model cannot be built, or differs from that of ``start_from``.
    """
    recipe = data_module.recipe
    matcher = build_matcher(
        data_module,
        recipe.seed,
        keep_bias=start is not None and start.matcher.logit_bias is not None,
    )
    if start is not None:
        copy_start_weights(start, matcher, data_module.processor, recipe)
    for phase in recipe.phases[:1]:
        start_scale_and_bias(matcher, phase)
    return matcher


def build_matcher(data_module: DataModule, seed: int, *, keep_bias: bool = False) -> Matcher:
    """Build the model of a recipe.

    Args:
        data_module: Data of the recipe.
        seed: Seed of the new weights.
        keep_bias: Whether the model has a learned bias even if no objective uses it.

    Returns:
        The model.

    Raises:
        RecipeError: If the model does not fit the features.
    """
    kind = find_model(data_module.recipe.model["kind"])
    assert kind is not None  # check_model_fields has found it
    if data_module.recipe.visual.item_vectors:
        kind = text_side(kind)
    torch.manual_seed(seed)
    try:
        matcher = kind(
            build_object(kind.Config, _architecture(data_module, kind, keep_bias=keep_bias))
        )
    except VisavisError as error:
        raise RecipeError(
            f"model {kind.name}: {str(error).removeprefix(f'{kind.__name__}: ')}"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise RecipeError(
            f"model {kind.name}: cannot be built: {str(error).splitlines()[0]}."
        ) from None
    if isinstance(data_module.visual, ItemVectors):
        _check_text_dim(data_module, matcher)
    for whitening in (module for module in matcher.modules() if isinstance(module, Whitening)):
        train = data_module.training_split
        whitening.fit(sample_features(data_module.sources(train)[1], len(train.captions)))
    return matcher


def _encode_one_text(data_module: DataModule, matcher: Matcher) -> torch.Tensor:
    _, text = data_module.sources(data_module.training_split)
    encoded = encode_items(matcher, "text", [text.read(np.arange(1))], [np.arange(1)])
    return get_vectors(matcher.first_stage_items(encoded))


def _check_text_dim(data_module: DataModule, matcher: Matcher) -> None:
    """Check that a text side has vectors of the dimension of its items."""
    assert data_module.visual is not None
    expected = data_module.visual.embedding_dim
    actual = _encode_one_text(data_module, matcher).shape[1]
    if actual != expected:
        raise RecipeError(
            f"model {matcher.name}: expected texts of dimension {expected}, as the item vectors in "
            f"{data_module.recipe.visual.features}, got {actual}. Use another text encoder, or a "
            "model such as Heads."
        )


def _resolve_matryoshka_dims(data_module: DataModule, matcher: Matcher) -> tuple[int, ...]:
    """The Matryoshka dimensions of a recipe, with the full one last. () if the recipe names none."""
    recipe = data_module.recipe
    if not recipe.matryoshka_dims:
        return ()
    if not matcher.score_is_cosine:
        raise RecipeError(
            "matryoshka_dims: expected a model that scores by the cosine of one vector per item, "
            f"got {matcher.name}. Remove matryoshka_dims, "
            "or use a model such as Heads."
        )
    if any(isinstance(phase.supervision, OfflineNegativeSupervision) for phase in recipe.phases):
        raise RecipeError(
            "matryoshka_dims: OfflineNegativeSupervision supplies scores of full vectors only. "
            "Remove one of them."
        )
    full = _encode_one_text(data_module, matcher).shape[1]
    if max(recipe.matryoshka_dims) > full:
        raise RecipeError(
            f"matryoshka_dims: expected at most {full}, the dimensions of this model, got "
            f"{max(recipe.matryoshka_dims)}."
        )
    return tuple(sorted({*recipe.matryoshka_dims, full}))


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


def _fit_standardization(data_module: DataModule) -> Standardization:
    """Fit the standardization to the features of the training images."""
    train = data_module.training_split
    batches = map(
        data_module.sources(train)[0].read,
        equal_batches(np.arange(len(train.images)), IMAGES_PER_BATCH),
    )
    # Without the padding of features of different lengths.
    vectors = (
        get_vectors(items) if items.mask is None else get_vectors(items)[items.mask]  # type: ignore[index]
        for items in batches
    )
    return Standardization.fit(
        vectors, signed_sqrt=data_module.recipe.visual.standardize == "sqrt_zscore"
    )


DERIVED_MODEL_KEYS = {
    "backbone": 'visual.encoder with visual.granularity = "pixels"',
    "text_backbone": 'text.encoder with text.granularity = "tokens"',
    "visual_granularity": "visual.granularity",
    "text_granularity": "text.granularity",
    "visual_input_dim": "the encoder or features of visual",
    "text_input_dim": "the encoder or features of text",
    "experts": "visual.experts",
    "logit_bias": "the objective of the phases",
}
"""Fields of a model that follow from other sections of a recipe, and would be replaced."""


def check_model_fields(recipe: Recipe) -> None:
    """Check the model of a recipe before its data are read, so that a wrong name costs no time.

    Args:
        recipe: Recipe of a training.

    Raises:
        RecipeError: If the model does not exist, or a field is unknown or follows from the data.
    """
    name = str(recipe.model.get("kind"))
    kind = find_model(name)
    if kind is None:
        raise RecipeError(f"model.kind: {name!r} is not a model: {suggest_model(name)}")
    if recipe.visual.item_vectors:
        text_side(kind)
    known = {field.name for field in fields(kind.Config)} - DERIVED_MODEL_KEYS.keys()
    for key in recipe.model.keys() - {"kind"}:
        if source := DERIVED_MODEL_KEYS.get(key):
            raise RecipeError(
                f"model.{key}: expected none, because it follows from {source}. Remove "
                f"model.{key}, and set {source}."
            )
        if key not in known:
            raise RecipeError(
                f"model {kind.name}: Config has no field {key!r}: {suggest_name(key, sorted(known))}"
            )


def _architecture(
    data_module: DataModule, kind: type[Matcher], *, keep_bias: bool
) -> dict[str, Any]:
    """The fields of the model config: the fields of the recipe, the granularity and dimensions of
    the features, and a learned bias.
    """
    recipe = data_module.recipe
    architecture = {
        key: value for key, value in recipe.model.items() if key != "kind"
    } | _text_backbone_field(recipe, kind)
    uses_bias = keep_bias or any(
        phase.objective.without_bias() is not None for phase in recipe.phases
    )
    if (
        uses_bias
        and recipe.model.get("scale") == "learned"
        and "logit_bias" in {field.name for field in fields(kind.Config)}
    ):
        architecture |= {"logit_bias": "learned"}
    tokens = data_module.processor.vocabulary or data_module.processor.pretrained_tokenizer
    architecture |= {
        "visual_granularity": "regions"
        if recipe.visual.granularity == "frames"
        else recipe.visual.granularity,
        "text_granularity": recipe.text.granularity,
        "text_input_dim": len(tokens) if tokens else data_module.text.embedding_dim,  # type: ignore[union-attr]
    }
    if isinstance(data_module.visual, ExpertStore) and "experts" in kind.visual_granularities:
        architecture |= {"experts": data_module.visual.embedding_dims}
    if isinstance(data_module.visual, ItemVectors):
        return architecture | _item_vector_fields(data_module, kind)
    if data_module.visual is not None:
        return architecture | {"visual_input_dim": data_module.visual.embedding_dim}
    architecture |= {"backbone": recipe.visual.encoder}
    # The granularity of the backbone depends on the other fields, and its dimensions on its
    # granularity.
    granularity = build_object(
        kind.Config, architecture | {"visual_input_dim": 1}
    ).backbone_granularity
    encoder: VisualEncoder | EmbeddingImageEncoder = open_encoder(
        replace(data_module.processor.visual_spec, granularity=granularity)
    )  # type: ignore[assignment]
    return architecture | {"visual_input_dim": encoder.embedding_dim}


def _item_vector_fields(data_module: DataModule, kind: type[Matcher]) -> dict[str, Any]:
    """The fields of the config of a text side: its vectors have the dimensions of the items."""
    assert data_module.visual is not None
    dim = data_module.visual.embedding_dim
    known = {field.name: field for field in fields(kind.Config)}
    values: dict[str, Any] = {"visual_input_dim": dim}
    # A matcher that reads no pooled features is built for its own kind, without its visual side.
    granularities = kind.visual_granularities
    values["visual_granularity"] = "pooled" if "pooled" in granularities else granularities[0]
    if "embedding_dim" in known:
        values["embedding_dim"] = dim
    if "backbone" in known and known["backbone"].default is MISSING:
        # A dual encoder, whose text encoder it is.
        values["backbone"] = data_module.recipe.text.encoder
    return values


def _text_backbone_field(recipe: Recipe, kind: type[Matcher]) -> dict[str, str]:
    """The config field ``text_backbone`` with its value, or {} if the recipe trains no separate
    text encoder.
    """
    text = recipe.text
    if text.encoder == "vocabulary" or text.granularity != "tokens":
        return {}
    if "text_backbone" in {field.name for field in fields(kind.Config)}:
        return {"text_backbone": text.encoder}
    if text.encoder == recipe.visual.encoder or recipe.visual.item_vectors:  # a dual encoder
        return {}
    raise RecipeError(
        f'text.granularity: expected a frozen text encoder for {kind.name}, got "tokens". Set text.granularity = "pooled" or "words".'
    )
