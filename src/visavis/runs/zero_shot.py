"""A model without a run, where a verb takes a run: a CLIP or SigLIP model as it comes, or a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visavis import storage
from visavis.errors import RunError
from visavis.models.clip import CLIP, find_dual_encoder
from visavis.models.pretrained import model_folder
from visavis.models.processor import SavedConfig
from visavis.training.recipe import Recipe
from visavis.training.settings import TextSettings, VisualSettings


def zero_shot_recipe(name: str | Path) -> Recipe | None:
    """What a recipe says of such a model, without data and without phases; None if there is no model of this name."""
    if (file := Path(name) / "model" / "config.json").is_file():
        return _saved_recipe(Path(name).resolve().name, storage.read_json(file, SavedConfig, error=RunError))
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


def _saved_recipe(name: str, config: SavedConfig) -> Recipe | None:
    """What the model of a folder reads; None for one that knows stored features alone."""
    if config.visual is None or config.stored_texts:
        return None
    views, visual = config.architecture, config.visual
    read: dict[str, Any] = {key: getattr(visual, key) for key in ("crops", "size", "random_crops", "frames_per_second")}
    read |= {"view": "pixels" if views["visual_view"] == "pixels" else visual.view}
    read |= {"standardize": "values"} if config.standardization else {}  # the model's own, whichever it is
    text = config.text.name if config.text else config.tokenizer or "vocabulary"
    return Recipe(
        name=name,
        visual=VisualSettings(tower=visual.name, **read),
        text=TextSettings(tower=text, view=views["text_view"]),
        model={"kind": config.kind, **views},
        phases=(),
    )


def pretrained_of(recipe: Recipe) -> str | None:
    """The CLIP or SigLIP model that a recipe's model learns on, by its name; None if it is none on both sides.

    Raises DataError if it is there no more.
    """
    tower = recipe.visual.tower
    return tower if tower and recipe.text.tower == tower and find_dual_encoder(model_folder(tower)) else None
