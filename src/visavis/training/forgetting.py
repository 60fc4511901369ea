"""Forgetting: how much a pretrained CLIP or SigLIP model loses on other data when it is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis.errors import RecipeError
from visavis.evaluation import Evaluation
from visavis.models.base import Matcher
from visavis.progress import Progress
from visavis.recipes.data_module import DataModule, open_data_module
from visavis.recipes.features import open_data
from visavis.recipes.recipe import Recipe, build_recipe
from visavis.runs.open_run import open_run, pretrained_dual_encoder, read_run_recipe


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
        metrics = (("RSUM", "rsum"), ("image-to-text R@10", "i2t_r10"), ("text-to-image R@10", "t2i_r10"))
        changes = [f"{label} {self.before.metrics[key]:.1f} -> {self.after.metrics[key]:.1f}" for label, key in metrics]
        return f"{self.data}, pretrained -> fine-tuned: {', '.join(changes)}."

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            The name of the data set, and both evaluations.
        """
        return {"data": self.data, "before": self.before.to_json(), "after": self.after.to_json()}


def check_forgetting(recipe: Recipe, progress: Progress) -> None:
    """Check before a training that ``evaluation.forgetting`` can be measured after it.

    Args:
        recipe: Recipe of the training.
        progress: Receives progress.

    Raises:
        RecipeError: If the model does not start from a pretrained dual encoder.
        DataError: If the other data set cannot be read or has no test split.
    """
    if not recipe.evaluation.forgetting:
        return
    if pretrained_dual_encoder(recipe) is None:
        raise RecipeError(
            "evaluation.forgetting: expected the same pretrained CLIP or SigLIP model as visual.encoder and text.encoder, got "
            f"{recipe.visual.encoder or 'none'} and {recipe.text.encoder}. Set both to one dual encoder, or remove evaluation.forgetting."
        )
    other = _recipe_on_other_data(recipe)
    open_data(other, progress, skip_bad=other.data.skip_bad).split(other.evaluation.test)


def measure_forgetting(data_module: DataModule, matcher: Matcher, progress: Progress) -> Forgetting:
    """Evaluate the pretrained and the fine-tuned model on the data set of ``evaluation.forgetting``.

    Args:
        data_module: Data of the training.
        matcher: Fine-tuned model.
        progress: Receives progress.

    Returns:
        Both evaluations.
    """
    recipe = _recipe_on_other_data(data_module.recipe)
    other = open_data_module(recipe, progress, data_module.processor)
    encoder, test = Path(recipe.visual.encoder), recipe.evaluation.test
    pretrained = read_run_recipe(encoder, recipe.data.path, recipe.memory or None).model_copy(update={"data": recipe.data})
    pretrained_data, pretrained_matcher = open_run(encoder, pretrained, progress)
    return Forgetting(other.data.name, pretrained_data.evaluate(pretrained_matcher, test), other.evaluate(matcher, test))


def _recipe_on_other_data(recipe: Recipe) -> Recipe:
    changes = {"data.path": recipe.evaluation.forgetting, "data.noise_ratio": 0.0, "visual.features": ""}
    return build_recipe(recipe.to_dict(), changes, "evaluation.forgetting")
