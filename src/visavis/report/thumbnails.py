"""Images small enough for a page with hundreds of them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from PIL import ImageOps

from visavis.data.dataset import Dataset

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SIDE = 128
"""Pixels of a side."""


class Thumbnails:
    """The images of a data set as squares, cut from their middle, each read once."""

    def __init__(self, data: Dataset):
        self.images = data.images
        self.pictures: dict[int, Picture] = {}

    def picture(self, index: int) -> Picture | None:
        """The square of one image; None where the data set has features instead of pixels."""
        if self.images[index].bytes is None:
            return None
        if index not in self.pictures:
            self.pictures[index] = ImageOps.fit(self.images[index].preview(), (SIDE, SIDE))
        return self.pictures[index]

    def jpeg(self, index: int) -> bytes | None:
        picture = self.picture(index)
        if picture is None:
            return None
        raw = io.BytesIO()
        picture.save(raw, "jpeg", quality=80, optimize=True)
        return raw.getvalue()
