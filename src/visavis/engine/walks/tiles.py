"""The scores of negatives, tile by tile, and the positive pairs that stood among them.

A gradient spread over all scores needs them twice: to sum up rows and columns, and again to weigh each score by its
row and column. Tiles are taken in steps, step k being the rows and the columns of block k as far as they are not yet
seen. After it these rows and columns are complete, so tiles near the diagonal need not wait long for their weights: a
band of them is kept meanwhile, and only those far from the diagonal are scored a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from visavis.engine.positives import by_ids_alone, positive_pairs
from visavis.engine.scores import Block, Scores
from visavis.memory import spans
from visavis.objectives.pairs import NEVER
from visavis.targets import Targets


class Tile(NamedTuple):
    """Some rows and columns of scores, -inf where a pair is no negative; which positive pairs stood here, where, with which scores."""

    rows: slice
    columns: slice
    pairs: slice
    place: tuple[Tensor, Tensor]
    positive: Tensor
    block: Block

    @property
    def scores(self) -> Tensor:
        return self.block.scores


class Tiles:
    """All tiles of a score matrix; query ``[P]``, candidate ``[P]``: its positive pairs, ordered by tile.

    tile: rows and columns of one. in_steps: false for one step over everything. kept_bytes: of scores that are kept for the second time.
    """

    def __init__(self, scores: Scores, targets: Targets, tile: tuple[int, int], *, in_steps: bool, kept_bytes: int):
        self.scores, self.targets = scores, targets
        height, width = tile
        self.blocks, self.stripes = spans(scores.shape[0], height), spans(scores.shape[1], width)
        query, candidate = positive_pairs(targets, self.blocks)
        number, order = (query // height * max(len(self.stripes), 1) + candidate // width).sort(stable=True)
        self.query, self.candidate = query[order], candidate[order]
        self.bounds = torch.searchsorted(number, torch.arange(len(self.blocks) * len(self.stripes) + 1, device=number.device)).tolist()
        self.number = max(min(len(self.blocks), len(self.stripes)), 1) if in_steps else 1
        self.kept: list[list[Tile]] = [[] for _ in range(self.number)]
        self.later: list[tuple[int, int]] = []
        self.room = kept_bytes if scores.light else 0
        self.band = band_of(self.room, math.prod(scores.shape) / self.number**2 * torch.finfo(scores.dtype).bits / 8)
        self.negative: tuple[slice, Tensor] | None = None

    def first_time(self, step: int) -> Iterator[Tile]:
        """The tiles of a step."""
        for row, column in self._places():
            steps = self._step(row, self.blocks), self._step(column, self.stripes)
            if min(steps) != step:
                continue
            tile = self._tile(row, column, pushed=self.scores.light)
            if max(steps) - step <= self.band and self.room >= tile.scores.nbytes:
                self.room -= tile.scores.nbytes
                self.kept[max(steps)].append(tile._replace(block=Block(tile.scores.clone(), tile.block.push)))
            else:
                self.later.append((row, column))
            yield tile

    def second_time(self, step: int) -> Iterator[Tile]:
        """The tiles whose rows and columns are complete after a step; after the last one, all that are left."""
        while self.kept[step]:
            tile = self.kept[step].pop()
            self.room += tile.scores.nbytes
            yield tile
        if step == self.number - 1:
            yield from (self._tile(*place, pushed=True) for place in self.later)

    def completed(self, step: int) -> tuple[slice, slice]:
        """The rows and the columns that a step completes."""
        return self._covered(step, self.blocks), self._covered(step, self.stripes)

    def new(self, *length: int, value: float = NEVER) -> Tensor:
        return torch.full(length, value, dtype=self.scores.dtype, device=self.query.device)

    def _places(self) -> Iterator[tuple[int, int]]:
        return ((row, column) for row in range(len(self.blocks)) for column in range(len(self.stripes)))

    def _step(self, number: int, blocks: list[slice]) -> int:
        return number * self.number // len(blocks)

    def _covered(self, step: int, blocks: list[slice]) -> slice:
        own = [block for number, block in enumerate(blocks) if self._step(number, blocks) == step]
        return slice(own[0].start, own[-1].stop) if own else slice(0, 0)

    def _tile(self, row: int, column: int, *, pushed: bool) -> Tile:
        rows, columns, number = self.blocks[row], self.stripes[column], row * len(self.stripes) + column
        pairs, block = slice(*self.bounds[number : number + 2]), self.scores.block(rows, columns, pushed=pushed)
        place = (self.query[pairs] - rows.start, self.candidate[pairs] - columns.start)
        positive = block.scores[place]
        if by_ids_alone(self.targets):
            block.scores[place] = NEVER
        else:
            block.scores.masked_fill_(~self._negative(rows)[:, columns], NEVER)
        return Tile(rows, columns, pairs, place, positive, block)

    def _negative(self, rows: slice) -> Tensor:
        """Which pairs of some rows are negatives, where ids alone do not say; once for all tiles side by side."""
        if self.negative is None or self.negative[0] != rows:
            self.negative = rows, self.targets[rows].negative
        return self.negative[1]


def band_of(room: float, cell: float) -> float:
    """The widest band of which ``band * (band + 1)`` cells of so many bytes have room."""
    return (math.sqrt(1 + 4 * room / max(cell, 1)) - 1) / 2
