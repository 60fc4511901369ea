"""Late interaction: two-stage search compared with exact MaxSim, over 100,000 items of 49 vectors.

    VISAVIS_DATA=... python benchmarks/late_interaction.py [--run RUN] [--items 100000] [--dim 128]
    [--queries 50]

Items are the 49 regions of the photos of Flickr8k, repeated with noise of length 0.3 per vector.
With ``--run``, a run of a MaxSim model, regions come from the model without ``region_grid``, and
queries are captions. Otherwise regions are MobileNetV2 features in the first ``--dim`` principal
components, and a query is 12 regions of a photo with noise.

    visavis train maxsim-minilm-flickr8k model.embedding_dim=128 model.context_dim=256
    phases.0.epochs=1 seed=1 --out runs/maxsim

Printed: bytes per item, recall@10 of exact MaxSim, and milliseconds of single queries, all in one
process. ``--recall``: also the recall of other numbers of pooled vectors and candidates. ``--item-bytes 1000 2000``: only compressed
vectors of these sizes, compared with exact search in float32. With ``--grid``, regions are averaged
as by the model, and queries are captions of the test split. With 7,999 items, there are no copies.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.core.progress import NoProgress
from visavis.core.ragged import MaxSimDirection
from visavis.data.data_paths import data_folder
from visavis.data.dataset_reader import open_dataset
from visavis.models.base import get_vectors
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.image_text.cross_attention import RegionWordMatcher
from visavis.models.retriever import Retriever
from visavis.retrieval.build.compression import choose_codec, noisy_set_queries
from visavis.retrieval.items import IndexItem
from visavis.retrieval.stores.base import MaxSimQuery, VectorSets
from visavis.retrieval.stores.maxsim_search import MaxSimSearch, pool_vectors
from visavis.retrieval.stores.sqlite_store import SqliteStore
from visavis.training.runs.open_run import open_run, read_run_recipe

TOP = 10
NOISE = 0.3
BATCH = 2000
INDEX_ID = "00"


def print_now(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def backbone_regions(dim: int) -> np.ndarray:
    """Regions of the photos in their principal components, ``[N, 49, dim]``."""
    data_root = data_folder()
    if data_root is None:
        raise SystemExit("VISAVIS_DATA: missing. Set it to the folder that contains flickr8k/.")
    features = cache_features(
        open_dataset(data_root / "flickr8k"), EncoderSpec("visual", "mobilenet-v2", "regions")
    )
    sample = get_vectors(features.read(np.arange(0, len(features), 40))).float().flatten(0, 1)
    mean = sample.mean(0)
    basis = torch.linalg.eigh((sample - mean).T @ (sample - mean)).eigenvectors[:, -dim:]
    parts = []
    for start in range(0, len(features), 256):
        vectors = get_vectors(
            features.read(np.arange(start, min(start + 256, len(features))))
        ).float()
        parts.append(unit(((vectors - mean) @ basis).numpy()))
    return np.concatenate(parts)


def run_vectors(
    run: Path, count: int, *, grid: bool = False
) -> tuple[np.ndarray, list[MaxSimQuery], MaxSimDirection, np.ndarray]:
    """Regions of the photos of a run's data, queries of its captions, the direction of its model,
    and the photo of each query.
    """
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    direction = matcher.late_interaction
    if direction is None:
        raise SystemExit(f"{run}: expected a run of a MaxSim model.")
    if isinstance(matcher.config, RegionWordMatcher.Config) and not grid:
        # The layers read single regions, so that a model of pooled regions also encodes all of
        # them.
        matcher.config = replace(matcher.config, region_grid=0)
    visual, text = data_module.encode(matcher, data_module.data)
    data = data_module.data
    splits = np.array([image.split for image in data.images])[data.image_of]
    captions = np.flatnonzero(splits == "test") if grid else np.arange(len(text))
    sampled = np.random.default_rng(1).choice(captions, count, replace=False)
    words = Retriever(matcher, data_module.processor).item_vectors(
        text[torch.from_numpy(np.sort(sampled))]
    )
    return (
        get_vectors(visual).numpy(),
        [MaxSimQuery.from_vectors((1.0, rows.numpy())) for rows in words],
        direction,
        np.array(data.image_of)[np.sort(sampled)],
    )


def noisy_batches(regions: np.ndarray, number: int) -> Iterator[tuple[int, np.ndarray]]:
    """The photos, then repetitions with noise, in batches."""
    generator = np.random.default_rng(0)
    for start in range(0, number, BATCH):
        rows = regions[np.arange(start, min(start + BATCH, number)) % len(regions)]
        if start >= len(regions):
            rows = unit(rows + NOISE * unit(generator.standard_normal(rows.shape, np.float32)))
        yield start, rows


def as_sets(rows: np.ndarray) -> VectorSets:
    return VectorSets(rows.reshape(-1, rows.shape[-1]), np.arange(len(rows) + 1) * rows.shape[1])


def fill(store: SqliteStore, regions: np.ndarray, number: int) -> float:
    """Add all items. Return the seconds."""
    started = time.perf_counter()
    for start, rows in noisy_batches(regions, number):
        items = [
            IndexItem(f"{row:08d}", f"{row:08d}.jpg", "image", "", 0, row)
            for row in range(start, start + len(rows))
        ]
        store.add(items, as_sets(rows))
    return time.perf_counter() - started


def timed(
    search: Callable[[MaxSimQuery], Any], queries: list[MaxSimQuery]
) -> tuple[list[Any], np.ndarray]:
    """Results, and milliseconds of each query: elapsed, and of processors."""
    results = []
    milliseconds = []
    for query in queries:
        started = time.perf_counter()
        used = time.process_time()
        results.append(search(query))
        milliseconds.append(
            (1000 * (time.perf_counter() - started), 1000 * (time.process_time() - used))
        )
    return results, np.array(milliseconds)


def describe(milliseconds: np.ndarray) -> str:
    low, median, high = np.percentile(milliseconds[:, 0], [10, 50, 90])
    used = np.median(milliseconds[:, 1])
    return f"median {median:.1f} ms per query (10 to 90 %: {low:.1f} to {high:.1f}), processor time {used:.1f} ms"


def recall(results: list[list[int]], true: list[list[int]]) -> float:
    return 100 * float(
        np.mean(
            [
                len(set(items) & set(best)) / len(best)
                for items, best in zip(results, true, strict=True)
            ]
        )
    )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def two_stages(
    store: SqliteStore, queries: list[MaxSimQuery], direction: MaxSimDirection, with_recall: bool
) -> None:
    """Recall and time of the store's search, and the time of exact search, in turn."""
    sets = store.all_vectors()
    assert isinstance(sets, VectorSets)
    exact = MaxSimSearch(sets, direction)
    searches: dict[str, Callable[[MaxSimQuery], list[int]]] = {
        "exact": lambda query: exact.search([query], TOP)[1][0].tolist(),
        "two stages": lambda query: [int(key) for key, _ in store.search([query], TOP)[0]],
    }
    for search in searches.values():
        timed(search, queries[:2])
    results = {name: timed(search, queries) for name, search in searches.items()}
    true = results["exact"][0]
    for name, (items, milliseconds) in results.items():
        print_now(
            f"{name}, {direction}: recall@{TOP} {recall(items, true):.1f} %, "
            f"{describe(milliseconds)}"
        )
    if not with_recall:
        return
    last = np.array(
        [
            exact.exact_scores(np.array(best), query)[-1]
            for best, query in zip(true, queries, strict=True)
        ]
    )
    full = all_scores(sets, queries, direction)
    for count in (1, 2, 4, 6, 9):
        order = (-all_scores(pool_vectors(sets, count), queries, direction)).argsort(1)[:, :4096]
        correct = np.take_along_axis(full, order, 1) >= last[:, None] - 1e-6
        shares = ", ".join(
            f"{n}: {100 * np.minimum(correct[:, :n].sum(1) / TOP, 1).mean():.1f} %"
            for n in (64, 256, 1024, 2048, 4096)
        )
        print_now(f"{count} pooled vectors, recall@{TOP} by candidates: {shares}")


def compressed(
    options: argparse.Namespace,
    regions: np.ndarray,
    queries: list[MaxSimQuery],
    direction: MaxSimDirection,
    photos: np.ndarray,
) -> None:
    """Recall, size and time of searches in compressed vectors."""
    sets = as_sets(np.concatenate([rows for _, rows in noisy_batches(regions, options.items)]))
    exact = MaxSimSearch(sets, direction)

    def captions(results: list[list[int]]) -> float:
        return 100 * float(np.mean([p in r for p, r in zip(photos, results, strict=True)]))

    def measure(name: str, search: MaxSimSearch, true: list[list[int]]) -> list[list[int]]:
        search.search(queries[:1], TOP)
        results, milliseconds = timed(lambda q: search.search([q], TOP)[1][0].tolist(), queries)
        print_now(
            f"{name}: recall@{TOP} {recall(results, true or results):.1f} %, captions "
            f"{captions(results):.1f} %, {describe(milliseconds)}"
        )
        return results

    count, dim = regions.shape[1:]
    true = measure(f"{options.items:,} items of {count} x {dim}, float32", exact, [])
    for size in options.item_bytes:
        codec = choose_codec(sets, size, direction)
        codes = codec.encode(sets)
        kept = codec.encoding.num_vectors or count
        bits = 8 * codec.encoding.vector_bytes / dim
        name = f"{codes.rows.size / len(sets):,.0f} bytes, {kept} vectors, {bits:.2f} bits"
        measure(name, MaxSimSearch(codes, direction), true)


def all_scores(
    sets: VectorSets, queries: list[MaxSimQuery], direction: MaxSimDirection
) -> np.ndarray:
    """Scores of all items for all queries of one part each, in float32, ``[Q, N]``."""
    vectors = torch.from_numpy(np.concatenate([query.parts[0] for query in queries]))
    scores = []
    for start in range(0, len(sets), 1024):
        block = sets[start : start + 1024]
        products = vectors @ torch.from_numpy(np.array(block.rows)).T
        of_items = products.view(len(vectors), len(block), -1).split(
            [len(query.parts[0]) for query in queries]
        )
        means = {
            "t2i": [part.amax(2).mean(0) for part in of_items],
            "i2t": [part.amax(0).mean(1) for part in of_items],
        }
        scores.append(
            torch.stack(
                [sum(pair) / 2 for pair in zip(*means.values(), strict=True)]
                if direction == "both"
                else means[direction]
            )
        )
    joined: np.ndarray = torch.cat(scores, 1).numpy()
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument(
        "--folder", type=Path, help="Folder for the store. Default: a temporary one."
    )
    parser.add_argument("--recall", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--item-bytes", type=int, nargs="*")
    for name, default in (
        ("items", 100_000),
        ("dim", 128),
        ("queries", 50),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_now(f"{os.uname().nodename}: {options.threads} threads")
    if options.run:
        regions, queries, direction, photos = run_vectors(
            options.run, options.queries, grid=options.grid
        )
        if options.item_bytes:
            compressed(options, regions, queries, direction, photos)
            return
        options.dim = regions.shape[-1]
    else:
        regions = backbone_regions(options.dim)
        direction = "both"
        sampled = np.sort(
            np.random.default_rng(1).choice(len(regions), options.queries, replace=False)
        )
        queries = noisy_set_queries(as_sets(regions[sampled]))
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        if options.items:
            folder = Path(temporary) / "store"
            store = SqliteStore(folder, options.dim, index_id=INDEX_ID, late_interaction=direction)
            seconds = fill(store, regions, options.items)
            started = time.perf_counter()
            store.prepare_search()
            print_now(
                f"{options.items:,} items of {regions.shape[1]} x {options.dim}, "
                f"{np.mean([len(query.parts[0]) for query in queries]):.1f} vectors "
                f"per query: written in {seconds:.0f} s, pooled in "
                f"{time.perf_counter() - started:.0f} s"
            )
            sizes = {
                "vectors": (folder / "vectors" / "1.npy").stat().st_size,
                "pooled": sum(map(folder_bytes, folder.glob("vectors/*.coarse-*"))),
                "items": (folder / "index.db").stat().st_size,
                "store on disk": folder_bytes(folder),
            }
            print_now(
                "bytes per item: "
                + ", ".join(f"{name} {size / options.items:,.0f}" for name, size in sizes.items())
            )
            for search_direction in dict.fromkeys((direction, "t2i")):
                # The direction is a setting of the search. The stored vectors are the same.
                store.late_interaction = search_direction
                store._snapshot = None
                two_stages(store, queries, search_direction, options.recall)
            store.close()


if __name__ == "__main__":
    main()
