"""Which regions of an image answered which words of a text, by a model that attends."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visavis import storage
from visavis.data.pictures import open_picture
from visavis.errors import DataError, RunError, VisavisError
from visavis.models import CATALOG, Matcher
from visavis.models.retriever import Retriever
from visavis.models.towers import TowerSpec, seen_by
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of, refuse_ensemble
from visavis.types import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which regions of an image answered which words of a text.

    model: the kind of matcher. image: the path or name of the image. score: of image and text, the second where there are two stages. words:
    those of the text, or pieces of them; the marks of its beginning and end are left out. weights ``[W, R]``: the share of each region in
    what answered a word, a row's sum is 1. scores ``[W]``: of each word with what answered it: their cosine, or the word's part of the score.
    grid: rows and columns of the regions on ``picture``, row by row; None where it is not known where they lie. picture: what the model saw
    of the image. file: where it was drawn.
    """

    model: str
    image: str
    text: str
    score: float
    words: tuple[str, ...]
    weights: np.ndarray
    scores: np.ndarray
    grid: tuple[int, int] | None = None
    picture: Picture | None = None
    file: Path | None = None

    @cached_property
    def best(self) -> np.ndarray:
        """The region with the largest share in the answer to each word ``[W]``."""
        return self.weights.argmax(1)

    def to_json(self) -> dict[str, Any]:
        words = [
            {"word": word, "score": float(score), "best_region": int(best), "weights": row.tolist()}
            for word, score, best, row in zip(self.words, self.scores, self.best, self.weights, strict=True)
        ]
        named = {"model": self.model, "image": self.image, "text": self.text, "score": self.score}
        grid = None if self.grid is None else list(self.grid)
        return {**named, "grid": grid, "words": words, "file": None if self.file is None else str(self.file)}


def explained(run: Path, image: str, text: str, progress: Progress) -> Explanation:
    """The attention of a run's best model. image: the path of a picture, or the name of an image in the run's data.

    Raises VisavisError for a model that attends to nothing, or a text without words that it knows, DataError for an image that is not there.
    """
    if not text.strip():
        raise VisavisError("the text is empty: write what the image may show, such as 'a dog runs on the beach'.")
    refuse_ensemble(run)
    model = Retriever.load(run)
    if model.processor.frames_per_second:
        raise RunError(f"{run} reads videos, frame by frame, and what it attends to is drawn for models that read pictures alone.")
    if unknown := model.processor.unknown_words(text):
        progress.say(f"words that this model has not learned: {', '.join(unknown)}")
    visual, picture = _image(run, model, image, progress)
    told, matcher = model.processor.texts([text], model.device), model.matcher
    with torch.no_grad():
        visual, told = visual.to(model.device), told.to(model.device)
        attention = matcher.attention(visual, told)
        if attention is None:
            raise RunError(
                f"{run} is a model of kind {matcher.name}, whose score does not tell which regions answered which words: {_having()}"
            )
        score = (matcher.second_stage if matcher.rerank else matcher.score)(matcher.encode_visual(visual), matcher.encode_text(told)).item()
    positions = [(row, word) for row, word in enumerate(model.processor.words_of(text)) if word is not None]
    rows = [row for row, _ in positions]
    weights = attention.weights[rows].double().cpu().numpy()
    seen, grid = _places(model.processor.visual, picture, weights.shape[1])
    return Explanation(
        matcher.name,
        image,
        text,
        score,
        tuple(word for _, word in positions),
        weights,
        attention.scores[rows].double().cpu().numpy(),
        grid,
        seen,
    )


def _having() -> str:
    """The kinds of matchers that attend, as the ending of a sentence."""
    return f"those that tell are {', '.join(name for name, kind in CATALOG.items() if kind.attention is not Matcher.attention)}."


def _image(run: Path, model: Retriever, image: str, progress: Progress) -> tuple[Encoded, Picture | None]:
    """An image as the model reads it, and its picture, if there is one."""
    if os.path.isfile(image):
        picture = open_picture(storage.read_bytes(image), image)
        return model.processor.images([picture], model.matcher.config.visual_view, model.device), picture
    data_module, _ = open_run(run, recipe_of(run), progress)
    data = data_module.data
    index = next((number for number, each in enumerate(data.images) if each.name == image), None)
    if index is None:
        raise DataError(f"{image!r} is neither a file nor an image of {data.name}, whose names are such as {data.images[0].name}.")
    items = data_module.sources(data)[0].read(np.array([index]))
    return items, None if data.images[index].bytes is None else data.images[index].open()


def _places(tower: TowerSpec | None, picture: Picture | None, regions: int) -> tuple[Picture | None, tuple[int, int] | None]:
    """What the model saw of a picture, and the rows and columns of its regions; None where it is not known where they lie."""
    if tower is None or picture is None or tower.crops > 1:
        return picture, None
    seen = seen_by(tower, picture)
    shapes = [(rows, regions // rows) for rows in range(1, regions + 1) if regions % rows == 0]
    rows, columns = min(shapes, key=lambda shape: abs(math.log(shape[1] / shape[0] * seen.height / seen.width)))
    square = 0.7 < columns / rows * seen.height / seen.width < 1.4
    return seen, (rows, columns) if square else None
