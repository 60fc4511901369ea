"""What is compared: every choice of objective and model, each at every point of a grid of other settings.

>>> from visavis.training.recipe_files import read_recipe
>>> recipe = read_recipe("heads-flickr8k")
>>> [setting.name for setting in settings_of(recipe, ["VLC(gamma=40)"], [], ["training.batch_size=[64, 128]"])]
['VLC(gamma=40), training.batch_size=64', 'VLC(gamma=40), training.batch_size=128']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from visavis.errors import RecipeError
from visavis.objectives import Goal, parse
from visavis.spec import parse_call
from visavis.training.overrides import parse_override
from visavis.training.recipe import Recipe, build_recipe

FAMILIES = {"Goal.all()": tuple(f"Goal(triplet={goal.triplet!r}, pair={goal.pair!r})" for goal in Goal.all())}
"""Names that stand for several objectives."""


Choices: TypeAlias = tuple[Sequence[str], Sequence[str], Sequence[str]]
"""Objectives, models and the grid, as texts."""
THE_RECIPE = "the recipe as it is"


@dataclass(frozen=True)
class Setting:
    """One way to train. choice: what is compared, such as an objective and a model. point: the other settings, of which each choice has those
    that are best on validation. content: of its recipe, resolved, but for the seed.
    """

    choice: str
    point: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.choice, self.point)))

    @property
    def short(self) -> str:
        """A part of a folder's name that tells a person which this is; not the only one of its kind."""
        return re.sub(r"[^a-z0-9+]+", "-", self.choice.lower()).strip("-")[:40].rstrip("-")


def settings_of(recipe: Recipe, objectives: Sequence[str], models: Sequence[str], grid: Sequence[str]) -> tuple[Setting, ...]:
    """All settings, in the order given. grid: ``key=[value, value]``. What is not named is as the recipe has it.

    Raises SpecError for an objective or model that cannot be read, RecipeError for a grid that is none, for a setting that is named twice,
    and for one that makes no recipe.
    """
    base = recipe.to_dict()
    specs = [spec for text in objectives for spec in FAMILIES.get(text.replace(" ", ""), (text,))]
    choices = itertools.product(
        [(spec, {"objective": repr(parse(spec))}) for spec in specs] or [("", {})],
        [(spec, {"model": spec}) for spec in models if parse_call(spec)] or [("", {})],
    )
    settings = [
        Setting(
            ", ".join(filter(None, (objective, model))) or THE_RECIPE,
            ", ".join(f"{key}={value}" for key, value in point),
            build_recipe(base, {**of_objective, **of_model, **dict(point)}, recipe.name).to_dict(),
        )
        for (objective, of_objective), (model, of_model) in choices
        for point in itertools.product(*map(_values, grid))
    ]
    for number, setting in enumerate(settings):
        if any(setting.content == other.content for other in settings[:number]):
            raise RecipeError(f"{setting.name} is to be compared with itself: name it once.")
    return tuple(settings)


def _values(text: str) -> list[tuple[str, Any]]:
    """The values that one key of the grid takes."""
    key, values = parse_override(text)
    if not isinstance(values, list | tuple) or not values:
        raise RecipeError(f"the grid has {text!r}, expected several values, such as phases.0.optimizer.lr=[3e-4, 1e-3].")
    return [(key, value) for value in values]
