"""Declaration of a metric: its function and its description for results, tables and reference pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

DIRECTION_ROLES = {"i2t": {"query": "image", "candidate": "text"}, "t2i": {"query": "text", "candidate": "image"}}
"""Query and candidate of each direction."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, declared once. Evaluation, results, the CLI and the reference follow from its entry in a tuple of the catalog.

    Attributes:
        name: Key in results without the direction: ``r1`` becomes ``i2t_r1`` and ``t2i_r1``. A K in it is replaced by its value.
        label: Name in tables.
        definition: What it measures. ``{query}`` and ``{candidate}`` become image and text, or text and image.
        formula: Formula as text.
        unit: Unit of the value.
        input: What ``function`` takes. "ranks": positive ranks of one direction ``[Q, M]``, see `positive_ranks`. It returns a
            number. "relevance": scores and relevance of one direction ``[Q, C]`` and the values of K, ascending. It returns
            ``[Q, len(ks)]``, NaN where undefined. "metrics": all metrics of ranks by key. It returns a number without direction.
        function: Computes the metric.
        higher_is_better: Whether larger values are better.
    """

    name: str
    label: str
    definition: str
    formula: str
    unit: str
    input: Literal["ranks", "relevance", "metrics"]
    function: Callable[..., Any] = field(repr=False)
    higher_is_better: bool = True

    def key(self, direction: str, k: int | None = None) -> str:
        """Make the key in results.

        Args:
            direction: "i2t" or "t2i".
            k: Cutoff, for a metric with a K in its name.

        Returns:
            A key such as ``i2t_r1`` or ``i2t_cs_at_100``.
        """
        return f"{direction}_{self.name if k is None else self.name.replace('K', str(k))}"

    def for_direction(self, direction: str) -> Metric:
        """Make the metric of one direction, under its key in results.

        Args:
            direction: "i2t" or "t2i".

        Returns:
            The metric.
        """
        return replace(self, name=self.key(direction), definition=self.definition.format(**DIRECTION_ROLES[direction]))
