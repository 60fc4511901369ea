"""Ranking 5,000 images and 25,000 captions, D = 1024, both directions: tiles against full matrix
and argsort.

The alternative is that of the VSE++ family: the whole score matrix, then one numpy argsort per
query. Each method runs in its own process on the same numbers. Prints the median time and the peak
memory beyond the embeddings.

    python benchmarks/evaluation.py [--images 5000] [--width 1024] [--threads 2] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.evaluation import evaluate

CAPTIONS = 5


def embeddings(images: int, width: int) -> tuple[Tensor, Tensor]:
    """Unit rows: captions are noisy copies of their images, so that ranks spread over three orders
    of magnitude.
    """
    torch.manual_seed(0)
    visual = torch.nn.functional.normalize(torch.randn(images, width), dim=1)
    text = torch.randn(images * CAPTIONS, width).mul_(10.0 / width**0.5)
    for caption in range(CAPTIONS):
        text[caption::CAPTIONS] += visual
    return visual, torch.nn.functional.normalize(text, dim=1, out=text)


def by_tiles(visual: Tensor, text: Tensor) -> tuple[np.ndarray, np.ndarray]:
    def cosine(visual: Encoded, text: Encoded) -> Tensor:
        return visual.vectors @ text.vectors.T  # type: ignore[operator, union-attr]

    ids = torch.arange(len(visual))
    result = evaluate(Encoded(visual), Encoded(text), cosine, ids, ids.repeat_interleave(CAPTIONS))
    return result.image_ranks, result.text_ranks


def by_argsort(visual: Tensor, text: Tensor) -> tuple[np.ndarray, np.ndarray]:
    scores = (visual @ text.T).numpy()
    image_ranks = np.empty(len(visual), np.int64)
    text_ranks = np.empty(len(text), np.int64)
    for i, row in enumerate(scores):
        order = np.argsort(row)[::-1]
        image_ranks[i] = 1 + np.isin(order, np.arange(CAPTIONS * i, CAPTIONS * (i + 1))).argmax()
    for j, column in enumerate(scores.T):
        order = np.argsort(column)[::-1]
        text_ranks[j] = 1 + (order == j // CAPTIONS).argmax()
    return image_ranks, text_ranks


METHODS = {"tiles": by_tiles, "argsort": by_argsort}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(method: str, arguments: argparse.Namespace) -> None:
    """Run one method once and write one JSON line."""
    torch.set_num_threads(arguments.threads)
    visual, text = embeddings(arguments.images, arguments.width)
    METHODS[method](
        visual[:20], text[: 20 * CAPTIONS]
    )  # Warm up, so that libraries loaded on first use do not count as memory of the method.
    before = peak_bytes()
    start = time.perf_counter()
    ranks = METHODS[method](visual, text)
    seconds = time.perf_counter() - start
    sums = [int(side.sum()) for side in ranks]
    sys.stdout.write(
        json.dumps({"seconds": seconds, "bytes": peak_bytes() - before, "rank_sums": sums}) + "\n"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Run all methods in turn, each in its own process, and print the medians."""
    medians = {}
    runs: dict[str, list[dict]] = {method: [] for method in METHODS}
    for _ in range(arguments.repeats):
        for method in METHODS:
            command = [sys.executable, __file__, *sys.argv[1:], "--method", method]
            runs[method].append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
    for method, results in runs.items():
        medians[method] = statistics.median(result["seconds"] for result in results)
        memory = max(result["bytes"] for result in results) / 2**20
        sys.stdout.write(
            f"{method:8s} {medians[method]:6.2f} s  {memory:5.0f} MiB beyond the embeddings  rank "
            f"sums {results[0]['rank_sums']}\n"
        )
    sys.stdout.write(
        f"tiles are {medians['argsort'] / medians['tiles']:.2f}x as fast, {arguments.threads} "
        "threads\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("images", 5000), ("width", 1024), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        measure(arguments.method, arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
