"""What all cosines have in common: vectors at length 1, their gradient, a scale."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from visavis.engine.items import Items, vectors
from visavis.engine.scores.base import Gradients, NeedsGrad, Scores, learnable_scale
from visavis.errors import ShapeError

SHORTEST = 1e-12  # the length that normalize divides by at least
ROWS_AT_ONCE = 1024
"""Of vectors, where a temporary copy is made of some."""


class Units:
    """The vectors of one side at length 1, and their gradient: None while there is none, or none is needed."""

    def __init__(self, given: Tensor, dtype: torch.dtype, product: torch.dtype, *, needs_grad: bool):
        given = given.detach().to(dtype)
        self.needs_grad = needs_grad
        self.length = given.norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
        self.rows = given / self.length
        self.factors = self.rows.to(product)
        self.gradient: Tensor | None = None

    def total(self) -> Tensor:
        """The gradient, to add to."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.rows)
        return self.gradient

    def fork(self) -> Units:
        other = copy(self)
        other.gradient = None
        return other

    def gradient_of_given(self) -> Tensor | None:
        """The gradient of the vectors as they were given: the part across the unit rows, over their length; in place."""
        if not self.needs_grad:
            return None
        for gradient, rows, length in zip(*(part.split(ROWS_AT_ONCE) for part in (self.total(), self.rows, self.length)), strict=True):
            gradient.sub_(torch.linalg.vecdot(gradient, rows)[:, None] * rows).div_(length)
        return self.gradient


class CosineScores(Scores):
    """Cosines of vectors. Products run in the precision of autocast where it is on, sums in float32 at least."""

    light = True

    def __init__(self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad):
        visual, textual = vectors(images), vectors(texts)
        if visual.shape[1] != textual.shape[1]:
            raise ShapeError(f"images are {visual.shape[1]} wide and texts {textual.shape[1]}: a cosine needs equal widths.")
        self.dtype = torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32)
        device = visual.device.type
        mixed = torch.is_autocast_enabled(device) and self.dtype == torch.float32
        product = torch.get_autocast_dtype(device) if mixed else self.dtype
        self.units = [
            Units(side, self.dtype, product, needs_grad=of_parts[0]) for side, of_parts in zip((visual, textual), needs_grad, strict=True)
        ]
        self.parameters = learnable_scale(scale)
        self.scale = None if scale is None else float(scale.detach() if isinstance(scale, Tensor) else scale)
        self.scale_gradient = torch.zeros((), dtype=self.dtype, device=visual.device) if self.parameters else None

    @property
    def sides(self) -> tuple[int, int]:
        return len(self.units[0].rows), len(self.units[1].rows)

    def of_given(self) -> Gradients:
        """What the gradients of unit vectors mean for the vectors as they were given."""
        visual, textual = (side.gradient_of_given() for side in self.units)
        return Gradients([visual], [textual], [self.scale_gradient] if self.parameters else [])

    def scaled(self, rows: Tensor) -> Tensor:
        factor = self.factor if self.scale is None else self.factor * self.scale
        return rows if factor == 1 else rows * factor
