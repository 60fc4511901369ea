"""Evaluation of encoded items, or of a score matrix, under a protocol: ranks, then metrics.

`evaluate` pairs images and texts by ids, `evaluate_listed` ranks the queries and positives that a
protocol lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import Score, ScoreCost
from visavis.core.encoded import Encoded, RaggedItems
from visavis.core.errors import ShapeError, SpecError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.evaluation.metrics import ranking_metrics
from visavis.evaluation.metrics.ranking import Ties, best_rank_column
from visavis.evaluation.protocols import (
    UNPAIRED,
    ListedPositives,
    Protocol,
    get_protocol,
    pair_targets,
)
from visavis.evaluation.results import Evaluation
from visavis.evaluation.tiled_ranking import RankedQueries, rank_by_rows, rank_by_tiles
from visavis.losses.corrections import CorrectedScore
from visavis.losses.scoring import as_slice, select_items
from visavis.losses.targets import Ids, to_id_tensor


def evaluate(
    visual: Encoded,
    text: Encoded,
    score: Score,
    image_ids: Ids,
    text_ids: Ids,
    *,
    keys: Ids | None = None,
    protocol: str | Protocol = "plain",
    ties: Ties | None = None,
    memory: MemoryLimit = None,
    group: ProcessGroup = ONE_PROCESS,
) -> Evaluation:
    """Rank all texts for each image and all images for each text, by tiles of the score matrix.

    Args:
        visual: Encoded images.
        text: Encoded texts.
        score: ``score(visual[rows], text[columns]) -> [rows, columns]``, such as the method
            ``score`` of a model, or a `visavis.losses.corrections.CorrectedScore`.
        image_ids: One id per image, shape ``[V]``. Equal ids belong together. -1: an image without
            a text, which is a candidate and not a query.
        text_ids: One id per text, shape ``[T]``. -1: a text without an image.
        keys: Number of each different text, see `visavis.evaluation.protocols.text_keys`, for a
            protocol whose equal texts are positives.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.
        memory: Memory of a tile, bytes or "2GiB". None: a share of the free memory. The result does
            not depend on it.
        group: Processes that share out the scores. Each holds all items and receives the result.

    Returns:
        The result.

    Raises:
        SpecError: If the data do not match the protocol.
        ShapeError: If lengths differ, or an image or text with an id belongs to nothing.
        DataError: If a score is NaN.
    """
    protocol = get_protocol(protocol)
    ties = ties or protocol.ties
    image_ids = to_id_tensor(image_ids, "image_ids").cpu()
    text_ids = to_id_tensor(text_ids, "text_ids").cpu()
    if protocol.positives_file:
        raise SpecError(
            f"protocol {protocol.name}: expected listed positives, got ids. Use evaluate_listed, "
            "or visavis evaluate RUN."
        )
    protocol.validate(image_ids, text_ids)
    _check_ids(visual, text, image_ids, text_ids)
    text_keys = None
    if protocol.equal_texts != "negatives":
        if keys is None or len(keys) != len(text_ids):
            raise ShapeError(
                "keys: expected one number per text, because equal texts of protocol "
                f"{protocol.name} are positives, got {'none' if keys is None else len(keys)} for "
                f"{len(text_ids)}. Pass keys=text_keys(texts)."
            )
        text_keys = to_id_tensor(keys, "keys").cpu()
    folds = protocol.split_folds(image_ids, text_ids)
    rankings = [
        rank_by_tiles(
            select_items(visual, images),
            select_items(text, texts),
            score,
            image_ids[images],
            text_ids[texts],
            targets=pair_targets(
                image_ids[images], text_ids[texts], None if text_keys is None else text_keys[texts]
            ),
            ties=ties,
            memory=memory,
            group=group,
        )
        for images, texts in folds
    ]
    # Each metric is the mean over folds, as published.
    fold_metrics = [
        ranking_metrics(images.positive_ranks, texts.positive_ranks) for images, texts in rankings
    ]
    # The rankings of the image queries of all folds, and of the text queries.
    by_images, by_texts = zip(*rankings, strict=True)
    image_folds, text_folds = zip(*folds, strict=True)
    image_queries, image_ranks, top_texts = _merge_folds(image_folds, text_folds, by_images, ties)
    text_queries, text_ranks, top_images = _merge_folds(text_folds, image_folds, by_texts, ties)
    scores = {
        "positive": [ranked.positive_scores.flatten() for ranked in by_images],
        "hardest_i2t": [ranked.hardest_negative_scores for ranked in by_images],
        "hardest_t2i": [ranked.hardest_negative_scores for ranked in by_texts],
    }
    return Evaluation(
        protocol=protocol.describe(
            len(image_ids) - len(image_queries),
            len(text_ids) - len(text_queries),
            _correction_of(score),
        ),
        correction=_correction_of(score),
        # All folds have the same size.
        num_images=len(image_folds[-1]),
        num_texts=len(text_folds[-1]),
        captions_per_image=len(text_queries) / len(image_queries),
        ties=ties,
        metrics={
            name: float(np.mean([metrics[name] for metrics in fold_metrics]))
            for name in fold_metrics[0]
        },
        image_ranks=image_ranks.numpy(),
        text_ranks=text_ranks.numpy(),
        image_ids=image_ids[image_queries].numpy(),
        text_ids=text_ids[text_queries].numpy(),
        top_texts=top_texts.numpy(),
        top_images=top_images.numpy(),
        # Rows without a negative, and the padding of shorter rows, hold -inf.
        score_samples={
            name: (values := torch.cat(parts))[values > -torch.inf]
            for name, parts in scores.items()
        },
    )


def _correction_of(score: Score) -> str:
    """Correction of a score with its bank. Empty: none."""
    return str(score) if isinstance(score, CorrectedScore) else ""


def _merge_folds(
    items: Sequence[Tensor],
    candidates: Sequence[Tensor],
    rankings: Sequence[RankedQueries],
    ties: Ties,
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries in ascending order, the rank of the best positive of each, and its best-scored
    candidate: ``[Q]`` each. Items and candidates are given by fold.
    """
    # From positions in the fold to positions among all items.
    parts = [
        (
            fold_items[ranked.queries],
            best_rank_column(ranked.positive_ranks, ties),
            fold_candidates[ranked.top_candidates],
        )
        for fold_items, fold_candidates, ranked in zip(items, candidates, rankings, strict=True)
    ]
    queries, ranks, top_candidates = (torch.cat(part) for part in zip(*parts, strict=True))
    order = queries.argsort()
    return queries[order], ranks[order], top_candidates[order]


def _check_ids(visual: Encoded, text: Encoded, image_ids: Tensor, text_ids: Tensor) -> None:
    """Check that there is one id per item, and that each image has a text and each text an image."""
    for encoded, ids in ((visual, image_ids), (text, text_ids)):
        # A part with more rows than items would be read in part. Ragged items are selected from
        # each part by the same index.
        is_ragged = isinstance(encoded, RaggedItems)
        lengths = [len(encoded)] if is_ragged else [len(part) for part in encoded.tensors]
        if set(lengths) != {len(ids)}:
            raise ShapeError(
                f"ids: expected one per row of the encoded items, got {len(ids)} for "
                f"{' and '.join(str(length) for length in sorted(set(lengths)))}."
            )
        if not len(ids):
            raise ShapeError(
                "images, texts: expected at least one of each, got none. There is nothing to rank."
            )
    for kind, other, ids, other_ids in (
        ("image", "text", image_ids, text_ids),
        ("text", "image", text_ids, image_ids),
    ):
        # numpy is ten times as fast on a few thousand ids.
        is_alone = ~np.isin(ids.numpy(), other_ids.numpy()) & (ids.numpy() != UNPAIRED)
        for item in np.flatnonzero(is_alone)[:1].tolist():
            raise ShapeError(
                f"{kind} {item}: expected at least one {other} with its id, got none. Leave it "
                "out, it cannot be ranked, or set its id to -1: a candidate that is not a query."
            )
        if (ids == UNPAIRED).all():
            raise ShapeError(
                f"ids: expected at least one {kind} with a partner, got only -1. There is nothing "
                "to rank."
            )


def evaluate_listed(
    visual: Encoded,
    text: Encoded,
    score: Score,
    text_ids: Ids,
    positives: tuple[ListedPositives, ListedPositives],
    *,
    protocol: str | Protocol,
    ties: Ties | None = None,
    memory: MemoryLimit = None,
) -> Evaluation:
    """Evaluate under a protocol that lists its positives. Only listed items are queries, all items
    are candidates.

    Args:
        visual: Encoded images.
        text: Encoded texts.
        score: Score function.
        text_ids: Position of the image for which each text was written, shape ``[T]``.
        positives: Listed positives of the images and of the texts.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.
        memory: Memory of a block.

    Returns:
        The result.

    Raises:
        SpecError: If the protocol lists no positives, or the items do not match it.
        ShapeError: If there is not one encoded item per candidate of the lists.
    """
    protocol = get_protocol(protocol)
    ties = ties or protocol.ties
    if not protocol.positives_file:
        raise SpecError(
            f"protocol {protocol.name}: expected a protocol with listed positives. Use evaluate "
            "with the ids of images and texts."
        )
    text_ids = to_id_tensor(text_ids, "text_ids").cpu()
    listed_images, listed_texts = positives
    for name, encoded, expected in (
        ("visual", visual, listed_texts.targets.shape[1]),
        ("text", text, listed_images.targets.shape[1]),
    ):
        if len(encoded) != expected:
            raise ShapeError(
                f"{name}: expected {expected} items, the candidates of the listed positives, got "
                f"{len(encoded)}."
            )
    protocol.validate(torch.arange(len(visual)), text_ids)
    images = rank_by_rows(
        select_items(visual, listed_images.queries),
        text,
        score,
        listed_images.targets,
        "i2t",
        ties=ties,
        memory=memory,
    )
    texts = rank_by_rows(
        visual,
        select_items(text, listed_texts.queries),
        score,
        listed_texts.targets,
        "t2i",
        ties=ties,
        memory=memory,
    )
    return Evaluation(
        protocol=protocol.describe(correction=_correction_of(score)),
        correction=_correction_of(score),
        num_images=len(visual),
        num_texts=len(text),
        captions_per_image=len(text) / len(visual),
        ties=ties,
        metrics=ranking_metrics(images.positive_ranks, texts.positive_ranks),
        image_ranks=best_rank_column(images.positive_ranks, ties).numpy(),
        text_ranks=best_rank_column(texts.positive_ranks, ties).numpy(),
        image_ids=listed_images.queries.numpy(),
        text_ids=text_ids[listed_texts.queries].numpy(),
        top_texts=images.top_candidates.numpy(),
        top_images=texts.top_candidates.numpy(),
    )


def rank_scores(
    scores: Tensor,
    image_ids: Ids,
    text_ids: Ids,
    *,
    keys: Ids | None = None,
    protocol: str | Protocol = "plain",
    ties: Ties | None = None,
) -> Evaluation:
    """Evaluate a full score matrix, such as the mean of the matrices of two models. See `evaluate`.

    Args:
        scores: Scores of shape ``[V, T]``.
        image_ids: One id per image. -1: an image without a text.
        text_ids: One id per text. -1: a text without an image.
        keys: Number of each different text, see `visavis.evaluation.protocols.text_keys`.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.

    Returns:
        The result.

    Raises:
        ShapeError: If the scores do not match the ids.
    """
    scores = scores.detach()
    image_ids = to_id_tensor(image_ids, "image_ids")
    text_ids = to_id_tensor(text_ids, "text_ids")
    if scores.shape != (len(image_ids), len(text_ids)):
        raise ShapeError(
            f"scores: expected shape {[len(image_ids), len(text_ids)]}, as many images and texts "
            f"as ids, got {list(scores.shape)}."
        )
    # Items are positions in the matrix, so tiles are cut out of it.
    visual, text = (Encoded(torch.arange(length)) for length in scores.shape)
    return evaluate(
        visual,
        text,
        _MatrixScore(scores),
        image_ids,
        text_ids,
        keys=keys,
        protocol=protocol,
        ties=ties,
    )


@dataclass(frozen=True, eq=False)
class _MatrixScore:
    """Scores of positions in a matrix."""

    scores: Tensor

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost:
        # A copy of rows, and one of their columns.
        pair_bytes = 2.0 * self.scores.element_size()
        return ScoreCost(inference_bytes=pair_bytes, training_bytes=pair_bytes)

    def __call__(self, visual: Encoded, text: Encoded) -> Tensor:
        rows, columns = (
            as_slice(side.vectors)  # type: ignore[arg-type]
            for side in (visual, text)
        )
        return self.scores[rows][:, columns]
