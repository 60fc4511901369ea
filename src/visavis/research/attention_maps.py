"""Attention maps: which regions of an image a cross-attention or late-interaction model matches
with which words of a text, as numbers and as an image.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image as Pillow
from PIL.Image import Image

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.data.images import decode_image
from visavis.models import Matcher, all_models
from visavis.models.encoders.encoder_spec import EncoderSpec, visible_part
from visavis.models.retriever import Retriever
from visavis.research.reports.html_report import (
    LIGHT_THEME,
    new_figure,
    quote_shortened,
    with_own_style,
)
from visavis.training.runs.open_run import check_single_run, open_run, read_run_recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = 6
PANEL_WIDTH, PANEL_HEIGHT, HEADER_HEIGHT = 1.6, 2.1, 0.8
"""Inches of the panel of a word, and of the lines above the panels."""
MAX_TITLE_LENGTH = 14
"""Maximum number of characters of a word above its panel."""
IMAGE_FORMATS = {".png": "png", ".pdf": "pdf", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""File formats by the ending of the file name."""
MAX_WORDS = 40
"""Maximum number of words that are drawn. The image has a note if words are left out."""
MIN_BRIGHTNESS = 0.35
"""Brightness of regions without attention."""


@dataclass(frozen=True, eq=False)
class AttentionMap(Result):
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

    def tables(self) -> list[Table]:
        """Return the score and the best region of each word."""
        rows = []
        for index, (word, best) in enumerate(zip(self.words, self.best_regions, strict=True)):
            region = str(best + 1)
            if self.grid is not None:
                row, column = divmod(best, self.grid[1])
                region = f"row {row + 1}, column {column + 1}"
            attention = 100 * float(self.weights[index, best])
            rows.append((word, float(self.scores[index]), region, attention))
        columns = (
            Column("word", is_text=True),
            Column("score", ".3f"),
            Column("best region"),
            Column("attention", ".0f", unit=" %"),
        )
        note = f"{self.model}, score {self.score:.4f}. Image: {self.file}"
        return [Table(columns, tuple(rows), (note,))]

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
    """Compute the attention of a run's best model. The image is a file, or an image of its data."""
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
    words = model.processor.process_texts([text], model.device)
    matcher = model.matcher
    with torch.no_grad():
        visual = visual.to(model.device)
        words = words.to(model.device)
        attention = matcher.attention(visual, words)
        if attention is None:
            supported = ", ".join(
                name
                for name, kind in all_models().items()
                if kind.attention is not Matcher.attention
            )
            raise RunError(
                f"{run}: expected a model with attention between regions and words ({supported}), "
                f"got {matcher.name}."
            )
        # the stage whose attention is shown
        score = matcher.second_stage_scores if matcher.rerank_top_k else matcher.score
        value = score(matcher.encode_visual(visual), matcher.encode_text(words)).item()
    positions = [
        (row, word)
        for row, word in enumerate(model.processor.split_words(text))
        if word is not None
    ]
    # Rows of start and end markers are left out.
    rows = [row for row, _ in positions]
    weights = attention.weights[rows].cpu().double().numpy()
    visible_image, grid = _locate_regions(model.processor.visual, opened, weights.shape[1])
    return AttentionMap(
        model=matcher.name,
        image=image,
        text=text,
        score=value,
        words=tuple(word for _, word in positions),
        weights=weights,
        scores=attention.scores[rows].cpu().double().numpy(),
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
    # Of all ways to divide the regions, the one whose cells are closest to squares.
    shapes = [(rows, regions // rows) for rows in range(1, regions + 1) if regions % rows == 0]
    rows, columns = min(
        shapes,
        key=lambda shape: abs(math.log(shape[1] / shape[0] * visible.height / visible.width)),
    )
    # Far from squares, the regions are hardly a grid of this image.
    is_square = 0.7 < columns / rows * visible.height / visible.width < 1.4
    return visible, (rows, columns) if is_square else None


def image_format(file: Path) -> str:
    """Return the format for the ending of a file name: png, pdf or jpeg."""
    if file.suffix.lower() not in IMAGE_FORMATS:
        expected = ", ".join(IMAGE_FORMATS)
        raise VisavisError(
            f"{file}: expected a file name with one of the endings {expected}, got "
            f"{file.suffix or 'none'}."
        )
    return IMAGE_FORMATS[file.suffix.lower()]


@with_own_style
def draw_attention(explanation: AttentionMap, image_format: str = "png") -> bytes:
    """Draw an image and its text, then a panel for each word with its score."""
    number = min(len(explanation.words), MAX_WORDS)
    columns = min(COLUMNS, number + 1)
    rows = math.ceil((number + 1) / columns)
    figure = new_figure(PANEL_WIDTH * columns, HEADER_HEIGHT + PANEL_HEIGHT * rows, LIGHT_THEME)
    note = f"{explanation.model}, score {explanation.score:.3f}: bright regions have high attention, the frame marks the maximum"
    if number < len(explanation.words):
        note = f"the first {number} of {len(explanation.words):,} words. {note}"
    figure.suptitle(
        f"{quote_shortened(explanation.text)}\n{note}", size=8, color=LIGHT_THEME.foreground
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in panels:
        axes.set_axis_off()
    panels[0].set_title("the image", size=9, color=LIGHT_THEME.foreground)
    if explanation.visible_image is not None:
        panels[0].imshow(explanation.visible_image.convert("RGB"))
    for row, axes in enumerate(panels[1 : number + 1]):
        _draw_word(axes, explanation, row)
    figure.tight_layout()
    raw = io.BytesIO()
    figure.savefig(raw, format=image_format)
    return raw.getvalue()


def _draw_word(axes: Axes, explanation: AttentionMap, row: int) -> None:
    """The word with its score, and the image: in color where the word attends, gray and dark
    elsewhere.
    """
    from matplotlib.patches import Rectangle

    weights = explanation.weights[row]
    best = int(explanation.best_regions[row])
    word = explanation.words[row]
    word = word if len(word) <= MAX_TITLE_LENGTH else f"{word[: MAX_TITLE_LENGTH - 1]}…"
    score = f"{explanation.scores[row]:+.2f}".replace("-", "−")
    title = f"{word}  {score}\nbest region {100 * weights[best]:.0f} %"
    axes.set_title(title.replace("$", r"\$"), size=9, color=LIGHT_THEME.foreground)
    # Without positions of the regions, the panel is a bar chart.
    if explanation.grid is None or explanation.visible_image is None:
        colors = [LIGHT_THEME.lines[0 if region == best else 1] for region in range(len(weights))]
        axes.bar(range(len(weights)), weights, color=colors)
        return
    rows, columns = explanation.grid
    image = explanation.visible_image.convert("RGB")
    uniform = 1 / len(weights)  # attention without a preference
    attention = (
        np.clip((weights - uniform) / (max(weights[best], 2 * uniform) - uniform), 0, 1)
        .reshape(rows, columns)
        .astype(np.float32)
    )
    # Bicubic interpolation would spread a single region, such as that of MaxSim, over its
    # neighbors.
    resampling = (
        Pillow.Resampling.BICUBIC if np.count_nonzero(attention) > 1 else Pillow.Resampling.NEAREST
    )
    brightness = np.clip(
        np.asarray(Pillow.fromarray(attention).resize(image.size, resampling)), 0, 1
    )[..., None]
    pixels = np.asarray(image) / 255
    gray = MIN_BRIGHTNESS * pixels.mean(-1, keepdims=True)
    axes.imshow(np.clip(gray + brightness * (pixels - gray), 0, 1))
    region_row, region_column = divmod(best, columns)
    width = image.width / columns
    height = image.height / rows
    corner = region_column * width, region_row * height
    axes.add_patch(
        Rectangle(corner, width, height, fill=False, edgecolor=LIGHT_THEME.lines[0], linewidth=2)
    )
