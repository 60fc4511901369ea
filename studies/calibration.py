"""Calibration of match probabilities: learned on the validation split of a run, tested on its test split.

    visavis train heads-flickr8k seed=1 training.threads=1 --out runs/heads
    VISAVIS_DATA=... python studies/calibration.py runs/heads [--taken-out 200] [--draws 20] [--seed 0]

Prints the reliability of the probabilities over the first ten results of each test query, in ten bins of equal mass. Then it tests
"no match": the images of some queries are removed from the collection. It prints the share of these queries that is detected, at the
threshold learned on validation and over the curve of false alarms. The queries are sampled several times. It shows the mean and the
extremes over the samples.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from visavis.errors import VisavisError
from visavis.retrieval.calibration import fit_calibration, reliability
from visavis.retrieval.index_builder import validation_scores
from visavis.runs.open_run import read_run_recipe


def taken_out(scores: Tensor, relevant: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The best scores of all other queries, and of the queries whose images were removed from the collection."""
    queries = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))[:count]
    left = ~relevant[queries].any(0)
    without = scores[queries][:, left].amax(1)
    answered = relevant[:, left].any(1)
    return scores[answered][:, left].amax(1), without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--taken-out", type=int, default=200)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    evaluation = read_run_recipe(options.run).evaluation
    calibration = fit_calibration(*validation_scores(options.run, evaluation.validation))
    scores, relevant = validation_scores(options.run, evaluation.test)
    result = reliability(calibration, scores, relevant)
    print("| predicted | relevant | results |\n|---|---|---|")
    for predicted, share, count in result.bins:
        print(f"| {100 * predicted:.1f} % | {100 * share:.1f} % | {count:,} |")
    print(f"\nexpected calibration error {result.error:.4f}, Brier skill {result.skill:.3f}, base rate {100 * result.base_rate:.1f} %")
    draws = [taken_out(scores, relevant, options.taken_out, options.seed + draw) for draw in range(options.draws)]
    alarms, found = ([(best < calibration.min_score).double().mean().item() for best in side] for side in zip(*draws, strict=True))
    print(f"\nat the threshold of validation ({calibration.floor:.3f}): {spread(found)} detected at {spread(alarms)} false alarms")
    print("\n| false alarms on test | detected |\n|---|---|")
    for rate in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        shares = [(gone < torch.quantile(here.double(), rate)).double().mean().item() for here, gone in draws]
        print(f"| {100 * rate:.0f} % | {spread(shares)} |")


def spread(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f})"


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"calibration: {error}")
