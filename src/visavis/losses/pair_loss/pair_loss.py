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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visavis.core.blocking import Score, ScoreCost, checked_scores
from visavis.core.encoded import Encoded, Items, as_encoded
from visavis.core.errors import (
    ShapeError,
    SpecError,
    VisavisError,
    format_value,
    log_debug,
    warn,
)
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ProcessGroup, select_process_group
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
    PairwiseObjective,
    SummaryObjective,
    promote_half,
    validate_half_scale,
    validate_targets,
)
from visavis.losses.pair_loss.blocks import (
    ValueAndGradients,
    run_row_blocks,
    run_shared_blocks,
)
from visavis.losses.pair_loss.candidates import (
    CandidatePool,
    ExtraCandidates,
    add_extra_candidates,
    are_local_positions,
    concatenate_items,
    describe_batch,
    encode_in_chunks,
    gather_extra_candidates,
    gather_targets,
    has_no_negatives,
    smaller_dims,
    targets_from_ids,
    truncate_embeddings,
    validate_matryoshka_dims,
)
from visavis.losses.pair_loss.plan import ExecutionPlan, Planner
from visavis.losses.pair_loss.score_gradients import ScoreGradients, observed_scores
from visavis.losses.pair_loss.scores import (
    CosineScores,
    FunctionScores,
    Scores,
    cosine,
    trainable,
)
from visavis.losses.pair_loss.tiles import run_tiles
from visavis.losses.targets import (
    Ids,
    Targets,
    annotations_needing_grad,
    replace_annotation_tensors,
)

EncodeFunction = Callable[[Any], Items]
BATCHES_BEFORE_WARNING = 2
"""Number of first batches without a negative after which the loss warns. A single one may be the
last, smaller batch of a data set.
"""


class _Comparison(NamedTuple):
    """Inputs of one call: items of this rank, extra candidates and targets of both directions,
    scale and bias, and ranks.
    """

    images: Encoded
    texts: Encoded
    extra_images: ExtraCandidates | None
    extra_texts: ExtraCandidates | None
    targets: tuple[Targets, Targets]
    scale_and_bias: ScaleAndBias
    group: ProcessGroup

    @property
    def has_extra_candidates(self) -> bool:
        return self.extra_images is not None or self.extra_texts is not None

    def truncate(self, embedding_dim: int) -> _Comparison:
        """The same comparison at the leading dimensions of all embeddings."""
        return self._replace(
            images=truncate_embeddings(self.images, embedding_dim),
            texts=truncate_embeddings(self.texts, embedding_dim),
            extra_images=None
            if self.extra_images is None
            else self.extra_images.truncate(embedding_dim),
            extra_texts=None
            if self.extra_texts is None
            else self.extra_texts.truncate(embedding_dim),
        )


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
        if not isinstance(objective, Objective):
            raise _not_an_objective(objective)
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
            _as_items("images", images),
            _as_items("texts", texts),
            (image_ids, text_ids),
            targets,
            (extra_images, extra_image_ids, extra_texts, extra_text_ids),
            (scale, bias),
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
        ids: tuple[Ids | None, Ids | None],
        targets: Targets | None,
        extra: tuple[Items | None, Ids | None, Items | None, Ids | None] = (None,) * 4,
        scale_and_bias: tuple[OptionalScalar, OptionalScalar] = (None, None),
    ) -> _Comparison:
        """Check the arguments of a call, and gather candidates and targets over ranks."""
        extra_images, extra_image_ids, extra_texts, extra_text_ids = extra
        extra_image_items, extra_text_items = (
            None if items is None else _as_items(name, items)
            for name, items in (("extra_images", extra_images), ("extra_texts", extra_texts))
        )
        resolved = resolve_scale_and_bias((self.scale, self.bias), scale_and_bias)
        self._validate_half_precision(images, resolved.scale)
        targets, targets_source = self._resolve_targets(images, texts, *ids, targets)
        group = select_process_group(
            self.gather,
            targets.query_ids.device,
            training=self.training,
            describe_batch=lambda: describe_batch(
                self.objective, self.dataset, images, texts, targets, targets_source
            ),
        )
        ids_are_positions = ids[0] is None and are_local_positions(
            [targets.query_ids, targets.candidate_ids], group
        )
        extra_image_pool = gather_extra_candidates(
            "extra_images", extra_image_items, extra_image_ids, images, group
        )
        extra_text_pool = gather_extra_candidates(
            "extra_texts", extra_text_items, extra_text_ids, texts, group
        )
        image_to_text, text_to_image = (
            add_extra_candidates(
                gather_targets(direction, group, ids_are_positions=ids_are_positions),
                pool,
                ids_are_positions=ids_are_positions,
            )
            for direction, pool in ((targets, extra_text_pool), (targets.T, extra_image_pool))
        )
        return _Comparison(
            images,
            texts,
            extra_image_pool,
            extra_text_pool,
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
            _as_items("images", images).map(Tensor.detach),
            _as_items("texts", texts).map(Tensor.detach),
            (None, None),
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
        return _apply(resolve_scale_and_bias((self.scale, self.bias), (None, None)), scores)

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
            The execution path and the expected memory. ``print`` describes them in one line.

        Raises:
            SpecError: If the cost of a score function is unknown.

        Example:
            >>> from visavis.losses.objectives import TripletHN
            >>> print(PairLoss(TripletHN()).plan(65536, 65536))
            tiles of 1024 x 1024 scores for both directions. About 264.0 MiB next to items and gradients.
        """
        samples = None
        if images is not None and texts is not None:
            samples = _as_items("images", images), _as_items("texts", texts)
        return self.planner.plan_sizes(
            (num_images, num_texts), embedding_dim, targets, samples, torch.device(device)
        )

    def extra_repr(self) -> str:
        """Show the objective in ``repr``.

        Returns:
            The spec of the objective.
        """
        return repr(self.objective)

    def _resolve_targets(
        self,
        images: Encoded,
        texts: Encoded,
        image_ids: Ids | None,
        text_ids: Ids | None,
        targets: Targets | None,
    ) -> tuple[Targets, str]:
        """Make the targets of a batch, and describe how they were given."""
        if targets is None:
            source = "in order" if image_ids is None else "by ids"
            targets = targets_from_ids(len(images), len(texts), image_ids, text_ids)
        elif image_ids is None and text_ids is None:
            source = "by targets"
        else:
            raise ShapeError(
                "targets: expected no ids next to targets, got both. Pass one of them."
            )
        validate_targets(targets, torch.Size((len(images), len(texts))))
        if self.matryoshka_dims:
            if targets.query_offline_scores is not None:
                raise ShapeError(
                    "matryoshka_dims: expected no offline scores, which are those of whole "
                    "embeddings. Leave out one of them."
                )
            source += f" at dimensions {self.matryoshka_dims}"
        return targets.to(images.tensors[0].device), source

    def _validate_half_precision(self, images: Encoded, scale: OptionalScalar) -> None:
        """Refuse a scale that float16 scores cannot hold. Cosines are in float32, except under
        autocast.
        """
        tensors = images.tensors
        device = tensors[0].device.type
        is_autocast = (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        )
        if is_autocast or (
            self.score is not cosine and any(each.dtype == torch.float16 for each in tensors)
        ):
            factor = 1.0 if scale is None or isinstance(scale, Tensor) else scale
            validate_half_scale(self.objective, factor * self.objective.gradient_scale)

    def _loss(self, comparison: _Comparison) -> Tensor:
        """Compute the loss by the planned path. Under a compiler, one rank takes the dense path
        without a plan.
        """
        group = comparison.group
        if torch.compiler.is_compiling() and group.world_size == 1:
            return self._dense_loss(comparison)
        plan = self.planner.plan_batch(
            comparison.images,
            comparison.texts,
            comparison.targets,
            has_extra_candidates=comparison.has_extra_candidates,
            world_size=group.world_size,
            training=self.training,
        )
        log_debug(__name__, "%s: %s", self.objective, plan)
        return (
            self._dense_loss(comparison)
            if plan.path == "dense"
            else self._blockwise_loss(comparison, plan)
        )

    def _dense_loss(self, comparison: _Comparison) -> Tensor:
        """Compute the loss on the graph of one score matrix, or of one per direction with extra
        candidates.
        """
        images = comparison.images
        texts = comparison.texts
        scale_and_bias = comparison.scale_and_bias
        if not comparison.has_extra_candidates:
            return self.objective(
                self._scores(images, texts, scale_and_bias), comparison.targets[0]
            )
        all_images, all_texts = (
            items if extra is None else concatenate_items(items, extra.local_items, extra.name)
            for items, extra in ((images, comparison.extra_images), (texts, comparison.extra_texts))
        )
        image_to_text = self.objective.prepare(
            self._scores(images, all_texts, scale_and_bias), comparison.targets[0]
        )
        text_to_image = self.objective.prepare(
            self._scores(all_images, texts, scale_and_bias).T, comparison.targets[1]
        )
        return self.objective.reduce(
            self.objective.terms(*image_to_text), self.objective.terms(*text_to_image)
        )

    def _scores(self, images: Encoded, texts: Encoded, scale_and_bias: ScaleAndBias) -> Tensor:
        return _apply(scale_and_bias, checked_scores(self.score, images, texts))

    def _blockwise_loss(self, comparison: _Comparison, plan: ExecutionPlan) -> Tensor:
        """Compute value and gradients in one forward pass over blocks, and attach them to the
        graph.
        """
        group = comparison.group
        scale_and_bias = comparison.scale_and_bias
        targets = comparison.targets
        images = CandidatePool(comparison.images, comparison.extra_images, group)
        texts = CandidatePool(comparison.texts, comparison.extra_texts, group)
        scores = self._block_scores(images, texts, scale_and_bias.scale, plan)
        biases = trainable(scale_and_bias.bias)
        inputs = (
            scores.parameters,
            annotations_needing_grad(targets[0]),
            annotations_needing_grad(targets[1]),
            biases,
        )
        needs_grad = torch.is_grad_enabled() and (
            any((*images.needs_grad, *texts.needs_grad)) or any(map(bool, inputs))
        )
        with torch.no_grad():
            if plan.tile_shape is not None:
                assert isinstance(self.objective, SummaryObjective)
                result = run_tiles(
                    self.objective,
                    scores.window(images.query_rows),
                    targets[0],
                    plan.tile_shape,
                    group,
                    cache_bytes=plan.cached_bytes,
                    needs_grad=needs_grad,
                )
            elif plan.shares_blocks:
                assert isinstance(self.objective, PairwiseObjective)
                result = run_shared_blocks(
                    self.objective,
                    scores.window(images.query_rows),
                    targets[0],
                    plan.block_rows[0],
                    group,
                    bias=scale_and_bias.bias,
                    needs_grad=needs_grad,
                )
            else:
                windows = images.query_rows, texts.query_rows
                result = run_row_blocks(
                    self.objective,
                    scores,
                    windows,
                    targets,
                    plan.block_rows,
                    group,
                    bias=scale_and_bias.bias,
                    needs_grad=needs_grad,
                )
            if not needs_grad:
                return result.value
            gradients = _local_gradients(result, images, texts, scores.parameters, biases, group)
        return _attach_gradients(result.value, gradients)

    def _block_scores(
        self,
        images: CandidatePool,
        texts: CandidatePool,
        scale: OptionalScalar,
        plan: ExecutionPlan,
    ) -> Scores:
        inputs = images.items, texts.items, scale, (images.needs_grad, texts.needs_grad)
        if self.score is not cosine:
            return FunctionScores(self.score, *inputs, plan.block_columns)
        return CosineScores(*inputs)

    def _warn_if_no_negatives(self, value: Tensor, comparison: _Comparison) -> None:
        """Count batches without negatives until a batch has some. Later batches are not counted."""
        assert self.batches_without_negatives is not None
        no_negatives = all(map(has_no_negatives, comparison.targets))
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


def _apply(scale_and_bias: ScaleAndBias, scores: Tensor) -> Tensor:
    scores = scores if scale_and_bias.scale is None else scores * scale_and_bias.scale
    return scores if scale_and_bias.bias is None else promote_half(scores) + scale_and_bias.bias


def _as_items(name: str, items: Items) -> Encoded:
    """Wrap a tensor. All further code reads one type of items."""
    if not (isinstance(items, Encoded) or (isinstance(items, Tensor) and items.dim())):
        raise ShapeError(
            f"{name}: expected a tensor [N, D] or Encoded items, got {type(items).__name__}."
        )
    encoded = as_encoded(items)
    # Items without values would be copied to the device of the others, with whatever its memory
    # holds.
    if any(part.is_meta for part in encoded.tensors):
        raise ShapeError(
            f"{name}: expected tensors with values, got one on the device meta. Load the "
            "weights of the model first."
        )
    return encoded


def _local_gradients(
    result: ValueAndGradients,
    images: CandidatePool,
    texts: CandidatePool,
    parameters: Sequence[Tensor],
    biases: Sequence[Tensor],
    group: ProcessGroup,
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of each input tensor of this rank and its gradient.

    Gradients of items and annotations belong to one rank and are multiplied by the number of ranks
    for the mean of DistributedDataParallel. Gradients of parameters and the bias are equal on all
    ranks and are summed.
    """
    parameter_grads = zip(parameters, result.gradients.parameters, strict=True)
    return [
        *images.local_gradients(result.gradients.images, group),
        *texts.local_gradients(result.gradients.texts, group),
        *(
            (tensor, group.all_reduce_sum(gradient))
            for tensor, gradient in parameter_grads
            if gradient is not None
        ),
        *(
            (tensor, group.scale_for_ddp_mean(gradient))
            for tensor, gradient in result.annotation_grads
        ),
        *((tensor, group.all_reduce_sum(torch.as_tensor(result.bias_grad))) for tensor in biases),
    ]


def _not_an_objective(value: Any) -> SpecError:
    got = format_value(value)
    fix = "visavis.parse makes one of a text."
    if isinstance(value, type):
        got = f"the class {value.__name__}"
        fix = f"Make an object of it: {value.__name__}()."
    return SpecError(f"objective: expected an objective such as Unified(), got {got}. {fix}")


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


def _attach_gradients(value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attach a value with known gradients to the graph.

    Args:
        value: A scalar.
        gradients: Pairs of an input and the gradient of the value with respect to it.

    Returns:
        The value. Its backward pass multiplies the known gradients by the upstream gradient.
    """
    needed = [
        (tensor, gradient.reshape(tensor.shape).to(tensor.dtype))
        for tensor, gradient in gradients
        if tensor.requires_grad
    ]
    return _KnownGradients.apply(
        value, [gradient for _, gradient in needed], *(tensor for tensor, _ in needed)
    )


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise VisavisError(
                "PairLoss cannot be differentiated twice, because its gradient is computed in the "
                "forward pass. "
                "Call the objective on the score matrix instead: objective(scores, targets)."
            )
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)
