"""Items and candidates of a batch: encoding in chunks, Matryoshka dimensions, the items of all ranks,
extra candidates, and the targets that belong to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visavis.core.encoded import Encoded, Items, Vectors, as_encoded, concatenate
from visavis.core.errors import ShapeError, SpecError, format_value
from visavis.core.memory_budget import return_freed_memory
from visavis.core.process_group import ProcessGroup
from visavis.losses.objective import Objective
from visavis.losses.targets import (
    ANNOTATIONS,
    CANDIDATE_ANNOTATIONS,
    PAIRWISE_ANNOTATIONS,
    Factors,
    Ids,
    Targets,
    annotations_needing_grad,
    require_ids_of_one_kind,
    to_id_tensor,
)


def embedding_matrix(items: Items) -> Tensor:
    """Return the embeddings of items that have one vector each.

    Args:
        items: The items.

    Returns:
        Embeddings of shape ``[N, D]``.

    Raises:
        ShapeError: If the items are not one floating-point vector each.
    """
    rows = as_encoded(items).vectors
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise ShapeError(
            "cosine scores: expected one floating-point vector per item, [N, D]. Pass "
            "PairLoss(score=...) for regions, words or named parts."
        )
    return rows


def concatenate_items(items: Encoded, extra_items: Encoded, name: str) -> Encoded:
    """Append extra items to the items of a batch.

    Args:
        items: Items of the batch.
        extra_items: Items to append.
        name: Name of the extra items, for the error message.

    Returns:
        All items.

    Raises:
        ShapeError: If the two differ in kind or dimension.
    """
    are_tensors = [isinstance(each, Vectors) for each in (items, extra_items)]
    if are_tensors[0] != are_tensors[1] or (
        are_tensors[0] and items.vectors.shape[1:] != extra_items.vectors.shape[1:]  # type: ignore[union-attr]
    ):
        raise ShapeError(
            f"{name}: expected the kind and dimension of the batch, both tensors [N, D] or both "
            "Encoded."
        )
    return concatenate([items, extra_items])


def validate_matryoshka_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Check and sort Matryoshka dimensions.

    Args:
        dims: Numbers of leading dimensions at which a loss is computed.

    Returns:
        The distinct dimensions in ascending order.

    Raises:
        SpecError: If they are not integers >= 1.

    Source:
        Kusupati et al., Matryoshka Representation Learning (2022): the sum of the losses at all
        dimensions, each of weight 1.

    Example:
        >>> validate_matryoshka_dims([256, 64, 256])
        (64, 256)
    """
    values: list[Any] = list(dims) if isinstance(dims, list | tuple) else [dims]
    if not all(
        isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values
    ):
        raise SpecError(
            "matryoshka_dims: expected a list of integers >= 1, such as [64, 256], got "
            f"{format_value(dims)}."
        )
    return tuple(sorted(set(values)))


def smaller_dims(dims: Sequence[int], items: Encoded) -> tuple[int, ...]:
    """Select the Matryoshka dimensions below the dimension of the embeddings.

    Args:
        dims: Matryoshka dimensions.
        items: The items.

    Returns:
        The smaller dimensions.

    Raises:
        ShapeError: If one is larger than the dimension of the embeddings.
    """
    if not dims:
        return ()
    embedding_dim = embedding_matrix(items).shape[1]
    if max(dims) > embedding_dim:
        raise ShapeError(
            f"matryoshka_dims: expected at most {embedding_dim}, the dimension of the embeddings, "
            f"got {', '.join(map(str, dims))}."
        )
    return tuple(dim for dim in dims if dim < embedding_dim)


def truncate_embeddings(items: Encoded, embedding_dim: int) -> Encoded:
    """Keep the leading dimensions of the embeddings.

    Args:
        items: Items with one vector each.
        embedding_dim: Number of dimensions to keep.

    Returns:
        The truncated items, or the items themselves if they have this dimension.
    """
    rows = embedding_matrix(items)
    return (
        items if rows.shape[1] == embedding_dim else replace(items, vectors=rows[:, :embedding_dim])
    )


def encode_in_chunks(encode: Callable[[Any], Items], chunks: Iterable[Any]) -> Items:
    """Encode items chunk by chunk, with the activations of one chunk in memory.

    Activations are recomputed in the backward pass. Gradients are exact, including dropout, because
    a chunk gets the same random numbers again. BatchNorm statistics are those of the chunks and are
    updated twice.

    Args:
        encode: Encodes one chunk.
        chunks: Arguments of ``encode``.

    Returns:
        The items of all chunks.

    Raises:
        ShapeError: If ``chunks`` is empty.
    """
    # Otherwise the heap grows to several times the activations of a chunk, because chunks are freed
    # and allocated in turns.
    return_freed_memory()
    encoded = [checkpoint(encode, chunk, use_reentrant=False) for chunk in chunks]
    if not encoded:
        raise ShapeError("chunks: expected at least one, got none. A chunk may hold no items.")
    return concatenate([as_encoded(chunk) for chunk in encoded]).score_input()


def describe_batch(
    objective: Objective,
    dataset: str | None,
    images: Encoded,
    texts: Encoded,
    targets: Targets,
    targets_source: str,
) -> str:
    """Describe what must be equal on all ranks before they can compare their items.

    Lengths of texts and numbers of regions may differ between ranks, so they are not part of the
    description.

    Args:
        objective: The objective.
        dataset: Name of the data set of the batch, if known.
        images: Images of this rank.
        texts: Texts of this rank.
        targets: Targets of this rank.
        targets_source: How the targets were given.

    Returns:
        One line of text.
    """
    kinds = " with ".join(map(_describe_kind, (images, texts)))
    annotations = "".join(
        f" and {annotation.name}"
        for annotation in ANNOTATIONS
        if getattr(targets, annotation.name) is not None
    )
    return f"{objective!r}{'' if dataset is None else f' of {dataset}'} on {kinds}, {targets_source}{annotations}"


def _describe_kind(items: Encoded) -> str:
    if isinstance(items, Vectors) and items.vectors.dim() == 2:
        return f"embeddings of {items.vectors.shape[1]} dimensions and {items.vectors.dtype}"
    return ", ".join(f"tensors of {part.dim()} axes and {part.dtype}" for part in items.tensors)


def has_no_negatives(targets: Targets) -> bool:
    """Return whether no pair can be negative: all queries and candidates have one single id, or
    there are none.

    Args:
        targets: The targets.

    Returns:
        Whether negatives are impossible. Always False for a relation.
    """
    ids = torch.cat([targets.query_ids, targets.candidate_ids])
    return targets.relation is None and not bool((ids != ids[:1]).any())


class ExtraCandidates(NamedTuple):
    """Extra candidates of one side, such as a memory bank or a queue. They are never queries.

    Attributes:
        name: Name of the argument.
        local_items: Items of this rank, on the graph.
        all_items: Items of all ranks, detached. A bank that all ranks share is in it once.
        all_ids: Their ids.
        local_rows: Rows of this rank in ``all_items``. None for a shared bank.
    """

    name: str
    local_items: Encoded
    all_items: Encoded
    all_ids: Tensor
    local_rows: slice | None

    def truncate(self, embedding_dim: int) -> ExtraCandidates:
        """Keep the leading dimensions of the embeddings.

        Args:
            embedding_dim: Number of dimensions to keep.

        Returns:
            The truncated candidates.
        """
        return self._replace(
            local_items=truncate_embeddings(self.local_items, embedding_dim),
            all_items=truncate_embeddings(self.all_items, embedding_dim),
        )


def gather_extra_candidates(
    name: str,
    local_items: Encoded | None,
    ids: Ids | None,
    batch_items: Encoded,
    group: ProcessGroup,
) -> ExtraCandidates | None:
    """Gather the extra candidates of one side over all ranks.

    Args:
        name: Name of the argument.
        local_items: Extra items of this rank, if any.
        ids: Their ids.
        batch_items: Items of the batch of the same side.
        group: Process group.

    Returns:
        The candidates, or None if no rank has any.

    Raises:
        ShapeError: Unless there is one id per item.
    """
    if local_items is None and ids is not None:
        raise ShapeError(
            f"{name}: expected items for the given ids, got none. Pass extra_images and "
            "extra_texts with their ids."
        )
    if not group.any_rank(local_items is not None):
        return None
    if local_items is None:
        local_items = batch_items[:0]
        ids = []
    local_ids = to_id_tensor([] if ids is None else ids, f"ids of {name}").to(group.device)
    if len(local_ids) != len(local_items):
        count = "no ids" if ids is None else f"{len(local_ids)} ids"
        raise ShapeError(
            f"{name}: expected one id per item, got {len(local_items)} items and {count}."
        )
    detached = local_items.map(Tensor.detach)
    if all(group.is_equal_on_all_ranks(tensor) for tensor in (local_ids, *detached.tensors)):
        return ExtraCandidates(name, local_items, detached, local_ids, None)
    all_items, local_rows = group.all_gather_items(detached)
    return ExtraCandidates(
        name, local_items, all_items, group.all_gather_rows(local_ids), local_rows
    )


class CandidatePool:
    """All candidates of one side, detached: the items of all ranks, then the extra candidates.

    Args:
        items: Items of this rank.
        extra_candidates: Extra candidates of this side, if any.
        group: Process group.
    """

    def __init__(
        self, items: Encoded, extra_candidates: ExtraCandidates | None, group: ProcessGroup
    ) -> None:
        self.local_tensors = items.float_tensors
        self.extra_candidates = extra_candidates
        all_items, self.query_rows = group.all_gather_items(items.map(Tensor.detach))
        self.num_batch_items = len(all_items)
        self.items = all_items
        parts = [self.local_tensors]
        if extra_candidates is not None:
            self.items = concatenate_items(
                all_items, extra_candidates.all_items, extra_candidates.name
            )
            parts.append(extra_candidates.local_items.float_tensors)
        self.needs_grad = [
            torch.is_grad_enabled() and group.any_rank(any(part.requires_grad for part in tensors))
            for tensors in zip(*parts, strict=True)
        ]

    def local_gradients(
        self, pool_gradients: Sequence[Tensor | None], group: ProcessGroup
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Select the gradients of the tensors of this rank, scaled so that their mean over ranks is
        the gradient of the value.

        Args:
            pool_gradients: Gradients of the floating-point tensors of the pool.
            group: Process group.

        Yields:
            Pairs of a tensor and its gradient.
        """
        extra = self.extra_candidates
        extra_tensors = (
            [None] * len(self.local_tensors) if extra is None else extra.local_items.float_tensors
        )
        # Not strict: cosine scores have a gradient of the embeddings only.
        for tensor, extra_tensor, total in zip(
            self.local_tensors, extra_tensors, pool_gradients, strict=False
        ):
            if total is None:
                continue
            batch_grad = group.all_reduce_sum(total[: self.num_batch_items])[self.query_rows]
            yield tensor, group.scale_for_ddp_mean(_without_padding(batch_grad, tensor))
            if (
                extra is not None
                and extra_tensor is not None
                and group.any_rank(extra_tensor.requires_grad)
            ):
                extra_grad = group.all_reduce_sum(total[self.num_batch_items :])
                if extra.local_rows is None:
                    yield extra_tensor, _without_padding(extra_grad, extra_tensor)
                else:
                    yield (
                        extra_tensor,
                        group.scale_for_ddp_mean(
                            _without_padding(extra_grad[extra.local_rows], extra_tensor)
                        ),
                    )


def _without_padding(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Drop the padding that was added to concatenate items of different lengths."""
    return gradient[:, : tensor.shape[1]] if tensor.dim() > 1 else gradient


def add_extra_candidates(
    targets: Targets, extra_candidates: ExtraCandidates | None, *, ids_are_positions: bool
) -> Targets:
    """Add extra candidates to targets.

    Args:
        targets: Targets of one direction.
        extra_candidates: The extra candidates, if any.
        ids_are_positions: Whether the ids are positions that were made global over ranks. These ids
            did not exist yet when the extra items were made.

    Returns:
        The targets with further candidates.

    Raises:
        ShapeError: If the targets hold pairwise annotations, which would be unknown for the extra
            candidates, or ids and positions are mixed.
    """
    if extra_candidates is None:
        return targets
    for field in ("relation", *PAIRWISE_ANNOTATIONS):
        if getattr(targets, field) is not None:
            raise ShapeError(
                f"{extra_candidates.name}: expected targets by ids only, got {field}, which is "
                "unknown for extra candidates."
            )
    if ids_are_positions and (extra_candidates.all_ids >= 0).any():
        raise ShapeError(
            f"{extra_candidates.name}: expected ids for the batches of all ranks too, got none. "
            "Pass image_ids and text_ids that are valid "
            "over all ranks, or give the extra items negative ids, which match nothing."
        )
    # Extra candidates are never anchors, so their margins and offline scores are not read.
    padded = {
        field: torch.cat([value, value.new_zeros(len(extra_candidates.all_ids), *value.shape[1:])])
        for field in CANDIDATE_ANNOTATIONS
        if (value := getattr(targets, field)) is not None
    }
    return replace(
        targets,
        candidate_ids=torch.cat([targets.candidate_ids, extra_candidates.all_ids]),
        columns=None,
        **padded,
    )


def are_local_positions(ids_of_sides: Sequence[Tensor], group: ProcessGroup) -> bool:
    """Return whether the ids of both sides are 0, 1, 2, ... on every one of several ranks.

    Args:
        ids_of_sides: Ids or positions of both sides.
        group: Process group.

    Returns:
        Whether they are positions in the batch of each rank.
    """
    return group.world_size > 1 and not group.any_rank(
        any(not torch.equal(ids, torch.arange(len(ids), device=ids.device)) for ids in ids_of_sides)
    )


def gather_targets(targets: Targets, group: ProcessGroup, *, ids_are_positions: bool) -> Targets:
    """Extend the targets of the queries of this rank to the candidates of all ranks.

    Positions that count 0, 1, 2, ... on every rank are positions in its batch and are made global.
    Other positions must be global already. A function is evaluated at the rows of this rank and the
    columns of all ranks.

    Args:
        targets: Targets of this rank.
        group: Process group.
        ids_are_positions: Whether the ids are positions in the batch.

    Returns:
        Targets of the queries of this rank against all candidates.

    Raises:
        ShapeError: If an annotation is unknown for the candidates of other ranks.
    """
    if group.world_size == 1:
        return targets
    for name in ("relation", *PAIRWISE_ANNOTATIONS):
        if isinstance(getattr(targets, name), Tensor):
            raise ShapeError(
                f"{name}: expected values for the candidates of all ranks, got a tensor for this "
                "rank. "
                "Pass ids, Factors or a function, or use gather=False."
            )
    if any("_vectors" in name for name in annotations_needing_grad(targets)):
        raise ShapeError(
            "Factors: expected no gradient when gathering over ranks. Detach them, or use "
            "gather=False."
        )
    first_query, first_candidate = (group.sum_over_lower_ranks(length) for length in targets.shape)
    query_ids = targets.query_ids
    candidate_ids = targets.candidate_ids
    rows = targets.rows
    columns = targets.columns
    assert rows is not None and columns is not None
    if ids_are_positions:
        query_ids = query_ids + first_query
        candidate_ids = candidate_ids + first_candidate
    if are_local_positions([rows, columns], group):
        rows = rows + first_query
        columns = columns + first_candidate
    changes: dict[str, Any] = {
        "query_ids": query_ids,
        "candidate_ids": group.all_gather_rows(candidate_ids),
        "rows": rows,
        "columns": group.all_gather_rows(columns),
    }
    for name in (*PAIRWISE_ANNOTATIONS, *CANDIDATE_ANNOTATIONS):
        value = getattr(targets, name)
        if isinstance(value, Factors):
            changes[name] = Factors(
                value.query_vectors, group.all_gather_rows(value.candidate_vectors)
            )
        elif isinstance(value, Tensor):
            changes[name] = group.all_gather_rows(value)
    gathered = replace(targets, **changes)
    # A function may accept only positions of its own rank.
    for name in PAIRWISE_ANNOTATIONS:
        if callable(getattr(gathered, name)) and group.any_rank(
            not _accepts_positions(gathered, name)
        ):
            raise ShapeError(
                f"{name}: expected a function of positions on all ranks, got one that fails at "
                "positions of other ranks. Pass "
                "Targets(rows=, columns=) with positions that are valid over all ranks, such as "
                "those in the data set, or Factors, or use "
                "gather=False."
            )
    return gathered


def _accepts_positions(targets: Targets, name: str) -> bool:
    try:
        return not len(targets.query_ids) or targets[:1].pairwise(name) is not None
    except LookupError:
        return False


def targets_from_ids(
    num_images: int, num_texts: int, image_ids: Ids | None, text_ids: Ids | None
) -> Targets:
    """Make the targets of a batch from ids. Without ids, image i belongs to text i.

    Args:
        num_images: Number of images.
        num_texts: Number of texts.
        image_ids: One id per image, or None for pairs in order.
        text_ids: One id per text. None: the image ids.

    Returns:
        Targets of shape ``[num_images, num_texts]``.

    Raises:
        ShapeError: If the numbers of items and ids do not match.
    """
    if image_ids is None:
        if text_ids is not None:
            raise ShapeError(
                "text_ids: expected image_ids as well, got none. Pass both, or neither for pairs "
                "in order."
            )
        if num_images != num_texts:
            raise ShapeError(
                f"images, texts: expected equal numbers without ids, got {num_images} and "
                f"{num_texts}. Pass image_ids and text_ids."
            )
        return Targets.paired(num_images)
    if text_ids is not None:
        require_ids_of_one_kind(image_ids, text_ids, names=("image_ids", "text_ids"))
    text_ids = to_id_tensor(
        image_ids if text_ids is None else text_ids,
        "text_ids" if text_ids is not None else "image_ids",
    )
    image_ids = to_id_tensor(image_ids, "image_ids")
    for kind, ids, number in (("image", image_ids, num_images), ("text", text_ids, num_texts)):
        if len(ids) != number:
            raise ShapeError(f"{kind}_ids: expected {number}, one per {kind}, got {len(ids)}.")
    return Targets(query_ids=image_ids, candidate_ids=text_ids)
