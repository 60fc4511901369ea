"""The declaration of a metric: its function, and what results, tables and reference pages say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SIDES = {"i2t": {"query": "image", "candidate": "text"}, "t2i": {"query": "text", "candidate": "image"}}
"""What is the query and what is ranked in each direction."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, declared once: evaluation, results, the command line and the reference follow from the entry in a tuple of the catalog.

    name: its key in results without the direction: ``r1`` becomes ``i2t_r1`` and ``t2i_r1``. A K in it is replaced by its value.
    label: its name in tables. definition: what it measures; ``{query}`` and ``{candidate}`` become image and text, or text and image.
    reads: what ``function`` takes. "places": those of one direction ``[Q, M]``, see ``ranking.places``; it returns a number. "degrees":
    scores and degrees of one direction ``[Q, C]`` and the values of K, ascending; it returns ``[Q, len(ks)]``, NaN where undefined.
    "metrics": all metrics of places by their keys; it returns a number, and its key has no direction.
    """

    name: str
    label: str
    definition: str
    formula: str
    unit: str
    reads: Literal["places", "degrees", "metrics"]
    function: Callable[..., Any] = field(repr=False)
    higher_is_better: bool = True

    def key(self, direction: str, k: int | None = None) -> str:
        """Its key in results: ``i2t_r1``; with a K ``i2t_cs_at_100``."""
        return f"{direction}_{self.name if k is None else self.name.replace('K', str(k))}"

    def toward(self, direction: str) -> Metric:
        """The same metric as one direction has it, under its key."""
        return replace(self, name=self.key(direction), definition=self.definition.format(**SIDES[direction]))
