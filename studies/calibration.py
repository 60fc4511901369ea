"""Calibration of match probabilities: learned on the validation split of a run, tested on its test
split.

    visavis train heads-flickr8k model.whiten_text=false seed=1 training.threads=1 --out runs/heads
    VISAVIS_DATA=... python studies/calibration.py runs/heads [--taken-out 200] [--draws 20] [--seed
    0]

Prints the reliability of the probabilities over the first ten results of each test query, in ten
bins of equal mass. Then it tests "no match": the images of some queries are removed from the
collection. It prints the share of these queries that is detected, at the threshold learned on
validation and over the curve of false alarms. The queries are sampled several times. It shows the
mean and the extremes over the samples.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visavis.core.errors import VisavisError
from visavis.retrieval.calibrate.calibration import (
    CALIBRATED_RESULTS,
    Calibration,
    fit_calibration,
    standardize_by,
)
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.runs.run_splits import RunSplits


@dataclass(frozen=True)
class Reliability:
    """Quality of a calibration on queries that it was not fitted on.

    Attributes:
        bins: For each bin of results by probability: mean probability, share of relevant results,
            number of results.
        expected_calibration_error: Mean over the bins, by size, of the absolute difference of the
            two.
        brier_skill: Brier skill score compared with always predicting the base rate. Above 0 is
            better than that.
        base_rate: Share of relevant results.
    """

    bins: tuple[tuple[float, float, int], ...]
    expected_calibration_error: float
    brier_skill: float
    base_rate: float


def reliability(
    calibration: Calibration, scores: np.ndarray, relevant: np.ndarray, bins: int = 10
) -> Reliability:
    """Measure a calibration over the first ten results of each query, in bins of equal size. Scores
    are standardized. Both arrays are ``[Q, candidates]``.
    """
    top_results = np.argsort(-scores, axis=1, kind="stable")[:, :CALIBRATED_RESULTS]
    predicted = np.interp(
        np.take_along_axis(scores, top_results, 1).ravel(),
        calibration.scores,
        calibration.probabilities,
    )
    outcome = np.take_along_axis(relevant, top_results, 1).ravel().astype(np.float64)
    parts = [
        part for part in np.array_split(np.argsort(predicted, kind="stable"), bins) if len(part)
    ]
    by_bin = tuple(
        (float(predicted[part].mean()), float(outcome[part].mean()), len(part)) for part in parts
    )
    error = sum(abs(mean - share) * count for mean, share, count in by_bin) / len(predicted)
    base_rate = float(outcome.mean())
    brier = float(((predicted - outcome) ** 2).mean())
    base_brier = float(((base_rate - outcome) ** 2).mean())
    return Reliability(by_bin, error, 1 - brier / base_brier if base_brier else 0.0, base_rate)


def remove_images(
    scores: np.ndarray, relevant: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best scores of all other queries, and of the queries whose images were removed from the
    collection.
    """
    queries = np.random.default_rng(seed).permutation(len(scores))[:count]
    remaining = ~relevant[queries].any(0)
    without_image = scores[queries][:, remaining].max(1)
    has_answer = relevant[:, remaining].any(1)
    return scores[has_answer][:, remaining].max(1), without_image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--taken-out", type=int, default=200)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    evaluation = read_run_recipe(options.run).evaluation
    splits = RunSplits(options.run)
    captions = splits.captions(evaluation.validation)
    calibration = fit_calibration(captions, *splits.scores(evaluation.validation))
    scores, relevant = splits.scores(evaluation.test)
    scores = standardize_by(scores, scores)
    result = reliability(calibration, scores, relevant)
    print("| predicted | relevant | results |\n|---|---|---|")
    for predicted, share, count in result.bins:
        print(f"| {100 * predicted:.1f} % | {100 * share:.1f} % | {count:,} |")
    error = result.expected_calibration_error
    skill = result.brier_skill
    print(
        f"\nexpected calibration error {error:.4f}, Brier skill {skill:.3f}, base rate "
        f"{100 * result.base_rate:.1f} %"
    )
    draws = [
        remove_images(scores, relevant, options.taken_out, options.seed + draw)
        for draw in range(options.draws)
    ]
    false_alarms, detected = (
        [float((best < calibration.min_score).mean()) for best in side]
        for side in zip(*draws, strict=True)
    )
    print(
        f"\nat the threshold of validation ({calibration.min_score:.3f}): {spread(detected)} "
        f"detected at {spread(false_alarms)} false alarms"
    )
    print("\n| false alarms on test | detected |\n|---|---|")
    for rate in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        shares = [
            float((without_image < np.quantile(with_image, rate)).mean())
            for with_image, without_image in draws
        ]
        print(f"| {100 * rate:.0f} % | {spread(shares)} |")


def spread(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f})"


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"calibration: {error}")
