"""Search without an index: encode the images of a place once, then rank them for a sentence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.data import Dataset, Image, open_dataset
from visavis.data.dataset import Bytes
from visavis.errors import DataError, VisavisError
from visavis.models.caching import cache_features
from visavis.models.retriever import PixelSource, Retriever
from visavis.types import concatenate
from visavis.watch import Watch

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"})
BATCH = 256


@dataclass(frozen=True)
class Hit:
    """One image that was found: its name, its score (a cosine), and the image itself."""

    name: str
    score: float
    image: Image

    def to_json(self) -> dict[str, Any]:
        path = None if self.image.bytes is None else str(self.image.bytes.path)
        return {"name": self.name, "score": self.score, "path": path}


def search_images(run: Path, query: str, inside: Path | None, top: int, watch: Watch) -> list[Hit]:
    """The ``top`` images of a place that fit a sentence best. Raises DataError where there are none."""
    if not query.strip():
        raise VisavisError("the query is empty: write what to look for, such as 'a dog runs on the beach'.")
    if top < 1:
        raise VisavisError(f"top is {top}, expected at least 1.")
    model = Retriever.load(run)
    place = collection(inside if inside is not None else own_data(run))
    return rank(model, place, query, top, watch)


def rank(model: Retriever, place: Dataset, query: str, top: int, watch: Watch) -> list[Hit]:
    """The best images of a collection for one sentence, best first; equal scores in the collection's order."""
    matcher, front = model.matcher, model.front
    if matcher.config.visual_view == "pixels":
        source: Any = PixelSource(place, front.vision_tower, augment=False)
        rows = np.arange(len(place.images))
    else:
        source = cache_features(place, front.vision_spec, progress=lambda done, total, per_s: watch.work("images", done, total, per_s))
        rows = source.rows(image.name for image in place.images)
    crops = front.vision_spec.crops
    with torch.inference_mode():
        text = matcher.encode_text(front.texts([query]))
        blocks = []
        for start in range(0, len(rows), BATCH):
            items = source.read(rows[start : start + BATCH])
            blocks.append(matcher.encode_visual(items.map(lambda part: part.mean(1)) if crops > 1 else items))
        scores = matcher.score(concatenate(blocks), text)[:, 0]
    best = torch.argsort(scores, descending=True, stable=True)[:top]
    return [Hit(place.images[i].name, scores[i].item(), place.images[i]) for i in best.tolist()]


def own_data(run: Path) -> Path:
    """The data set that a run was trained on."""
    from visavis.training.running import recipe_of

    return Path(recipe_of(run).data.path)


def collection(path: Path) -> Dataset:
    """A data set, or any folder of images; the latter is known by its files' sizes and times, so that a changed one is new."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        try:
            return open_dataset(path, skip_bad=True)
        except DataError:
            if not files:
                raise DataError(f"{path} holds no images and no data set: name a folder with pictures in it.") from None
        digest = hashlib.sha256("".join(f"{file}{file.stat().st_size}{file.stat().st_mtime_ns}" for file in files).encode())
        images = tuple(Image(str(file.relative_to(path)), "all", Bytes(file)) for file in files)
        return Dataset(f"{path.resolve().name}-{digest.hexdigest()[:8]}", images, (), np.empty(0, np.int64))
    return open_dataset(path, skip_bad=True)
