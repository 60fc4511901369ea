"""What a metric is: a function, and all that results, tables and pages say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SIDES = {"i2t": {"query": "image", "candidate": "text"}, "t2i": {"query": "text", "candidate": "image"}}
"""What asks and what is ranked in each direction."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, declared once: evaluation, results, the command line and the reference follow from the entry in a tuple of the catalog.

    name: its key in results, behind the direction: ``r1`` stands there as ``i2t_r1`` and ``t2i_r1``. A K in it is filled in.
    label: how tables call it. definition: what it says; ``{query}`` and ``{candidate}`` become image and text, or text and image.
    reads: what ``function`` takes. "places": those of one direction ``[Q, M]``, see ``ranking.places``; it returns a number. "degrees":
    scores and degrees of one direction ``[Q, C]`` and the K, rising; it returns a value a query and K ``[Q, len(ks)]``, NaN where
    it is undefined. "metrics": all numbers of places by their keys; it returns a number, and its name stands without a direction.
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
