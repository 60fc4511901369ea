"""Published rows: a row of a paper's table, its difference from a result, and the format of
published and reached values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from visavis.core.encoded import DIRECTIONS
from visavis.core.table import Column, Table
from visavis.evaluation.metrics import CATALOG, Metric
from visavis.evaluation.metrics.catalog import own_metrics

MEASURES = {
    "per_moved": "C^q",
    "per_query": "C^q of all",
    "in_batch": "C^B",
    "idle": "C^0",
    "push": "W-",
    "pull": "W+",
    "effective": "effective",
}
"""Measures of contributing samples, and their symbols in the COCOS paper, which has no effective
number.
"""


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table of a paper, or one curve of a figure, which has no values.

    Attributes:
        paper: Key of the paper.
        table: Number of the table, or ``figure-NUMBER``.
        row: Key of the row.
        source: Citation of the paper.
        protocol: Protocol of the measurement. Empty where the row counts a training (see ``visavis
            diagnose``).
        values: Mean and, if published, standard deviation by metric key.
        experiment_id: Number of the experiment in the paper, the same in all its tables, if it has
            one.
        cited: Whether the paper took the row from another paper.
        unreported: Training settings that are not published.
        substitutes: Parts that are trained here in place of the published ones.
        misprint: How the row contradicts itself.
        code_difference: How the released code counts differently from the paper's definition.
        not_trainable: Why the row cannot be trained here. Empty if it can.
        pretrained: Model that the row evaluates without training, a name on the Hugging Face Hub.
    """

    paper: str
    table: int | str
    row: str
    source: str
    protocol: str
    values: Mapping[str, tuple[float, float | None]]
    experiment_id: str = ""
    cited: bool = False
    unreported: str = ""
    substitutes: str = ""
    misprint: str = ""
    code_difference: str = ""
    not_trainable: str = ""
    pretrained: str = ""

    @property
    def id(self) -> str:
        """Identifier that ``visavis train`` accepts."""
        return f"{self.paper}/{self.table}/{self.row}"

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        means = {key: mean for key, (mean, _) in self.values.items()}
        stds = {f"{key}_std": std for key, (_, std) in self.values.items() if std is not None}
        described = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "values"
        }
        return described | {"published": means | stds}

    def differences(self, reached: Mapping[str, float | None]) -> list[MetricDifference]:
        """Compare a result with the row."""
        return [
            MetricDifference(key, mean, std, reached.get(key))
            for key, (mean, std) in self.values.items()
        ]

    def comparison_table(self, reached: Mapping[str, float | None], protocol: str) -> Table:
        """Make a table of published and reached values, with remarks about the row."""
        rows = [
            tuple(comparison_cells(each.key, each.published, each.std, each.reached))
            for each in self.differences(reached)
        ]
        notes = [f"Published: {self.id}{', cited there' if self.cited else ''}: {self.source}."]
        if self.protocol != protocol:
            notes.append(
                f"Protocols differ: published {self.protocol}, reached {protocol}, with other "
                "candidates."
            )
        remarks = {
            "Not published": self.unreported,
            "Trained with": self.substitutes,
            "Misprint in the paper": self.misprint,
            "Published as counted by the released code": self.code_difference,
        }
        notes += [f"{title}: {remark}." for title, remark in remarks.items() if remark]
        columns = (
            Column(is_text=True),
            *map(Column, ("published", "reached", "difference")),
        )
        return Table(columns, tuple(rows), tuple(notes))


@dataclass(frozen=True)
class MetricDifference:
    """A published metric and the one of a result.

    Attributes:
        key: Metric key.
        published: Published mean.
        std: Published standard deviation.
        reached: Value of the result. None if it was not measured, such as CS@1000 on fewer images.
    """

    key: str
    published: float
    std: float | None
    reached: float | None

    @property
    def difference(self) -> float | None:
        """Reached minus published."""
        return None if self.reached is None else self.reached - self.published

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        std = {} if self.std is None else {"std": self.std}
        return {
            "published": self.published,
            **std,
            "reached": self.reached,
            "difference": self.difference,
        }


def find_metric(key: str) -> Metric:
    """Find the metric of a key in results, where K is a number."""
    by_key = {metric.name: metric for metric in (*CATALOG, *own_metrics())}
    # Keys of the catalog with a number have "K" in its place, such as i2t_cs_at_K.
    return by_key[key] if key in by_key else by_key[re.sub(r"(_at_)\d+", r"\1K", key)]


def metric_label(key: str) -> str:
    """Return the label of a metric, or of a measure of contributing samples, in tables."""
    if (measure := key.partition("_")[2]) in MEASURES:
        return MEASURES[measure]
    number = re.search(r"_at_(\d+)", key)
    return find_metric(key).label.replace("K", number[1] if number else "K")


def metric_title(key: str) -> str:
    """Return the label of a metric with its direction."""
    return f"{DIRECTIONS.get(key.partition('_')[0], '')} {metric_label(key)}".strip()


def format_metric(key: str, value: float, std: float | None = None, *, sign: str = "") -> str:
    """Format a value and its standard deviation with the digits of their unit: ``61.2 ± 0.4``."""
    digits = (
        2
        if key.partition("_")[2] in MEASURES
        else 1
        if find_metric(key).unit in ("percent", "rank")
        else 3
    )
    return f"{value:{sign}.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def comparison_cells(
    key: str,
    published: float,
    std: float | None,
    reached: float | None,
    reached_std: float | None = None,
) -> list[str]:
    """Format a line of a table: title, published and reached value, and their difference."""
    start = [metric_title(key), format_metric(key, published, std)]
    if reached is None:
        return [*start, "-", "-"]
    return [
        *start,
        format_metric(key, reached, reached_std),
        format_metric(key, reached - published, sign="+"),
    ]
