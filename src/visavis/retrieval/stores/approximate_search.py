"""Approximate vector indexes: settings, and recall measured against exact search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from visavis.retrieval.stores.base import Neighbor

MEASURED_TOP, TARGET_RECALL, MEASURED_QUERIES = 10, 0.98, 200
NOISE_NORM = 0.3
"""Length of the noise that is added to a stored unit vector to make a query."""


class ApproximateIndex(BaseModel):
    """Settings and measured recall of an approximate index.

    Attributes:
        kind: Type of the index.
        num_items: Number of items when the index was built.
        partitions: Number of partitions of the index.
        probes: Partitions (IVF) or candidates (HNSW) that a query visits.
        refine_factor: Candidates per result that are scored again with full vectors.
        recall: Mean recall of the true top 10, 0 to 1.
        num_queries: Number of queries that recall was measured on.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["IVF_RQ", "IVF_SQ", "HNSW"]
    num_items: int
    partitions: int
    probes: int
    refine_factor: int
    recall: float
    num_queries: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.num_items:,} items: recall of the true top {MEASURED_TOP} is {100 * self.recall:.1f} % ({self.num_queries} queries)"


def noisy_queries(vectors: np.ndarray) -> np.ndarray:
    """Make queries from stored vectors by adding noise of length ``NOISE_NORM`` with a fixed seed.

    Args:
        vectors: Stored vectors, shape ``[N, D]``.

    Returns:
        Unit vectors, float32, shape ``[N, D]``.
    """
    noise = np.random.default_rng(0).standard_normal(vectors.shape)
    noise *= NOISE_NORM / np.linalg.norm(noise, axis=1, keepdims=True)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors / np.where(length == 0, 1, length) + noise
    return (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)


def sample_keys(keys: Sequence[str]) -> list[str]:
    """Sample keys at random with a fixed seed.

    Args:
        keys: Keys to sample from.

    Returns:
        At most ``MEASURED_QUERIES`` keys, in their order.
    """
    rows = np.random.default_rng(0).choice(len(keys), min(MEASURED_QUERIES, len(keys)), replace=False)
    return [keys[row] for row in sorted(rows.tolist())]


def mean_recall(found: Sequence[Sequence[Neighbor]], expected: Sequence[Sequence[Neighbor]]) -> float:
    """Compute the mean recall over queries. A result with the score of the last expected one counts as found.

    Args:
        found: Results of each query.
        expected: True results of each query.

    Returns:
        Recall, 0 to 1.
    """
    recalls = [
        sum(near.score >= best[-1].score for near in results[: len(best)]) / len(best)
        for results, best in zip(found, expected, strict=True)
        if best
    ]
    return float(np.mean(recalls)) if recalls else 1.0


def fewest_probes(measure: Callable[[int], float], max_probes: int, target: float) -> tuple[int, float]:
    """Find the first of 8, 16, 32, ... probes that reaches a target recall.

    Args:
        measure: Returns the recall for a number of probes.
        max_probes: Maximum number of probes.
        target: Target recall, 0 to 1.

    Returns:
        Number of probes (``max_probes`` if the target is not reached), and its recall.

    Example:
        >>> fewest_probes(lambda probes: probes / 100, 50, 0.3), fewest_probes(lambda probes: 0.5, 20, 0.9)
        ((32, 0.32), (20, 0.5))
    """
    probes = min(8, max_probes)
    while (recall := measure(probes)) < target and probes < max_probes:
        probes = min(2 * probes, max_probes)
    return probes, recall
