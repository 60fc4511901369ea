"""Execution plan of a PairLoss, chosen before the batch is scored.

>>> from visavis.losses.objectives import Unified
>>> directions = Targets.paired(8192), Targets.paired(8192).T
>>> item_bytes = 4 * 512 * (8192 + 8192)
>>> plan = choose_plan(PlanInputs(Unified(), directions, item_bytes, torch.device("cpu"), memory_bytes=2**30))
>>> print(plan)  # doctest: +NORMALIZE_WHITESPACE
tiles of 2048 x 2048 scores for both directions, up to 240.0 MiB of exponentials cached. About 304.0 MiB next to items and gradients.
Reason: 67,108,864 scores exceed 65,536, and the objective needs one number per query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from visavis.core.blocking import (
    MAX_BLOCK_BYTES,
    BlockCost,
    Score,
    ScoreCost,
    block_cost_of,
    block_shape,
)
from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError, VisavisError
from visavis.core.memory_budget import (
    MemoryLimit,
    budget_bytes,
    chunk_slices,
    format_bytes,
    parse_memory,
)
from visavis.losses.objective import Objective, PairwiseObjective, validate_targets
from visavis.losses.pair_summaries import NegativeLogSumExp, NegativeSummary
from visavis.losses.targets import (
    ANNOTATION_NAMES,
    Factors,
    Targets,
    annotations_needing_grad,
    has_annotations,
)

MAX_DENSE_SCORES = 2**22
"""Up to this number of scores, the graph of one matrix is as fast as blocks of queries."""
MAX_SUMMARY_DENSE_SCORES = 2**16
"""The same for cosines of an objective that needs one number per query, whose tiles serve both
directions.
"""
MAX_ROW_BLOCK_SCORES = 2**21
"""Number of scores of a block of queries."""
NUMBERS_PER_QUERY = 64
"""Numbers that the terms of a query or of a positive pair take next to its scores, at most."""
MIN_FAST_BLOCK_ROWS = 64
"""Number of rows below which a matrix product is slow."""
TILE_SIDE, SECOND_PASS_TILE_SIDE, GPU_TILE_SIDE = 1024, 2048, 8192
"""Rows and columns of a tile. One of the first size stays in the cache of a CPU core.

With a second pass, twice the side saves 4 % (float32) and 15 % (bfloat16) of the time at 8,192
pairs on two threads, because each tile adds to the gradients of its vectors. GPUs are faster with
few large tiles.
"""
MAX_CACHED_TILE_BYTES = 15 * 2**24
"""Memory of exponentials that wait for their gradient. They save a quarter of the time from 512 to
8,192 pairs.
"""

MAX_CACHED_PLANS = 256

IntPair = tuple[int, int]


@dataclass(frozen=True)
class PlanInputs:
    """A comparison of images and texts, and the memory for its loss.

    Attributes:
        objective: The objective.
        targets: Targets of the image-to-text and of the text-to-image direction. Their candidates
            exceed the queries of the other direction with extra candidates or several ranks.
        item_bytes: Memory of all items in the precision of their gradients.
        device: Device of the items.
        memory_bytes: Memory for gradients of items and for blocks.
        score_cost: Memory of blocks of images x texts of a score function. None: cosines.
        element_bytes: Memory of one score.
        has_extra_candidates: Whether some candidates are never queries.
        world_size: Number of ranks.
        block_rows: Maximum number of queries per block.
        needs_grad: Whether gradients are computed.
    """

    objective: Objective
    targets: tuple[Targets, Targets]
    item_bytes: int
    device: torch.device
    memory_bytes: int
    score_cost: BlockCost | None = None
    element_bytes: int = 4
    has_extra_candidates: bool = False
    world_size: int = 1
    block_rows: int | None = None
    needs_grad: bool = True

    @property
    def queries(self) -> IntPair:
        """Number of images and of texts of this rank that are queries."""
        return self.targets[0].shape[0], self.targets[1].shape[0]

    @property
    def candidates(self) -> IntPair:
        """Number of texts that images are compared with, and of images that texts are compared
        with.
        """
        return self.targets[0].shape[1], self.targets[1].shape[1]

    @property
    def summary(self) -> NegativeSummary | None:
        """The number per query that suffices for the objective, if any."""
        return self.objective.summary(self.targets[0])

    @property
    def shares_blocks(self) -> bool:
        """Whether the terms of both directions follow from a block of one of them."""
        is_pairwise = isinstance(self.objective, PairwiseObjective)
        return is_pairwise and self.targets[0].is_defined_by_ids and not self.has_extra_candidates

    @property
    def term_cost(self) -> BlockCost:
        """Memory of the terms of one direction. Rows are queries, or positive pairs for an
        objective that needs the pair matrix.
        """
        return BlockCost(
            self.objective.scores_held * self.element_bytes,
            visual_bytes=NUMBERS_PER_QUERY * self.element_bytes,
        )

    @property
    def gradient_bytes(self) -> int:
        """Memory of the gradients of the items. The backward pass needs it once more for their
        product with the upstream gradient.
        """
        return self.item_bytes if self.needs_grad else 0

    @property
    def block_budget(self) -> int:
        """Memory that is left next to the gradients of the items."""
        return self.memory_bytes - self.gradient_bytes

    @property
    def unit_vector_bytes(self) -> int:
        """Memory of the normalized embeddings."""
        return self.item_bytes if self.score_cost is None else 0

    @property
    def reason_against_tiles(self) -> str:
        """Why no tile can serve both directions. Empty: tiles can."""
        if self.summary is None:
            return "the objective needs all negatives of a query"
        if self.has_extra_candidates:
            return "extra candidates are never queries"
        if self.world_size > 1 and has_annotations(self.targets[0]):
            return "each rank has only its own annotations"
        return ""

    @property
    def max_dense_scores(self) -> int:
        """Number of scores up to which one matrix is not slower than blocks."""
        are_tiles_fast = (
            not self.reason_against_tiles
            and self.score_cost is None
            and not annotations_needing_grad(self.targets[0])
        )
        return MAX_SUMMARY_DENSE_SCORES if are_tiles_fast else MAX_DENSE_SCORES

    @property
    def objective_scores(self) -> int:
        """Number of scores that the objective holds at once, in the larger direction."""
        numbers: list[int] = []
        for targets in self.targets:
            rows, candidates = targets.shape
            if self.objective.needs_pair_matrix:  # one row per positive pair
                rows = max(rows, _count_pairs(targets))
            numbers.append(rows * candidates)
        return max(numbers)


@dataclass(frozen=True)
class ExecutionPlan:
    """How a loss is computed. ``print`` describes it in one line.

    Attributes:
        path: "dense" for the graph of one matrix, "blocks" for blocks that are scored one after the
            other, each with its gradient.
        num_queries: Number of images and of texts that are queries.
        block_rows: Maximum number of queries of a block, for each direction.
        block_columns: Maximum number of candidates that are scored with a graph at once, for each
            direction.
        tile_shape: Maximum rows and columns of a block that serves both directions by one number per
            query. None: blocks have all candidates.
        shares_blocks: Whether the blocks of images serve both directions.
        cached_bytes: Memory for exponentials of tiles that wait for their gradient.
        expected_bytes: Expected peak memory next to the items and their gradients.
        reason: Why this path was chosen.
    """

    path: Literal["dense", "blocks"]
    num_queries: IntPair
    block_rows: IntPair
    block_columns: IntPair
    tile_shape: IntPair | None = None
    shares_blocks: bool = False
    cached_bytes: int = 0
    expected_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        images, texts = self.num_queries
        if self.path == "dense":
            description = f"the graph of one matrix of {images} x {texts} scores"
        elif self.tile_shape is not None:
            height, width = self.tile_shape
            description = f"tiles of {height} x {width} scores for both directions"
        elif self.shares_blocks:
            description = f"both directions in blocks of {self.block_rows[0]} images"
        else:
            description = (
                f"one direction after the other in blocks of {self.block_rows[0]} images, then of "
                f"{self.block_rows[1]} texts, at most {self.block_columns[0]} texts and "
                f"{self.block_columns[1]} images scored at once"
            )
        if self.cached_bytes:
            description += f", up to {format_bytes(self.cached_bytes)} of exponentials cached"
        memory = format_bytes(self.expected_bytes)
        reason = f" Reason: {self.reason}." if self.reason else ""
        return f"{description}. About {memory} next to items and gradients.{reason}"


def choose_plan(inputs: PlanInputs) -> ExecutionPlan:
    """Choose the plan of a loss. The result depends only on the arguments.

    - dense: one rank, no ``block_rows``, and at most 2^22 scores (pairs x candidates for an
      objective that needs the pair matrix) that fit into the memory. For cosines of an objective
      with a summary at most 2^16 scores, because tiles are faster.
    - blocks: otherwise. Tiles if the objective needs one number per query with these targets,
      without extra candidates, on one rank or with targets that hold only ids. Else blocks of
      queries, which serve both directions if the loss of a pair is the same in both.

    Blocks have the fastest size (see the constants of this module), or as much less as the memory
    requires. Under a compiler, PairLoss uses the dense path on one rank without a plan.

    Args:
        inputs: The comparison and the memory.

    Returns:
        The plan.

    Raises:
        VisavisError: If even the smallest block does not fit into the memory.
    """
    if inputs.block_budget <= 0:
        raise VisavisError(
            f"memory: expected more than {format_bytes(inputs.gradient_bytes)} for the gradients "
            "of the items, got "
            f"{format_bytes(inputs.memory_bytes)} after the reserve for libraries. Set a larger "
            "memory."
        )
    if inputs.world_size > 1:
        return blocks_plan(inputs, f"the batch is on {inputs.world_size} ranks")
    if inputs.block_rows is not None:
        return blocks_plan(inputs, "block_rows is set")
    num_scores = inputs.objective_scores
    max_scores = inputs.max_dense_scores
    if num_scores > max_scores:
        held = "scores of the pair matrix" if inputs.objective.needs_pair_matrix else "scores"
        return blocks_plan(inputs, f"{num_scores:,} {held} exceed {max_scores:,}")
    plan = dense_plan(inputs)
    if plan.expected_bytes > inputs.block_budget:
        needed, left = map(format_bytes, (plan.expected_bytes, inputs.block_budget))
        return blocks_plan(inputs, f"one matrix needs {needed}, but {left} are left")
    return replace(plan, reason=f"blocks are not faster up to {max_scores:,} scores")


def blocks_plan(inputs: PlanInputs, reason_against_dense: str = "") -> ExecutionPlan:
    """Plan blocks: tiles where the objective has a summary with these targets, else blocks of
    queries.
    """
    if reason := inputs.reason_against_tiles:
        plan = _plan_rows(inputs)
        if plan.shares_blocks:
            reason = "the loss of a pair is the same in both directions"
    else:
        plan = _plan_tiles(inputs)
        reason = "the objective needs one number per query"
    return replace(plan, reason=", and ".join(filter(None, (reason_against_dense, reason))))


def _cap_block_budget(inputs: PlanInputs, budget: int, minimum: int) -> int:
    """The memory for a block of a score function: no more than gains speed, and enough for the
    minimum.
    """
    return budget if inputs.score_cost is None else min(budget, max(MAX_BLOCK_BYTES, minimum))


def dense_plan(inputs: PlanInputs) -> ExecutionPlan:
    """Plan one matrix, whatever the memory is."""
    images, texts = inputs.queries
    all_texts, all_images = inputs.candidates
    loss_cost = inputs.term_cost + inputs.term_cost
    score_cost = inputs.score_cost or BlockCost(
        2.0 * inputs.element_bytes, fixed_bytes=4.0 * inputs.unit_vector_bytes
    )
    expected_bytes = score_cost.total_bytes(images, all_texts) + loss_cost.total_bytes(
        images, all_texts
    )
    if inputs.has_extra_candidates:
        expected_bytes += score_cost.total_bytes(all_images, texts)
    return ExecutionPlan(
        "dense",
        (images, texts),
        (images, texts),
        (all_texts, all_images),
        expected_bytes=expected_bytes,
    )


def _plan_tiles(inputs: PlanInputs) -> ExecutionPlan:
    height, width = inputs.targets[0].shape
    has_second_pass = (
        isinstance(inputs.summary, NegativeLogSumExp)
        and inputs.score_cost is None
        and inputs.needs_grad
    )
    side = SECOND_PASS_TILE_SIDE if has_second_pass else TILE_SIDE
    if inputs.device.type != "cpu":
        side = GPU_TILE_SIDE
    max_shape = min(inputs.block_rows or side, side), side
    mask_bytes = 0.0 if inputs.targets[0].is_defined_by_ids else 3.0
    # The scores, and their exponentials or the rows that exceed the previous maximum.
    cost = BlockCost(2.0 * inputs.element_bytes + mask_bytes)
    if inputs.score_cost is not None:
        cost = inputs.score_cost + cost
    budget = inputs.block_budget - inputs.unit_vector_bytes
    tile_budget = _cap_block_budget(inputs, budget, cost.total_bytes(1, 1))
    tile = block_shape(height, width, cost, tile_budget, max_shape=max_shape)
    tile_bytes = cost.total_bytes(min(tile[0], height), min(tile[1], width))
    cached_bytes = 0
    if has_second_pass:
        score_bytes = height * width * inputs.element_bytes
        cached_bytes = int(min(MAX_CACHED_TILE_BYTES, max(budget - tile_bytes, 0), score_bytes))
    scores_whole_rows = (
        inputs.score_cost is None or inputs.score_cost.total_bytes(tile[0], width) <= tile_budget
    )
    peak_bytes = inputs.unit_vector_bytes + tile_bytes + cached_bytes
    return ExecutionPlan(
        "blocks",
        inputs.queries,
        (tile[0], tile[0]),
        (width, height) if scores_whole_rows else (tile[1], tile[1]),
        tile_shape=tile,
        cached_bytes=cached_bytes,
        expected_bytes=max(peak_bytes, inputs.gradient_bytes),
    )


def _plan_rows(inputs: PlanInputs) -> ExecutionPlan:
    score_bytes = inputs.element_bytes * (1 if inputs.score_cost is None else 2)
    terms = inputs.term_cost + BlockCost(score_bytes)
    # With a sum reduction both directions share one gradient buffer, otherwise each has its own.
    fork_bytes = 0 if inputs.objective.reduction == "sum" else inputs.gradient_bytes
    fixed_bytes = inputs.unit_vector_bytes + fork_bytes
    image_cost = inputs.score_cost or BlockCost(0.0)
    costs = image_cost, image_cost.transposed
    rows = list[int]()
    columns = list[int]()
    block_bytes = 0
    for queries, candidates, score_cost in zip(
        inputs.queries, inputs.candidates, costs, strict=True
    ):
        max_rows = inputs.block_rows or max(
            MIN_FAST_BLOCK_ROWS, MAX_ROW_BLOCK_SCORES // max(candidates, 1)
        )
        minimum = terms.total_bytes(1, candidates) + score_cost.total_bytes(1, 1)
        budget = _cap_block_budget(inputs, inputs.block_budget - fixed_bytes, minimum)
        height, width = _fit_rows(queries, candidates, max_rows, terms, score_cost, budget)
        rows.append(height)
        columns.append(width)
        height = min(height, queries)
        block_bytes = max(
            block_bytes,
            terms.total_bytes(height, candidates) + score_cost.total_bytes(height, width),
        )
    return ExecutionPlan(
        "blocks",
        inputs.queries,
        (rows[0], rows[1]),
        (columns[0], columns[1]),
        shares_blocks=inputs.shares_blocks,
        expected_bytes=max(fixed_bytes + block_bytes, inputs.gradient_bytes),
    )


def _fit_rows(
    queries: int, candidates: int, max_rows: int, terms: BlockCost, score: BlockCost, budget: float
) -> IntPair:
    """Choose the rows of a block and the candidates that are scored at once: all of them unless the
    rows become too few. ``terms`` is held for all candidates, ``score`` for those scored at once.
    """
    total = terms + score
    height = max(min(max_rows, queries), 1)
    min_height = MIN_FAST_BLOCK_ROWS // 2
    if total.total_bytes(height, candidates) <= budget:
        return max_rows, max(candidates, 1)
    bytes_per_row = total.visual_bytes + total.pair_bytes * candidates
    rows_that_fit = int(
        (budget - total.fixed_bytes - total.text_bytes * candidates) // max(bytes_per_row, 1e-9)
    )
    if rows_that_fit >= min(height, min_height) or (score == BlockCost(0.0) and rows_that_fit >= 1):
        return min(rows_that_fit, max_rows), max(candidates, 1)
    height = min(height, min_height)
    while height:
        remaining = (
            budget
            - terms.total_bytes(height, candidates)
            - score.fixed_bytes
            - score.visual_bytes * height
        )
        width = int(remaining // max(score.text_bytes + score.pair_bytes * height, 1e-9))
        if width >= 1:
            return height, min(width, max(candidates, 1))
        height //= 2
    required_bytes = terms.total_bytes(1, candidates) + score.total_bytes(1, 1)
    raise VisavisError(
        f"memory: expected {format_bytes(required_bytes)} next to items and gradients for one "
        f"query and {candidates} candidates, "
        f"got {format_bytes(max(budget, 0))}. Set a larger memory."
    )


class Planner:
    """Makes the plans of one loss. Score costs and memory budgets are cached, so that plans do not
    change between batches.

    Args:
        objective: The objective.
        score: Score function. None: cosines.
        block_rows: Maximum number of queries per block.
        memory: Memory setting.
        score_cost: Declared cost of the score function.
    """

    def __init__(
        self,
        objective: Objective,
        score: Score | None,
        block_rows: int | None,
        memory: MemoryLimit,
        score_cost: ScoreCost | None,
    ) -> None:
        parse_memory(memory)
        self.objective = objective
        self.score = score
        self.block_rows = block_rows
        self.memory = memory
        self.score_cost = score_cost
        self.budgets: dict[torch.device, int] = {}
        self.cost_by_form: dict[tuple[Any, ...], BlockCost] = {}
        self.plans: dict[tuple[Any, ...], ExecutionPlan] = {}

    def plan_batch(
        self,
        images: Encoded,
        texts: Encoded,
        targets: tuple[Targets, Targets],
        *,
        has_extra_candidates: bool,
        world_size: int,
        training: bool,
        in_rows: bool = False,
    ) -> ExecutionPlan:
        """Make the plan of a batch, which batches of equal shape share. With ``in_rows``, it has
        blocks of queries, also where another path is faster.
        """
        key = (
            _form(images),
            _form(texts),
            *(_targets_form(each, self.objective) for each in targets),
            has_extra_candidates,
            world_size,
            training,
            in_rows,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(targets[0].query_ids.device.type),
        )
        if key in self.plans:
            return self.plans[key]
        needs_grad = torch.is_grad_enabled()
        device = targets[0].query_ids.device
        # Candidates of other ranks are items, too.
        num_candidates = sum(each.shape[1] for each in targets)
        num_items = max(len(images) + len(texts), 1)
        item_bytes = (_float_bytes(images) + _float_bytes(texts)) * num_candidates // num_items
        score_cost = None
        if self.score is not None:
            score_cost = self._measure_cost(
                self.score, images, texts, needs_grad=needs_grad, training=training
            )
        # Scores of half precision are promoted to float32.
        sizes = [part.dtype.itemsize for part in (*images.float_tensors, *texts.float_tensors)]
        inputs = PlanInputs(
            self.objective,
            targets,
            item_bytes,
            device,
            self._memory_bytes(device, item_bytes),
            score_cost=score_cost,
            element_bytes=max([4, *sizes]),
            has_extra_candidates=has_extra_candidates,
            world_size=world_size,
            block_rows=self.block_rows,
            needs_grad=needs_grad,
        )
        # Batches of ever new lengths must not fill the memory.
        if len(self.plans) >= MAX_CACHED_PLANS:
            self.plans.clear()
        self.plans[key] = _plan_rows(inputs) if in_rows else choose_plan(inputs)
        return self.plans[key]

    def plan_sizes(
        self,
        num_items: tuple[int, int],
        embedding_dim: int,
        targets: Targets | None,
        samples: tuple[Encoded, Encoded] | None,
        device: torch.device,
    ) -> ExecutionPlan:
        """Make the plan of a batch that does not exist yet, from a few sample items if given."""
        num_images, num_texts = num_items
        if targets is None:  # captions spread evenly over images
            image_of = torch.arange(num_texts) * max(num_images, 1) // max(num_texts, 1)
            targets = Targets(query_ids=torch.arange(num_images), candidate_ids=image_of)
        validate_targets(targets, torch.Size(num_items))
        cost = None
        item_bytes = 4 * embedding_dim * (num_images + num_texts)
        if self.score is not None and samples is not None:
            cost = self._measure_cost(self.score, *samples, needs_grad=True, training=True)
            item_bytes = sum(
                _float_bytes(items) * count // max(len(items), 1)
                for items, count in zip(samples, num_items, strict=True)
            )
        elif self.score is not None:
            if self.score_cost is None:
                raise SpecError(
                    "score_cost: expected the cost of the score function, got none. Set "
                    "PairLoss(score_cost=...), or pass images= and texts=."
                )
            cost = self.score_cost.to_block_cost(training=True)
        memory_bytes = self._memory_bytes(device, item_bytes)
        return choose_plan(
            PlanInputs(
                self.objective,
                (targets, targets.T),
                item_bytes,
                device,
                memory_bytes,
                cost,
                block_rows=self.block_rows,
            )
        )

    def _memory_bytes(self, device: torch.device, item_bytes: int) -> int:
        """Memory for gradients of items and for blocks."""
        if device not in self.budgets:
            self.budgets[device] = budget_bytes(self.memory, device)
        # Without a limit the budget is a share of the free memory for blocks only: what items and
        # gradients need is added.
        return self.budgets[device] + (4 * item_bytes if self.memory is None else 0)

    def _measure_cost(
        self, score: Score, images: Encoded, texts: Encoded, *, needs_grad: bool, training: bool
    ) -> BlockCost:
        """Cost of a block of the score function, declared or measured once for each shape of items."""
        form = tuple(
            (part.shape[1:], part.dtype, part.device)
            for items in (images, texts)
            for part in items.tensors
        )
        key = (
            form,
            needs_grad,
            training,
            torch.is_autocast_enabled(images.tensors[0].device.type),
        )
        if key not in self.cost_by_form:
            self.cost_by_form[key] = block_cost_of(
                score, images, texts, training=needs_grad, declared=self.score_cost
            )
        return self.cost_by_form[key]


def _float_bytes(items: Encoded) -> int:
    """Memory of the tensors that can have a gradient, at least in float32, in which gradients are
    summed.
    """
    return sum(part.numel() * max(part.dtype.itemsize, 4) for part in items.float_tensors)


def _form(items: Encoded) -> tuple[Any, ...]:
    """What a plan depends on in items."""
    return tuple((part.shape, part.dtype, part.device) for part in items.tensors)


def _targets_form(targets: Targets, objective: Objective) -> tuple[Any, ...]:
    """What a plan depends on in targets: their shape, kinds of annotations, and number of pairs."""
    kinds = tuple(
        (name, type(value), getattr(value, "requires_grad", None))
        if not isinstance(value, Factors)
        else (name, value.query_vectors.requires_grad, value.candidate_vectors.requires_grad)
        for name in ("relation", *ANNOTATION_NAMES)
        if (value := getattr(targets, name)) is not None
    )
    return targets.shape, kinds, _count_pairs(targets) if objective.needs_pair_matrix else 0


def _count_pairs(targets: Targets) -> int:
    return int(targets.positive_counts(chunk_slices(targets.shape[0], MAX_DENSE_SCORES)).sum())
