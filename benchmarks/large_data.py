"""A data set of 10 million captions with pooled features on disk: time to open it, memory, and time
until the first batch of an epoch.

    python benchmarks/large_data.py [--captions N] [--captions-per-image N] [--folder PATH]

Each stage runs in a process of its own. The first opening converts the table, checks the features
and hashes them. Later ones use the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

DIMENSIONS = 64
ROWS_PER_WRITE = 2**18
BATCH_SIZE = 1024
# Batches whose time is measured, after the first one.
TIMED_BATCHES = 100
WORDS = [
    "a",
    "two",
    "red",
    "small",
    "large",
    "dog",
    "cat",
    "child",
    "woman",
    "boat",
    "tree",
    "runs",
    "sits",
    "near",
    "on",
    "under",
    "beach",
]


def make_data(folder: Path, captions: int, captions_per_image: int) -> None:
    """Write ``captions.parquet`` and random features of images and captions in blocks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    images = -(-captions // captions_per_image)
    for name, rows in (("images.npy", images), ("texts.npy", captions)):
        array = np.lib.format.open_memmap(folder / name, "w+", np.float16, (rows, DIMENSIONS))
        for start in range(0, rows, ROWS_PER_WRITE):
            count = min(ROWS_PER_WRITE, rows - start)
            array[start : start + count] = rng.standard_normal((count, DIMENSIONS), np.float32)
        array.flush()
    schema = pa.schema(
        [("filename", pa.string()), ("caption", pa.string()), ("split", pa.string())]
    )
    words = np.array(WORDS)
    with pq.ParquetWriter(folder / "captions.parquet", schema) as writer:
        for start in range(0, captions, ROWS_PER_WRITE):
            numbers = np.arange(start, min(start + ROWS_PER_WRITE, captions))
            image = numbers // captions_per_image
            texts = [
                " ".join(row) + f" {i}"
                for i, row in zip(
                    numbers.tolist(),
                    words[rng.integers(0, len(words), (len(numbers), 9))],
                    strict=True,
                )
            ]
            # 1,000 images each for validation and test.
            split = np.where(
                image >= images - 1000, "test", np.where(image >= images - 2000, "val", "train")
            )
            files = [f"photos/{number % 1000:03d}/{number:08d}.jpg" for number in image.tolist()]
            writer.write_table(
                pa.table([files, texts, pa.array(split, pa.string())], schema=schema)
            )


def memory() -> dict[str, int]:
    """Memory of this process in MB: now, at most, and now without pages of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        key: int(status[name].split()[0]) // 1024
        for key, name in (("resident", "VmRSS"), ("peak", "VmHWM"), ("anonymous", "RssAnon"))
    }


def recipe(folder: Path, epochs: int = 1) -> Any:
    from visavis.training.recipes.recipe import build_recipe

    values = {
        "name": "large",
        "data": {"path": str(folder)},
        "visual": {"features": str(folder / "images.npy")},
        "text": {"features": str(folder / "texts.npy"), "granularity": "pooled"},
        "model": {"kind": "Heads", "embedding_dim": 64},
        "training": {"batch_size": BATCH_SIZE, "device": "cpu"},
        "phases": [{"epochs": epochs, "objective": "InfoNCE()"}],
    }
    return build_recipe(values, {}, "large")


def measure(folder: Path) -> dict[str, Any]:
    """Open the data as a training does, then read the first batches of an epoch, and some of a
    resumed one.
    """
    import torch

    from visavis.core.progress import NoProgress
    from visavis.training.runs.record import RunRecord
    from visavis.training.training_run import prepare_training

    torch.set_num_threads(2)
    imported = memory()
    rows = {}
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    start_cpu = time.process_time()
    data_module, matcher = prepare_training(recipe(folder))
    seconds["open"] = time.perf_counter() - start
    seconds["open_cpu"] = time.process_time() - start_cpu
    rows["open"] = memory()
    start = time.perf_counter()
    start_cpu = time.process_time()
    RunRecord.from_training(data_module, matcher, NoProgress())
    seconds["record"] = time.perf_counter() - start
    seconds["record_cpu"] = time.process_time() - start_cpu
    start = time.perf_counter()
    start_cpu = time.process_time()
    loader = data_module.loaders[0]
    batches = loader.epoch(1)
    next(batches)
    seconds["first_batch"] = time.perf_counter() - start
    seconds["first_batch_cpu"] = time.process_time() - start_cpu
    start = time.perf_counter()
    for _ in range(TIMED_BATCHES):
        next(batches)
    seconds["batch"] = (time.perf_counter() - start) / TIMED_BATCHES
    start = time.perf_counter()
    resumed = loader.epoch(2, start=loader.num_batches // 2)
    next(resumed)
    seconds["resumed_epoch"] = time.perf_counter() - start
    rows["end"] = memory()
    sizes = {
        "images": len(data_module.data.images),
        "captions": len(data_module.data.captions),
        "batches": loader.num_batches,
    }
    return {
        **sizes,
        "seconds": {key: round(value, 4) for key, value in seconds.items()},
        "imports": imported,
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--captions", type=int, default=10_000_000)
    parser.add_argument("--captions-per-image", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    # 2,000 images are not in the training split.
    fewest = (TIMED_BATCHES + 1) * BATCH_SIZE + 2000 * options.captions_per_image
    if options.captions < fewest:
        parser.error(
            f"--captions: expected at least {fewest:,}, got {options.captions:,}. Set a larger "
            "number."
        )
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary) / "data"
        folder.mkdir()
        start = time.perf_counter()
        make_data(folder, options.captions, options.captions_per_image)
        print(
            f"{platform.node()}, {os.cpu_count()} cores. Data made in "
            f"{time.perf_counter() - start:.0f} s.",
            flush=True,
        )
        environment = {**os.environ, "VISAVIS_CACHE": str(Path(temporary) / "cache")}
        for stage in ("first", "second", "third"):
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--measure", str(folder)],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(
                f"{stage} opening, {time.perf_counter() - start:.1f} s with imports: "
                f"{done.stdout.strip()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
