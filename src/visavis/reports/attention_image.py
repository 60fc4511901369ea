"""Image of attention maps: for each word of a text the image, bright in the regions that the word attends to."""

from __future__ import annotations

import io
import math
from bisect import bisect
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visavis.errors import VisavisError
from visavis.reports.plotting import LIGHT_THEME

if TYPE_CHECKING:
    from visavis.diagnostics.attention_maps import AttentionMap

TILE, GAP, MARGIN = 208, 18, 28
WORD, SMALL, TITLE = 19, 13, 22
"""Font sizes in pixels."""
COLUMNS = 6
IMAGE_FORMATS = {".png": "png", ".pdf": "pdf", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""File formats by the ending of the file name."""
MAX_WORDS = 40
"""Maximum number of words that are drawn. The image has a note if words are left out."""
MIN_BRIGHTNESS = 0.35
"""Brightness of regions without attention."""


def image_format(file: Path) -> str:
    """Return the file format for a file name.

    Args:
        file: Name of the file.

    Returns:
        png, pdf or jpeg.

    Raises:
        VisavisError: If the name has another ending.
    """
    if file.suffix.lower() not in IMAGE_FORMATS:
        expected = ", ".join(IMAGE_FORMATS)
        raise VisavisError(f"{file}: expected a file name with one of the endings {expected}, got {file.suffix or 'none'}.")
    return IMAGE_FORMATS[file.suffix.lower()]


def draw_attention(explanation: AttentionMap, image_format: str = "png") -> bytes:
    """Draw an image and its text, then a tile for each word with its score.

    Args:
        explanation: Attention of each word. Without positions of the regions, tiles are bar charts.
        image_format: png, pdf or jpeg.

    Returns:
        Bytes of the file.
    """
    tiles = [_draw_tile(explanation, row) for row in range(len(explanation.words[:MAX_WORDS]))]
    columns = min(COLUMNS, len(tiles) + 1)
    rows = math.ceil((len(tiles) + 1) / columns)
    height = max(tile.height for tile in tiles)
    step = TILE + GAP, height + GAP + 46
    top = MARGIN + TITLE + SMALL + 28
    sheet = Image.new("RGB", (2 * MARGIN + columns * step[0] - GAP, top + MARGIN + rows * step[1] - GAP), LIGHT_THEME.background)
    pen = ImageDraw.Draw(sheet)
    _write(pen, (MARGIN, MARGIN - 6), explanation.text, TITLE, LIGHT_THEME.foreground, sheet.width - 2 * MARGIN)
    note = f"{explanation.model}, score {explanation.score:.3f}: bright regions have high attention, the frame marks the maximum"
    if len(explanation.words) > MAX_WORDS:
        note = f"the first {MAX_WORDS} of {len(explanation.words):,} words. {note}"
    _write(pen, (MARGIN, MARGIN + TITLE + 4), note, SMALL, LIGHT_THEME.lines[1], sheet.width - 2 * MARGIN)
    corners = [(MARGIN + index % columns * step[0], top + index // columns * step[1]) for index in range(len(tiles) + 1)]
    if explanation.visible_image is not None:
        whole_image = _resize_to_tile(explanation.visible_image)
        # thumbnail never enlarges
        whole_image.thumbnail((TILE, height))
        sheet.paste(whole_image, corners[0])
    _write(pen, (corners[0][0], corners[0][1] + height + 6), "the image", SMALL, LIGHT_THEME.foreground, TILE)
    for row, (tile, (left, tile_top)) in enumerate(zip(tiles, corners[1:], strict=True)):
        sheet.paste(tile, (left, tile_top))
        _draw_caption(pen, (left, tile_top + height + 4), explanation, row)
    raw = io.BytesIO()
    sheet.save(raw, image_format, quality=95)
    return raw.getvalue()


def _draw_tile(explanation: AttentionMap, row: int) -> Image.Image:
    """The image for one word: in color where the word attends, gray and dark elsewhere."""
    weights = explanation.weights[row]
    if explanation.grid is None or explanation.visible_image is None:
        return _draw_bars(weights)
    rows, columns = explanation.grid
    image = _resize_to_tile(explanation.visible_image)
    uniform = 1 / len(weights)
    top = max(weights.max(), 2 * uniform)
    attention = np.clip((weights - uniform) / (top - uniform), 0, 1).reshape(rows, columns).astype(np.float32)
    # bicubic interpolation of a single bright region would darken it
    resampling = Image.Resampling.BICUBIC if np.count_nonzero(attention) > 1 else Image.Resampling.NEAREST
    brightness = np.clip(np.asarray(Image.fromarray(attention).resize(image.size, resampling)), 0, 1)[..., None]
    colors = np.asarray(image, dtype=np.float32)
    gray = colors.mean(-1, keepdims=True) * MIN_BRIGHTNESS
    tile = Image.fromarray((colors * brightness + gray * (1 - brightness)).round().astype(np.uint8))
    region_row, region_column = divmod(int(explanation.best_regions[row]), columns)
    width, height = image.width / columns, image.height / rows
    left, top_edge = round(region_column * width), round(region_row * height)
    frame = (left, top_edge, round((region_column + 1) * width) - 1, round((region_row + 1) * height) - 1)
    ImageDraw.Draw(tile).rectangle(frame, outline=LIGHT_THEME.lines[0], width=2)
    return tile


def _draw_bars(weights: np.ndarray) -> Image.Image:
    """Weights of regions whose positions are not known, one bar each, in their order."""
    tile = Image.new("RGB", (TILE, TILE // 2), "#f2f4f8")
    pen = ImageDraw.Draw(tile)
    width, top = TILE / len(weights), weights.max()
    for index, weight in enumerate(weights):
        height = weight / top * (tile.height - 6)
        color = LIGHT_THEME.lines[0] if index == weights.argmax() else LIGHT_THEME.lines[1]
        right = max((index + 1) * width - 1.5, index * width + 0.5)
        pen.rectangle((index * width, tile.height - height, right, tile.height), fill=color)
    return tile


def _resize_to_tile(image: Image.Image) -> Image.Image:
    return image.convert("RGB").resize((TILE, max(1, round(TILE * image.height / image.width))))


def _draw_caption(pen: ImageDraw.ImageDraw, corner: tuple[int, int], explanation: AttentionMap, row: int) -> None:
    """The word, its score as a number and a bar, and the maximum weight."""
    left, top = corner
    _write(pen, (left, top), explanation.words[row], WORD, LIGHT_THEME.foreground, TILE - 62)
    score, weight = float(explanation.scores[row]), float(explanation.weights[row].max())
    pen.text(
        (left + TILE, top + 3),
        f"{score:+.2f}".replace("-", "−"),
        fill=LIGHT_THEME.foreground,
        font=ImageFont.load_default(SMALL + 2),
        anchor="ra",
    )
    scale = max(float(np.abs(explanation.scores).max()), 1e-6)
    color = LIGHT_THEME.positive if score > 0 else LIGHT_THEME.lines[0]
    pen.rectangle((left, top + 26, left + TILE, top + 30), fill=LIGHT_THEME.grid)
    pen.rectangle((left, top + 26, left + TILE * abs(score) / scale, top + 30), fill=color)
    pen.text(
        (left + TILE, top + 33),
        f"best region {100 * weight:.0f} %",
        fill=LIGHT_THEME.lines[1],
        font=ImageFont.load_default(SMALL - 1),
        anchor="ra",
    )


def _write(pen: ImageDraw.ImageDraw, corner: tuple[int, int], text: str, size: int, color: str, width: int) -> None:
    """Write a line of text, truncated at the given width."""
    font = ImageFont.load_default(size)
    if pen.textlength(text, font) > width:
        length = bisect(range(len(text)), float(width), key=lambda end: pen.textlength(f"{text[:end]}…", font))
        text = f"{text[: max(length - 1, 0)]}…"
    pen.text(corner, text, fill=color, font=font)
