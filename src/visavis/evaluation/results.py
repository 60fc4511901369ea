"""Results of an evaluation: metrics, the protocol behind them, and the rank of every query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from visavis.core.encoded import DIRECTIONS
from visavis.core.result import Result, flat_record
from visavis.core.table import Column, Row, Table
from visavis.evaluation.metrics.catalog import RECALLS, equivalent_measures
from visavis.evaluation.metrics.ranking import TIES_IN_WORDS
from visavis.evaluation.published_row import PublishedRow, format_metric, metric_title
from visavis.evaluation.query_ranks import QueryRanks

RECALL_COLUMNS = {
    **{metric.name: Column(metric.label, ".1f") for metric in RECALLS},
    "medr": Column("median rank", ".0f"),
    "meanr": Column("mean rank", ".1f"),
}
"""Columns of metrics, by the end of their keys."""


class SectionResult(ABC):
    """Further part of a result, such as the coherence with graded relevance (base class)."""

    @property
    @abstractmethod
    def metrics(self) -> dict[str, float | None]:
        """Metrics by key. None: undefined for these items."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return a flat JSON object with the metrics and the rules behind them. No other part of
        the result has its keys.
        """

    @abstractmethod
    def table(self) -> Table:
        """Return the table that is printed below the recalls."""


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """Result of a model and the rules behind it.

    Attributes:
        protocol: Name of the protocol, with a correction of the scores.
        num_images: Number of candidates of a text (in one fold).
        num_texts: Number of candidates of an image (in one fold).
        captions_per_image: Ratio of texts to images.
        ties: Tie rule.
        metrics: Metrics by key, recalls in percent.
        image_ranks: Rank of the best positive of each image query, starting at 1. The queries are
            all images in the order given, shape ``[V]``, or those that the protocol lists, in its
            order.
        text_ranks: The same for text queries.
        sections: Further parts of the result.
        other_protocols: The same items under further protocols.
        extra_metrics: Metric keys to print next to the usual ones.
        published: Row of a paper to compare with.
        pretrained: The same result for the pretrained model from which training started.
        image_ids: Id of each image query, as given, or its position in the data set if the protocol
            lists its queries.
        text_ids: Id of the image of each text query.
        top_texts: Position of the best-scored text of each image query.
        top_images: Position of the best-scored image of each text query.
        correction: Correction of the scores with its bank, "fixed-bank" or "transductive". Empty:
            none.
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
    sections: tuple[SectionResult, ...] = ()
    other_protocols: tuple[Evaluation, ...] = ()
    extra_metrics: tuple[str, ...] = ()
    published: PublishedRow | None = None
    pretrained: Evaluation | None = None
    image_ids: np.ndarray | None = None
    text_ids: np.ndarray | None = None
    top_texts: np.ndarray | None = None
    top_images: np.ndarray | None = None
    correction: str = ""
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
        """All metrics, with the metrics of the sections."""
        metrics = dict[str, float | None](self.metrics)
        for section in self.sections:
            metrics |= section.metrics
        return metrics

    @property
    def under_published_protocol(self) -> Evaluation:
        """Result under the protocol of the published row, or this one without such a protocol."""
        return self.by_protocol.get(self.published.protocol, self) if self.published else self

    def tables(self) -> list[Table]:
        """Return recalls and ranks of each protocol, the sections, and published results."""
        tables = []
        for evaluation in (self, *self.other_protocols):
            tables.append(evaluation._recall_table(self.extra_metrics))
            tables += [section.table() for section in evaluation.sections]
        if self.published is not None:
            reached = self.under_published_protocol
            tables.append(self.published.comparison_table(reached.all_metrics, reached.protocol))
        if self.pretrained is not None:
            first, *others = self.pretrained.tables()
            tables += [replace(first, title="Pretrained model:"), *others]
        return tables

    def _recall_table(self, extra_metrics: Sequence[str]) -> Table:
        """Recalls and ranks of one protocol, and in notes its rules and further metrics."""
        metrics = self.metrics
        rows: list[Row] = [
            (title, *(metrics[f"{direction}_{key}"] for key in RECALL_COLUMNS))
            for direction, title in DIRECTIONS.items()
        ]
        rule = (
            f"RSUM {metrics['rsum']:.1f}, average recall {metrics['average_recall']:.1f}  (protocol "
            f"{self.protocol}: {self.num_images:,} images, {self.num_texts:,} texts, "
            f"{self.captions_per_image:g} captions per image, {TIES_IN_WORDS[self.ties]})"
        )
        extra = (f"{metric_title(key)} {format_metric(key, metrics[key])}" for key in extra_metrics)
        notes = [rule, ", ".join(extra)]
        queries = len(self.image_ranks), len(self.text_ranks)
        if queries[0] < self.num_images or queries[1] < self.num_texts:
            notes.append(
                f"R-Precision {metrics['i2t_r_precision']:.3f} and "
                f"{metrics['t2i_r_precision']:.3f}, mAP@R {metrics['i2t_map_at_r']:.3f} and "
                f"{metrics['t2i_map_at_r']:.3f}, over the {queries[0]:,} images and "
                f"{queries[1]:,} texts that are queries"
            )
        columns = (Column(is_text=True), *RECALL_COLUMNS.values())
        return Table(columns, tuple(rows), tuple(filter(None, notes)))

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each protocol."""
        return [flat_record(evaluation._flat()) for evaluation in self.by_protocol.values()]

    def to_json(self) -> dict[str, Any]:
        """Convert to one flat JSON object: the rules, then all metrics of the first protocol.

        Returns:
            The object. With several protocols, ``protocols`` holds one object per protocol.
            ``ir_measures`` names the measures of ir_measures by key. ``published`` holds the
            published values with the reached ones, and ``pretrained`` the same object for the
            pretrained model.
        """
        result = self._with_measures()
        if self.other_protocols:
            results = self.by_protocol.items()
            result["protocols"] = {
                name: evaluation._with_measures() for name, evaluation in results
            }
        if self.published is not None:
            reached = self.under_published_protocol
            differences = self.published.differences(reached.all_metrics)
            result["published"] = self.published.to_json() | {
                "published": {each.key: each.to_json() for each in differences},
                "reached_protocol": reached.protocol,
            }
        if self.pretrained is not None:
            result["pretrained"] = self.pretrained.to_json()
        return result

    def _with_measures(self) -> dict[str, Any]:
        flat = self._flat()
        return flat | {"ir_measures": equivalent_measures(flat)}

    def _flat(self) -> dict[str, Any]:
        rules = ["protocol", "num_images", "num_texts", "captions_per_image", "ties"]
        rules += ["correction"] * bool(self.correction)
        queries = {"image_queries": len(self.image_ranks), "text_queries": len(self.text_ranks)}
        flat = {name: getattr(self, name) for name in rules} | queries | self.metrics
        for section in self.sections:
            flat |= section.to_json()
        return flat
