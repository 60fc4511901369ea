"""Validation of the arguments of evaluation functions, next to those of metrics."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.errors import DataError, ShapeError, SpecError, format_value
from visavis.memory_budget import MemoryLimit, parse_memory
from visavis.metrics.validation import validate_count, validate_tensor
from visavis.types import Encoded, EncodedBatches


def validate_items(value: Any, name: str) -> Encoded:
    """Check encoded items: tensors of one length.

    Args:
        value: The argument.
        name: Its name.

    Returns:
        The items.

    Raises:
        ShapeError: If it is not Encoded, or its parts have different lengths.
    """
    if isinstance(value, EncodedBatches):
        return value
    parts = value.vectors if isinstance(value, Encoded) else None
    if isinstance(parts, Tensor):
        parts = {"vectors": parts}
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts.values()):
        raise ShapeError(f"{name}: expected Encoded(vectors) of tensors with one row per item, got {format_value(value)}.")
    lengths = {part: len(tensor) for part, tensor in parts.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"{name}: expected one row of each part per item, got parts of different lengths: {lengths}.")
    return value


def validate_score_matrix(value: Any, name: str) -> Tensor:
    """Check scores ``[V, T]``, without NaN.

    Args:
        value: The argument.
        name: Its name.

    Returns:
        The scores.

    Raises:
        DataError: If a score is NaN.
    """
    scores = validate_tensor(value, name, "images x texts")
    for image, text in scores.isnan().nonzero()[:1].tolist():
        raise DataError(f"score of image {image} and text {text}: expected a number, got NaN. Check the model and its features.")
    return scores


def validate_score_function(value: Any, name: str) -> Any:
    """Check that a value is a function of two arguments.

    Args:
        value: The argument.
        name: Its name.

    Returns:
        The function.

    Raises:
        SpecError: If it cannot be called with two arguments.
    """
    try:
        inspect.signature(value).bind(None, None)
    except (TypeError, ValueError):
        raise SpecError(
            f"{name}: expected a function of visual and text items, such as the method score of a model, got {format_value(value)}."
        ) from None
    return value


def validate_tile_shape(value: Any, name: str) -> tuple[int, int] | None:
    """Check the largest number of images and texts of a tile.

    Args:
        value: The argument.
        name: Its name.

    Returns:
        The numbers, or None.

    Raises:
        SpecError: If it is not a pair of integers >= 1.
    """
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise SpecError(f"{name}: expected two integers, for images and texts, or None, got {format_value(value)}.")
    images, texts = (validate_count(side, f"a side of {name}") for side in value)
    return images, texts


def validate_memory(value: MemoryLimit) -> MemoryLimit:
    """Check a memory setting.

    Args:
        value: The setting.

    Returns:
        The setting.
    """
    parse_memory(value)
    return value


def validate_dataset_sizes(visual: Encoded, text: Encoded, data: Dataset) -> None:
    """Check that there is one visual item per image of a data set and one text per caption.

    Args:
        visual: Encoded images.
        text: Encoded captions.
        data: The data set.

    Raises:
        ShapeError: If a length differs.
    """
    for name, encoded, items in (("visual", visual, data.images), ("text", text, data.captions)):
        if len(encoded) != len(items):
            raise ShapeError(f"{name}: expected {len(items)} items, one per image or caption of {data.name}, got {len(encoded)}.")
