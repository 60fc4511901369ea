"""Edits of pictures that leave what they show: who still recognizes it?"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

BLUR = 0.02
"""The deviation of the blur, as a share of the shorter side."""
CROP = 0.8
"""The share of both sides that stays, from the middle."""
QUALITY = 10
"""Of JPEG, 1 to 95."""


def blurred(picture: Picture) -> Picture:
    from PIL.ImageFilter import GaussianBlur

    return picture.filter(GaussianBlur(BLUR * min(picture.size)))


def cropped(picture: Picture) -> Picture:
    width, height = picture.size
    left, top = round((1 - CROP) / 2 * width), round((1 - CROP) / 2 * height)
    return picture.crop((left, top, width - left, height - top))


def compressed(picture: Picture) -> Picture:
    from PIL import Image

    raw = io.BytesIO()
    picture.convert("RGB").save(raw, "jpeg", quality=QUALITY)
    return Image.open(raw).convert("RGB")


def gray(picture: Picture) -> Picture:
    return picture.convert("L").convert("RGB")


EDITS: dict[str, Callable[[Picture], Picture]] = {"blurred": blurred, "cropped": cropped, "JPEG": compressed, "gray": gray}
"""By what is said of an edited picture."""
