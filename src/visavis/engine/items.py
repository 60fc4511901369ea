"""Items of one side as the tensors they are made of, whatever their kind: a tensor, or Encoded with parts and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.errors import ShapeError
from visavis.types import Encoded, concatenate

Items = Tensor | Encoded


def tensors(items: Items) -> list[Tensor]:
    """Every tensor of the items, masks included, in a fixed order."""
    if isinstance(items, Tensor):
        return [items]
    every: list[Tensor] = []

    def keep(part: Tensor) -> Tensor:
        every.append(part)
        return part

    items.map(keep)
    return every


def parts(items: Items) -> list[Tensor]:
    """The tensors that can have a gradient."""
    return [part for part in tensors(items) if part.is_floating_point()]


def rebuilt(items: Items, new: list[Tensor]) -> Items:
    """Items of the same form made of other tensors."""
    if isinstance(items, Tensor):
        return new[0]
    remaining = iter(new)
    return items.map(lambda _: next(remaining))


def off_graph(items: Items) -> Items:
    return items.detach() if isinstance(items, Tensor) else items.map(Tensor.detach)


def as_leaves(items: Items, rows: slice) -> Items:
    """Some of the items, off the graph; with gradients switched on, leaves of a new one."""

    def leaf(part: Tensor) -> Tensor:
        return part[rows].detach().requires_grad_(part.is_floating_point() and torch.is_grad_enabled())

    return leaf(items) if isinstance(items, Tensor) else items.map(leaf)


def vectors(items: Items) -> Tensor:
    """One vector an item, ``[N, D]``. Raises ShapeError for anything else."""
    rows = items.vectors if isinstance(items, Encoded) else items
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise ShapeError(
            "cosine scores need one floating-point vector an item, [N, D]: give PairLoss(score=...) for regions, words or named parts."
        )
    return rows


def join(items: Items, extra: Items, name: str) -> Items:
    """The items with extra ones behind them. Raises ShapeError if they are of two kinds."""
    if isinstance(items, Encoded) and isinstance(extra, Encoded):
        return concatenate([items, extra])
    if isinstance(items, Encoded) or isinstance(extra, Encoded) or items.shape[1:] != extra.shape[1:]:
        raise ShapeError(f"{name} must be of the same kind and width as the batch's own: both tensors [N, D], or both Encoded.")
    return torch.cat([items, extra])
