"""The door of evaluation: its arguments beside those of metrics, by their names."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor

from visavis.batches import EncodedBatches
from visavis.data.dataset import Dataset
from visavis.degrees import CATALOG, Degrees
from visavis.errors import DataError, ShapeError, SpecError, shown
from visavis.evaluation.protocols import named
from visavis.memory import Memory, parse_memory
from visavis.metrics import arguments
from visavis.metrics.arguments import Form, choice, count, door, instance, table
from visavis.spec import parse
from visavis.types import Direction, Encoded


def items(value: Any, name: str) -> Encoded:
    """Encoded tensors, all of one length."""
    if isinstance(value, EncodedBatches):
        return value
    parts = value.vectors if isinstance(value, Encoded) else None
    if isinstance(parts, Tensor):
        parts = {"vectors": parts}
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts.values()):
        raise ShapeError(f"{name} is {shown(value)}, expected Encoded(vectors) of tensors with one row for each item.")
    lengths = {part: len(tensor) for part, tensor in parts.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"{name} has parts of different lengths, {lengths}: expected one row of each part for each item.")
    return value


def matrix(value: Any, name: str) -> Tensor:
    """Scores ``[V, T]``, none of them NaN."""
    found = table(value, name, "images x texts")
    for image, text in found.isnan().nonzero()[:1].tolist():
        raise DataError(f"the score of image {image} and text {text} is NaN: the model or its features are broken.")
    return found


def function(value: Any, name: str) -> Any:
    """A function of two arguments."""
    try:
        inspect.signature(value).bind(None, None)
    except (TypeError, ValueError):
        raise SpecError(
            f"{name} is {shown(value)}, expected a function of visual and text items, as every matcher has it: model.score."
        ) from None
    return value


def estimator(value: Any, name: str) -> Degrees:
    return instance(Degrees, 'an estimator of degrees such as "CBoW()"', parse(value, CATALOG) if isinstance(value, str) else value, name)


def counts(value: Any, name: str) -> tuple[int, ...]:
    """Whole numbers from 1 up."""
    if not isinstance(value, list | tuple | range | set | frozenset):
        raise SpecError(f"{name} is {shown(value)}, expected several values of K, such as (10, 100).")
    return tuple(count(each, f"a value of {name}") for each in value)


def tile(value: Any, name: str) -> tuple[int, int] | None:
    """How many images and texts."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise SpecError(f"{name} is {shown(value)}, expected two whole numbers, of images and of texts, or None.")
    images, texts = (count(each, f"a side of {name}") for each in value)
    return images, texts


def memory(value: Any, _: str) -> Memory:
    parse_memory(value)
    return value


def fit(visual: Encoded, text: Encoded, data: Dataset) -> None:
    """Raise ShapeError unless there is one visual item for each image of a data set and one text for each caption."""
    for name, encoded, there in (("visual", visual, data.images), ("text", text, data.captions)):
        if len(encoded) != len(there):
            raise ShapeError(f"{name} has {len(encoded)} items, expected {len(there)}: one for each image and caption of {data.name}.")


FORMS: dict[str, Form] = arguments.FORMS | {
    "visual": items,
    "text": items,
    "scores": matrix,
    "score": function,
    "data": partial(instance, Dataset, "a data set as visavis.data.open_dataset gives it"),
    "degrees": estimator,
    "protocol": lambda value, _: named(value),
    "ks": counts,
    "tile": tile,
    "memory": memory,
    "way": choice(Direction),
}
checked = door(FORMS)
"""The decorator of an evaluation."""
