"""Shared by the parts of an audit: the issues that they report, and a disk cache of results, so
that an interrupted audit resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.progress import Progress

Result = TypeVar("Result")


@dataclass(frozen=True)
class Issue:
    """One kind of problem in a data set.

    Attributes:
        kind: Name of the kind, such as "copies across splits".
        count: Number of affected pairs or captions.
        description: Sentence with the measured values.
        fix: How to fix it.
        examples: Descriptions of affected items, the worst first.
        serious: Whether the problem is common enough to change a training or an evaluation.
    """

    kind: str
    count: int
    description: str
    fix: str
    examples: tuple[str, ...]
    serious: bool


@dataclass(frozen=True)
class CachedModel(Generic[Result]):
    """Model that an audit trains, and whose result is cached.

    Attributes:
        file: Cache file of the result.
        num_steps: Number of training steps.
        result: Function that returns the result, and trains the model if the file does not exist.
            It receives the progress.
    """

    file: Path
    num_steps: int
    result: Callable[[Progress], Result]


def format_count(count: int, noun: str) -> str:
    """Format a number of items.

    Args:
        count: The number.
        noun: Counted items, in the singular.

    Returns:
        The number and the noun, in the plural where needed.

    Example:
        >>> format_count(1, "pair"), format_count(1200, "pair")
        ('1 pair', '1,200 pairs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cache_path(*key_parts: Any) -> Path:
    """Return the path, without a suffix, of a cached result.

    Args:
        key_parts: Everything the result depends on. The versions of torch and visavis are added.

    Returns:
        A path in the cache folder.
    """
    text = json.dumps(
        [version("visavis"), torch.__version__, *key_parts], sort_keys=True, default=str
    )
    return storage.cache_folder() / "audits" / hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_tensors(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Read cached tensors, or compute and cache them. A damaged file is computed again.

    Args:
        path: Path from ``cache_path``.
        compute: Computes the tensors.

    Returns:
        The tensors by name.
    """
    file = path.with_suffix(".safetensors")
    if os.path.exists(file):
        try:
            return storage.read_tensors(file)
        except DataError as damage:
            storage.remove_damaged(file, [file], str(damage))
    tensors = compute()
    storage.write_tensors(file, tensors)
    return tensors


def cached_value(path: Path, shape: Any, compute: Callable[[], Any]) -> Any:
    """Read a cached JSON value, or compute and cache it. A damaged file is computed again.

    Args:
        path: Path from ``cache_path``.
        shape: Type of the value, such as ``list[float]`` or a dataclass.
        compute: Computes the value as JSON data.

    Returns:
        The value as an instance of ``shape``.
    """
    file = path.with_suffix(".json")
    if (value := storage.read_checksummed_json(file, shape)) is not None:
        return value
    storage.write_checksummed_json(file, compute())
    return storage.read_checksummed_json(file, shape)
