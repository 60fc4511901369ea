"""CS@K of 5,000 images and their first captions, both directions: blocks of queries against whole matrices.

The other way is that of the released code of the Ladder loss: the whole matrices of scores and of degrees, one argsort and
one Kendall's tau a query and K. "report" is what ``visavis evaluate --degrees`` does: also nDCG@K, and both of random scores.
Each way runs in a process of its own on the same numbers; shown are the median time, and the peak memory beyond the embeddings.

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
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from torch.nn.functional import normalize

from visavis.data.dataset import Dataset, Image
from visavis.degrees import Degrees
from visavis.degrees.words import CosineDegrees
from visavis.evaluation import coherence_of
from visavis.metrics import coherent_scores
from visavis.types import Encoded

Sides = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Known(Degrees):
    """The degrees of vectors that are there already."""

    vectors: Tensor

    def of(self, captions):
        return CosineDegrees(self.vectors)


def embeddings(images: int) -> Sides:
    """Images, captions near them, and word vectors of the captions: unit rows."""
    torch.manual_seed(0)
    visual = normalize(torch.randn(images, 1024), dim=1)
    return visual, normalize(visual + 0.3 * torch.randn(images, 1024), dim=1), normalize(torch.rand(images, 50), dim=1)


def by_blocks(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    sums = []
    for queries, candidates in ((visual, text), (text, visual)):
        found = dict.fromkeys(ks, 0.0)
        for rows in torch.arange(len(visual)).split(256):
            scores, degrees = queries[rows] @ candidates.T, (words[rows] @ words.T).clamp(0, 1)
            for k in ks:
                found[k] += coherent_scores(scores, degrees, k=k).sum().item()
        sums += found.values()
    return sums


def by_matrices(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    scores, degrees = (visual @ text.T).numpy(), (words @ words.T).clamp(0, 1).numpy()
    sums = []
    for matrix in (scores, scores.T):
        for k in ks:
            order = [np.argsort(row)[::-1][:k] for row in matrix]
            taus = [kendalltau(row[top], near[top]).statistic for row, near, top in zip(matrix, degrees, order, strict=True)]
            sums.append(float(np.sum(taus)))
    return sums


def by_report(sides: Sides, ks: list[int]) -> list[float]:
    visual, text, words = sides
    number = len(visual)
    data = Dataset("bench", tuple(Image(str(i), "test") for i in range(number)), tuple(map(str, range(number))), np.arange(number))
    found = coherence_of(Encoded(visual), Encoded(text), lambda v, t: v.vectors @ t.vectors.T, data, Known(words), ks=tuple(ks))
    return [float(found.per_query[f"{way}_cs_at_{k}"].sum()) for way in ("i2t", "t2i") for k in ks]


WAYS = {"blocks": by_blocks, "matrices": by_matrices, "report": by_report}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, arguments: argparse.Namespace) -> None:
    """Run one way once and write one JSON line."""
    torch.set_num_threads(arguments.threads)
    sides = embeddings(arguments.images)
    small = tuple(side[:20] for side in sides)
    WAYS[way](small, [10])  # what is loaded on first use is not the way's memory
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    sums = WAYS[way](sides, arguments.ks)
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu, "bytes": peak_bytes() - before}
    sys.stdout.write(json.dumps(spent | {"sums": sums}) + "\n")


def compare(arguments: argparse.Namespace) -> None:
    """Run all ways in turn, each in a process of its own, and show the medians."""
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(arguments.repeats)]
        seconds, cpu = (statistics.median(run[name] for run in runs) for name in ("seconds", "cpu_seconds"))
        means = " ".join(f"{total / arguments.images:.12f}" for total in runs[0]["sums"])
        memory = max(run["bytes"] for run in runs) / 2**20
        sys.stdout.write(f"{way:8s} {seconds:6.1f} s, {cpu:6.1f} s of CPU  {memory:5.0f} MiB beyond the embeddings  means {means}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("images", 5000), ("threads", 1), ("repeats", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ks", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
