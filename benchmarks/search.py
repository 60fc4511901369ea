"""Search: exact search compared with faiss, and an approximate index of Milvus Lite compared with
exact search.

    python benchmarks/search.py [--rows 1000000] [--milvus 200000] [--filtered 100000]
    [--width 512] [--repeats 5]

Times are the minimum of the repeats, all in one process and in turn. OMP_NUM_THREADS sets the
threads of each.

``--rows``: exact top 10 of random unit vectors, with a batch of 64 queries and with one, compared
with faiss' IndexFlatIP and with a sum over the same array. The top 10 is compared with one in
float64. ``--milvus``: sentence embeddings of Flickr8k's captions in Milvus Lite, repeated with noise
of length 0.3. Queries are captions with such noise. ``--filtered``: single queries with filters that
a share of the items passes, compared with faiss' IDSelectorBitmap in the same random vectors. 0
leaves a part out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.data.data_paths import data_folder
from visavis.data.dataset_reader import open_dataset
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features
from visavis.retrieval.build.compression import TARGET_RECALL
from visavis.retrieval.items import CHECKSUM, NO_FILTER, IndexItem, ItemFilter, ItemKind
from visavis.retrieval.stores.base import MAX_NORM, Neighbor
from visavis.retrieval.stores.exact_search import (
    ExactSearch,
    Int8Pass,
    exact_scores,
    is_int8_faster,
    max_threads,
    open_int8_codes,
    write_int8_codes,
)
from visavis.retrieval.stores.item_snapshot import ItemSnapshot, SearchedRows
from visavis.retrieval.stores.item_table import ItemTable
from visavis.retrieval.stores.milvus_store import TIE_MARGIN, MilvusStore

BATCH = 64
TOP = 10
NOISE = 0.3
FILTERED_QUERIES = 10
"""Queries for each filter."""


def print_now(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def unit(rows: np.ndarray) -> np.ndarray:
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def random_rows(number: int, width: int, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng(seed).standard_normal((number, width), np.float32))


def minimum_times(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The minimum time of each function. The functions take turns."""
    seconds = dict.fromkeys(work, float("inf"))
    for _ in range(repeats + 1):  # The first round is also a warm-up.
        for name, run in work.items():
            started = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def exact(options: argparse.Namespace, folder: Path) -> None:
    """Exact search compared with faiss."""
    import faiss

    faiss.omp_set_num_threads(max_threads())
    rows = random_rows(options.rows, options.width)
    queries = random_rows(BATCH, options.width, 1)
    row_tensor = torch.from_numpy(rows)
    flat = faiss.IndexFlatIP(options.width)
    flat.add(rows)
    float32_search = ExactSearch(rows)
    searches = {}
    if is_int8_faster(*rows.shape):
        started = time.perf_counter()
        write_int8_codes(folder, rows)
        print_now(f"int8 rows written in {time.perf_counter() - started:.1f} s")
        searches["int8"] = ExactSearch(rows, coarse=open_int8_codes(folder))
    searches["float32"] = float32_search
    scores = np.concatenate(
        [
            rows[chunk].astype(np.float64) @ queries.astype(np.float64).T
            for chunk in np.array_split(np.arange(len(rows)), 100)
        ]
    )
    true = np.argsort(-scores.astype(np.float32), axis=0, kind="stable")[:TOP].T
    for name, search in searches.items():
        print_now(
            f"{name}: the true top {TOP} of "
            f"{(search.search(queries, TOP)[1] == true).all(1).sum()} of {BATCH} queries"
        )
    for number in (BATCH, 1):
        query_batch = queries[:number]
        work: dict[str, Callable[[], object]] = {
            name: lambda search=search, query_batch=query_batch: search.search(query_batch, TOP)
            for name, search in searches.items()
        }
        seconds = minimum_times(
            {
                "sum": row_tensor.sum,
                "faiss": lambda query_batch=query_batch: flat.search(query_batch, TOP),
                **work,
            },
            options.repeats,
        )
        for name in searches:
            times = f"{seconds['faiss'] / seconds[name]:.1f} times as fast as faiss ({1000 * seconds['faiss']:.1f} ms)"
            times += f", {seconds[name] / seconds['sum']:.2f} times a sum ({1000 * seconds['sum']:.1f} ms)"
            print_now(
                f"{options.rows:,} x {options.width}, {number:2d} queries, {name}: "
                f"{1000 * seconds[name]:.1f} ms, {times}"
            )


def filtered(options: argparse.Namespace) -> None:
    """Recall and time of filtered searches. The items that pass are spread over all rows."""
    import faiss

    faiss.omp_set_num_threads(max_threads())
    # Python wrappers replace constructors at run time, which stubs do not describe.
    untyped_faiss: Any = faiss
    number = options.filtered
    rows = random_rows(number, options.width)
    queries = random_rows(FILTERED_QUERIES, options.width, 1)
    paths = [f"{row % 1000:03d}/{row:08d}.jpg" for row in range(number)]
    kinds: list[ItemKind] = ["image", "video"] * (number // 2)
    table = ItemTable.in_memory(
        IndexItem(path, path, kind, "", 0, 0).to_row() | {CHECKSUM: 0}
        for path, kind in zip(paths, kinds, strict=True)
    )
    # The items are in the order of keys.
    rows = rows[np.argsort(paths)]
    search = ExactSearch(rows, coarse=Int8Pass.from_vectors(rows), max_norm=MAX_NORM)
    snapshot = ItemSnapshot("benchmark", "", table, rows, [SearchedRows(0, search)])
    flat = faiss.IndexFlatIP(options.width)
    flat.add(rows)

    chunks = np.array_split(np.arange(number), 100)
    wide = queries.astype(np.float64).T
    scores = np.concatenate([rows[chunk].astype(np.float64) @ wide for chunk in chunks])
    for where in (
        NO_FILTER,
        ItemFilter(path="000/*"),
        ItemFilter(path="00*"),
        ItemFilter(path="0*"),
        ItemFilter(kind="image"),
        ItemFilter(path="*.jpg"),
    ):
        mask = np.zeros(number, bool)
        mask[table.matching_rows(where)] = True
        selector = untyped_faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        parameters = untyped_faiss.SearchParameters(sel=selector) if where else None
        allowed = np.flatnonzero(mask)

        def ours(query: np.ndarray, where: ItemFilter = where) -> np.ndarray:
            return search.search(query[None], TOP, snapshot._mask(where))[1][0]

        def ours_new(query: np.ndarray) -> np.ndarray:
            snapshot._masks = {}
            return ours(query)

        def faiss_search(query: np.ndarray, parameters: Any = parameters) -> object:
            return flat.search(query[None], TOP, params=parameters)

        work: dict[str, Callable[[np.ndarray], Any]] = {
            "ours": ours,
            "new filter": ours_new,
            "faiss": faiss_search,
        }
        seconds = {name: list[float]() for name in work}
        found = 0
        for number_of_query, query in enumerate(queries):
            for name, run in work.items():
                started = time.perf_counter()
                result = run(query)
                seconds[name].append(time.perf_counter() - started)
                if name == "ours":
                    own = scores[allowed, number_of_query]
                    # Ties at the last place are not expected among random vectors.
                    true = allowed[np.argpartition(-own, TOP)[:TOP]]
                    found += len({*true.tolist()} & {*np.asarray(result).tolist()})
        times = ", ".join(
            f"{name} {1000 * np.median(one):.1f} ({1000 * min(one):.1f})"
            for name, one in seconds.items()
        )
        print_now(
            f"{number:,} x {options.width}, {f'{100 * mask.mean():.1f} % pass' if where else 'no filter'}: recall "
            f"{found / len(queries) / TOP:.3f}, median (minimum) ms: {times}"
        )


def captions(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings, and 200 queries."""
    data_root = data_folder()
    if data_root is None:
        raise SystemExit("VISAVIS_DATA: missing. Set it to the folder that contains flickr8k/.")
    features = cache_features(
        open_dataset(data_root / "flickr8k"), EncoderSpec("text", "minilm", "pooled")
    )
    vectors = features.read(range(len(features))).vectors
    assert isinstance(vectors, torch.Tensor)
    plain = unit(vectors.float().numpy())
    generator = np.random.default_rng(0)

    def noisy(rows: np.ndarray) -> np.ndarray:
        noise = unit(generator.standard_normal(rows.shape, np.float32))
        return unit(rows + NOISE * noise)

    parts = [plain, *(noisy(plain) for _ in range(-(-number // len(plain)) - 1))]
    return np.concatenate(parts)[:number], noisy(
        plain[generator.choice(len(plain), 200, replace=False)]
    )


def rank(query: np.ndarray, keys: list[str], vectors: np.ndarray) -> list[Neighbor]:
    """The items by exact score."""
    neighbors = map(Neighbor, keys, exact_scores(vectors, query).tolist())
    return sorted(neighbors, key=lambda neighbor: (-neighbor.score, neighbor.key))


def milvus_search(store: MilvusStore, query: np.ndarray, candidates: int) -> list[Neighbor]:
    """Approximate search with at least ``candidates`` candidates. As many results are fetched as in
    an exact search.
    """
    limit = TOP + TIE_MARGIN
    params = {"metric_type": "IP", "params": {"ef": max(candidates, 2 * limit)}}
    hits = store._client.search(
        store.collection,
        data=[query],
        limit=limit,
        output_fields=["key", "vector"],
        search_params=params,
    )[0]
    rows = [hit["entity"] for hit in hits]
    return rank(
        query, [row["key"] for row in rows], np.array([row["vector"] for row in rows], np.float32)
    )[:TOP]


def build_milvus_index(store: MilvusStore) -> int:
    """Build an index of type HNSW. Returns the maximum number of candidates."""
    client = store._client
    collection = store.collection
    client.flush(collection)  # Milvus does not index vectors outside sealed segments.
    index = client.prepare_index_params()
    index.add_index(
        "vector", index_type="HNSW", metric_type="IP", params={"M": 16, "efConstruction": 200}
    )
    client.release_collection(collection)
    client.drop_index(collection, "vector")
    client.create_index(collection, index)
    client.load_collection(collection)
    return 4096


def fewest_candidates(measure: Callable[[int], float], maximum: int) -> tuple[int, float]:
    """The first of 8, 16, 32, ... candidates that reaches the target recall, and its recall."""
    candidates = min(8, maximum)
    while (recall := measure(candidates)) < TARGET_RECALL and candidates < maximum:
        candidates = min(2 * candidates, maximum)
    return candidates, recall


def near(options: argparse.Namespace, folder: Path) -> None:
    """An approximate index compared with exact search."""
    number = options.milvus
    rows, queries = captions(number)
    store = MilvusStore(folder / "near.db", embedding_dim=rows.shape[1])
    for chunk in np.array_split(np.arange(number), max(number // 20_000, 1)):
        store.add(
            [IndexItem(f"{row:08d}", f"{row:08d}.jpg", "image", "", 0, int(row)) for row in chunk],
            rows[chunk],
        )
    scores = ExactSearch(rows).search(queries, TOP)[0]
    started = time.perf_counter()
    max_candidates = build_milvus_index(store)

    def recall(candidates: int) -> float:
        """The share of the true top 10. A result with the score of the last true one counts."""
        results = [milvus_search(store, query, candidates) for query in queries]
        return float(
            np.mean(
                [
                    sum(near.score >= true[-1] for near in neighbors) / TOP
                    for neighbors, true in zip(results, scores, strict=True)
                ]
            )
        )

    candidates, recall_at_top = fewest_candidates(recall, max_candidates)
    print_now(
        f"Milvus Lite, {number:,} x {rows.shape[1]}: HNSW: recall of the true top {TOP} is "
        f"{100 * recall_at_top:.1f} % ({len(queries)} queries), built and measured in "
        f"{time.perf_counter() - started:.0f} s, {candidates} candidates"
    )
    [seconds] = minimum_times(
        {"search": lambda: [milvus_search(store, query, candidates) for query in queries]}, 1
    ).values()
    print_now(f"Milvus Lite: {len(queries) / seconds:.0f} queries per second, in sequence")
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("rows", 1_000_000),
        ("milvus", 200_000),
        ("filtered", 100_000),
        ("width", 512),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(max_threads())
    with tempfile.TemporaryDirectory() as folder:
        if options.rows:
            exact(options, Path(folder))
        if options.filtered:
            filtered(options)
        if options.milvus:
            near(options, Path(folder))


if __name__ == "__main__":
    main()
