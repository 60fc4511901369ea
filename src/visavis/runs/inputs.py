"""What a training reads besides its captions, in few words each: pictures, stored features, towers, vocabulary, degrees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from visavis import spec, supervision
from visavis.data.contents import Contents
from visavis.data.dataset import Bytes
from visavis.data.experts import ExpertStore
from visavis.data.features import FeatureStore
from visavis.data.region_features import RegionFeatures
from visavis.models.pretrained import model_files
from visavis.progress import Progress
from visavis.training.data_module import DataModule
from visavis.training.starting import start_files

ENCODERS = ("the encoder of the images", "the encoder of the texts")
"""What a trained model reads everything through, whatever the data."""


def inputs_of(
    data_module: DataModule, known: Mapping[str, Contents], progress: Progress, among: Container[str] | None = None
) -> dict[str, Contents]:
    """Every input by what it is, in the words of a sentence.

    known: those of an earlier time, which are read again only where they changed. among: the ones that are asked for; None: all.
    """
    recipe, data, words = data_module.recipe, data_module.data, data_module.processor.vocabulary
    files: dict[str, dict[str, Bytes]] = {}
    told: dict[str, str] = {}
    if data_module.judged is not None:
        told["the judgements"] = data_module.judged.fingerprint
    if isinstance(data_module.visual, ExpertStore | RegionFeatures):
        told["the stored features"] = data_module.visual.sha256
    elif isinstance(data_module.visual, FeatureStore) or data_module.visual is None:
        files["the pictures"] = {image.name: image.bytes for image in data.images if image.bytes is not None}
    else:
        files["the stored features"] = _named(data_module.visual.files)
    sides = ((data_module.visual, recipe.visual.tower), (data_module.text, recipe.text.tower))
    for encoder, (features, tower) in zip(ENCODERS, sides, strict=True):
        if isinstance(features, FeatureStore):
            told[encoder] = features.description.weights
        elif features is None and (among is None or encoder in among):
            files[encoder] = _named(model_files(tower))
    if words is not None:
        told["the vocabulary"] = hashlib.sha256(json.dumps(words.words).encode()).hexdigest()[:32]
    if among is None:
        files["the model that the training starts from"] = _named(start_files(recipe))
    for number, phase in enumerate(recipe.phases):
        read = spec.parse(phase.supervision, supervision.CATALOG).files(data)
        files[f"what the supervision of phase {number} reads"] = _named(read)

    def told_by(what: str, places: Mapping[str, Bytes]) -> Contents:
        return Contents.of(places, known.get(what), lambda done, total: progress.work(f"reading {what}", done, total, 0.0))

    asked = [*files, *told] if among is None else among
    return {what: told_by(what, places) for what, places in files.items() if places and what in asked} | {
        what: Contents(1, content, content) for what, content in told.items() if what in asked
    }


def _named(files: Iterable[Path]) -> dict[str, Bytes]:
    """By number and name, wherever their folder lies now."""
    return {f"{number} {file.name}": Bytes(file) for number, file in enumerate(files)}
