"""Settings of a comparison: every choice of objective and model, at every point of a grid of other
recipe keys.

>>> from visavis.training.recipes.files import read_recipe
>>> recipe = read_recipe("heads-flickr8k")
>>> [setting.name for setting in build_settings(recipe, ["VLC(gamma=40)"], [], ["training.batch_size=[64, 128]"])]
['VLC(gamma=40), training.batch_size=64', 'VLC(gamma=40), training.batch_size=128']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from visavis.core import own_code
from visavis.core.errors import RecipeError
from visavis.core.spec import parse_call
from visavis.losses.objectives import Goal, parse
from visavis.training.recipes.recipe import Recipe, build_recipe, parse_override

OBJECTIVE_FAMILIES = {
    "Goal.all()": tuple(
        f"Goal(triplet={goal.triplet!r}, pair={goal.pair!r})" for goal in Goal.all()
    )
}
"""Names of several objectives."""


Choices: TypeAlias = tuple[Sequence[str], Sequence[str], Sequence[str]]
"""Objectives, models and grid keys, as texts."""
UNCHANGED_RECIPE = "unchanged recipe"


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        choice: The compared parts, such as an objective and a model.
        grid_point: Values of the other keys. Each choice is compared at its best point on
            validation.
        recipe_values: The resolved recipe, without the seed.
    """

    choice: str
    grid_point: str = ""
    recipe_values: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The choice and the grid point."""
        return ", ".join(filter(None, (self.choice, self.grid_point)))

    @property
    def slug(self) -> str:
        """A readable part of folder names. It may not be unique."""
        return re.sub(r"[^a-z0-9+]+", "-", self.choice.lower()).strip("-")[:40].rstrip("-")


def build_settings(
    recipe: Recipe, objectives: Sequence[str], models: Sequence[str], grid: Sequence[str]
) -> tuple[Setting, ...]:
    """Build all settings of a comparison. Keys that are not named keep the value of the recipe."""
    base = recipe.to_dict()
    # For each key of the grid, its values.
    axes: list[list[tuple[str, Any]]] = []
    for text in grid:
        key, values = parse_override(text)
        if not isinstance(values, list | tuple) or not values:
            raise RecipeError(
                f"grid: expected a key with a list of values, got {text!r}. Write it as "
                "phases.0.optimizer.lr=[3e-4, 1e-3]."
            )
        axes.append([(key, value) for value in values])
    specs = [
        spec
        for text in objectives
        for spec in OBJECTIVE_FAMILIES.get(str(text).replace(" ", ""), (text,))
    ]
    settings: list[Setting] = []
    # The code of these texts may run, but not that of texts in the recipe.
    with own_code.named_by_user(*objectives, *models, *grid):
        # Parsing raises SpecError here, before any run.
        choices = itertools.product(
            [(spec, {"objective": spec}) for spec in specs if parse(spec)] or [("", {})],
            [(spec, {"model": spec}) for spec in models if parse_call(spec)] or [("", {})],
        )
        for (objective, of_objective), (model, of_model) in choices:
            for point in itertools.product(*axes):
                changes = {**of_objective, **of_model, **dict(point)}
                setting = Setting(
                    ", ".join(filter(None, (objective, model))) or UNCHANGED_RECIPE,
                    ", ".join(f"{key}={value}" for key, value in point),
                    build_recipe(base, changes, recipe.name).to_dict(),
                )
                if any(setting.recipe_values == other.recipe_values for other in settings):
                    raise RecipeError(
                        f"{setting.name}: expected different settings, got this one twice. Pass it "
                        "once."
                    )
                settings.append(setting)
    return tuple(settings)
