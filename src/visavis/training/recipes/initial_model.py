"""Model of a recipe with the weights that a training starts with: new ones, or the weights of
``start_from``.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.core.errors import RecipeError, RunError, VisavisError, suggest_name
from visavis.core.spec import build_object
from visavis.data.features.expert_store import ExpertStore
from visavis.data.features.item_vectors import ItemVectors
from visavis.models import Matcher, find_model, suggest_model
from visavis.models.base import SCALE_PART, get_mask, get_vectors
from visavis.models.encoders.frozen_encoders import (
    EmbeddingImageEncoder,
    VisualEncoder,
    open_encoder,
)
from visavis.models.inference import encode_items, equal_batches
from visavis.models.layers import Whitening, mean_pool
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_side import text_side
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.learned_scale import start_scale_and_bias
from visavis.training.recipes.recipe import Recipe
from visavis.training.supervision import OfflineNegativeSupervision

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
    """Check the model of a recipe before its data are read, so that a wrong name costs no time."""
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


def start_model_files(recipe: Recipe) -> list[Path]:
    """List config and weights of the model that a training starts from. [] without ``start_from``."""
    if not recipe.start_from:
        return []
    root = Path(recipe.start_from)
    for folder in (root / "model", root):
        files = [folder / "config.json", folder / "model.safetensors"]
        if all(os.path.isfile(file) for file in files):
            return files
    raise RecipeError(
        f"start_from: expected a run folder, or its folder model, got {recipe.start_from}. Name a "
        "folder of visavis train."
    )


def load_start_model(recipe: Recipe) -> Retriever | None:
    """Load the model that a training starts from."""
    if not (files := start_model_files(recipe)):
        return None
    try:
        return Retriever.load(files[0].parent, device="cpu")
    except RunError as error:
        raise RecipeError(f"start_from: {error}") from None


def copy_start_weights(
    start: Retriever, matcher: Matcher, processor: Processor, recipe: Recipe
) -> None:
    """Copy the weights of the model that a training starts from, if both are of one kind."""
    source = f"start_from: {recipe.start_from}"
    advice = "Train with the recipe of that run, its run.toml."
    has_items = processor.items is not None
    if start.matcher.name != matcher.name or (not has_items and start.processor.items is not None):
        raise RecipeError(
            f"{source}: expected a model of kind {matcher.name}, got {start.matcher.name}. {advice}"
        )
    before = start.processor.to_config
    now = processor.to_config
    if has_items:
        # Only the text side of the other model is read.
        for config in (before, now):
            for key in ("visual", "standardization", "items", "vocabulary"):
                config.pop(key, None)
    if changed := next((key for key in {**before, **now} if before.get(key) != now.get(key)), None):
        raise RecipeError(
            f"{source}: expected the same {changed} as in this recipe, got another. {advice}"
        )
    weights = start.matcher.state_dict()
    initial_weights = matcher.state_dict()
    if has_items:
        known, all_words = (len(each.vocabulary or ()) for each in (start.processor, processor))
        weights = {name: weights[name] for name in initial_weights if name in weights}
        for name, part in weights.items():
            initial = initial_weights[name]
            # Word embeddings get further rows for new words. Other weights are unchanged.
            if part.dim() == 2 and (len(part), len(initial)) == (known, all_words):
                weights[name] = torch.cat([part, initial[known:]])
    # A scale or bias that the earlier training did not learn starts as in a new training.
    scale_names = {name for name, _ in matcher.parameters_by_part().get(SCALE_PART, ())}
    weights |= {name: initial_weights[name] for name in scale_names - weights.keys()}
    start_shapes, shapes = (
        {name: list(part.shape) for name, part in state.items()}
        for state in (weights, initial_weights)
    )
    for name in sorted(start_shapes.keys() | shapes.keys()):
        if start_shapes.get(name) != shapes.get(name):
            actual, expected = (
                f"shape {of_model[name]}" if name in of_model else "nothing"
                for of_model in (start_shapes, shapes)
            )
            raise RecipeError(f"{source}: {name}: expected {expected}, got {actual}. {advice}")
    matcher.load_state_dict(weights)


def initial_matcher(data_module: DataModule, start: Retriever | None) -> Matcher:
    """Build the model with the weights that a training starts with."""
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
    """Build the model of a recipe with new weights. ``keep_bias``: with a learned bias even if no
    objective uses it.
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
        # A text side scores its vectors with stored ones.
        expected = data_module.visual.embedding_dim
        actual = _encode_one_text(data_module, matcher).shape[1]
        if actual != expected:
            raise RecipeError(
                f"model {matcher.name}: expected texts of dimension {expected}, as the item vectors "
                f"in {data_module.recipe.visual.features}, got {actual}. Use another text encoder, "
                "or a model such as Heads."
            )
    for whitening in (module for module in matcher.modules() if isinstance(module, Whitening)):
        train = data_module.training_split
        # Up to 100,000 captions in equal distances (150 MB of MiniLM features). Of words, their mean.
        count = len(train.captions)
        rows = np.linspace(0, count - 1, min(count, 100_000)).astype(np.int64)
        text = data_module.sources(train)[1]
        blocks = (text.read(part) for part in equal_batches(rows, 256))
        vectors = [
            get_vectors(block)
            if get_vectors(block).dim() == 2
            else mean_pool(get_vectors(block), get_mask(block))
            for block in blocks
        ]
        whitening.fit(torch.cat(vectors))
    return matcher


def _architecture(
    data_module: DataModule, kind: type[Matcher], *, keep_bias: bool
) -> dict[str, Any]:
    """The fields of the model config: the fields of the recipe, the granularity and dimensions of
    the features, and a learned bias.
    """
    recipe = data_module.recipe
    visual = recipe.visual
    text = recipe.text
    known = {field.name: field for field in fields(kind.Config)}
    architecture = {key: value for key, value in recipe.model.items() if key != "kind"}

    # A separate text encoder that the recipe trains.
    if text.encoder != "vocabulary" and text.granularity == "tokens":
        is_dual_encoder = text.encoder == visual.encoder or visual.item_vectors
        if "text_backbone" in known:
            architecture["text_backbone"] = text.encoder
        elif not is_dual_encoder:
            raise RecipeError(
                f"text.granularity: expected a frozen text encoder for {kind.name}, got "
                '"tokens". Set text.granularity = "pooled" or "words".'
            )

    uses_bias = keep_bias or any(
        phase.objective.without_bias() is not None for phase in recipe.phases
    )
    if uses_bias and recipe.model.get("scale") == "learned" and "logit_bias" in known:
        architecture["logit_bias"] = "learned"

    tokens = data_module.processor.vocabulary or data_module.processor.pretrained_tokenizer
    architecture |= {
        "visual_granularity": "regions" if visual.granularity == "frames" else visual.granularity,
        "text_granularity": text.granularity,
        "text_input_dim": len(tokens) if tokens else data_module.text.embedding_dim,  # type: ignore[union-attr]
    }

    if isinstance(data_module.visual, ExpertStore) and "experts" in kind.visual_granularities:
        architecture["experts"] = data_module.visual.embedding_dims
    if data_module.visual is not None:
        architecture["visual_input_dim"] = data_module.visual.embedding_dim
    if isinstance(data_module.visual, ItemVectors):
        # The vectors of a text side have the dimension of the items. A matcher that reads no pooled
        # features is built for its own kind, without its visual side.
        granularities = kind.visual_granularities
        architecture["visual_granularity"] = (
            "pooled" if "pooled" in granularities else granularities[0]
        )
        if "embedding_dim" in known:
            architecture["embedding_dim"] = data_module.visual.embedding_dim
        if "backbone" in known and known["backbone"].default is MISSING:
            # A dual encoder, whose text encoder it is.
            architecture["backbone"] = text.encoder
    if data_module.visual is None:
        architecture["backbone"] = visual.encoder
        # The granularity of the backbone depends on the other fields, and its dimensions on its
        # granularity.
        granularity = build_object(
            kind.Config, architecture | {"visual_input_dim": 1}
        ).backbone_granularity
        encoder: VisualEncoder | EmbeddingImageEncoder = open_encoder(
            replace(data_module.processor.visual_spec, granularity=granularity)
        )  # type: ignore[assignment]
        architecture["visual_input_dim"] = encoder.embedding_dim
    return architecture


def resolve_matryoshka_dims(data_module: DataModule, matcher: Matcher) -> tuple[int, ...]:
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


def _encode_one_text(data_module: DataModule, matcher: Matcher) -> torch.Tensor:
    """Encode the first training caption, [1, D]."""
    _, text = data_module.sources(data_module.training_split)
    encoded = encode_items(matcher, "text", [text.read(np.arange(1))], [np.arange(1)])
    return get_vectors(matcher.first_stage_items(encoded))
