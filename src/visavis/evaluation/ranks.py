"""The rank of every query of an evaluation, kept in a file beside a result: what comparisons over images are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from visavis import storage
from visavis.errors import RunError, ShapeError


@dataclass(frozen=True, eq=False)
class QueryRanks:
    """The ranks of one protocol.

    image_ranks ``[V]``, text_ranks ``[T]``: of each query's best right answer, from 1. image_ids ``[V]``, text_ids ``[T]``: the image that
    each query belongs to, by a number; an image and its captions have the same.
    """

    image_ranks: np.ndarray
    text_ranks: np.ndarray
    image_ids: np.ndarray
    text_ids: np.ndarray

    def __post_init__(self) -> None:
        for ranks, ids in ((self.image_ranks, self.image_ids), (self.text_ranks, self.text_ids)):
            if ranks.ndim != 1 or ranks.shape != ids.shape or not len(ranks):
                raise ShapeError(f"ranks of shape {list(ranks.shape)} have ids of shape {list(ids.shape)}, expected one id for each query.")


def write_ranks(path: str | Path, ranks: Mapping[str, QueryRanks]) -> None:
    """The ranks of each protocol, by its name, in one safetensors file."""
    storage.write_tensors(
        path,
        {
            f"{protocol}/{field.name}": torch.from_numpy(_small(getattr(of_protocol, field.name)))
            for protocol, of_protocol in ranks.items()
            for field in fields(QueryRanks)
        },
    )


def read_ranks(path: str | Path) -> dict[str, QueryRanks]:
    """The ranks of each protocol, by its name. Raises RunError for a file that holds none."""
    by_protocol: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in storage.read_tensors(path, error=RunError).items():
        protocol, _, field = name.rpartition("/")
        by_protocol.setdefault(protocol, {})[field] = tensor.numpy()
    known = {field.name for field in fields(QueryRanks)}
    if not by_protocol or any(parts.keys() != known for parts in by_protocol.values()):
        raise RunError(f"{path} holds no ranks of queries, expected {', '.join(sorted(known))} of each protocol: evaluate the run anew.")
    return {protocol: QueryRanks(**parts) for protocol, parts in by_protocol.items()}


def _small(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers in four bytes where they fit; means of tied ranks as they are."""
    fit = numbers.dtype.kind == "i" and np.abs(numbers).max() < 2**31
    return numbers.astype(np.int32) if fit else numbers
