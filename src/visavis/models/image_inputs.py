"""Images as callers pass them: paths, Pillow images, arrays, tensors and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.images import convert_image, decode_image
from visavis.data.video import is_video

ImageInput: TypeAlias = "str | Path | Image | np.ndarray | Tensor | bytes"
"""A path, a Pillow image, a uint8 array ``[H, W, 3]``, a tensor ``[3, H, W]`` of uint8 or of floats
in 0..1, or an encoded file.
"""


def read_image(image: Any, name: str, min_side: int = 0) -> Image:
    """Convert an image of any accepted kind to an upright RGB image. Of an animation, the first
    frame is used.

    Args:
        image: The image.
        name: Its name in error messages, such as ``images[3]``.
        min_side: Shorter side that is needed of a JPEG, in pixels. 0: it is decoded in full.

    Returns:
        An RGB image.

    Raises:
        DataError: If the file is not an image, or if the array or tensor has another shape, type or
            range.
    """
    if isinstance(image, str | Path):
        if is_video(str(image)):
            raise DataError(
                f'{image}: expected an image, got a video. Use a model that was trained with visual.granularity = "frames".'
            )
        return decode_image(
            storage.read_bytes(image), str(image), min_side=min_side, allow_animated=True
        )
    if isinstance(image, bytes | bytearray):
        return decode_image(bytes(image), name, min_side=min_side, allow_animated=True)
    if isinstance(image, Image):
        return convert_image(image, name, min_side=min_side)
    shape, pixels = list(image.shape), image
    if isinstance(image, Tensor) and image.dim() == 3:
        pixels = image.detach().cpu()
        if pixels.is_floating_point():
            pixels = pixels.float()
            # Values from 0 to 255 would become a white image without an error.
            if not bool(((pixels >= 0) & (pixels <= 1)).all()):
                raise DataError(
                    f"{name}: expected floats from 0 to 1 in a tensor [3, H, W], got others. "
                    "Divide the pixels by 255."
                )
            pixels = (pixels * 255).round().to(torch.uint8)
        pixels = pixels.permute(1, 2, 0).numpy()
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise DataError(
            f"{name}: expected a path, a Pillow image, bytes, a uint8 array [H, W, 3] or a tensor "
            f"[3, H, W], got {str(image.dtype).removeprefix('torch.')} of shape {shape}. "
            "Convert the image."
        )
    return fromarray(np.ascontiguousarray(pixels))
