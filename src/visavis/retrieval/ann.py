"""An approximate index: how it was made, how it is asked, and how much of the true top 10 it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from visavis.retrieval.store import Near

WORTH_FROM = 2_000_000
"""Items from which on an approximate index is worth its time: below, exact search answers within a fraction of a second."""
TOP, WANTED, ASKED = 10, 0.98, 200
NOISE = 0.3
"""The length of what is added to a stored unit vector to make a query of it."""


class Ann(BaseModel):
    """kind: of the index. rows: items when it was made. partitions: it has. probes: partitions, or candidates in HNSW, that a query looks
    at. refined: candidates for each result that are scored again. recall: of the true top 10, found on average over ``queries`` queries.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["IVF_RQ", "IVF_SQ", "HNSW"]
    rows: int
    partitions: int
    probes: int
    refined: int
    recall: float
    queries: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.rows:,} items finds {100 * self.recall:.1f} % of the true top {TOP} ({self.queries} queries)"


def perturbed(vectors: np.ndarray) -> np.ndarray:
    """Queries beside stored vectors: unit vectors with noise of length ``NOISE`` added, always the same."""
    noise = np.random.default_rng(0).standard_normal(vectors.shape)
    noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors / np.where(length == 0, 1, length) + noise
    return (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)


def sample(keys: Sequence[str]) -> list[str]:
    """At most ``ASKED`` keys, always the same, in their order."""
    rows = np.random.default_rng(0).choice(len(keys), min(ASKED, len(keys)), replace=False)
    return [keys[row] for row in sorted(rows.tolist())]


def recall(found: Sequence[Sequence[Near]], true: Sequence[Sequence[Near]]) -> float:
    """Which share of what is truly nearest was found, on average over queries; a score that is equal to the last true one counts."""
    shares = [
        sum(near.score >= best[-1].score for near in own[: len(best)]) / len(best) for own, best in zip(found, true, strict=True) if best
    ]
    return float(np.mean(shares)) if shares else 1.0


def fewest(measure: Callable[[int], float], most: int, wanted: float) -> tuple[int, float]:
    """The first of 8, 16, 32, ... probes, at most ``most``, that finds what is wanted, and its recall; else those of ``most``.

    >>> fewest(lambda probes: probes / 100, 50, 0.3), fewest(lambda probes: 0.5, 20, 0.9)
    ((32, 0.32), (20, 0.5))
    """
    probes = min(8, most)
    while (reached := measure(probes)) < wanted and probes < most:
        probes = min(2 * probes, most)
    return probes, reached
