"""Checks of fine-tuned models: weight interpolation (WiSE-FT), and what a pretrained CLIP or SigLIP
model loses on other data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.core.errors import RecipeError
from visavis.core.progress import Progress
from visavis.evaluation import Evaluation
from visavis.models.base import Matcher
from visavis.models.clip.model import LORA_A_MARK
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.open_data import open_data, open_data_module
from visavis.training.recipes.recipe import Recipe, build_recipe
from visavis.training.runs.open_run import open_run, pretrained_dual_encoder, read_run_recipe

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Interpolation:
    """Interpolation that was chosen on the validation split.

    Attributes:
        alpha: Share of the trained weights, from 0 to 1.
        start_rsum: Validation RSUM of the initial weights, in percent.
        rsum: Validation RSUM of each alpha that was tried.
    """

    alpha: float
    start_rsum: float
    rsum: dict[float, float]

    def __str__(self) -> str:
        largest = max(self.rsum)
        return (
            f"Interpolated weights with alpha {self.alpha:g}: validation RSUM "
            f"{self.rsum[self.alpha]:.1f} "
            f"(initial weights {self.start_rsum:.1f}, alpha {largest:g} {self.rsum[largest]:.1f})."
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "alpha": self.alpha,
            "start_rsum": self.start_rsum,
            "rsum": {f"{alpha:g}": rsum for alpha, rsum in self.rsum.items()},
        }


def choose_interpolation(
    data_module: DataModule,
    matcher: Matcher,
    start_weights: Weights,
    trained_weights: Weights,
    start_rsum: float,
) -> Interpolation:
    """Evaluate each alpha of a recipe and load the interpolated weights of the chosen one."""
    settings = data_module.recipe.interpolation
    split = data_module.validation
    # Source: Wortsman et al., Robust fine-tuning of zero-shot models (2022).
    rsum: dict[float, float] = {}
    for alpha in sorted(set(settings.alphas)):
        matcher.load_state_dict(interpolate_weights(start_weights, trained_weights, alpha))
        rsum[alpha] = data_module.evaluate(matcher, split).metrics["rsum"]
    alpha = smallest_alpha(start_rsum, rsum, settings.min_gain_ratio)
    matcher.load_state_dict(interpolate_weights(start_weights, trained_weights, alpha))
    return Interpolation(alpha, start_rsum, rsum)


def interpolate_weights(start: Weights, end: Weights, alpha: float) -> dict[str, Tensor]:
    """Interpolate weights linearly: $(1 - alpha) start + alpha end$."""
    # Of a LoRA adapter only the factor that starts at 0 is interpolated, so that the product of both
    # factors is interpolated linearly.
    return {
        name: torch.lerp(start[name], weight, alpha)
        if weight.is_floating_point() and LORA_A_MARK not in name
        else weight
        for name, weight in end.items()
    }


def smallest_alpha(start_rsum: float, rsum: Mapping[float, float], min_gain_ratio: float) -> float:
    """Choose the smallest alpha with a given ratio of the best gain.

    Args:
        start_rsum: RSUM of the initial weights.
        rsum: RSUM of each alpha.
        min_gain_ratio: Required ratio of the best gain over ``start_rsum``.

    Returns:
        The smallest such alpha. If no alpha gains, the smallest of those with the best RSUM.

    Example:
        >>> smallest_alpha(100.0, {0.25: 150.0, 0.5: 192.0, 1.0: 200.0}, 0.9)
        0.5
    """
    best = max(rsum.values())
    min_rsum = start_rsum + min_gain_ratio * (best - start_rsum) if best > start_rsum else best
    return min(alpha for alpha in rsum if rsum[alpha] >= min_rsum)


@dataclass(frozen=True)
class Forgetting:
    """Results of the pretrained and of the fine-tuned model on the test split of another data set.

    Attributes:
        data: Name of the data set.
        before: Evaluation of the pretrained model.
        after: Evaluation of the fine-tuned model.
    """

    data: str
    before: Evaluation
    after: Evaluation

    def __str__(self) -> str:
        metrics = (
            ("RSUM", "rsum"),
            ("image-to-text R@10", "i2t_r10"),
            ("text-to-image R@10", "t2i_r10"),
        )
        changes = [
            f"{label} {self.before.metrics[key]:.1f} -> {self.after.metrics[key]:.1f}"
            for label, key in metrics
        ]
        return f"{self.data}, pretrained -> fine-tuned: {', '.join(changes)}."

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {"data": self.data, "before": self.before.to_json(), "after": self.after.to_json()}


def check_forgetting(recipe: Recipe, progress: Progress) -> None:
    """Check before a training that ``evaluation.forgetting`` can be measured after it."""
    if not recipe.evaluation.forgetting:
        return
    if pretrained_dual_encoder(recipe) is None:
        raise RecipeError(
            "evaluation.forgetting: expected the same pretrained CLIP or SigLIP model as "
            "visual.encoder and text.encoder, got "
            f"{recipe.visual.encoder or 'none'} and {recipe.text.encoder}. Set both to one dual "
            "encoder, or remove evaluation.forgetting."
        )
    other = _recipe_on_other_data(recipe)
    open_data(other, progress).split(other.evaluation.test)


def measure_forgetting(data_module: DataModule, matcher: Matcher) -> Forgetting:
    """Evaluate the pretrained and the fine-tuned model on the data set of
    ``evaluation.forgetting``.
    """
    recipe = _recipe_on_other_data(data_module.recipe)
    other = open_data_module(recipe, data_module.context, data_module.processor)
    encoder = Path(recipe.visual.encoder)
    test = recipe.evaluation.test
    pretrained = read_run_recipe(encoder, recipe.data.path, recipe.memory or None).model_copy(
        update={"data": recipe.data}
    )
    pretrained_data, pretrained_matcher = open_run(encoder, pretrained, data_module.progress)
    return Forgetting(
        other.data.name,
        pretrained_data.evaluate(pretrained_matcher, test),
        other.evaluate(matcher, test),
    )


def _recipe_on_other_data(recipe: Recipe) -> Recipe:
    changes = {
        "data.path": recipe.evaluation.forgetting,
        "data.noise": "",
        "visual.features": "",
    }
    return build_recipe(recipe.to_dict(), changes, "evaluation.forgetting")
