"""How likely a result is a match: what ``visavis index`` learns on the validation split of a run, tried on its test split.

    visavis train heads-flickr8k seed=1 training.threads=1 --out runs/heads
    VISAVIS_DATA=... python studies/calibration.py runs/heads [--taken-out 200] [--draws 20] [--seed 0]

Printed: the reliability of the probabilities over the first ten results of each test query, in ten bins of equal mass; then "nothing
here fits": of queries whose pictures were taken out of the collection, the share that is told so, at the floor learned on validation
and over the whole curve of false alarms; the queries are drawn anew several times, and the mean and the extremes over the draws shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from visavis.errors import VisavisError
from visavis.retrieval.calibration import fit_calibration, reliability
from visavis.retrieval.learning import scores_of
from visavis.runs.folder import recipe_of


def taken_out(scores: Tensor, relevant: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The best scores of all other queries, and of some whose pictures were taken out of the collection for all."""
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
    evaluation = recipe_of(options.run).evaluation
    calibration = fit_calibration(*scores_of(options.run, evaluation.validation))
    scores, relevant = scores_of(options.run, evaluation.test)
    told = reliability(calibration, scores, relevant)
    print("| said | fits | results |\n|---|---|---|")
    for said, fits, count in told.bins:
        print(f"| {100 * said:.1f} % | {100 * fits:.1f} % | {count:,} |")
    print(f"\nexpected calibration error {told.error:.4f}, Brier skill {told.skill:.3f}, base rate {100 * told.base_rate:.1f} %")
    draws = [taken_out(scores, relevant, options.taken_out, options.seed + draw) for draw in range(options.draws)]
    alarms, found = ([(best < calibration.floor).double().mean().item() for best in side] for side in zip(*draws, strict=True))
    print(f"\nat the floor of validation ({calibration.floor:.3f}): {spread(found)} found at {spread(alarms)} false alarms")
    print("\n| false alarms on test | found |\n|---|---|")
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
