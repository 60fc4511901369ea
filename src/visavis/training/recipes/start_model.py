"""Model of ``start_from``, whose weights, vocabulary and standardization a training starts with.
Start of a learned scale and bias.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from visavis.core.errors import RecipeError, RunError, SpecError
from visavis.models import Matcher
from visavis.models.base import SCALE_PART
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import Phase


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


def learned_start_values(matcher: Matcher, phase: Phase) -> dict[str, float]:
    """Return the values at which a learned scale and bias start by ``phase.learned_start``.

    Args:
        matcher: Model of the training.
        phase: A phase of its recipe.

    Returns:
        Values of the objective by name. Empty if the values of the model are kept.

    Raises:
        RecipeError: If the model does not learn such a value, or if the scale is out of its bounds.
    """
    objective = phase.objective
    learned = {
        "scale": matcher.scale,
        "bias": None if objective.without_bias() is None else matcher.logit_bias,
    }
    values = dict[str, float]()
    for name in phase.learned_start:
        if learned[name] is None:
            raise RecipeError(
                f"learned_start: expected values that {matcher.name} learns with "
                f"{phase.objective}, got {name!r}. "
                f'Remove it, or set model.scale="learned".'
            )
        values[name] = objective.gradient_scale if name == "scale" else objective.bias  # type: ignore[attr-defined]
    if matcher.scale is not None and "scale" in values:
        try:
            matcher.scale.validate(values["scale"])
        except SpecError as error:
            raise RecipeError(
                f"{phase.objective}: {error} Change the objective, or the bounds of the learned "
                "scale."
            ) from None
    return values


@torch.no_grad()
def start_scale_and_bias(matcher: Matcher, phase: Phase, previous: Phase | None = None) -> None:
    """Set a learned scale and bias to ``learned_start_values`` at the start of a phase.

    Args:
        matcher: Model of the training.
        phase: Phase that starts.
        previous: Phase before it. With the same objective and ``learned_start``, the current values
            stay.
    """
    if previous is not None and (previous.objective, previous.learned_start) == (
        phase.objective,
        phase.learned_start,
    ):
        return
    values = learned_start_values(matcher, phase)
    if matcher.scale is not None and "scale" in values:
        matcher.scale.log.fill_(math.log(values["scale"]))
    if matcher.logit_bias is not None and "bias" in values:
        matcher.logit_bias.fill_(values["bias"])


def describe_scale_and_bias(matcher: Matcher, phase: Phase) -> str:
    """Describe the learned scale and bias with which a phase starts, and those of the pretrained
    model if they differ.

    Args:
        matcher: Model with the weights at the start of the phase.
        phase: Phase that starts.

    Returns:
        Text that follows the objective. Empty for an objective with a fixed gamma or margin.
    """
    objective = phase.objective
    if objective.without_scale() is None:
        return ""
    used = {"scale": objective.gradient_scale}
    if objective.without_bias() is not None:
        used["bias"] = objective.bias if matcher.logit_bias is None else matcher.logit_bias.item()  # type: ignore[attr-defined]
    if matcher.scale is not None:
        used["scale"] = matcher.scale().item()
    used_texts, pretrained = (
        {name: f"{name} {value:.4g}" for name, value in values.items()}
        for values in (used, matcher.pretrained_logits)
    )
    text = "" if matcher.scale is None else f", learned from {' and '.join(used_texts.values())}"
    differs = any(name in used and used_texts[name] != value for name, value in pretrained.items())
    return text + (f" (pretrained: {' and '.join(pretrained.values())})" if differs else "")
