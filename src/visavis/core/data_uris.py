"""Images as data URIs, in HTML pages and in requests."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from visavis.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL_SIZE = (160, 120)
"""Largest width and height of a thumbnail, in pixels."""


def data_uri(content: bytes, image_format: str = "png") -> str:
    """Return an image as a data URI."""
    return f"data:image/{image_format};base64,{base64.b64encode(content).decode()}"


def jpeg_uri(image: Image, quality: int = 80) -> str:
    """Return an image as the data URI of a JPEG."""
    raw = io.BytesIO()
    image.save(raw, "jpeg", quality=quality, optimize=True)
    return data_uri(raw.getvalue(), "jpeg")


def thumbnail_uri(image: Image) -> str:
    """Return a thumbnail of an image as the data URI of a JPEG."""
    small = image.convert("RGB")
    small.thumbnail(THUMBNAIL_SIZE)
    return jpeg_uri(small)


# A media type, a parameter or the content follows the colon: "data: a new oil" is a text.
_DATA_URL = re.compile(r"\s*data:(?:[\w.+-]+/|[;,]|[^,]{0,100};\s*base64\s*,)", re.IGNORECASE)
_BASE64 = re.compile(r";\s*base64\s*", re.IGNORECASE)


def is_data_url(text: str) -> bool:
    """Check whether a text begins as a data URL, which is never the description of an image.

    Args:
        text: The text.

    Returns:
        Whether it is a data URL, of any media type or none, also a damaged one.

    Example:
        >>> is_data_url(" DATA:;BASE64,aGk="), is_data_url("data: a new oil, perhaps")
        (True, False)
    """
    return _DATA_URL.match(text) is not None


def read_data_url(text: str) -> bytes:
    """Read the content of a data URL.

    Args:
        text: A text for which ``is_data_url`` holds.

    Returns:
        The content. Its media type is ignored, because browsers send a general one for HEIC.

    Raises:
        DataError: If it is not in base64, or empty.

    Example:
        >>> read_data_url("data:image/png;base64,aGk=")
        b'hi'
    """
    header, _, content = text.partition(",")
    if not _BASE64.search(header):
        raise DataError(
            f"expected data:image/...;base64,..., got {header.strip()[:40]!r}. Encode an image in "
            "base64"
        )
    return read_base64(unquote(content) if "%" in content else content)


def read_base64(text: str) -> bytes:
    """Read a file in base64.

    Args:
        text: The characters, with or without line breaks.

    Returns:
        Content of the file.

    Raises:
        DataError: If there are other characters, or none.

    Example:
        >>> read_base64("aG k=")
        b'hi'
    """
    problem = "an empty text"
    content = b""
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        problem = f"a text that is not base64 ({str(error).lower()})"
    if not content:
        raise DataError(
            f"expected an image in base64, got {problem}. Encode the content of the image file in "
            "base64"
        )
    return content
