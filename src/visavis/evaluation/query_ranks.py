"""Ranks of every query of a result, and the file that stores them for comparisons over images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from visavis.core import storage
from visavis.core.errors import RunError, ShapeError

RANK_TYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Types of ranks and ids in a file."""


@dataclass(frozen=True, eq=False)
class QueryRanks:
    """Rank of every query under one protocol, stored next to a result for comparisons over images.

    Attributes:
        image_ranks: Rank of the best positive of each image, shape ``[V]``, starting at 1.
        text_ranks: Rank of the best positive of each text, shape ``[T]``.
        image_ids: Number of each image, shape ``[V]``.
        text_ids: Number of the image of each text, shape ``[T]``.
    """

    image_ranks: np.ndarray
    text_ranks: np.ndarray
    image_ids: np.ndarray
    text_ids: np.ndarray

    def __post_init__(self) -> None:
        for ranks, ids in ((self.image_ranks, self.image_ids), (self.text_ranks, self.text_ids)):
            if ranks.ndim != 1 or ranks.shape != ids.shape or not len(ranks):
                raise ShapeError(
                    f"ranks: expected one id per query, got ranks of shape {list(ranks.shape)} and "
                    f"ids of shape {list(ids.shape)}."
                )


def write_query_ranks(path: str | Path, ranks: Mapping[str, QueryRanks]) -> None:
    """Write the ranks of several protocols to one safetensors file."""
    tensors = {}
    for protocol, query_ranks in ranks.items():
        for name, numbers in vars(query_ranks).items():
            # Integers take four bytes if they fit. Means of tied ranks stay as they are.
            fits = numbers.dtype.kind == "i" and np.abs(numbers).max() < 2**31
            tensors[f"{protocol}/{name}"] = torch.from_numpy(
                numbers.astype(np.int32) if fits else numbers
            )
    storage.write_tensors(path, tensors)


def read_query_ranks(path: str | Path) -> dict[str, QueryRanks]:
    """Read the ranks of several protocols."""
    by_protocol: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in storage.read_tensors(path, error=RunError).items():
        if tensor.dtype not in RANK_TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise RunError(
                f"{path}: expected ranks as integers or floating-point numbers, got {kind} in "
                f"{name}. Evaluate the run again."
            )
        protocol, _, field = name.rpartition("/")  # protocol names may have slashes
        by_protocol.setdefault(protocol, {})[field] = tensor.numpy()
    expected = {field.name for field in fields(QueryRanks)}
    if not by_protocol or any(tensors.keys() != expected for tensors in by_protocol.values()):
        given = next((sorted(each) for each in by_protocol.values() if each.keys() != expected), [])
        raise RunError(
            f"{path}: expected {', '.join(sorted(expected))} of each protocol, got "
            f"{', '.join(given) or 'no tensors'}. Evaluate the run again."
        )
    return {protocol: QueryRanks(**tensors) for protocol, tensors in by_protocol.items()}
