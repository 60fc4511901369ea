"""Sums and weights of exponentials over a tile of scores, for its rows and its columns at once.

One shift serves a whole tile where all of its sums can bear that, which is tested after the fact: a sum that came near
the smallest number may have lost terms, and the tile is summed again with a shift for every row and column. So no
sharpness and no spread of scores underflows, and the usual tile costs one exponential a score.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Exponentials:
    """Room for one tile, used again for every other."""

    def __init__(self) -> None:
        self.room = torch.empty(0)

    def log_sums(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of every row and of every column; -inf where all is -inf."""
        shift = _finite(scores.amax())
        raised = torch.sub(scores, shift, out=self._like(scores)).exp_()
        rows, columns = raised.sum(1), raised.sum(0)
        if torch.minimum(rows.min(), columns.min()) < _least(scores):
            return scores.logsumexp(1), scores.logsumexp(0)
        return rows.log_().add_(shift), columns.log_().add_(shift)

    def weights(self, scores: Tensor, rows: Tensor, columns: Tensor, to_rows: Tensor, to_columns: Tensor) -> Tensor:
        """``to_rows_i e^(s_ij - rows_i) + to_columns_j e^(s_ij - columns_j)``, written over the scores; rows, columns: +inf for none."""
        shift = _finite(scores.amax())
        over_rows, over_columns = shift - rows, shift - columns
        if torch.maximum(over_rows.max(), over_columns.max()) < -math.log(_least(scores)):
            per_row, per_column = to_rows * over_rows.exp_(), to_columns * over_columns.exp_()
            factors = torch.add(per_column, per_row[:, None], out=self._like(scores))
            return scores.sub_(shift).exp_().mul_(factors)
        raised = torch.sub(scores, columns, out=self._like(scores)).exp_().mul_(to_columns)
        return scores.sub_(rows[:, None]).exp_().mul_(to_rows[:, None]).add_(raised)

    def _like(self, scores: Tensor) -> Tensor:
        if self.room.numel() < scores.numel():
            self.room = torch.empty_like(scores).flatten()
        return self.room[: scores.numel()].view(scores.shape)


def _finite(shift: Tensor) -> Tensor:
    """Nothing to shift by where all is -inf."""
    return torch.where(shift == -math.inf, 0.0, shift)


def _least(scores: Tensor) -> float:
    """Below this a sum of so many terms may miss something that matters, lost under the smallest number."""
    number = torch.finfo(scores.dtype)
    return number.tiny / number.eps * scores.numel()
