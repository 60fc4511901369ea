"""Images as callers pass them: paths, Pillow images, arrays, tensors and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError, format_value
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
    pixels = _tensor_pixels(image, name) if isinstance(image, Tensor) else image
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] != 3
        or not pixels.size
    ):
        raise DataError(
            f"{name}: expected a path, a Pillow image, bytes, a uint8 array [H, W, 3] or a tensor "
            f"[3, H, W], got {_describe(image)}. "
            "Convert the image."
        )
    return fromarray(np.ascontiguousarray(pixels))


def _tensor_pixels(image: Tensor, name: str) -> np.ndarray | None:
    """Return the pixels ``[H, W, 3]`` of a tensor. None if it has another layout."""
    if (
        image.layout != torch.strided
        or image.is_meta
        or image.dim() != 3
        or image.dtype == torch.bool
        or image.is_complex()
    ):
        return None
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.float()
        if not bool(((image >= 0) & (image <= 1)).all()):
            raise DataError(
                f"{name}: expected floats from 0 to 1 in a tensor [3, H, W], got others. Divide "
                "the pixels by 255."
            )
        image = (image * 255).round().to(torch.uint8)
    return image.permute(1, 2, 0).numpy()


def _describe(image: Any) -> str:
    """Describe an argument that is not an image by its type and shape."""
    if isinstance(image, np.ndarray | Tensor):
        return f"{str(image.dtype).removeprefix('torch.')} of shape {list(image.shape)}"
    return format_value(image)
