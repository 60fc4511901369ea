"""PairLoss: the loss of an objective on two sets of embeddings, exact at any batch size and over
several ranks.

>>> import torch
>>> from visavis.losses.objectives import Unified
>>> loss = PairLoss(Unified())
>>> loss(torch.eye(4), torch.eye(4)) < 1e-6
tensor(True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visavis.core.blocking import Score, ScoreCost
from visavis.core.encoded import Encoded, Items
from visavis.core.errors import (
    ShapeError,
    SpecError,
    format_value,
    log_debug,
    warn,
)
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import select_process_group
from visavis.losses.auto_scale import number
from visavis.losses.logits import (
    OptionalScalar,
    Scale,
    ScaleAndBias,
    is_valid_bias,
    is_valid_scale,
    resolve_scale_and_bias,
)
from visavis.losses.objective import (
    Objective,
    validate_half_scale,
)
from visavis.losses.pair_loss.batch_comparison import (
    NO_EXTRA_ITEMS,
    BatchComparison,
    BatchIds,
    ExtraItems,
    add_extra_candidates,
    are_local_positions,
    describe_batch,
    gather_extra_candidates,
    gather_targets,
    make_targets,
)
from visavis.losses.pair_loss.batch_items import (
    as_items,
    encode_in_chunks,
    smaller_dims,
    validate_matryoshka_dims,
)
from visavis.losses.pair_loss.blocks import (
    run_row_blocks,
)
from visavis.losses.pair_loss.paths import CandidatePool, blockwise_loss, dense_loss
from visavis.losses.pair_loss.plan import ExecutionPlan, Planner
from visavis.losses.pair_loss.score_gradients import ScoreGradients, observed_scores
from visavis.losses.pair_loss.scores import (
    cosine,
)
from visavis.losses.targets import (
    Ids,
    Targets,
    annotations_needing_grad,
    replace_annotation_tensors,
)

EncodeFunction = Callable[[Any], Items]
UNSCALED = ScaleAndBias()
BATCHES_BEFORE_WARNING = 2
"""Number of first batches without a negative after which the loss warns. A single one may be the
last, smaller batch of a data set.
"""


class PairLoss(nn.Module):
    """Loss of an objective for images and texts, in both directions.

    Value and gradient are exact and the same for any block size. A score function is called again
    at each use of a block.

    Gathering over distributed processes (ranks): a rank scores its queries against the candidates
    of all ranks, including extra candidates. A memory bank that all ranks share counts once. Ids,
    and positions that functions read, must be valid over all ranks. Numbers of items may differ
    between ranks and be 0. The value is the global loss on each rank. Gradients of items are scaled
    so that their mean over ranks, which DistributedDataParallel forms, is the global gradient.
    Gradients of scale, bias and score parameters are global already.

    Args:
        objective: An objective of the catalog.
        block_rows: Maximum number of queries that are scored at once, in blocks. None: chosen
            automatically, with one matrix for small batches.
        score: Function ``(images, texts) -> [V, T]``. None: cosine.
        scale: Factor of the scores: a number, a `LearnedScale`, or an ``nn.Parameter`` (clamped to
            0..100 at each call). Only for objectives with a temperature or scale (NTXent, InfoNCE,
            Sigmoid), which then use 1.
        gather: None gathers over ``torch.distributed`` in train mode if all ranks use the same
            objective, data set and kind of items, and otherwise warns and compares the items of
            each rank only. True raises an error instead. False never gathers.
        memory: Memory next to the items, for their gradients and blocks of scores: bytes, "2GiB",
            or None for a share of the free memory for blocks.
        score_cost: Bytes per pair of ``score``. None: declared by the score (``score_cost(visual,
            text)`` of a matcher or callable), or measured on a few items.
        dataset: Name of the data set of the batches, if ranks may take a step from different ones.
        bias: Added after the scale: a number or an ``nn.Parameter``. Only for Sigmoid, in place of
            its own bias.
        matryoshka_dims: Leading dimensions at which the loss is computed too. The value is the sum
            over these and the whole embeddings. Only for cosines.

    Raises:
        SpecError: If an argument is invalid.
    """

    def __init__(
        self,
        objective: Objective,
        block_rows: int | None = None,
        score: Score | None = None,
        scale: Scale = None,
        gather: bool | None = None,
        *,
        memory: MemoryLimit = None,
        score_cost: ScoreCost | None = None,
        dataset: str | None = None,
        bias: OptionalScalar = None,
        matryoshka_dims: Sequence[int] = (),
    ) -> None:
        super().__init__()
        given: Any = objective
        if not isinstance(given, Objective):
            got = format_value(given)
            fix = "visavis.parse makes one of a text."
            if isinstance(given, type):
                got = f"the class {given.__name__}"
                fix = f"Make an object of it: {given.__name__}()."
            raise SpecError(f"objective: expected an objective such as Unified(), got {got}. {fix}")
        for name in objective.auto_fields:
            number(getattr(objective, name))  # raises
        if block_rows is not None and (
            isinstance(block_rows, bool) or not isinstance(block_rows, int) or block_rows < 1
        ):
            raise SpecError(
                "block_rows: expected an integer >= 1, or None for an automatic choice, got "
                f"{format_value(block_rows)}."
            )
        unscaled, scale, bias = _split_scale_and_bias(objective, scale, bias)
        if not (gather is None or isinstance(gather, bool)):
            raise SpecError(
                "gather: expected True, False, or None to gather where possible, got "
                f"{format_value(gather)}."
            )
        self.matryoshka_dims = validate_matryoshka_dims(matryoshka_dims)
        if self.matryoshka_dims and score not in (None, cosine):
            raise SpecError(
                "matryoshka_dims: expected cosine scores, got a score function. Leave out one of "
                "them."
            )
        self.objective = unscaled
        self.block_rows = block_rows
        self.score = score or cosine
        self.scale = scale
        self.bias = bias
        self.gather = gather
        self.dataset = dataset
        # Batches without a negative so far. None: no longer counted.
        self.batches_without_negatives: int | None = 0
        self.planner = Planner(
            unscaled, None if self.score is cosine else self.score, block_rows, memory, score_cost
        )

    def forward(
        self,
        images: Items,
        texts: Items,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        *,
        extra_images: Items | None = None,
        extra_image_ids: Ids | None = None,
        extra_texts: Items | None = None,
        extra_text_ids: Ids | None = None,
        targets: Targets | None = None,
        scale: OptionalScalar = None,
        bias: OptionalScalar = None,
    ) -> Tensor:
        """Compute the loss of a batch. Warns in train mode if the first batches have no negative
        and loss 0.

        Args:
            images: Image embeddings ``[V, D]``, or Encoded images.
            texts: Text embeddings ``[T, D]``, or Encoded texts.
            image_ids: One id per image, an integer or a text. Equal ids belong together. None: image i belongs to text i.
            text_ids: One id per text. None: the image ids.
            extra_images: Further candidates for texts (a memory bank or queue), never queries.
            extra_image_ids: Their ids.
            extra_texts: Further candidates for images, never queries.
            extra_text_ids: Their ids.
            targets: Targets ``[V, T]`` in place of ids, for objectives that need annotations.
            scale: Scale of this call, for models that own it. Replaces the one of the loss.
            bias: Bias of this call.

        Returns:
            The loss, a scalar.

        Raises:
            ShapeError: If the arguments do not match.
            SpecError: If scale or bias is invalid.
        """
        comparison = self._compare(
            as_items("images", images),
            as_items("texts", texts),
            BatchIds(image_ids, text_ids),
            targets,
            ExtraItems(extra_images, extra_image_ids, extra_texts, extra_text_ids),
            ScaleAndBias(scale, bias),
        )
        value = self._loss(comparison)
        for embedding_dim in smaller_dims(self.matryoshka_dims, comparison.images):
            value = value + self._loss(comparison.truncate(embedding_dim))
        if (
            self.training
            and self.batches_without_negatives is not None
            and not torch.compiler.is_compiling()
        ):
            self._warn_if_no_negatives(value, comparison)
        return value

    def _compare(
        self,
        images: Encoded,
        texts: Encoded,
        ids: BatchIds,
        targets: Targets | None,
        extra: ExtraItems = NO_EXTRA_ITEMS,
        scale_and_bias: ScaleAndBias = UNSCALED,
    ) -> BatchComparison:
        """Check the arguments of a call, and gather candidates and targets over ranks."""
        resolved = resolve_scale_and_bias((self.scale, self.bias), scale_and_bias)
        # Refuse a scale that float16 scores cannot hold. Cosines are in float32, except under
        # autocast.
        device = images.tensors[0].device
        is_half = self.score is not cosine and any(
            part.dtype == torch.float16 for part in images.tensors
        )
        if torch.is_autocast_enabled(device.type):
            is_half |= torch.get_autocast_dtype(device.type) == torch.float16
        if is_half:
            scale = resolved.scale
            factor = 1.0 if scale is None or isinstance(scale, Tensor) else scale
            validate_half_scale(self.objective, factor * self.objective.gradient_scale)

        targets, source = make_targets(images, texts, ids, targets)
        if self.matryoshka_dims:
            if targets.query_offline_scores is not None:
                raise ShapeError(
                    "matryoshka_dims: expected no offline scores, which are those of whole "
                    "embeddings. Leave out one of them."
                )
            source += f" at dimensions {self.matryoshka_dims}"
        group = select_process_group(
            self.gather,
            targets.query_ids.device,
            training=self.training,
            describe_batch=lambda: describe_batch(
                self.objective, self.dataset, images, texts, targets, source
            ),
        )
        # Without ids, the ids 0, 1, 2, ... of each rank are positions in its batch.
        ids_are_positions = ids.images is None and are_local_positions(
            [targets.query_ids, targets.candidate_ids], group
        )
        extra_images = gather_extra_candidates(
            "extra_images", extra.images, extra.image_ids, images, group
        )
        extra_texts = gather_extra_candidates(
            "extra_texts", extra.texts, extra.text_ids, texts, group
        )
        image_to_text = add_extra_candidates(
            gather_targets(targets, group, ids_are_positions=ids_are_positions),
            extra_texts,
            ids_are_positions=ids_are_positions,
        )
        text_to_image = add_extra_candidates(
            gather_targets(targets.T, group, ids_are_positions=ids_are_positions),
            extra_images,
            ids_are_positions=ids_are_positions,
        )
        return BatchComparison(
            images,
            texts,
            extra_images,
            extra_texts,
            (image_to_text, text_to_image),
            resolved,
            group,
        )

    @torch.no_grad()
    def score_gradients(self, images: Items, texts: Items, targets: Targets) -> ScoreGradients:
        """Compute the gradient of the loss at the scores and at the normalized vectors of a batch.

        The loss of whole vectors, without extra candidates. A score function with dropout draws
        random numbers of its own.

        Args:
            images: Image embeddings ``[V, D]``, or Encoded images.
            texts: Text embeddings ``[T, D]``, or Encoded texts.
            targets: Targets ``[V, T]``.

        Returns:
            The gradients, with respect to scores before a scale of the loss.
        """
        detached = {
            name: tensor.detach() for name, tensor in annotations_needing_grad(targets).items()
        }
        comparison = self._compare(
            as_items("images", images).map(Tensor.detach),
            as_items("texts", texts).map(Tensor.detach),
            BatchIds(),
            replace_annotation_tensors(targets, detached),
        )
        group = comparison.group
        plan = self.planner.plan_batch(
            comparison.images,
            comparison.texts,
            comparison.targets,
            has_extra_candidates=False,
            world_size=group.world_size,
            training=self.training,
            in_rows=True,
        )
        image_pool, text_pool = (
            CandidatePool(items, None, group) for items in (comparison.images, comparison.texts)
        )
        scale, bias = comparison.scale_and_bias
        scores = observed_scores(self.score, image_pool, text_pool, scale, plan)
        result = run_row_blocks(
            self.objective,
            scores,
            (image_pool.query_rows, text_pool.query_rows),
            comparison.targets,
            plan.block_rows,
            group,
            bias=bias,
            needs_grad=True,
        )
        return scores.collect(result.gradients, (image_pool, text_pool), group)

    def logits(self, scores: Tensor) -> Tensor:
        """Apply the scale and the bias of the loss, as its objective reads the scores.

        Args:
            scores: Scores.

        Returns:
            A tensor of the same shape.
        """
        return resolve_scale_and_bias((self.scale, self.bias), UNSCALED).apply(scores)

    def from_chunks(
        self,
        encode_images: EncodeFunction,
        encode_texts: EncodeFunction,
        image_chunks: Iterable[Any],
        text_chunks: Iterable[Any],
        *ids: Ids,
        **annotations: Any,
    ) -> Tensor:
        """Compute the loss of items that are encoded in chunks, with the activations of one chunk
        in memory.

        Args:
            encode_images: Encodes one chunk of images. See `encode_in_chunks`.
            encode_texts: Encodes one chunk of texts.
            image_chunks: Chunks of images.
            text_chunks: Chunks of texts.
            *ids: Image ids and text ids of the items of all chunks.
            **annotations: Further arguments of the loss.

        Returns:
            The loss, a scalar.
        """
        return self(
            encode_in_chunks(encode_images, image_chunks),
            encode_in_chunks(encode_texts, text_chunks),
            *ids,
            **annotations,
        )

    def plan(
        self,
        num_images: int,
        num_texts: int,
        *,
        embedding_dim: int = 512,
        targets: Targets | None = None,
        images: Items | None = None,
        texts: Items | None = None,
        device: torch.device | str = "cpu",
    ) -> ExecutionPlan:
        """Plan the computation for given numbers of images and texts.

        Args:
            num_images: Number of images.
            num_texts: Number of texts.
            embedding_dim: Dimension of the embeddings, for cosines.
            targets: Targets with the annotations of the batch. None: captions spread evenly over
                images.
            images: A few images, to measure the cost of a score function.
            texts: A few texts.
            device: Device of the batch.

        Returns:
            The execution path, its reason, and the expected memory. ``print`` describes them in one
            line.

        Raises:
            SpecError: If the cost of a score function is unknown.

        Example:
            >>> from visavis.losses.objectives import TripletHN
            >>> print(PairLoss(TripletHN()).plan(65536, 65536))  # doctest: +NORMALIZE_WHITESPACE
            tiles of 1024 x 1024 scores for both directions. About 264.0 MiB next to items and gradients.
            Reason: 4,294,967,296 scores exceed 65,536, and the objective needs one number per query.
        """
        samples = None
        if images is not None and texts is not None:
            samples = as_items("images", images), as_items("texts", texts)
        return self.planner.plan_sizes(
            (num_images, num_texts), embedding_dim, targets, samples, torch.device(device)
        )

    def extra_repr(self) -> str:
        """Show the objective in ``repr``.

        Returns:
            The spec of the objective.
        """
        return repr(self.objective)

    def _loss(self, comparison: BatchComparison) -> Tensor:
        """Compute the loss by the planned path. Under a compiler, one rank takes the dense path
        without a plan.
        """
        group = comparison.group
        if torch.compiler.is_compiling() and group.world_size == 1:
            return dense_loss(self.objective, self.score, comparison)
        plan = self.planner.plan_batch(
            comparison.images,
            comparison.texts,
            comparison.targets,
            has_extra_candidates=comparison.has_extra_candidates,
            world_size=group.world_size,
            training=self.training,
        )
        log_debug(__name__, "%s: %s", self.objective, plan)
        if plan.path == "dense":
            return dense_loss(self.objective, self.score, comparison)
        return blockwise_loss(self.objective, self.score, comparison, plan)

    def _warn_if_no_negatives(self, value: Tensor, comparison: BatchComparison) -> None:
        """Count batches without negatives until a batch has some. Later batches are not counted."""
        assert self.batches_without_negatives is not None
        no_negatives = True
        for targets in comparison.targets:
            ids = torch.cat([targets.query_ids, targets.candidate_ids])
            # All ids are one single id. A relation may have negatives in any case.
            no_negatives &= targets.relation is None and not bool((ids != ids[:1]).any())
        self.batches_without_negatives = (
            self.batches_without_negatives + 1 if no_negatives else None
        )
        if self.batches_without_negatives == BATCHES_BEFORE_WARNING:
            self.batches_without_negatives = None
            # InfoNCE learns from positives alone.
            if float(value.detach()) != 0:
                return
            num_images, num_texts = (len(targets.query_ids) for targets in comparison.targets)
            warn(
                "No pair is negative: every batch so far had at most one id, the last one for "
                f"{num_images} images and {num_texts} texts. "
                f"{self.objective!r} is 0 and nothing is learned. Give different items different "
                "ids, or use larger batches."
            )


def _split_scale_and_bias(
    objective: Objective, scale: Scale, bias: OptionalScalar
) -> tuple[Objective, Scale, OptionalScalar]:
    """Move the scale and the bias out of an objective, so that they can be applied to the scores
    before it.
    """
    if bias is not None:
        unbiased = objective.without_bias()
        if unbiased is None:
            raise SpecError(
                f"bias: expected None, got {format_value(bias)}. {objective!r} has no bias. Pass a "
                "bias only with Sigmoid."
            )
        if not is_valid_bias(bias):
            raise SpecError(
                "bias: expected a number up to 1e12 or an nn.Parameter of one number, got "
                f"{format_value(bias)}{_dtype_note(bias)}."
            )
        objective, scale = unbiased, objective.gradient_scale if scale is None else scale
    unscaled = objective if scale is None else objective.without_scale()
    if unscaled is None:
        raise SpecError(
            f"scale: expected None, got {format_value(scale)}. {objective!r} has a fixed gamma or "
            "margin, which a scale would change. "
            "Pass a scale only with NTXent, InfoNCE or Sigmoid."
        )
    if not is_valid_scale(scale):
        raise SpecError(
            "scale: expected a number from 1e-12 to 1e12 or an nn.Parameter of one number, got "
            f"{format_value(scale)}{_dtype_note(scale)}."
        )
    return unscaled, scale, bias


def _dtype_note(number: Any) -> str:
    return f" of {number.dtype}" if isinstance(number, Tensor) and number.numel() == 1 else ""
