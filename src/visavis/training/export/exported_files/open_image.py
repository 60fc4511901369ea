"""Opening of images as the exported model was trained to see them. Needs Pillow and NumPy."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from visavis.data.upright_images import encoded_jpeg, reduce_jpeg, to_upright_rgb

# Shorter side of a JPEG that the model needs, in pixels. 0: it is decoded in full.
MIN_SIDE = 0


def open_image(image: str | Path | Image.Image | bytes, min_side: int = MIN_SIDE) -> Image.Image:
    """Open an image upright, in sRGB with 8 bits, and on white where it is transparent."""
    if isinstance(image, Image.Image):
        if (content := encoded_jpeg(image)) is None:
            return to_upright_rgb(image)
        image = content
    with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        reduce_jpeg(opened, min_side)
        return to_upright_rgb(opened)
