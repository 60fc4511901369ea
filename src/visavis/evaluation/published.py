"""A row of a paper's table, and how far from it a result is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visavis.metrics import CATALOG, Metric


@dataclass(frozen=True)
class Published:
    """What a paper prints in one row of one table; it belongs to that row, whatever else has the same configuration.

    source: the paper. number: the paper's own of the experiment, the same in all its tables, if it has one. protocol: what the row was
    measured by, "" where it counts a training (see ``visavis diagnose``) instead. values: a mean and, where one was
    printed, a deviation, by keys of results. cited: taken over from the paper that made it.
    unstated: what of its training is published nowhere. misprint: where the row contradicts itself. caution: how the released code
    counts otherwise than the paper defines. absent: why it cannot be trained here; "": it can.
    """

    paper: str
    table: int
    row: str
    source: str
    protocol: str
    values: Mapping[str, tuple[float, float | None]]
    number: str = ""
    cited: bool = False
    unstated: str = ""
    misprint: str = ""
    caution: str = ""
    absent: str = ""

    @property
    def address(self) -> str:
        """What ``visavis train`` takes."""
        return f"{self.paper}/{self.table}/{self.row}"

    def to_json(self) -> dict[str, Any]:
        """Means under their keys, deviations under the same with ``_std``."""
        facts = ("paper", "table", "row", "number", "source", "protocol", "cited", "unstated", "misprint", "caution", "absent")
        means = {key: mean for key, (mean, _) in self.values.items()}
        deviations = {f"{key}_std": deviation for key, (_, deviation) in self.values.items() if deviation is not None}
        return {name: getattr(self, name) for name in facts} | {"published": means | deviations}

    def differences(self, reached: Mapping[str, float | None]) -> list[Difference]:
        """Published and reached, for every figure of the row."""
        return [Difference(key, mean, deviation, reached.get(key)) for key, (mean, deviation) in self.values.items()]


@dataclass(frozen=True)
class Difference:
    """One figure: as published, and as reached; None where that was not measured, such as CS@1000 on fewer images."""

    key: str
    published: float
    deviation: float | None
    reached: float | None

    @property
    def difference(self) -> float | None:
        return None if self.reached is None else self.reached - self.published

    def to_json(self) -> dict[str, Any]:
        spread = {} if self.deviation is None else {"std": self.deviation}
        return {"published": self.published, **spread, "reached": self.reached, "difference": self.difference}


def metric_of(key: str) -> Metric:
    """The metric of a key of results, whose K is a number there. Raises KeyError for none."""
    by_key = {metric.name: metric for metric in CATALOG}
    return by_key[key] if key in by_key else by_key[re.sub(r"(_at_)\d+", r"\1K", key)]


def label_of(key: str) -> str:
    """The name of a key in tables, without its direction."""
    number = re.search(r"_at_(\d+)", key)
    return metric_of(key).label.replace("K", number[1] if number else "K")
