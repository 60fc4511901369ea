"""Alignment of two images of which one may be a crop of the other: correlation of thumbnails over
the best overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

PAIRS_PER_BATCH = 512
# Images are compared at a grid of this many points per side.
_GRID_SIZE = 16
# Shares of a side that the first crops leave out.
_MARGINS = (0.0, 0.08, 0.16)
# Shares of a side by which an edge of the best crop is then moved.
_STEPS = (0.03, 0.02, 0.02, 0.01, 0.01)
# Largest increase of a correlation by moving the edges of a crop.
_MAX_REFINEMENT_GAIN = 0.15
# Of 255 levels. An image that varies less has no content that could agree.
_MIN_STANDARD_DEVIATION = 4.0


def aligned_correlation(first: Tensor, second: Tensor, threshold: float = 0.0) -> Tensor:
    """Compute the correlation of pairs of images over their best overlap.

    Each image as a whole is compared with crops of the other that keep at least 80 % of its sides.
    The search starts with centered crops and crops at the edges and corners. Then it moves the
    edges of the best crop.

    Args:
        first: Thumbnails with values from 0 to 255, shape ``[N, 3, S, S]``.
        second: Thumbnails of the same shape.
        threshold: Correlation of interest. Values far below it are computed roughly.

    Returns:
        Correlations of at most 1, shape ``[N]``.
    """
    best = [
        _best_crop_correlation(a, b, threshold - _MAX_REFINEMENT_GAIN)
        for a, b in ((first, second), (second, first))
    ]
    return torch.maximum(*best)


def _best_crop_correlation(full_images: Tensor, cropped: Tensor, min_coarse: float) -> Tensor:
    """Return the best correlation of whole images with crops of others, refined where it is at
    least ``min_coarse``.
    """
    results = [torch.zeros(0)]
    for full_batch, crop_batch in zip(
        full_images.split(PAIRS_PER_BATCH), cropped.split(PAIRS_PER_BATCH), strict=True
    ):
        target, image = (
            _unit(_sample(_smooth(full_batch.float()), _full_boxes(len(full_batch)))),
            _smooth(crop_batch.float()),
        )
        best, boxes = _search_start_crops(target, image)
        is_promising = best >= min_coarse
        best[is_promising] = _refine_edges(
            target[is_promising], image[is_promising], best[is_promising], boxes[is_promising]
        )
        results.append(best)
    return torch.cat(results)


def _search_start_crops(target: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    best, boxes = torch.full((len(target),), -1.0), _full_boxes(len(target))
    for margin in _MARGINS:
        for x in sorted({0.0, margin / 2, margin}):
            for y in sorted({0.0, margin / 2, margin}):
                box = torch.tensor([x, y, x + 1 - margin, y + 1 - margin]).expand(len(target), 4)
                best, boxes = _keep_better(target, image, best, boxes, box)
    return best, boxes


def _refine_edges(target: Tensor, image: Tensor, best: Tensor, boxes: Tensor) -> Tensor:
    for step in _STEPS:
        for edge in range(4):
            for offset in (-step, step):
                moved = boxes.clone()
                moved[:, edge] = (moved[:, edge] + offset).clamp(0, 1)
                best, boxes = _keep_better(target, image, best, boxes, moved)
    return best


def _keep_better(
    target: Tensor, image: Tensor, best: Tensor, boxes: Tensor, candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the better correlation of the current and the candidate boxes for each pair, and its
    box.
    """
    scores = (_unit(_sample(image, candidates)) * target).sum(1)
    return torch.maximum(best, scores), torch.where((scores > best)[:, None], candidates, boxes)


def _full_boxes(count: int) -> Tensor:
    return torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(count, 1)


def _smooth(images: Tensor) -> Tensor:
    """Remove details that depend on the sampling grid."""
    return avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)


def _sample(images: Tensor, boxes: Tensor) -> Tensor:
    """Sample a grid in boxes ``[N, 4]`` (left, top, right, bottom, as shares of the sides): points
    ``[N, 3 * grid * grid]``.
    """
    steps = (torch.arange(_GRID_SIZE) + 0.5) / _GRID_SIZE
    x, y = (
        boxes[:, low, None] + steps * (boxes[:, high] - boxes[:, low])[:, None]
        for low, high in ((0, 2), (1, 3))
    )
    grid = (
        torch.stack(
            [x[:, None, :].expand(-1, _GRID_SIZE, -1), y[:, :, None].expand(-1, -1, _GRID_SIZE)], -1
        )
        * 2
        - 1
    )
    return grid_sample(images, grid, align_corners=False, padding_mode="border").flatten(1)


def _unit(points: Tensor) -> Tensor:
    """Center and scale to length 1. A flat image stays short, so that it correlates with nothing."""
    centered = points - points.mean(1, keepdim=True)
    return centered / centered.norm(dim=1, keepdim=True).clamp(
        min=_MIN_STANDARD_DEVIATION * points.shape[1] ** 0.5
    )
