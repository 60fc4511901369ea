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
    """Describe what must be equal on all ranks before they can compare their items."""
    kinds: list[str] = []
    for items in (images, texts):
        if isinstance(items, Vectors) and items.vectors.dim() == 2:
            dim = items.vectors.shape[1]
            kinds.append(f"embeddings of {dim} dimensions and {items.vectors.dtype}")
        else:
            # Without lengths of texts and numbers of regions, which may differ between ranks.
            parts = (f"tensors of {part.dim()} axes and {part.dtype}" for part in items.tensors)
            kinds.append(", ".join(parts))
    annotations = "".join(
        f" and {annotation.name}"
        for annotation in ANNOTATIONS
        if getattr(targets, annotation.name) is not None
    )
    source = f"{'' if dataset is None else f' of {dataset}'} on {' with '.join(kinds)}"
    return f"{objective!r}{source}, {targets_source}{annotations}"


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
        """Keep the leading dimensions of the embeddings."""
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
        """Keep the leading dimensions of all embeddings."""
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
    """Make the targets of a batch, ``[V, T]`` on the device of its images, and describe how they
    were given: "in order", "by ids" or "by targets".
    """
    num_images = len(images)
    num_texts = len(texts)
    if targets is not None:
        source = "by targets"
        if ids.images is not None or ids.texts is not None:
            raise ShapeError(
                "targets: expected no ids next to targets, got both. Pass one of them."
            )
    elif ids.images is not None:
        source = "by ids"
        if ids.texts is not None:
            require_ids_of_one_kind(ids.images, ids.texts, names=("image_ids", "text_ids"))
        text_ids = to_id_tensor(
            ids.images if ids.texts is None else ids.texts,
            "image_ids" if ids.texts is None else "text_ids",
        )
        image_ids = to_id_tensor(ids.images, "image_ids")
        for kind, given, number in (
            ("image", image_ids, num_images),
            ("text", text_ids, num_texts),
        ):
            if len(given) != number:
                raise ShapeError(
                    f"{kind}_ids: expected {number}, one per {kind}, got {len(given)}."
                )
        targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
    else:
        source = "in order"
        if ids.texts is not None:
            raise ShapeError(
                "text_ids: expected image_ids as well, got none. Pass both, or neither for pairs "
                "in order."
            )
        if num_images != num_texts:
            raise ShapeError(
                f"images, texts: expected equal numbers without ids, got {num_images} and "
                f"{num_texts}. Pass image_ids and text_ids."
            )
        targets = Targets.paired(num_images)
    validate_targets(targets, torch.Size((num_images, num_texts)))
    return targets.to(images.tensors[0].device), source


def gather_extra_candidates(
    name: str,
    items: Items | None,
    ids: Ids | None,
    batch_items: Encoded,
    group: ProcessGroup,
) -> ExtraCandidates | None:
    """Gather the extra candidates of one side over all ranks. None: no rank has any."""
    if items is None and ids is not None:
        raise ShapeError(
            f"{name}: expected items for the given ids, got none. Pass extra_images and "
            "extra_texts with their ids."
        )
    local_items = None if items is None else as_items(name, items)
    if not group.any_rank(local_items is not None):
        return None
    if local_items is None:  # another rank has some
        local_items = batch_items[:0]
        ids = []
    local_ids = to_id_tensor([] if ids is None else ids, f"ids of {name}").to(group.device)
    if len(local_ids) != len(local_items):
        count = "no ids" if ids is None else f"{len(local_ids)} ids"
        raise ShapeError(
            f"{name}: expected one id per item, got {len(local_items)} items and {count}."
        )
    detached = local_items.map(Tensor.detach)
    # A bank that all ranks share counts once.
    if all(group.is_equal_on_all_ranks(tensor) for tensor in (local_ids, *detached.tensors)):
        return ExtraCandidates(name, local_items, detached, local_ids, None)
    all_items, local_rows = group.all_gather_items(detached)
    return ExtraCandidates(
        name, local_items, all_items, group.all_gather_rows(local_ids), local_rows
    )


def add_extra_candidates(
    targets: Targets, extra_candidates: ExtraCandidates | None, *, ids_are_positions: bool
) -> Targets:
    """Append extra candidates to the candidates of the targets of one direction."""
    if extra_candidates is None:
        return targets
    for field in ("relation", *PAIRWISE_ANNOTATIONS):
        if getattr(targets, field) is not None:
            raise ShapeError(
                f"{extra_candidates.name}: expected targets by ids only, got {field}, which is "
                "unknown for extra candidates."
            )
    # The extra items got their ids before the positions became global over ranks.
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
    """Return whether the ids of both sides are 0, 1, 2, ... on every one of several ranks."""
    return group.world_size > 1 and not group.any_rank(
        any(not torch.equal(ids, torch.arange(len(ids), device=ids.device)) for ids in ids_of_sides)
    )


def gather_targets(targets: Targets, group: ProcessGroup, *, ids_are_positions: bool) -> Targets:
    """Extend the targets of the queries of this rank to the candidates of all ranks."""
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
    # Positions that count 0, 1, 2, ... on every rank are positions in its batch and are made
    # global. Other positions must be global already.
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
    # A function is called with the rows of this rank and the columns of all ranks, but it may
    # accept only positions of its own rank.
    for name in PAIRWISE_ANNOTATIONS:
        if not callable(getattr(gathered, name)):
            continue
        try:
            fails = bool(len(query_ids)) and gathered[:1].pairwise(name) is None
        except LookupError:
            fails = True
        if group.any_rank(fails):
            raise ShapeError(
                f"{name}: expected a function of positions on all ranks, got one that fails at "
                "positions of other ranks. Pass "
                "Targets(rows=, columns=) with positions that are valid over all ranks, such as "
                "those in the data set, or Factors, or use "
                "gather=False."
            )
    return gathered
