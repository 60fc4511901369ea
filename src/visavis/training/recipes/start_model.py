"""Model of ``start_from``, whose weights, vocabulary and standardization a training starts with."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from visavis.core.errors import RecipeError, RunError
from visavis.models import Matcher
from visavis.models.base import SCALE_PART
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.training.recipes.recipe import Recipe


def start_model_files(recipe: Recipe) -> list[Path]:
    """List the files of the model that a training starts from.

    Args:
        recipe: Recipe.

    Returns:
        Config and weights. Empty without ``start_from``.

    Raises:
        RecipeError: If ``start_from`` is not a run folder.
    """
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
    """Load the model that a training starts from.

    Args:
        recipe: Recipe.

    Returns:
        The model. None without ``start_from``.

    Raises:
        RecipeError: If ``start_from`` is not a run folder, or its model is broken.
    """
    if not (files := start_model_files(recipe)):
        return None
    try:
        return Retriever.load(files[0].parent, device="cpu")
    except RunError as error:
        raise RecipeError(f"start_from: {error}") from None


def copy_start_weights(
    start: Retriever, matcher: Matcher, processor: Processor, recipe: Recipe
) -> None:
    """Copy the weights of the model that a training starts from.

    Args:
        start: Model of ``start_from``.
        matcher: Model of the training.
        processor: Preprocessing of the training.
        recipe: Recipe of the training.

    Raises:
        RecipeError: Naming the first difference of the models.
    """
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
        sizes = [len(each.vocabulary or ()) for each in (start.processor, processor)]
        weights = {
            name: _with_new_words(weights[name], initial, *sizes)
            for name, initial in initial_weights.items()
            if name in weights
        }
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


def _with_new_words(start: Tensor, initial: Tensor, known: int, all_words: int) -> Tensor:
    """Word embeddings of a model with further rows for new words. Other weights are unchanged."""
    is_extended = (len(start), len(initial)) == (known, all_words) if start.dim() == 2 else False
    return torch.cat([start, initial[known:]]) if is_extended else start
