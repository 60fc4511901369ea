"""Who encodes the shards of a collection: this process, or the processes of a Ray cluster; the rows are the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from visavis.data.dataset import Bytes
from visavis.errors import MissingExtra, VisavisError
from visavis.models.retriever import Retriever
from visavis.retrieval.encoding import Shard, encode_shard
from visavis.retrieval.item import Item
from visavis.retrieval.sources import File

SHARD = 256
"""Files that are encoded and stored at once: what a crash can lose."""
Engine = Literal["local", "ray"]


def shards(
    engine: Engine, workers: int, model_name: str, model: Retriever, files: Sequence[File], moments_s: float
) -> Iterator[tuple[Sequence[File], Shard]]:
    """The files, so many at a time, and their rows; of "ray" in the order in which they come. Raises MissingExtra without Ray."""
    parts = [files[start : start + SHARD] for start in range(0, len(files), SHARD)]
    if engine == "local":
        yield from ((part, encode_shard(model, part, moments_s)) for part in parts)
    elif engine == "ray":
        yield from _by_ray(workers, model_name, model.width, parts, moments_s)
    else:
        raise VisavisError(f'engine is {engine!r}, expected "local" or "ray".')


def _by_ray(
    workers: int, model: str, width: int | None, parts: Sequence[Sequence[File]], moments_s: float
) -> Iterator[tuple[Sequence[File], Shard]]:
    """Ray Data over shards, an actor with the model in each process; a lost actor's shards are computed again by another."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise MissingExtra("ray", "scale", "indexing with --engine ray") from None
    if workers < 1:
        raise VisavisError(f"workers is {workers}, expected at least 1.")
    if not parts:
        return
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"number": number, "files": json.dumps([_said(file) for file in part])} for number, part in enumerate(parts)]
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        _Encoder,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
        fn_constructor_args=(model, width, moments_s),
    )
    for row in data.iter_rows():
        items = tuple(Item(**fields) for fields in json.loads(row["items"]))
        vectors = np.frombuffer(row["vectors"], np.float32).reshape(len(items), -1) if items else np.empty((0, 0), np.float32)
        yield parts[row["number"]], Shard(items, vectors, json.loads(row["bad"]))


class _Encoder:
    """What each process of the cluster holds."""

    def __init__(self, model: str, width: int | None, moments_s: float):
        loaded = Retriever.load(model)
        self.model, self.moments_s = loaded if width is None else loaded.narrowed(width), moments_s

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shard = encode_shard(self.model, [_heard(fields) for fields in json.loads(batch["files"][0])], self.moments_s)
        return {
            "number": batch["number"],
            "items": [json.dumps([asdict(item) for item in shard.items])],
            "vectors": [shard.vectors.tobytes()],
            "bad": [json.dumps(shard.bad)],
        }


def _said(file: File) -> dict[str, Any]:
    return asdict(file) | {"bytes": {**asdict(file.bytes), "path": str(file.bytes.path.absolute())}}


def _heard(fields: dict[str, Any]) -> File:
    place = fields["bytes"]
    return File(**{**fields, "bytes": Bytes(**{**place, "path": Path(place["path"])})})
