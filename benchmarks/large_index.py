"""Large indexes: time to the first result beyond the vector search, and time to update one file.

    python benchmarks/large_index.py [--items 10000 100000 1000000] [--width 256] [--top 30]
    [--repeats 5] [--filter] [--queries CAPTIONS] [--keep FOLDER]

The vectors are random, and the files of the items are one byte long. All times are processor time
of one process, without loading libraries and the model. To compare two versions of visavis, run the
script with each of them first on ``PYTHONPATH``.

- open: open the index.
- search: the first search of an opened index. The time inside of ``ExactSearch.search`` is
  subtracted, which scans the vectors.
- update: ``visavis.index`` after one file changed. The time to list the source, which is not a part
  of the index, is subtracted.

Of the first two, the minimum of the repeats is printed. Each repeat opens the index again.

With ``--queries``, the text side is trained on the index with this number of captions, five of each
image, in the recipe of the index for one epoch. Then three commands are timed as a whole, with the
start of Python: ``train``, ``indexes use-queries`` and the first ``search`` by text.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import visavis
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.retriever import Retriever
from visavis.retrieval.build import index_builder
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import open_index_store, read_manifest, write_manifest
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.source_files import list_readable_files
from visavis.retrieval.stores.exact_search import ExactSearch

RECIPE = """
name = "small"
visual = {{ encoder = "scenes", granularity = "pooled" }}
text = {{ encoder = "vocabulary", min_count = 1 }}
model = {{ kind = "VSE++", embedding_dim = {width}, word_dim = 8 }}
training = {{ batch_size = 32 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
"""
BATCH = 50_000
# Multiples of this number modulo 2^256 differ in many bits.
HASH_FACTOR = (
    int(0.6180339887498949 * 2**52) * 2**204 + 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251
)


@contextmanager
def measured(seconds: dict[str, float], name: str) -> Any:
    """Add the processor time of a block to a dictionary."""
    started = time.process_time()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - started


def timed(seconds: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with measured(seconds, name):
            return function(*arguments, **options)

    return call


def unit(rows: np.ndarray) -> np.ndarray:
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def item(root: Path, number: int) -> IndexItem:
    path = f"{number // 1000:04d}/{number:07d}.png"
    status = os.stat(root / path)
    return IndexItem(
        path,
        path,
        "image",
        f"{number:064x}",
        status.st_size,
        status.st_mtime_ns,
        dhash=f"{number * HASH_FACTOR % 2**256:064x}",
    )


def write_image(root: Path) -> None:
    """Write another image to the first file."""
    Image.fromarray(np.random.default_rng().integers(0, 256, (32, 32, 3), np.uint8)).save(
        root / "0000" / "0000000.png"
    )


def write_source(root: Path, count: int) -> None:
    """Write files of one byte after the first, which are never read, because the index contains
    them.
    """
    for number in range(1, count):
        (root / f"{number // 1000:04d}").mkdir(parents=True, exist_ok=True)
        (root / f"{number // 1000:04d}" / f"{number:07d}.png").write_bytes(b"0")


def fill(folder: Path, root: Path, count: int, width: int) -> None:
    """Add items with random vectors to an index of the first file, and finish it."""
    manifest = read_manifest(folder)
    random = np.random.default_rng(0)
    store = open_index_store(folder, manifest, create=True)
    for start in range(1, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        store.add(
            [item(root, number) for number in numbers],
            unit(random.standard_normal((len(numbers), width), np.float32)),
        )
    store.prepare_search()
    write_manifest(folder, replace(manifest, digest=store.digest()))
    store.close()


def measure(folder: Path, root: Path, run: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part."""
    seconds: dict[str, float] = {}
    query = torch.from_numpy(
        unit(np.random.default_rng(1).standard_normal((1, options.width), np.float32))
    )
    item_filter = ItemFilter(path="*7.png") if options.filter else NO_FILTER
    scan = ExactSearch.search
    rounds = list[dict[str, float]]()
    for _ in range(options.repeats):
        rounds.append({})
        with measured(rounds[-1], "open"):
            index = open_index(folder)
        with (
            patch.object(ExactSearch, "search", timed(rounds[-1], "scan", scan)),
            measured(rounds[-1], "search"),
        ):
            results = search_collection(
                index,
                SearchQuery.from_text("red"),
                options.top,
                item_filter,
                encode_texts=lambda _: list(query),
            )
        rounds[-1]["search"] -= rounds[-1]["scan"]
        assert len(results) == options.top
        index.store.close()
    seconds |= {name: min(one[name] for one in rounds) for name in rounds[0]}
    write_image(root)
    listing = patch.object(
        index_builder, "list_readable_files", timed(seconds, "listing", list_readable_files)
    )
    with listing, measured(seconds, "update"):
        report = build_index(run, root, folder, progress=NoProgress())
    seconds["update"] -= seconds["listing"]
    assert report.num_encoded == 1
    return seconds


def measure_queries(index: Path, root: Path, count: int) -> dict[str, float]:
    """Seconds of the commands that train, use and ask another query model."""
    words = np.random.default_rng(2).integers(0, 1000, (count, 8))
    rows = [
        f"{number // 5 // 1000:04d}/{number // 5:07d}.png,{split},{' '.join(f'w{word}' for word in line)}"
        for number, line in enumerate(words)
        for split in [("train", "val")[number // 5 % 20 == 0]]
    ]
    captions = root / "captions.csv"
    run = root.parent / f"queries-{root.name}"
    captions.write_text("\n".join(["filename,split,caption", *rows]))
    shutil.rmtree(run, ignore_errors=True)
    commands = {
        "train": ["train", "--index", index, "--data", captions, "--out", run],
        "use": ["indexes", "use-queries", index, run],
        "ask": ["search", index, "w1 w2 w3", "--top", "5"],
    }
    seconds = dict[str, float]()
    for name, words_of_command in commands.items():
        started = time.perf_counter()
        command = [sys.executable, "-m", "visavis", *map(str, words_of_command), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds[name] = time.perf_counter() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--filter", action="store_true", help="search the items whose path ends with 7.png"
    )
    parser.add_argument(
        "--keep", type=Path, help="keep the indexes in this folder, and use those in it"
    )
    parser.add_argument(
        "--queries", type=int, default=0, help="captions of another query model, 0: none"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "run").exists():
            scenes = write_synthetic_scenes(
                folder / "few",
                num_train=64,
                num_val=8,
                num_test=8,
                captions_per_image=1,
                size=32,
                seed=0,
            )
            (folder / "recipe.toml").write_text(RECIPE.format(width=options.width))
            visavis.train(folder / "recipe.toml", data=scenes, out=folder / "run")
        model = Retriever.load(folder / "run")
        Retriever.load = staticmethod(lambda *_, **__: model)  # type: ignore[method-assign]
        # The first index is a warm-up, and loads libraries.
        for number, count in enumerate([1000, *options.items]):
            root = folder / f"source-{count}"
            index = folder / f"index-{count}"
            if not index.exists():
                shutil.rmtree(root, ignore_errors=True)
                (root / "0000").mkdir(parents=True)
                write_image(root)
                build_index(folder / "run", root, index, progress=NoProgress())
                write_source(root, count)
                fill(index, root, count, options.width)
            seconds = measure(index, root, folder / "run", options)
            if number:
                print(
                    f"{count:9,} items: opened in {1000 * seconds['open']:.1f} ms, first result "
                    f"{1000 * seconds['search']:.1f} ms beyond the "
                    f"vector search of {1000 * seconds['scan']:.0f} ms, "
                    f"update of one file {seconds['update']:.2f} s beyond listing the source in "
                    f"{seconds['listing']:.2f} s",
                    flush=True,
                )
                if options.queries:
                    seconds = measure_queries(index, root, options.queries)
                    print(
                        f"{count:9,} items, {options.queries:,} captions: text side trained in "
                        f"{seconds['train']:.1f} s, in use after {seconds['use']:.1f} s, first "
                        f"result after {seconds['ask']:.1f} s more",
                        flush=True,
                    )
            if options.keep is None:
                shutil.rmtree(root)
                shutil.rmtree(index)


if __name__ == "__main__":
    main()
