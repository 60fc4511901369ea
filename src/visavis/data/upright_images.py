"""Conversion of opened Pillow images to upright sRGB images.

This file is copied into exported models. It imports only Pillow, NumPy and two modules that do the
same.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, JpegImagePlugin

from visavis.data.colors import to_srgb
from visavis.data.photo_worker import TRANSPOSE_OF_ORIENTATION, exif_orientation

# Largest number of pixels of an image in memory. A larger JPEG is decoded at a reduced size.
MAX_PIXELS = 64_000_000
JPEG_FORMATS = ("JPEG", "MPO")
_ORIENTATION_METADATA = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")


def encoded_jpeg(image: Image.Image) -> bytes | None:
    """Return the file of an opened JPEG that was not decoded yet. None for another format, and for a
    JPEG whose size or frame was changed.
    """
    if (
        isinstance(image, JpegImagePlugin.JpegImageFile)
        and image.fp is not None
        and image.tile
        and not image.decoderconfig
        and not image.tell()
    ):
        position = image.fp.tell()
        image.fp.seek(0)
        content = image.fp.read()
        # The image stays as it is.
        image.fp.seek(position)
        return content
    return None


def reduce_jpeg(image: Image.Image, min_side: int, max_pixels: int = MAX_PIXELS) -> None:
    """Let a JPEG be decoded at a reduced size whose shorter side has ``min_side`` pixels or more. 0:
    all pixels that ``max_pixels`` allows. Other formats are decoded in full.
    """
    if image.format not in JPEG_FORMATS:
        return
    width, height = image.size
    needed = next((factor for factor in (1, 2, 4) if width * height <= max_pixels * factor**2), 8)
    # Pillow decodes a JPEG at 1/2, 1/4 or 1/8, never below the requested size.
    factor = max(needed, min(width, height) // min_side if min_side else 1)
    if min_side or needed > 1:
        image.draft("RGB", (max(1, width // factor), max(1, height // factor)))


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """Convert an opened image: upright, in sRGB, over white, with 8 bits."""
    # Pillow turns a TIFF when it decodes it, and removes its orientation. So the orientation is
    # read after decoding.
    image.load()
    orientation = exif_orientation(image)
    profile = image.info.get("icc_profile")
    alpha = None
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        is_gray = image.mode in ("L", "LA", "La", "1")
        # Pillow converts premultiplied gray only to gray with transparency.
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        alpha = image.getchannel("A")
        image = image.getchannel("R") if is_gray else image.convert("RGB")
    elif image.mode in ("P", "1"):
        image = image.convert("RGB")
    rgb = to_srgb(image, profile) if profile else None
    if rgb is not None:
        # A second conversion must not apply it again.
        rgb.info.pop("icc_profile", None)
    else:
        rgb = _to_8_bits(image).convert("RGB")
    if alpha is not None:
        rgb.putalpha(alpha)
        rgb = Image.alpha_composite(Image.new("RGBA", rgb.size, "white"), rgb).convert("RGB")
    if orientation != 1:
        rgb = rgb.transpose(TRANSPOSE_OF_ORIENTATION[orientation])
        # The image is upright now, and must not be turned again.
        for key in _ORIENTATION_METADATA:
            rgb.info.pop(key, None)
    return rgb


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale gray values of more than 8 bits. Other images stay as they are."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.mode == "F":
        # NaN and infinity are black.
        values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        # Values from 0 to 1, or already from 0 to 255.
        values = values * (255 if values.max() <= 1 else 1)
    else:
        # 65535 / 255 = 257: 16 bits to 8 bits.
        values = np.clip(values, 0, 65535) // 257
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
