"""CS@K of 5,000 images and their first captions, both directions: blocks of queries against whole
matrices.

The alternative is that of the released code of the Ladder loss: whole matrices of scores and of
relevance values, with one argsort and one Kendall's tau per query and K. "report" is the work of
``visavis evaluate --section``, which also computes nDCG@K and both metrics of random scores. Each
method runs in its own process on the same numbers. Prints the median time and the peak memory
beyond the embeddings.

    python benchmarks/coherence.py [--images 5000] [--ks 100 1000] [--threads 1] [--repeats 1]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from torch.nn.functional import normalize

from visavis.core.encoded import Encoded
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.evaluation.metrics import coherent_scores
from visavis.papers.relevance import RelevanceEstimator, ranking_coherence
from visavis.papers.relevance.base import CosineRelevance

Sides = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Known(RelevanceEstimator):
    """Relevance values from given vectors."""

    vectors: Tensor

    def for_captions(self, captions: Sequence[str]) -> CosineRelevance:
        return CosineRelevance(self.vectors)


def embeddings(images: int) -> Sides:
    """Images, captions near them, and word vectors of the captions: unit rows."""
    torch.manual_seed(0)
    visual = normalize(torch.randn(images, 1024), dim=1)
    return (
        visual,
        normalize(visual + 0.3 * torch.randn(images, 1024), dim=1),
        normalize(torch.rand(images, 50), dim=1),
    )


def by_blocks(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    sums = list[float]()
    for queries, candidates in ((visual, text), (text, visual)):
        sums_by_k = dict.fromkeys(ks, 0.0)
        for rows in torch.arange(len(visual)).split(256):
            scores = queries[rows] @ candidates.T
            relevance = (words[rows] @ words.T).clamp(0, 1)
            for k in ks:
                sums_by_k[k] += coherent_scores(scores, relevance, k=k).sum().item()
        sums += sums_by_k.values()
    return sums


def by_matrices(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    scores = (visual @ text.T).numpy()
    relevance = (words @ words.T).clamp(0, 1).numpy()
    sums = []
    for matrix in (scores, scores.T):
        for k in ks:
            order = [np.argsort(row)[::-1][:k] for row in matrix]
            taus = [
                kendalltau(row[top], row_relevance[top]).statistic
                for row, row_relevance, top in zip(matrix, relevance, order, strict=True)
            ]
            sums.append(float(np.sum(taus)))
    return sums


def by_report(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    number = len(visual)
    data = Dataset(
        "bench",
        tuple(Image(str(i), "test") for i in range(number)),
        tuple(map(str, range(number))),
        np.arange(number),
    )
    report = ranking_coherence(
        Encoded(visual),
        Encoded(text),
        lambda v, t: v.vectors @ t.vectors.T,
        data,
        Known(words),
        ks=tuple(ks),
    )
    return [
        float(report.per_query[f"{direction}_cs_at_{k}"].sum())
        for direction in ("i2t", "t2i")
        for k in ks
    ]


METHODS = {"blocks": by_blocks, "matrices": by_matrices, "report": by_report}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(method: str, arguments: argparse.Namespace) -> None:
    """Run one method once and write one JSON line."""
    torch.set_num_threads(arguments.threads)
    sides = embeddings(arguments.images)
    visual, text, words = (side[:20] for side in sides)
    METHODS[method](
        (visual, text, words), [10]
    )  # Warm up, so that libraries loaded on first use do not count as memory of the method.
    before = peak_bytes()
    start = time.perf_counter()
    cpu = time.process_time()
    sums = METHODS[method](sides, arguments.ks)
    spent = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "bytes": peak_bytes() - before,
    }
    sys.stdout.write(json.dumps(spent | {"sums": sums}) + "\n")


def compare(arguments: argparse.Namespace) -> None:
    """Run all methods in turn, each in its own process, and print the medians."""
    for method in METHODS:
        command = [sys.executable, __file__, *sys.argv[1:], "--method", method]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(arguments.repeats)
        ]
        seconds, cpu = (
            statistics.median(run[name] for run in runs) for name in ("seconds", "cpu_seconds")
        )
        means = " ".join(f"{total / arguments.images:.12f}" for total in runs[0]["sums"])
        memory = max(run["bytes"] for run in runs) / 2**20
        sys.stdout.write(
            f"{method:8s} {seconds:6.1f} s, {cpu:6.1f} s of CPU  {memory:5.0f} MiB beyond the "
            f"embeddings  means {means}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("images", 5000), ("threads", 1), ("repeats", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ks", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        measure(arguments.method, arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
