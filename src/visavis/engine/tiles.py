"""The scores of negatives, tile by tile, and the positive pairs that stood among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from visavis.engine.positives import by_ids_alone, positive_pairs
from visavis.engine.row_blocks import row_blocks
from visavis.engine.scoring import Block, Scores
from visavis.objectives.pairs import NEVER
from visavis.targets import Targets

TILE = {"cpu": (512, 1024)}  # rows x columns that stay in a core's own cache; other devices would rather have few large ones
LARGE_TILE = (4096, 8192)
KEPT_BYTES = 7 * 2**24


class Tile(NamedTuple):
    """Some rows and columns of scores, -inf where a pair is no negative.

    pairs: which positive pairs stood here. place: where. positive: their scores.
    """

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
    """All tiles of a score matrix; query ``[P]`` and candidate ``[P]``: its positive pairs, ordered by tile."""

    def __init__(self, scores: Scores, targets: Targets, block_rows: int | None):
        self.scores, self.targets = scores, targets
        self.kept: dict[int, Tile] = {}
        self.rows: slice | None = None
        device = targets.query_ids.device
        height, width = TILE.get(device.type, LARGE_TILE)
        self.blocks = row_blocks(scores.shape, block_rows or height)
        self.stripes = row_blocks(scores.shape[::-1], width)
        query, candidate = positive_pairs(targets, self.blocks)
        tile = query // (block_rows or height) * max(len(self.stripes), 1) + candidate // width
        tile, order = tile.sort(stable=True)
        self.query, self.candidate = query[order], candidate[order]
        numbers = torch.arange(len(self.blocks) * len(self.stripes) + 1, device=device)
        self.bounds = torch.searchsorted(tile, numbers).tolist()

    def __call__(self, scores: Scores, *, keep: bool = False) -> Iterator[Tile]:
        """One tile after the other. keep: for a second time, as far as there is room, so that their product is formed once."""
        room = KEPT_BYTES if keep and scores.light else 0
        for number, (rows, columns) in enumerate(product(self.blocks, self.stripes)):
            if number in self.kept:
                yield self.kept.pop(number)
                continue
            pairs = slice(*self.bounds[number : number + 2])
            tile = self._masked(rows, columns, pairs, scores.block(rows, columns))
            room -= tile.scores.nbytes
            if room >= 0:
                self.kept[number] = tile._replace(block=Block(tile.scores.clone(), tile.block.push))
            yield tile

    def _masked(self, rows: slice, columns: slice, pairs: slice, block: Block) -> Tile:
        place = (self.query[pairs] - rows.start, self.candidate[pairs] - columns.start)
        positive = block.scores[place]
        if by_ids_alone(self.targets):
            block.scores[place] = NEVER
        else:
            block.scores.masked_fill_(~self._negative(rows)[:, columns], NEVER)
        return Tile(rows, columns, pairs, place, positive, block)

    def _negative(self, rows: slice) -> Tensor:
        """Which pairs of some rows are negatives, where ids alone do not say; once for all tiles beside each other."""
        if self.rows != rows:
            self.rows, self.negative = rows, self.targets[rows].negative
        return self.negative

    def new(self, length: int) -> Tensor:
        return torch.full((length,), NEVER, dtype=self.scores.dtype, device=self.query.device)
