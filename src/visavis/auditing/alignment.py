"""How well two pictures agree when one may be a part of the other: correlation of small copies, over parts of either."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

AT_ONCE = 512
"""Pairs that are compared at once."""
_SIDE = 16  # points a side at which two pictures are compared
_MARGINS = (0.0, 0.08, 0.16)  # shares of a side that are cut off in all, to begin with
_STEPS = (0.03, 0.02, 0.02, 0.01, 0.01)  # shares of a side by which an edge of a part is moved then
_GAIN = 0.15
"""What moving the edges of a part adds to a correlation at most."""
_FLAT = 4.0  # of 255 levels: what varies less than this has no picture to agree with


def aligned(first: Tensor, second: Tensor, enough: float = 0.0) -> Tensor:
    """The correlation of pictures ``[N]`` over their best overlap, at most 1. enough: what it is asked to be; far below, it is a rough one.

    first, second ``[N, 3, S, S]``: small copies, 0 to 255. The whole of the one is compared with parts of the other, of at least 0.8 of its
    sides, and the other way round: parts in the middle, along the edges and in the corners, then the edges of the best one moved.
    """
    parts = [_best_part(a, b, enough - _GAIN) for a, b in ((first, second), (second, first))]
    return torch.maximum(*parts)


def _best_part(inner: Tensor, outer: Tensor, hopeful: float) -> Tensor:
    """The best correlation of the whole of one picture with a part of another; a rough one where that is not ``hopeful``."""
    results = [torch.zeros(0)]
    for some, whole in zip(inner.split(AT_ONCE), outer.split(AT_ONCE), strict=True):
        wanted, picture = _unit(_sampled(_smooth(some.float()), _whole(len(some)))), _smooth(whole.float())
        best, boxes = _roughly(wanted, picture)
        near = best >= hopeful
        best[near] = _finely(wanted[near], picture[near], best[near], boxes[near])
        results.append(best)
    return torch.cat(results)


def _roughly(wanted: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
    best, boxes = torch.full((len(wanted),), -1.0), _whole(len(wanted))
    for margin in _MARGINS:
        for x in sorted({0.0, margin / 2, margin}):
            for y in sorted({0.0, margin / 2, margin}):
                part = torch.tensor([x, y, x + 1 - margin, y + 1 - margin]).expand(len(wanted), 4)
                best, boxes = _better(wanted, picture, best, boxes, part)
    return best, boxes


def _finely(wanted: Tensor, picture: Tensor, best: Tensor, boxes: Tensor) -> Tensor:
    for step in _STEPS:
        for edge in range(4):
            for way in (-step, step):
                moved = boxes.clone()
                moved[:, edge] = (moved[:, edge] + way).clamp(0, 1)
                best, boxes = _better(wanted, picture, best, boxes, moved)
    return best


def _better(wanted: Tensor, picture: Tensor, best: Tensor, boxes: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
    """The better of two parts for each pair, and its correlation."""
    scores = (_unit(_sampled(picture, offered)) * wanted).sum(1)
    return torch.maximum(best, scores), torch.where((scores > best)[:, None], offered, boxes)


def _whole(count: int) -> Tensor:
    return torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(count, 1)


def _smooth(pictures: Tensor) -> Tensor:
    """Without details that two samplings would see differently."""
    return avg_pool2d(pictures, 3, stride=1, padding=1, count_include_pad=False)


def _sampled(pictures: Tensor, boxes: Tensor) -> Tensor:
    """Points of parts of pictures ``[N, 3 * side * side]``. boxes ``[N, 4]``: left, top, right, bottom, as shares of the sides."""
    steps = (torch.arange(_SIDE) + 0.5) / _SIDE
    x, y = (boxes[:, low, None] + steps * (boxes[:, high] - boxes[:, low])[:, None] for low, high in ((0, 2), (1, 3)))
    grid = torch.stack([x[:, None, :].expand(-1, _SIDE, -1), y[:, :, None].expand(-1, -1, _SIDE)], -1) * 2 - 1
    return grid_sample(pictures, grid, align_corners=False, padding_mode="border").flatten(1)


def _unit(points: Tensor) -> Tensor:
    """Centered, and scaled to length 1; what is flat stays short, and agrees with nothing."""
    centered = points - points.mean(1, keepdim=True)
    return centered / centered.norm(dim=1, keepdim=True).clamp(min=_FLAT * points.shape[1] ** 0.5)
