"""The images of runs as a searchable collection: the images of their data, or of another data set
or folder. Features are cached by content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.errors import DataError, VisavisError
from visavis.core.progress import ItemCounter, Progress
from visavis.data.dataset import Dataset
from visavis.data.formats.listing import ListedImage, Listing
from visavis.data.image_file import Image
from visavis.data.image_validation import open_valid_dataset, validate_images
from visavis.data.item_sources import FeatureReader, ItemSource, StoredFeatures
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.inference import consecutive_batches, encode_items, score_all_pairs
from visavis.models.retriever import Retriever
from visavis.retrieval.calibrate.calibration import MatchScale, NoProbabilitiesError
from visavis.retrieval.items import IndexItem, ItemFilter, ItemKind
from visavis.retrieval.search import (
    EncodeTexts,
    NamedResult,
    SearchQuery,
    SearchResult,
    content_text,
)
from visavis.retrieval.source_files import list_readable_files

BATCH_SIZE = 256


class RunImages:
    """Images that one or several models of any kind score for a text, without stored vectors.

    Args:
        root: The data set or folder.
        models: The models. The score of an image is the mean of their scores.
        dataset: The images.
        features: Cached features of the images for each model. None: they are computed or read from
            the cache.
        progress: Receives the progress of features.
    """

    def __init__(
        self,
        root: Path,
        models: Sequence[Retriever],
        dataset: Dataset,
        features: Sequence[FeatureReader | None],
        progress: Progress,
    ):
        self.root = root
        self.models = models
        self.dataset = dataset
        self.features = features
        self.progress = progress
        self._images = {image.name: image for image in dataset.images}

    def match_scale(self, text: str | None) -> MatchScale:
        """Raise an error, see ``Collection.match_scale``."""
        raise NoProbabilitiesError("they need an index.")

    def rated_scores(self, encoded: Any, item_filter: ItemFilter) -> tuple[np.ndarray, np.ndarray]:
        """Raise an error, see ``Collection.rated_scores``."""
        raise NoProbabilitiesError("they need an index.")

    def one_version(self) -> AbstractContextManager[None]:
        """The images do not change, see ``Collection.one_version``."""
        return nullcontext()

    def encode_query(self, query: SearchQuery, encode_texts: EncodeTexts | None = None) -> Tensor:
        """Score all images for a query of one text: the mean over the models, ``[V]``."""
        if not query.is_single_text:
            raise VisavisError(
                "query: expected one text to search the images of a run, got several parts. Make "
                "an index with visavis index."
            )
        # Models of any kind score the text itself, so that ``encode_texts`` has no effect.
        [(_, written)] = query.texts
        text = content_text(written)
        scores = [
            self._scores(model, features, text)
            for model, features in zip(self.models, self.features, strict=True)
        ]
        for problem in self.dataset.skipped:
            self.progress.message(f"Skipped: {problem}")
        return torch.stack(scores).mean(0)

    def _scores(self, model: Retriever, features: FeatureReader | None, text: str) -> Tensor:
        """Scores of all images by one model, shape ``[V]``."""
        matcher = model.matcher
        processor = model.processor
        images = self.dataset.images
        source: ItemSource
        if matcher.config.visual_granularity == "pixels":
            source = processor.open_images(images)
        else:
            features = features or cache_features(
                self.dataset,
                processor.visual_spec,
                on_progress=lambda done, total, per_second: self.progress.update(
                    "images", done, total, per_second
                ),
            )
            source = StoredFeatures(
                features,
                features.rows(image.name for image in images),
                processor.visual.crops if processor.visual else 1,
                processor.standardization,
            )
        count = ItemCounter(self.progress, "images", len(images))
        batches = consecutive_batches(len(images), BATCH_SIZE)
        visual = encode_items(
            matcher,
            "visual",
            map(source.read, batches),
            batches,
            on_batch=lambda done, _: count(done),
        )
        return score_all_pairs(matcher, visual, model.encode_text([text]), model.memory)[:, 0]

    def count(self, item_filter: ItemFilter) -> int:
        """Count the images, see ``Collection.count``."""
        return len(self.dataset.images)

    def nearest(
        self, encoded: Tensor, count: int, item_filter: ItemFilter
    ) -> tuple[list[SearchResult], bool]:
        """Find the images with the highest scores, see ``Collection.nearest``. Equal scores are in
        the order of the data.
        """
        # Stable: equal scores are in the order of the data.
        order = torch.argsort(encoded, descending=True, stable=True).tolist()
        results = list[SearchResult]()
        for row in order:
            image = self.dataset.images[row]
            kind: ItemKind = "video" if image.is_video else "image"
            # Without the facts of a file, which only an index stores.
            item = IndexItem(image.name, image.name, kind, content="", size=0, modified_ns=0)
            if item_filter.matches(item):
                results.append(SearchResult(item, encoded[row].item()))
            if len(results) == count:
                break
        return results, len(results) == count

    def find_named(
        self, query: SearchQuery, count: int, item_filter: ItemFilter
    ) -> tuple[NamedResult, ...]:
        """Return nothing, see ``Collection.find_named``: only an index has a table of names."""
        return ()

    def item_vectors(self, items: Sequence[IndexItem]) -> None:
        """Return None, see ``Collection.item_vectors``: the models may have no vectors to compare."""

    def image(self, item: IndexItem) -> Image:
        """Find the image of an item, see ``Collection.image``."""
        return self._images[item.key]

    def explain_no_results(self, item_filter: ItemFilter) -> str:
        """Explain why a search found nothing, see ``Collection.explain_no_results``."""
        return "No image passes the filters."

    def close(self) -> None:
        """Close nothing: the files of features are mapped."""


def open_image_collection(path: Path, frames_per_second: float = 0.0) -> Dataset:
    """Open a data set, or any folder of images and clips. Files that are left out are listed in
    ``Dataset.skipped``.
    """
    read_clips = frames_per_second > 0  # 0: the models do not read clips
    try:
        dataset = open_valid_dataset(
            path,
            skip_bad=True,
            frames_per_second=frames_per_second,
            decode_all_frames=read_clips,
        )
    except DataError:
        if not os.path.isdir(path):
            raise
    else:
        if not (os.path.isdir(path) and dataset.unlisted_files):
            return dataset
    # Of a folder, all files are read, also those that its list of captions leaves out.
    collection = list_readable_files(path)
    files = [file for file in collection.files if read_clips or not file.is_video]
    if not files:
        first = f" {collection.skipped[0]}" if collection.skipped else ""
        raise DataError(
            f"{path}: expected a data set or a folder of images, got no images. Pass a folder that "
            f"contains some.{first}"
        )
    listing = Listing(
        path, "images", [ListedImage(file.path, "all", location=file.location) for file in files]
    )
    validate_images(listing, frames_per_second=frames_per_second, decode_all_frames=read_clips)
    dataset = listing.dataset()
    skipped = [*collection.skipped, *dataset.skipped]
    if num_videos := len(collection.files) - len(files):
        skipped.insert(0, f"{num_videos:,} videos: expected images, as the model reads no videos.")
    # Names of cached features contain this name. A changed file must not find old features.
    digest = hashlib.sha256(
        json.dumps([(file.path, file.size, file.modified_ns) for file in files]).encode()
    )
    return replace(
        dataset,
        name=f"{os.path.basename(os.path.realpath(path))}-{digest.hexdigest()[:8]}",
        skipped=tuple(skipped),
        other_files=collection.other_files,
    )
