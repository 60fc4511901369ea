"""What a pretrained CLIP or SigLIP model knew, and what it still knows after a training on other data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis.errors import RecipeError
from visavis.evaluation import Evaluation
from visavis.models.base import Matcher
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of
from visavis.runs.zero_shot import pretrained_of
from visavis.training.data_module import DataModule, open_data_module
from visavis.training.inputs import open_data
from visavis.training.recipe import Recipe, build_recipe


@dataclass(frozen=True)
class Forgetting:
    """The test split of another data set by the pretrained model and by the trained one."""

    data: str
    before: Evaluation
    after: Evaluation

    def __str__(self) -> str:
        told = [
            f"{name} {self.before.metrics[key]:.1f} -> {self.after.metrics[key]:.1f}"
            for name, key in (("RSUM", "rsum"), ("R@10 image to text", "i2t_r10"), ("text to image", "t2i_r10"))
        ]
        return f"{self.data}, by the pretrained model and after the training: {', '.join(told)}."

    def to_json(self) -> dict[str, Any]:
        return {"data": self.data, "before": self.before.to_json(), "after": self.after.to_json()}


def check_forgetting(recipe: Recipe, progress: Progress) -> None:
    """Raise RecipeError or DataError, before a training, for what ``forgetting`` could not tell after it."""
    if not recipe.evaluation.forgetting:
        return
    if pretrained_of(recipe) is None:
        raise RecipeError(
            "evaluation.forgetting compares with a pretrained CLIP or SigLIP model, and visual.tower and text.tower are not the same one: "
            f"{recipe.visual.tower or 'none'} and {recipe.text.tower}."
        )
    other = _on_other_data(recipe)
    open_data(other, progress, skip_bad=other.data.skip_bad).split(other.evaluation.test)


def forgetting(data_module: DataModule, matcher: Matcher, progress: Progress) -> Forgetting:
    """What is left, on the test split of the recipe's ``evaluation.forgetting``."""
    recipe = _on_other_data(data_module.recipe)
    other = open_data_module(recipe, progress, data_module.processor)
    tower, test = Path(recipe.visual.tower), recipe.evaluation.test
    as_it_was = recipe_of(tower, recipe.data.path, recipe.memory or None).model_copy(update={"data": recipe.data})
    before, untrained = open_run(tower, as_it_was, progress)
    return Forgetting(other.data.name, before.evaluate(untrained, test), other.evaluate(matcher, test))


def _on_other_data(recipe: Recipe) -> Recipe:
    changed = {"data.path": recipe.evaluation.forgetting, "data.misplaced": 0.0, "visual.features": ""}
    return build_recipe(recipe.to_dict(), changed, "evaluation.forgetting")
