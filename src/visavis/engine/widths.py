"""Vectors that serve at several widths: their first numbers are vectors of their own, as cosines read them, at length 1.

Source: Kusupati et al., Matryoshka Representation Learning (2022): the sum of the losses of all widths, each of weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from visavis.engine.items import Items, vectors
from visavis.errors import ShapeError, SpecError, shown
from visavis.types import Encoded

SomeItems = TypeVar("SomeItems", Tensor, Encoded, Items)


def checked_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """In ascending order, each once. Raises SpecError for anything but whole numbers above 0.

    >>> checked_widths([256, 64, 256])
    (64, 256)
    """
    given: list[Any] = list(widths) if isinstance(widths, list | tuple) else [widths]
    if not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in given):
        raise SpecError(f"widths are {shown(widths)}, expected a list of whole numbers above 0, such as [64, 256].")
    return tuple(sorted(set(given)))


def narrower(widths: Sequence[int], items: Items) -> tuple[int, ...]:
    """The widths below that of the vectors themselves, at which items are compared too. Raises ShapeError for a greater one."""
    if not widths:
        return ()
    whole = vectors(items).shape[1]
    if max(widths) > whole:
        raise ShapeError(f"widths are {', '.join(map(str, widths))}, but the vectors have {whole} numbers: expected none above {whole}.")
    return tuple(width for width in widths if width < whole)


def cut(items: SomeItems, width: int) -> SomeItems:
    """The first numbers of the vectors of items; items of that width as they are.

    >>> import torch
    >>> cut(torch.eye(3), 1).tolist()
    [[1.0], [0.0], [0.0]]
    """
    rows = vectors(items)
    if rows.shape[1] == width:
        return items
    return rows[:, :width] if isinstance(items, Tensor) else replace(items, vectors=rows[:, :width])
