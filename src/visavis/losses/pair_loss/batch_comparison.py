"""The comparison of a batch: its items on this rank, extra candidates, and targets for the candidates
of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.core.encoded import Encoded, Items, Vectors
from visavis.core.errors import ShapeError
from visavis.core.process_group import ProcessGroup
from visavis.losses.logits import ScaleAndBias
from visavis.losses.objective import Objective, validate_targets
from visavis.losses.pair_loss.batch_items import as_items, truncate_embeddings
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


class BatchComparison(NamedTuple):
    """Inputs of one call.

    Attributes:
        images: Images of this rank.
        texts: Texts of this rank.
        extra_images: Extra candidates for texts. None: there are none on any rank.
        extra_texts: Extra candidates for images.
        targets: Targets of the images of this rank against all texts, and of its texts against all
            images.
        scale_and_bias: Scale and bias of the call.
        group: Ranks whose items are compared.
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
        """Whether some candidates are never queries."""
        return self.extra_images is not None or self.extra_texts is not None

    def truncate(self, embedding_dim: int) -> BatchComparison:
        """Keep the leading dimensions of all embeddings.

        Args:
            embedding_dim: Number of dimensions to keep.

        Returns:
            The truncated comparison.
        """
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


class BatchIds(NamedTuple):
    """Ids of the items of a batch, as given.

    Attributes:
        images: One id per image. None: image i belongs to text i.
        texts: One id per text. None: the image ids.
    """

    images: Ids | None = None
    texts: Ids | None = None


class ExtraItems(NamedTuple):
    """Extra candidates of this rank and their ids, as given.

    Attributes:
        images: Candidates for texts.
        image_ids: Their ids.
        texts: Candidates for images.
        text_ids: Their ids.
    """

    images: Items | None = None
    image_ids: Ids | None = None
    texts: Items | None = None
    text_ids: Ids | None = None


NO_EXTRA_ITEMS = ExtraItems()


def make_targets(
    images: Encoded, texts: Encoded, ids: BatchIds, targets: Targets | None
) -> tuple[Targets, str]:
    """Make the targets of a batch on the device of its images, and describe how they were given.

    Args:
        images: Images of this rank.
        texts: Texts of this rank.
        ids: Their ids.
        targets: Targets in place of ids.

    Returns:
        The targets, and "in order", "by ids" or "by targets".

    Raises:
        ShapeError: If there are both, or they do not match the items.
    """
    if targets is None:
        source = "in order" if ids.images is None else "by ids"
        targets = targets_from_ids(len(images), len(texts), ids.images, ids.texts)
    elif ids.images is None and ids.texts is None:
        source = "by targets"
    else:
        raise ShapeError("targets: expected no ids next to targets, got both. Pass one of them.")
    validate_targets(targets, torch.Size((len(images), len(texts))))
    return targets.to(images.tensors[0].device), source


def gather_comparison(
    images: Encoded,
    texts: Encoded,
    targets: Targets,
    extra: ExtraItems,
    scale_and_bias: ScaleAndBias,
    group: ProcessGroup,
    *,
    has_ids: bool,
) -> BatchComparison:
    """Gather extra candidates and targets over ranks.

    Args:
        images: Images of this rank.
        texts: Texts of this rank.
        targets: Their targets.
        extra: Extra candidates of this rank.
        scale_and_bias: Scale and bias of the call.
        group: Process group.
        has_ids: Whether image ids were given. Otherwise ids 0, 1, 2, ... are positions in the batch.

    Returns:
        The comparison.

    Raises:
        ShapeError: If an argument does not match the others, or is unknown for other ranks.
    """
    ids_are_positions = not has_ids and are_local_positions(
        [targets.query_ids, targets.candidate_ids], group
    )
    extra_images, extra_texts = (
        gather_extra_candidates(
            name, None if items is None else as_items(name, items), ids, batch_items, group
        )
        for name, items, ids, batch_items in (
            ("extra_images", extra.images, extra.image_ids, images),
            ("extra_texts", extra.texts, extra.text_ids, texts),
        )
    )
    image_to_text, text_to_image = (
        add_extra_candidates(
            gather_targets(direction, group, ids_are_positions=ids_are_positions),
            pool,
            ids_are_positions=ids_are_positions,
        )
        for direction, pool in ((targets, extra_texts), (targets.T, extra_images))
    )
    return BatchComparison(
        images,
        texts,
        extra_images,
        extra_texts,
        (image_to_text, text_to_image),
        scale_and_bias,
        group,
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
