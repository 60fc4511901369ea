"""Results of an evaluation: metrics, the protocol behind them, and the rank of every query."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import Score
from visavis.core.encoded import Encoded, EncodedBatches, require_values
from visavis.core.errors import ShapeError, SpecError, format_value
from visavis.core.memory_budget import MemoryLimit
from visavis.core.notebook import NotebookTable, flat_row
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.data.dataset import Dataset
from visavis.evaluation.graded import RelevanceEstimator
from visavis.evaluation.graded.ranking_coherence import RankingCoherence, ranking_coherence
from visavis.evaluation.metrics import ranking_metrics
from visavis.evaluation.metrics.argument_checks import (
    Ties,
    validate_instance,
    validate_literal,
    validate_tensor,
)
from visavis.evaluation.metrics.ranking import best_rank_column
from visavis.evaluation.protocols import (
    Protocol,
    get_protocol,
    read_listed_positives,
    select_for_protocol,
)
from visavis.evaluation.published_row import PublishedRow
from visavis.evaluation.query_ranks import QueryRanks
from visavis.evaluation.tiled_ranking import RankedQueries, rank_by_rows, rank_by_tiles
from visavis.losses.scoring import select_items
from visavis.losses.targets import Ids, to_id_tensor


@dataclass(frozen=True, eq=False)
class Evaluation(NotebookTable):
    """Result of a model and the rules behind it.

    Attributes:
        protocol: Name of the protocol.
        num_images: Number of candidates of a text (in one fold).
        num_texts: Number of candidates of an image (in one fold).
        captions_per_image: Ratio of texts to images.
        ties: Tie rule.
        metrics: Metrics by key, recalls in percent.
        image_ranks: Rank of the best positive of each image query, starting at 1. The queries are
            all images in the order given, shape ``[V]``, or those that the protocol lists, in its
            order.
        text_ranks: The same for text queries.
        coherence: How well the whole ranking follows graded relevance, if it was given.
        other_protocols: The same items under further protocols.
        extra_metrics: Metric keys to print next to the usual ones.
        published: Row of a paper to compare with.
        pretrained: The same result for the pretrained model from which training started.
        image_ids: Id of each image query, as given, or its position in the data set if the protocol
            lists its queries.
        text_ids: Id of the image of each text query.
        top_texts: Position of the best-scored text of each image query.
        top_images: Position of the best-scored image of each text query.
        score_samples: Scores of all positives ("positive") and of the hardest negative of each
            query that has one ("hardest_i2t", "hardest_t2i"). Empty if the protocol lists its
            positives.
    """

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str
    metrics: dict[str, float]
    image_ranks: np.ndarray
    text_ranks: np.ndarray
    coherence: RankingCoherence | None = None
    other_protocols: tuple[Evaluation, ...] = ()
    extra_metrics: tuple[str, ...] = ()
    published: PublishedRow | None = None
    pretrained: Evaluation | None = None
    image_ids: np.ndarray | None = None
    text_ids: np.ndarray | None = None
    top_texts: np.ndarray | None = None
    top_images: np.ndarray | None = None
    score_samples: dict[str, Tensor] = field(default_factory=dict)

    @property
    def query_ranks(self) -> QueryRanks:
        """Rank of every query, for comparisons over images."""
        assert self.image_ids is not None
        assert self.text_ids is not None
        return QueryRanks(self.image_ranks, self.text_ranks, self.image_ids, self.text_ids)

    @property
    def query_ranks_by_protocol(self) -> dict[str, QueryRanks]:
        """Ranks of all protocols by name, as `write_query_ranks` takes them."""
        return {name: result.query_ranks for name, result in self.by_protocol.items()}

    @property
    def by_protocol(self) -> dict[str, Evaluation]:
        """Results of all protocols by name."""
        return {result.protocol: result for result in (self, *self.other_protocols)}

    @property
    def all_metrics(self) -> dict[str, float | None]:
        """All metrics, including those of coherence."""
        return {**self.metrics, **(self.coherence.metrics if self.coherence else {})}

    @property
    def under_published_protocol(self) -> Evaluation:
        """Result under the protocol of the published row, or this one without such a protocol."""
        return self.by_protocol.get(self.published.protocol, self) if self.published else self

    def table_rows(self) -> list[dict[str, Any]]:
        """Return a row for each protocol."""
        return [flat_row(evaluation._flat()) for evaluation in self.by_protocol.values()]

    def to_json(self) -> dict[str, Any]:
        """Convert to one flat JSON object: the rules, then all metrics of the first protocol.

        Returns:
            The object. With several protocols, ``protocols`` holds one object per protocol.
            ``published`` holds the published values with the reached ones, and ``pretrained`` the
            same object for the pretrained model.
        """
        result = self._flat()
        if self.other_protocols:
            result |= {
                "protocols": {
                    name: evaluation._flat() for name, evaluation in self.by_protocol.items()
                }
            }
        if self.published is not None:
            reached = self.under_published_protocol
            differences = {
                each.key: each.to_json() for each in self.published.differences(reached.all_metrics)
            }
            result |= {
                "published": self.published.to_json()
                | {"published": differences, "reached_protocol": reached.protocol}
            }
        if self.pretrained is not None:
            result |= {"pretrained": self.pretrained.to_json()}
        return result

    def _flat(self) -> dict[str, Any]:
        rules = ("protocol", "num_images", "num_texts", "captions_per_image", "ties")
        queries = {"image_queries": len(self.image_ranks), "text_queries": len(self.text_ranks)}
        graded = self.coherence.to_json() if self.coherence else {}
        return {name: getattr(self, name) for name in rules} | queries | self.metrics | graded


def evaluate(
    visual: Encoded,
    text: Encoded,
    score: Score,
    image_ids: Ids,
    text_ids: Ids,
    *,
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
            ``score`` of a model.
        image_ids: One id per image, shape ``[V]``. Equal ids belong together.
        text_ids: One id per text, shape ``[T]``.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.
        memory: Memory of a tile, bytes or "2GiB". None: a share of the free memory. The result does
            not depend on it.
        group: Processes that share out the scores. Each holds all items and receives the result.

    Returns:
        The result.

    Raises:
        SpecError: If the data do not match the protocol.
        ShapeError: If lengths differ, or an image or text belongs to nothing.
        DataError: If a score is NaN.
    """
    protocol, ties = _validate_arguments(visual, text, score, protocol, ties)
    group = validate_instance(group, ProcessGroup, "a process group", "group")
    image_ids, text_ids = (
        to_id_tensor(image_ids, "image_ids").cpu(),
        to_id_tensor(text_ids, "text_ids").cpu(),
    )
    if protocol.positives_file:
        raise SpecError(
            f"protocol {protocol.name}: expected listed positives, got ids. Use evaluate_listed, "
            "or visavis evaluate RUN."
        )
    protocol.validate(image_ids, text_ids)
    _check_ids(visual, text, image_ids, text_ids)
    image_folds, text_folds = zip(*protocol.split_folds(image_ids, text_ids), strict=True)
    rankings = []
    for images, texts in zip(image_folds, text_folds, strict=True):
        fold = select_items(visual, images), select_items(text, texts)
        rankings.append(
            rank_by_tiles(
                *fold,
                score,
                image_ids[images],
                text_ids[texts],
                ties=ties,
                memory=memory,
                group=group,
            )
        )
    image_queries, text_queries = zip(*rankings, strict=True)
    image_ranks, top_texts = _merge_folds(
        len(image_ids), image_folds, text_folds, image_queries, ties
    )
    text_ranks, top_images = _merge_folds(
        len(text_ids), text_folds, image_folds, text_queries, ties
    )
    fold_metrics = [
        ranking_metrics(images.positive_ranks, texts.positive_ranks) for images, texts in rankings
    ]
    return Evaluation(
        protocol=protocol.name,
        # All folds have the same size.
        num_images=len(image_folds[-1]),
        num_texts=len(text_folds[-1]),
        captions_per_image=len(text_ids) / len(image_ids),
        ties=ties,
        metrics={
            name: float(np.mean([metrics[name] for metrics in fold_metrics]))
            for name in fold_metrics[0]
        },
        image_ranks=image_ranks.numpy(),
        text_ranks=text_ranks.numpy(),
        image_ids=image_ids.numpy(),
        text_ids=text_ids.numpy(),
        top_texts=top_texts.numpy(),
        top_images=top_images.numpy(),
        score_samples=_score_samples(image_queries, text_queries),
    )


def _merge_folds(
    num_queries: int,
    queries: Sequence[Tensor],
    candidates: Sequence[Tensor],
    rankings: Sequence[RankedQueries],
    ties: Ties,
) -> tuple[Tensor, Tensor]:
    """Rank of the best positive, and the best-scored candidate, of each query: ``[Q]`` each.
    Queries and candidates are given by fold.
    """
    ranks, top_candidates = (
        torch.empty(num_queries, dtype=torch.double if ties == "mean" else torch.long),
        torch.empty(num_queries, dtype=torch.long),
    )
    for fold_queries, fold_candidates, ranked in zip(queries, candidates, rankings, strict=True):
        ranks[fold_queries] = best_rank_column(ranked.positive_ranks, ties)
        top_candidates[fold_queries] = fold_candidates[ranked.top_candidates]
    return ranks, top_candidates


def _score_samples(
    image_queries: Sequence[RankedQueries], text_queries: Sequence[RankedQueries]
) -> dict[str, Tensor]:
    """Scores of all positives and of the hardest negatives of all folds, without padding."""
    samples = {
        "positive": torch.cat([ranked.positive_scores.flatten() for ranked in image_queries]),
        "hardest_i2t": torch.cat([ranked.hardest_negative_scores for ranked in image_queries]),
        "hardest_t2i": torch.cat([ranked.hardest_negative_scores for ranked in text_queries]),
    }
    return {name: scores[scores > -torch.inf] for name, scores in samples.items()}


def _check_ids(visual: Encoded, text: Encoded, image_ids: Tensor, text_ids: Tensor) -> None:
    """Check that there is one id per item, and that each image has a text and each text an image."""
    for encoded, ids in ((visual, image_ids), (text, text_ids)):
        if len(encoded) != len(ids):
            raise ShapeError(f"ids: expected {len(encoded)}, one per encoded item, got {len(ids)}.")
        if not len(ids):
            raise ShapeError(
                "images, texts: expected at least one of each, got none. There is nothing to rank."
            )
    for kind, other, ids, other_ids in (
        ("image", "text", image_ids, text_ids),
        ("text", "image", text_ids, image_ids),
    ):
        for item in (~torch.isin(ids, other_ids)).nonzero()[:1, 0].tolist():
            raise ShapeError(
                f"{kind} {item}: expected at least one {other} with its id, got none. Leave it "
                "out, it cannot be ranked."
            )


def _validate_arguments(
    visual: Encoded, text: Encoded, score: Score, protocol: str | Protocol, ties: Ties | None
) -> tuple[Protocol, Ties]:
    """Check the items and the score function, and look up the protocol and its tie rule."""
    for name, items in (("visual", visual), ("text", text)):
        if not isinstance(items, EncodedBatches):
            _validate_items(items, name)
    try:
        # A class makes objects, not scores.
        inspect.signature(None if isinstance(score, type) else score).bind(None, None)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SpecError(
            "score: expected a function of visual and text items, such as the method score of a "
            f"model, got {format_value(score)}."
        ) from None
    protocol = get_protocol(protocol)
    return protocol, protocol.ties if ties is None else validate_literal(ties, Ties, "ties")


def _validate_items(items: Any, name: str) -> None:
    parts = items.tensors if isinstance(items, Encoded) and items.vectors is not None else []
    require_values(name, *parts)
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        raise ShapeError(
            f"{name}: expected Encoded(vectors) of tensors with one row per item, got "
            f"{format_value(items)}."
        )
    if len({len(part) for part in parts}) > 1:
        lengths = ", ".join(str(len(part)) for part in parts)
        raise ShapeError(
            f"{name}: expected one row of each part per item, got parts of different lengths: "
            f"{lengths}."
        )


def evaluate_listed(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    *,
    protocol: str | Protocol,
    ties: Ties | None = None,
    memory: MemoryLimit = None,
) -> Evaluation:
    """Evaluate under a protocol that lists its positives. Only listed items are queries, all items
    are candidates.

    Args:
        visual: Encoded images of the data set, in its order.
        text: Encoded captions of the data set, in its order.
        score: Score function.
        data: The data set.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.
        memory: Memory of a block.

    Returns:
        The result.

    Raises:
        SpecError: If the protocol lists no positives.
        ShapeError: If there is not one encoded item per image and caption.
    """
    protocol, ties = _validate_arguments(visual, text, score, protocol, ties)
    data = validate_instance(data, Dataset, "a data set of visavis.data.open_dataset", "data")
    if not protocol.positives_file:
        raise SpecError(
            f"protocol {protocol.name}: expected a protocol with listed positives. Use evaluate "
            "with the ids of images and texts."
        )
    for name, encoded, items in (("visual", visual, data.images), ("text", text, data.captions)):
        if len(encoded) != len(items):
            raise ShapeError(
                f"{name}: expected {len(items)} items, one per image or caption of {data.name}, "
                f"got {len(encoded)}."
            )
    protocol.validate(torch.arange(len(visual)), torch.from_numpy(data.image_of))
    listed_images, listed_texts = read_listed_positives(protocol, data)
    image_queries, text_queries = (
        select_items(visual, listed_images.queries),
        select_items(text, listed_texts.queries),
    )
    images = rank_by_rows(
        image_queries, text, score, listed_images.targets, "i2t", ties=ties, memory=memory
    )
    texts = rank_by_rows(
        visual, text_queries, score, listed_texts.targets, "t2i", ties=ties, memory=memory
    )
    return Evaluation(
        protocol=protocol.name,
        num_images=len(visual),
        num_texts=len(text),
        captions_per_image=len(text) / len(visual),
        ties=ties,
        metrics=ranking_metrics(images.positive_ranks, texts.positive_ranks),
        image_ranks=best_rank_column(images.positive_ranks, ties).numpy(),
        text_ranks=best_rank_column(texts.positive_ranks, ties).numpy(),
        image_ids=listed_images.queries.numpy(),
        text_ids=data.image_of[listed_texts.queries.numpy()],
        top_texts=images.top_candidates.numpy(),
        top_images=texts.top_candidates.numpy(),
    )


def rank_scores(
    scores: Tensor,
    image_ids: Ids,
    text_ids: Ids,
    *,
    protocol: str | Protocol = "plain",
    ties: Ties | None = None,
) -> Evaluation:
    """Evaluate a full score matrix, such as the mean of the matrices of two models. See `evaluate`.

    Args:
        scores: Scores of shape ``[V, T]``.
        image_ids: One id per image.
        text_ids: One id per text.
        protocol: Name of a protocol, or a protocol.
        ties: Tie rule. None: the protocol's.

    Returns:
        The result.

    Raises:
        ShapeError: If the scores do not match the ids.
    """
    scores = validate_tensor(scores, "scores", "images x texts")
    image_ids, text_ids = to_id_tensor(image_ids, "image_ids"), to_id_tensor(text_ids, "text_ids")
    if scores.shape != (len(image_ids), len(text_ids)):
        raise ShapeError(
            f"scores: expected shape {[len(image_ids), len(text_ids)]}, as many images and texts "
            f"as ids, got {list(scores.shape)}."
        )

    def score(visual: Encoded, text: Encoded) -> Tensor:
        return scores[visual.vectors][:, text.vectors]  # type: ignore[index]

    visual, text = (Encoded(torch.arange(length)) for length in scores.shape)
    return evaluate(visual, text, score, image_ids, text_ids, protocol=protocol, ties=ties)


def evaluate_dataset(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocols: Sequence[Protocol],
    *,
    relevance: RelevanceEstimator | None = None,
    semantics: str = "reference",
    memory: MemoryLimit = None,
    group: ProcessGroup = ONE_PROCESS,
) -> Evaluation:
    """Evaluate encoded images and captions with `evaluate` or `evaluate_listed`, as each protocol
    requires.

    Args:
        visual: Encoded images of the data set, in its order.
        text: Encoded captions of the data set, in its order.
        score: Score function.
        data: The data set.
        protocols: The first is the result, the others are its ``other_protocols``.
        relevance: Relevance estimator, for the coherence of the ranking with graded relevance.
            Empty: none.
        semantics: Semantics of CS@K.
        memory: Memory of a tile.
        group: Processes that share out the scores. Each holds all items and receives the result.

    Returns:
        The result.
    """
    results = []
    for protocol in protocols:
        selected, captions = select_for_protocol(data, text, protocol)
        if protocol.positives_file:
            result = evaluate_listed(
                visual, captions, score, selected, protocol=protocol, memory=memory
            )
        else:
            ids = torch.arange(len(selected.images)), torch.from_numpy(selected.image_of)
            result = evaluate(
                visual, captions, score, *ids, protocol=protocol, memory=memory, group=group
            )
        if relevance:
            coherence = ranking_coherence(
                visual,
                captions,
                score,
                selected,
                relevance,
                semantics=semantics,
                folds=protocol.folds,
                memory=memory,
            )
            result = replace(result, coherence=coherence)
        results.append(result)
    return replace(results[0], other_protocols=tuple(results[1:]))
