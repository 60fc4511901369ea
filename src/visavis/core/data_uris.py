"""Images as data URIs, which are part of an HTML page."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL_SIZE = (160, 120)
"""Largest width and height of a thumbnail, in pixels."""


def data_uri(content: bytes, image_format: str = "png") -> str:
    """Return an image as a data URI.

    Args:
        content: Bytes of the image file.
        image_format: png or jpeg.
    """
    return f"data:image/{image_format};base64,{base64.b64encode(content).decode()}"


def jpeg_uri(image: Image, quality: int = 80) -> str:
    """Return an image as the data URI of a JPEG.

    Args:
        image: RGB image.
        quality: Quality of the encoder.
    """
    raw = io.BytesIO()
    image.save(raw, "jpeg", quality=quality, optimize=True)
    return data_uri(raw.getvalue(), "jpeg")


def thumbnail_uri(image: Image) -> str:
    """Return a thumbnail of an image as the data URI of a JPEG.

    Args:
        image: Image of any mode.
    """
    small = image.convert("RGB")
    small.thumbnail(THUMBNAIL_SIZE)
    return jpeg_uri(small)
