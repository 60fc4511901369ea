"""Search without an index: encode the images of a place once, then rank them for a sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.data import Dataset, Image, open_dataset
from visavis.data.archives import IMAGE_SUFFIXES, VISUAL_SUFFIXES
from visavis.data.dataset import Bytes
from visavis.data.finite import file_marks
from visavis.data.listing import Entry, Listing
from visavis.data.loader import Features, Rows, Source
from visavis.data.pixels import check_pixels
from visavis.data.source_text import is_unicode
from visavis.data.walking import files_under
from visavis.errors import DataError, RunError, VisavisError
from visavis.memory import Memory
from visavis.models.caching import cache_features
from visavis.models.encoding import batches_of_at_most, encode
from visavis.models.pixel_source import PixelSource
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_all
from visavis.progress import Progress
from visavis.runs.ensemble import check_same_captions, members_of, recipes_of
from visavis.training.inputs import check_widths, open_data, visual_features

BATCH = 256


@dataclass(frozen=True)
class Hit:
    """One image that was found: its name, its score, and the image itself."""

    name: str
    score: float
    image: Image

    def to_json(self) -> dict[str, Any]:
        path = None if self.image.bytes is None else str(self.image.bytes.path)
        return {"name": self.name, "score": self.score, "path": path}


def search_images(runs: Sequence[Path], query: str, inside: Path | None, top: int, progress: Progress, memory: Memory = None) -> list[Hit]:
    """The ``top`` images of a place that fit a sentence best, by the mean of the scores of the models of runs.

    inside: the place; None: the data of the runs. memory: of blocks of scores. Raises DataError where there are no images, RunError for
    runs on different data.
    """
    if not query.strip():
        raise VisavisError("the query is empty: write what to look for, such as 'a dog runs on the beach'.")
    if top < 1:
        raise VisavisError(f"top is {top}, expected at least 1.")
    runs = members_of(runs)
    models = {run: Retriever.load(run, memory=memory) for run in runs}
    if inside is not None:
        rates = [model.processor.frames_per_second for model in models.values()]
        place = collection(inside, max(rates) if all(rates) else 0.0)
        return best([similarities(model, place, query, progress) for model in models.values()], place, top, progress)
    scores, places = [], dict[Path, Dataset]()
    for run, recipe in recipes_of(runs, memory=memory).items():
        if not recipe.data.path:
            raise RunError(f"{run} is a model that was not trained here and brings no data: name pictures with --in.")
        models[run].memory = recipe.memory or None
        places[run] = open_data(recipe, progress, skip_bad=True)
        check_same_captions(places)
        stored, _ = visual_features(recipe, places[run], progress)
        check_widths(models[run].matcher.config, stored, None, run)
        scores.append(similarities(models[run], places[run], query, progress, stored))
    return best(scores, places[runs[0]], top, progress)


def similarities(model: Retriever, place: Dataset, query: str, progress: Progress, stored: Features | None = None) -> Tensor:
    """The scores of all images of a collection for one sentence ``[V]``. stored: their features, where they need not be computed."""
    matcher, processor = model.matcher, model.processor
    say_unknown_words(model, query, progress)
    source: Source
    if matcher.config.visual_view == "pixels":
        source = PixelSource(place, processor.preprocess)
    else:
        store = stored or cache_features(
            place, processor.visual_spec, on_progress=lambda done, total, per_s: progress.work("images", done, total, per_s)
        )
        source = Rows(
            store,
            store.rows(image.name for image in place.images),
            processor.visual.crops if processor.visual else 1,
            processor.standardization,
        )
    visual = encode(matcher, "visual", source.read, batches_of_at_most(len(place.images), BATCH))
    return score_all(matcher, visual, model.encode_text([query]), model.memory)[:, 0]


def say_unknown_words(model: Retriever, text: str, progress: Progress) -> None:
    """Raises VisavisError if the model knows no word of it."""
    if unknown := model.processor.unknown_words(text):
        progress.say(f"words that this model has not learned: {', '.join(unknown)}")


def best(scores: Sequence[Tensor], place: Dataset, top: int, progress: Progress) -> list[Hit]:
    """The images of a collection of the highest mean score, best first; equal scores in the collection's order."""
    for sentence in place.skipped:
        progress.say(f"left out: {sentence}")
    mean = torch.stack(list(scores)).mean(0)
    order = torch.argsort(mean, descending=True, stable=True)[:top]
    return [Hit(place.images[i].name, mean[i].item(), place.images[i]) for i in order.tolist()]


def collection(path: Path, rate: float = 0.0) -> Dataset:
    """A data set, or any folder of images, with the videos in it where models read clips; what cannot be read is left out, and said in ``Dataset.skipped``.

    rate: pictures of a clip that models read a second; 0: they read no clips. A folder of images is known by its files' sizes and times, so
    that a changed one is new.
    """
    try:
        return open_dataset(path, skip_bad=True, pixels=True, rate=rate, whole=rate > 0)
    except DataError:
        if not path.is_dir() or not is_unicode(str(path)):
            raise
    found = dict(files_under(path, hidden=True))
    endings = VISUAL_SUFFIXES if rate else IMAGE_SUFFIXES
    files = sorted(file for file, trouble in found.items() if file.suffix.lower() in endings and trouble is None)
    if not files:
        raise DataError(f"{path} holds no images and no data set: name a folder with pictures in it.")
    listing = Listing(path, "images", [Entry(str(file.relative_to(path)), "all", bytes=Bytes(file)) for file in files])
    listing.check_texts()
    check_pixels(listing, rate=rate, whole=rate > 0)
    marks = [(str(file.relative_to(path)), *mark[1:]) for file, mark in file_marks(files).items()]
    digest = hashlib.sha256(json.dumps(marks).encode())
    return replace(listing.dataset(), name=f"{path.resolve().name}-{digest.hexdigest()[:8]}")
