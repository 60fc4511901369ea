"""Corrected text search of an index: time of a query, and of the biases of all items.

    python benchmarks/corrected_search.py [--items 100000] [--bank 5000] [--dim 256]

Random items, bank and queries share a mean and 20 directions, so that some items are hubs. Printed
for each correction: processor time of its biases, and the median and maximum time of 50 queries for
the first 20 results, next to the same search without a correction.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np

from visavis.losses.corrections import CATALOG
from visavis.retrieval.build.correction_builder import bank_scores
from visavis.retrieval.calibrate.index_correction import CorrectionSettings, IndexCorrection
from visavis.retrieval.items import NO_FILTER, IndexItem
from visavis.retrieval.stores.catalog import open_store

TOP = 20
QUERIES = 50
WARMUP = 3


def milliseconds(search: Callable[[np.ndarray], object], queries: np.ndarray) -> np.ndarray:
    """Processor time of each query."""
    times = []
    for query in queries:
        started = time.process_time()
        search(query[None])
        times.append(1000 * (time.process_time() - started))
    return np.array(times[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--bank", type=int, default=5_000)
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    basis = random.normal(size=(20, options.dim))
    mean = 1.5 * random.normal(size=options.dim)

    def vectors(count: int) -> np.ndarray:
        rows = random.normal(size=(count, 20)) @ basis + mean
        rows += 2 * random.normal(size=(count, options.dim))
        unit: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit.astype(np.float32)

    items, bank, queries = (vectors(count) for count in (options.items, options.bank, QUERIES))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder, options.dim)
        names = [f"{number:08}.jpg" for number in range(options.items)]
        store.add([IndexItem(name, name, "image", name, 1, 1) for name in names], items)
        keys = store.table().keys()
        plain = milliseconds(lambda query: store.search(query, TOP), queries)
        print(f"without a correction: median {np.median(plain):.1f} ms, maximum {plain.max():.1f}")
        for kind in CATALOG:
            started = time.process_time()
            fitted = kind().fit(bank_scores(store.all_vectors(), bank, None))
            seconds = time.process_time() - started
            hubs = None if fitted.is_hub is None else fitted.is_hub.numpy()
            settings = CorrectionSettings(repr(kind()), "random vectors", "", True, "")
            correction = IndexCorrection(settings, keys, fitted.bias.numpy(), hubs)
            times = milliseconds(
                lambda query: correction.nearest(store, query, TOP, NO_FILTER),  # noqa: B023
                queries,
            )
            print(
                f"{kind.__name__:16} biases {seconds:5.1f} s, median {np.median(times):.1f} ms, "
                f"maximum {times.max():.1f}"
            )


if __name__ == "__main__":
    main()
