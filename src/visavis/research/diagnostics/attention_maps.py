"""Attention maps: which regions of an image a cross-attention or late-interaction model matches
with which words of a text.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.core.progress import Progress
from visavis.data.images import decode_image
from visavis.models import CATALOG, Matcher
from visavis.models.encoders.encoder_spec import EncoderSpec, visible_part
from visavis.models.retriever import Retriever
from visavis.training.runs.open_run import check_single_run, open_run, read_run_recipe


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention between the regions of an image and the words of a text.

    Attributes:
        model: Kind of the model.
        image: Path or name of the image.
        text: The text.
        score: Score of image and text. For a model with two stages, the score of the second.
        words: Words of the text, or word pieces, without start and end markers.
        weights: Share of each region in the match of each word, shape ``[W, R]``. Each row sums to
            1.
        scores: Score of each word with the regions that match it, shape ``[W]``: their cosine, or
            the word's part of the score.
        grid: Rows and columns of the regions in ``visible_image``, row by row. None if their
            positions are unknown.
        visible_image: The part of the image that the model reads.
        file: Path of the plot.
    """

    model: str
    image: str
    text: str
    score: float
    words: tuple[str, ...]
    weights: np.ndarray
    scores: np.ndarray
    grid: tuple[int, int] | None = None
    visible_image: Image | None = None
    file: Path | None = None

    @cached_property
    def best_regions(self) -> np.ndarray:
        """Region with the largest share for each word, shape ``[W]``."""
        return self.weights.argmax(1)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        words = [
            {"word": word, "score": float(score), "best_region": int(best), "weights": row.tolist()}
            for word, score, best, row in zip(
                self.words, self.scores, self.best_regions, self.weights, strict=True
            )
        ]
        return {
            "model": self.model,
            "image": self.image,
            "text": self.text,
            "score": self.score,
            "regions": None if self.grid is None else list(self.grid),
            "words": words,
            "file": None if self.file is None else str(self.file),
        }


def attention_map(run: Path, image: str, text: str, progress: Progress) -> AttentionMap:
    """Compute the attention of a run's best model.

    Args:
        run: Run folder.
        image: Path of an image file, or name of an image in the run's data set.
        text: The text.
        progress: Receives messages.

    Returns:
        The attention map.

    Raises:
        DataError: If the image does not exist.
        RunError: If the model has no attention between regions and words, or reads videos.
        VisavisError: If the text has no known word.
    """
    if not text.strip():
        raise VisavisError(
            "text: expected a description such as 'a dog runs on the beach', got an empty text."
        )
    check_single_run(run)
    model = Retriever.load(run)
    if model.processor.frames_per_second:
        raise RunError(
            f"{run}: expected a model for images, got a model for videos. Attention maps support "
            "only images."
        )
    if unknown := model.processor.unknown_words(text):
        progress.message(f"words that this model has not learned: {', '.join(unknown)}")
    visual, opened = _read_image(run, model, image, progress)
    words, matcher = model.processor.process_texts([text], model.device), model.matcher
    with torch.no_grad():
        visual, words = visual.to(model.device), words.to(model.device)
        attention = matcher.attention(visual, words)
        if attention is None:
            supported = ", ".join(
                name for name, kind in CATALOG.items() if kind.attention is not Matcher.attention
            )
            raise RunError(
                f"{run}: expected a model with attention between regions and words ({supported}), "
                f"got {matcher.name}."
            )
        score = matcher.second_stage_scores if matcher.rerank_top_k else matcher.score
        value = score(matcher.encode_visual(visual), matcher.encode_text(words)).item()
    positions = [
        (row, word)
        for row, word in enumerate(model.processor.split_words(text))
        if word is not None
    ]
    rows = [row for row, _ in positions]
    weights = attention.weights[rows].double().cpu().numpy()
    visible_image, grid = _locate_regions(model.processor.visual, opened, weights.shape[1])
    return AttentionMap(
        model=matcher.name,
        image=image,
        text=text,
        score=value,
        words=tuple(word for _, word in positions),
        weights=weights,
        scores=attention.scores[rows].double().cpu().numpy(),
        grid=grid,
        visible_image=visible_image,
    )


def _read_image(
    run: Path, model: Retriever, image: str, progress: Progress
) -> tuple[Encoded, Image | None]:
    """An image as the model reads it, and its pixels if there are any."""
    if os.path.isfile(image):
        opened = decode_image(storage.read_bytes(image), image)
        return model.processor.process_images(
            [opened], model.matcher.config.visual_granularity, model.device
        ), opened
    data_module, _ = open_run(run, read_run_recipe(run), progress)
    data = data_module.data
    index = next((number for number, each in enumerate(data.images) if each.name == image), None)
    if index is None:
        raise DataError(
            f"image: expected a file or an image of {data.name} such as {data.images[0].name}, got "
            f"{image!r}."
        )
    items = data_module.sources(data)[0].read(np.array([index]))
    return items, None if data.images[index].location is None else data.images[index].open()


def _locate_regions(
    encoder: EncoderSpec | None, image: Image | None, regions: int
) -> tuple[Image | None, tuple[int, int] | None]:
    """The part of an image that the model reads, and rows and columns of its regions. None if their
    positions are unknown.
    """
    if encoder is None or image is None or encoder.crops > 1:
        return image, None
    visible = visible_part(encoder, image)
    shapes = [(rows, regions // rows) for rows in range(1, regions + 1) if regions % rows == 0]
    rows, columns = min(
        shapes,
        key=lambda shape: abs(math.log(shape[1] / shape[0] * visible.height / visible.width)),
    )
    is_square = 0.7 < columns / rows * visible.height / visible.width < 1.4
    return visible, (rows, columns) if is_square else None
