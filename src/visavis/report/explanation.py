"""A picture of what a model attended to: for each word of a text the image, bright where it answered the word."""

from __future__ import annotations

import io
import math
from bisect import bisect
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from visavis.errors import VisavisError
from visavis.report.figures import LIGHT

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from visavis.diagnosis.explanation import Explanation

TILE, GAP, MARGIN = 208, 18, 28
WORD, SMALL, TITLE = 19, 13, 22
"""Sizes of letters, in pixels."""
COLUMNS = 6
FORMS = {".png": "png", ".pdf": "pdf", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""Forms of the picture, by the ending of its file."""
MOST = 40
"""Words that are drawn; of more the first ones, which the picture says."""
DARKEST = 0.35
"""What is left of the light where a word was not answered."""


def form_of(file: Path) -> str:
    """The form of picture that the ending of a file names. Raises VisavisError for another ending."""
    if file.suffix.lower() not in FORMS:
        raise VisavisError(
            f"{file} {'ends in ' + file.suffix if file.suffix else 'has no ending'}, expected a file of a picture that can be drawn: {', '.join(FORMS)}."
        )
    return FORMS[file.suffix.lower()]


def explanation_picture(explanation: Explanation, form: str = "png") -> bytes:
    """The image and its text, then a tile a word with the word's score; without places of the regions a table of shares. form: of FORMS."""
    from PIL import Image, ImageDraw

    tiles = [_tile(explanation, row) for row in range(len(explanation.words[:MOST]))]
    columns = min(COLUMNS, len(tiles) + 1)
    rows = math.ceil((len(tiles) + 1) / columns)
    height = max(tile.height for tile in tiles)
    step = TILE + GAP, height + GAP + 46
    sheet = Image.new("RGB", (2 * MARGIN + columns * step[0] - GAP, 2 * MARGIN + TITLE + SMALL + 28 + rows * step[1] - GAP), LIGHT.paper)
    pen = ImageDraw.Draw(sheet)
    _write(pen, (MARGIN, MARGIN - 6), explanation.text, TITLE, LIGHT.ink, sheet.width - 2 * MARGIN)
    about = (
        f"{explanation.model}, score {explanation.score:.3f}: bright is where a word was answered; framed the region with the largest share"
    )
    if len(explanation.words) > MOST:
        about = f"the first {MOST} of {len(explanation.words):,} words; {about}"
    _write(pen, (MARGIN, MARGIN + TITLE + 4), about, SMALL, LIGHT.lines[1], sheet.width - 2 * MARGIN)
    top = MARGIN + TITLE + SMALL + 28
    places = [(MARGIN + place % columns * step[0], top + place // columns * step[1]) for place in range(len(tiles) + 1)]
    first = _whole(explanation, height)
    if first is not None:
        sheet.paste(first, places[0])
    _write(pen, (places[0][0], places[0][1] + height + 6), "the image", SMALL, LIGHT.ink, TILE)
    for row, (tile, (left, down)) in enumerate(zip(tiles, places[1:], strict=True)):
        sheet.paste(tile, (left, down))
        _legend(pen, (left, down + height + 4), explanation, row)
    raw = io.BytesIO()
    sheet.save(raw, form, quality=95)
    return raw.getvalue()


def _tile(explanation: Explanation, row: int) -> Picture:
    """The image of one word: in its own colors where a region answered, gray and dark elsewhere."""
    from PIL import Image, ImageDraw

    shares = explanation.weights[row]
    if explanation.grid is None or explanation.picture is None:
        return _bars(shares)
    rows, columns = explanation.grid
    picture = _fitting(explanation.picture)
    least = 1 / len(shares)  # what each would have if nothing stood out
    most = max(shares.max(), 2 * least)
    light = np.clip((shares - least) / (most - least), 0, 1).reshape(rows, columns).astype(np.float32)
    cells = Image.fromarray(light)
    soft = cells.resize(picture.size, Image.Resampling.BICUBIC if np.count_nonzero(light) > 1 else Image.Resampling.NEAREST)
    bright = np.clip(np.asarray(soft), 0, 1)[..., None]
    colors = np.asarray(picture, dtype=np.float32)
    gray = colors.mean(-1, keepdims=True) * DARKEST
    tile = Image.fromarray((colors * bright + gray * (1 - bright)).round().astype(np.uint8))
    down, right = divmod(int(explanation.best[row]), columns)
    wide, high = picture.width / columns, picture.height / rows
    frame = (round(right * wide), round(down * high), round((right + 1) * wide) - 1, round((down + 1) * high) - 1)
    ImageDraw.Draw(tile).rectangle(frame, outline=LIGHT.lines[0], width=2)
    return tile


def _bars(shares: np.ndarray) -> Picture:
    """The shares of regions whose places are not known, one bar each, in their order."""
    from PIL import Image, ImageDraw

    tile = Image.new("RGB", (TILE, TILE // 2), "#f2f4f8")
    pen = ImageDraw.Draw(tile)
    wide, most = TILE / len(shares), shares.max()
    for place, share in enumerate(shares):
        high = share / most * (tile.height - 6)
        color = LIGHT.lines[0] if place == shares.argmax() else LIGHT.lines[1]
        pen.rectangle((place * wide, tile.height - high, max((place + 1) * wide - 1.5, place * wide + 0.5), tile.height), fill=color)
    return tile


def _whole(explanation: Explanation, height: int) -> Picture | None:
    if explanation.picture is None:
        return None
    picture = _fitting(explanation.picture)
    if picture.height > height:
        picture.thumbnail((TILE, height))
    return picture


def _fitting(picture: Picture) -> Picture:
    """As wide as a tile."""
    return picture.convert("RGB").resize((TILE, max(1, round(TILE * picture.height / picture.width))))


def _legend(pen: ImageDraw, place: tuple[int, int], explanation: Explanation, row: int) -> None:
    """The word, its score as a number and a bar, and the largest share."""
    left, top = place
    _write(pen, (left, top), explanation.words[row], WORD, LIGHT.ink, TILE - 62)
    score, share = float(explanation.scores[row]), float(explanation.weights[row].max())
    pen.text((left + TILE, top + 3), f"{score:+.2f}".replace("-", "−"), fill=LIGHT.ink, font=_font(SMALL + 2), anchor="ra")
    scale = max(float(np.abs(explanation.scores).max()), 1e-6)
    pen.rectangle((left, top + 26, left + TILE, top + 30), fill=LIGHT.faint)
    pen.rectangle((left, top + 26, left + TILE * abs(score) / scale, top + 30), fill=LIGHT.right if score > 0 else LIGHT.lines[0])
    pen.text((left + TILE, top + 33), f"best region {100 * share:.0f} %", fill=LIGHT.lines[1], font=_font(SMALL - 1), anchor="ra")


def _write(pen: ImageDraw, place: tuple[int, int], text: str, size: int, color: str, width: int) -> None:
    """A line of text, cut where the width ends."""
    font = _font(size)
    if pen.textlength(text, font) > width:
        kept = bisect(range(len(text)), float(width), key=lambda end: pen.textlength(f"{text[:end]}…", font))
        text = f"{text[: max(kept - 1, 0)]}…"
    pen.text(place, text, fill=color, font=font)


def _font(size: int) -> FreeTypeFont | ImageFont:
    from PIL.ImageFont import load_default

    return load_default(size)
