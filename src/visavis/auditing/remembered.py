"""What an audit has computed is kept in the cache, by all that it follows from: the next call goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis import storage
from visavis.errors import DataError


def place(*facts: Any) -> Path:
    """Where something lies that follows from these facts, torch and this version."""
    text = json.dumps([version("visavis"), torch.__version__, *facts], sort_keys=True, default=str)
    return storage.cache_folder() / "audits" / hashlib.sha256(text.encode()).hexdigest()[:24]


def remembered_tensors(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors that an earlier call kept, or new ones, which are kept; a damaged file is made anew."""
    file = path.with_suffix(".safetensors")
    if file.exists():
        try:
            return storage.read_tensors(file)
        except DataError as damage:
            storage.discard(file, [file], str(damage))
    tensors = compute()
    storage.write_tensors(file, tensors)
    return tensors


def remembered_value(path: Path, shape: Any, compute: Callable[[], Any]) -> Any:
    """A JSON value, as a value of a type, that an earlier call kept, or a new one, which is kept."""
    file = path.with_suffix(".json")
    if (value := storage.kept(file, shape)) is not None:
        return value
    storage.keep(file, compute())
    return storage.kept(file, shape)
