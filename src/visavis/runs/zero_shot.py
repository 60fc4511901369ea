"""A CLIP or SigLIP model as it comes, where a verb takes a run."""

from __future__ import annotations

from pathlib import Path

from visavis.models.clip import CLIP, find_dual_encoder
from visavis.training.recipe import Recipe
from visavis.training.settings import TextSettings, VisualSettings


def zero_shot_recipe(name: str | Path) -> Recipe | None:
    """What a recipe says of such a model, without data and without phases; None if there is no model of this name."""
    backbone = find_dual_encoder(name)
    if backbone is None:
        return None
    return Recipe(
        name=Path(backbone).name,
        visual=VisualSettings(tower=backbone, view="pixels"),
        text=TextSettings(tower=backbone, view="tokens"),
        model={"kind": CLIP.name, "backbone": backbone},
        phases=(),
    )


def pretrained_of(recipe: Recipe) -> str | None:
    """The CLIP or SigLIP model that a recipe's model learns on, by its name; None if it is none on both sides."""
    tower = recipe.visual.tower
    return tower if tower and recipe.text.tower == tower and find_dual_encoder(tower) else None
