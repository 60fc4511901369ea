"""Which way a loss goes through its scores, decided in one place before anything is scored.

>>> from visavis.objectives import Unified
>>> both = Targets.paired(8192), Targets.paired(8192).T
>>> print(choose(Unified(), None, both, Sizes.of_vectors(8192, 8192, 512), torch.device("cpu"), 2**30))
tiles of 1024 x 1024 scores for both directions at once, up to 80.0 MiB of them kept in between; about 120.0 MiB beside items and gradients
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from visavis.engine.costs import terms_cost, value_cost
from visavis.engine.facts import facts_needing_grad, has_facts
from visavis.engine.positives import by_ids_alone, positive_counts
from visavis.engine.walks.tiles import band_of
from visavis.errors import VisavisError
from visavis.memory import LARGEST_BLOCK, BlockCost, block_shape, in_words, spans
from visavis.objectives.base import Objective
from visavis.objectives.summary import LogSumExp
from visavis.targets import Targets

DENSE_SCORES = 2**22  # up to so many scores, the graph of one matrix is as fast as blocks of any score
FEW_SCORES = 2**18  # up to so many, also as fast as blocks of kept cosines
KEPT_SCORES = 2**24  # up to so many cosines are kept
ROW_SCORES = 2**21  # of a block of rows
KEPT_ROW_SCORES = 2**18  # of a block of rows, where scores are kept: it stays in the caches
FEWEST_ROWS = 64  # fewer make a product slow
TILE = {"cpu": 1024}  # rows and columns that stay in the caches of a core; other devices would rather have few large ones
LARGE_TILE = 8192
KEPT_BYTES = 5 * 2**24  # of tiles that wait for their gradient

Path = Literal["dense", "kept", "rows", "tiles"]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """How much is to be compared.

    queries: images, and texts, that ask. candidates: texts that images are compared with, and images that texts are; more than the
    queries of the other side where there are extra ones (``extra``) or several ``processes``. item_bytes: of all items, in the
    precision of their gradients. number_bytes: of one score.
    """

    queries: Pair
    candidates: Pair
    item_bytes: int
    number_bytes: int = 4
    extra: bool = False
    processes: int = 1

    @classmethod
    def of_vectors(cls, num_images: int, num_texts: int, width: int) -> Sizes:
        return cls((num_images, num_texts), (num_texts, num_images), 4 * width * (num_images + num_texts))


@dataclass(frozen=True)
class Plan:
    """How a loss walks over its scores.

    path: "dense", the graph of one matrix; "kept", one direction after the other over a kept matrix of cosines; "rows", the same,
    each block scored when it is needed; "tiles", blocks that serve both directions. rows: queries of a block, for images as queries and
    for texts as queries. columns: candidates scored with a graph at once, likewise. tile: rows and columns of a tile. kept_bytes: that
    tiles which wait for their gradient may take. expected_bytes: the peak of memory beyond the items and their gradients.
    """

    path: Path
    queries: Pair
    rows: Pair
    columns: Pair
    tile: Pair = (0, 0)
    kept_bytes: int = 0
    expected_bytes: int = 0

    def __str__(self) -> str:
        images, texts = self.queries
        blocks = f"one direction after the other in blocks of {self.rows[0]} images, then of {self.rows[1]} texts"
        way = {
            "dense": f"the graph of one matrix of {images} x {texts} scores",
            "kept": f"{images} x {texts} cosines kept, {blocks}",
            "rows": f"{blocks}, at most {self.columns[0]} texts and {self.columns[1]} images scored at once",
            "tiles": f"tiles of {self.tile[0]} x {self.tile[1]} scores for both directions at once",
        }[self.path]
        waiting = f", up to {in_words(self.kept_bytes)} of them kept in between" if self.kept_bytes else ""
        return f"{way}{waiting}; about {in_words(self.expected_bytes)} beside items and gradients"


def choose(
    objective: Objective,
    cost: BlockCost | None,
    targets: tuple[Targets, Targets],
    sizes: Sizes,
    device: torch.device,
    memory_bytes: int,
    *,
    block_rows: int | None = None,
    needs_grad: bool = True,
) -> Plan:
    """The plan of a loss; a function of its arguments alone.

    cost: of blocks of images x texts by a score function; None for cosines. targets: of images as queries, and of texts. memory_bytes:
    what may be used beyond the items: gradients of items and blocks.

    The first line that holds and fits into the memory:

    ========  =========================================================================================================
    path      when
    ========  =========================================================================================================
    dense     one process, no ``block_rows``, at most 2^22 scores (of pairs x candidates for a ``wide`` objective), and blocks are
              not faster. They are for cosines without extra candidates and without facts that need a gradient: of summary objectives
              always, of others on a CPU from 2^18 scores on
    tiles     a summary suffices (``objective.summary``), no extra candidates, and one process or targets of ids alone
    kept      at most 2^24 cosines, one process, no extra candidates, no ``block_rows``
    rows      else
    ========  =========================================================================================================

    Under a compiler PairLoss asks for no plan: its path is dense.

    Blocks are those that are fastest (constants above), or as much smaller as the memory asks for; ``block_rows`` bounds their rows.
    Raises VisavisError where even the smallest block does not fit.
    """
    asked = _Question(objective, cost, targets, sizes, device, memory_bytes, block_rows, needs_grad)
    if asked.dense_is_fast and (plan := asked.dense()).expected_bytes <= asked.beyond_gradients:
        return plan
    if asked.summary is not None and not sizes.extra and (sizes.processes == 1 or not has_facts(targets[0])):
        return asked.tiles()
    if cost is None and not sizes.extra and sizes.processes == 1 and block_rows is None and asked.kept_is_small:
        plan = asked.in_rows("kept")
        if plan.expected_bytes <= asked.beyond_gradients:
            return plan
    return asked.in_rows("rows")


class _Question:
    """The arguments of ``choose``, and what each path would take."""

    def __init__(
        self,
        objective: Objective,
        cost: BlockCost | None,
        targets: tuple[Targets, Targets],
        sizes: Sizes,
        device: torch.device,
        memory_bytes: int,
        block_rows: int | None,
        needs_grad: bool,
    ) -> None:
        self.objective, self.cost, self.targets, self.sizes, self.device = objective, cost, targets, sizes, device
        self.block_rows, self.needs_grad, self.memory_bytes = block_rows, needs_grad, memory_bytes
        self.summary = objective.summary(targets[0])
        self.number = math.prod(targets[0].shape)
        self.item_bytes = sizes.item_bytes if needs_grad else 0
        self.beyond_gradients = memory_bytes - self.item_bytes
        self.unit_bytes = sizes.item_bytes if cost is None else 0
        self.to_upstream = self.item_bytes  # each gradient times what comes from above, when nothing else is left

    @property
    def dense_is_fast(self) -> bool:
        if self.sizes.processes > 1 or self.block_rows is not None:
            return False
        held = max(self._held(targets) for targets in self.targets)
        if held > DENSE_SCORES:
            return False
        many = held > FEW_SCORES and self.device.type == "cpu"
        faster = self.cost is None and not self.sizes.extra and (many or self.summary is not None)
        return not faster or bool(facts_needing_grad(self.targets[0]))

    @property
    def kept_is_small(self) -> bool:
        return self.number <= KEPT_SCORES and 2 * self.matrix_bytes <= self.beyond_gradients

    @property
    def matrix_bytes(self) -> int:
        """Of kept cosines, and of their gradients: one matrix for each direction whose share in the value only the end tells."""
        gradients = (1 if self.objective.reduction == "sum" else 2) if self.needs_grad else 0
        return (1 + gradients) * self.number * self.sizes.number_bytes

    def _held(self, targets: Targets) -> int:
        """How many scores the objective holds at once, in one direction."""
        wide = self.objective.wide
        pairs = int(positive_counts(targets, spans(targets.shape[0], DENSE_SCORES)).sum()) if wide else 0
        return max(targets.shape[0], pairs) * targets.shape[1]

    def dense(self) -> Plan:
        (images, texts), (all_texts, all_images) = self.sizes.queries, self.sizes.candidates
        value = value_cost(self.objective, self.targets[0], number_bytes=self.sizes.number_bytes)
        score = BlockCost(2.0 * self.sizes.number_bytes, fixed=4.0 * self.unit_bytes) if self.cost is None else self.cost
        number = score.of(images, all_texts) + value.of(images, all_texts)
        if self.sizes.extra:
            number += score.of(all_images, texts)
        return Plan("dense", (images, texts), (images, texts), (all_texts, all_images), expected_bytes=number)

    def tiles(self) -> Plan:
        height, width = self.sizes.queries[0], self.sizes.candidates[0]
        side, number_bytes = TILE.get(self.device.type, LARGE_TILE), self.sizes.number_bytes
        largest = min(self.block_rows or side, side), side
        masks = 0.0 if by_ids_alone(self.targets[0]) else 3.0
        numbers = BlockCost(2.0 * number_bytes + masks)  # the scores, and their exponentials or the rows that beat the best so far
        cost = numbers if self.cost is None else self.cost.plus(numbers.pair)
        room = self.beyond_gradients - self.unit_bytes
        enough = self._enough(room, cost.of(1, 1))
        tile = block_shape(height, width, cost, enough, largest=largest)
        of_tile, kept = cost.of(min(tile[0], height), min(tile[1], width)), 0
        if isinstance(self.summary, LogSumExp) and self.cost is None and self.needs_grad:
            kept = int(min(KEPT_BYTES, max(room - of_tile, 0)))
        whole = self.cost is None or self.cost.of(tile[0], width) <= enough
        expected = max(self.unit_bytes + of_tile + self._kept_at_most(height, width, tile, kept), self.to_upstream)
        columns = (width, height) if whole else (tile[1], tile[1])
        return Plan("tiles", self.sizes.queries, (tile[0], tile[0]), columns, tile, kept, expected)

    def _kept_at_most(self, height: int, width: int, tile: Pair, room: int) -> int:
        """The most bytes of tiles that are kept at a time, of at most so many bytes; as ``Tiles`` keeps them."""
        if self.sizes.processes > 1:
            return min(room, height * width * self.sizes.number_bytes)
        steps = max(min(-(-height // tile[0]), -(-width // tile[1])), 1)
        cell = height * width / steps**2 * self.sizes.number_bytes
        band, now, most = int(band_of(room, cell)), 0, 0
        waiting = [0] * steps
        for step in range(steps):
            for last in range(step, min(step + band + 1, steps)):
                waiting[last] += 1 if last == step else 2
                now += 1 if last == step else 2
            most = max(most, now)
            now -= waiting[step]
        return int(min(room, most * cell))

    def in_rows(self, path: Path) -> Plan:
        number_bytes, kept = self.sizes.number_bytes, path == "kept"
        terms = terms_cost(self.objective, self.targets[0], number_bytes=number_bytes)
        own = number_bytes * (1 if self.cost is None else 2)
        matrices = self.matrix_bytes if kept else 0
        forked = 0 if kept or self.objective.reduction == "sum" else self.item_bytes
        held = (0 if kept else self.unit_bytes) + matrices + forked
        room = self.beyond_gradients - held
        rows, columns, of_blocks = [], [], 0
        for queries, candidates, cost in zip(self.sizes.queries, self.sizes.candidates, self._score_costs(), strict=True):
            most = self.block_rows or max(FEWEST_ROWS, (KEPT_ROW_SCORES if kept else ROW_SCORES) // max(candidates, 1))
            enough = self._enough(room, terms.plus(own).of(1, candidates) + cost.of(1, 1))
            height, width = _rows_that_fit(queries, candidates, most, terms.plus(own), cost, enough)
            rows.append(height)
            columns.append(width)
            of_blocks = max(of_blocks, terms.plus(own).of(min(height, queries), candidates) + cost.of(min(height, queries), width))
        expected = max(held + (max(of_blocks, self.unit_bytes) if kept else of_blocks), self.to_upstream)
        return Plan(path, self.sizes.queries, (rows[0], rows[1]), (columns[0], columns[1]), expected_bytes=expected)

    def _enough(self, room: int, least: int) -> int:
        """What blocks use of the room: of a score function, no more than gains speed, and at least one pair."""
        return room if self.cost is None else min(room, max(LARGEST_BLOCK, least))

    def _score_costs(self) -> tuple[BlockCost, BlockCost]:
        """Of a block of images as queries, and of texts as queries, beside its numbers."""
        return (BlockCost(0.0), BlockCost(0.0)) if self.cost is None else (self.cost, self.cost.T)


def _rows_that_fit(queries: int, candidates: int, most: int, terms: BlockCost, score: BlockCost, room: float) -> Pair:
    """The rows of a block, at most so many, and how many candidates are scored at once: all of them, where so few rows are enough.

    terms: held for all candidates of a block. score: held for those that are scored at once.
    """
    both = BlockCost(terms.pair + score.pair, terms.visual + score.visual, terms.text + score.text, terms.fixed + score.fixed)
    height = max(min(most, queries), 1)
    if both.of(height, candidates) <= room:
        return most, max(candidates, 1)
    fewer = int((room - both.fixed - both.text * candidates) // max(both.visual + both.pair * candidates, 1e-9))
    if fewer >= min(height, FEWEST_ROWS // 2) or (score == BlockCost(0.0) and fewer >= 1):
        return min(fewer, most), max(candidates, 1)
    height = min(height, FEWEST_ROWS // 2)
    while height:
        left = room - terms.of(height, candidates) - score.fixed - score.visual * height
        width = int(left // max(score.text + score.pair * height, 1e-9))
        if width >= 1:
            return height, min(width, max(candidates, 1))
        height //= 2
    raise VisavisError(
        f"a single query against {candidates} candidates takes {in_words(terms.of(1, candidates) + score.of(1, 1))} beside items and gradients, "
        f"but {in_words(max(room, 0))} of the memory are left: give a larger memory."
    )
