"""Image of attention maps: for each word of a text the image, bright in the regions that the word
attends to.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from visavis.core.errors import VisavisError
from visavis.research.reports.plotting import LIGHT_THEME, new_figure, quote_shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from visavis.research.diagnostics.attention_maps import AttentionMap

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
        raise VisavisError(
            f"{file}: expected a file name with one of the endings {expected}, got "
            f"{file.suffix or 'none'}."
        )
    return IMAGE_FORMATS[file.suffix.lower()]


def draw_attention(explanation: AttentionMap, image_format: str = "png") -> bytes:
    """Draw an image and its text, then a panel for each word with its score.

    Args:
        explanation: Attention of each word. Without positions of the regions, panels are bar
            charts.
        image_format: png, pdf or jpeg.

    Returns:
        Bytes of the file.
    """
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

    weights, best, word = (
        explanation.weights[row],
        int(explanation.best_regions[row]),
        explanation.words[row],
    )
    word = word if len(word) <= MAX_TITLE_LENGTH else f"{word[: MAX_TITLE_LENGTH - 1]}…"
    score = f"{explanation.scores[row]:+.2f}".replace("-", "−")
    title = f"{word}  {score}\nbest region {100 * weights[best]:.0f} %"
    axes.set_title(title.replace("$", r"\$"), size=9, color=LIGHT_THEME.foreground)
    if explanation.grid is None or explanation.visible_image is None:
        colors = [LIGHT_THEME.lines[0 if region == best else 1] for region in range(len(weights))]
        axes.bar(range(len(weights)), weights, color=colors)
        return
    rows, columns = explanation.grid
    image = explanation.visible_image.convert("RGB")
    uniform = 1 / len(weights)
    attention = (
        np.clip((weights - uniform) / (max(weights[best], 2 * uniform) - uniform), 0, 1)
        .reshape(rows, columns)
        .astype(np.float32)
    )
    # Bicubic interpolation would spread a single region, such as that of MaxSim, over its
    # neighbors.
    resampling = (
        Image.Resampling.BICUBIC if np.count_nonzero(attention) > 1 else Image.Resampling.NEAREST
    )
    brightness = np.clip(
        np.asarray(Image.fromarray(attention).resize(image.size, resampling)), 0, 1
    )[..., None]
    pixels = np.asarray(image) / 255
    gray = MIN_BRIGHTNESS * pixels.mean(-1, keepdims=True)
    axes.imshow(np.clip(gray + brightness * (pixels - gray), 0, 1))
    region_row, region_column = divmod(best, columns)
    width, height = image.width / columns, image.height / rows
    corner = region_column * width, region_row * height
    axes.add_patch(
        Rectangle(corner, width, height, fill=False, edgecolor=LIGHT_THEME.lines[0], linewidth=2)
    )
