"""Doubtful pairs: heads on Flickr8k with 40 % of the training captions beside wrong images, NCR against TripletHN and Unified.

    VISAVIS_DATA=... python studies/noise.py [--seeds 3] [--share 0.4] [--threads 1] [--out runs/noise]

For each seed the same captions are misplaced for all, and all begin with the same warm-up by Unified. Printed, as a table: the test
RSUM of each (images and captions of the test split are right), mean and standard deviation; how far NCR lies above it, mean of the
differences by seed and its 95 % interval; and how well NCR's probabilities tell right training captions from misplaced ones (area
under the ROC curve).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from scipy.stats import t as student
from sklearn.metrics import roc_auc_score

import visavis
from visavis import storage
from visavis.data import open_dataset
from visavis.errors import VisavisError
from visavis.training.checkpoint import Checkpoint
from visavis.training.running import Trained, recipe_of

OTHERS = ("TripletHN(margin=0.2)", "Unified(margin=0.2, gamma=50)")


def train_all(out: Path, seed: int, share: float, threads: int) -> dict[str, Trained]:
    """One run of NCR, and one of each other objective after the same warm-up: the same recipe, in which every caption is trusted."""
    common = {"seed": seed, "data.misplaced": share, "training.threads": threads}
    trusting = {f"phases.{phase}.supervision": "PairSupervision()" for phase in (0, 1)}
    runs = {"NCR": visavis.train("ncr-heads-flickr8k", out=out / f"ncr-{seed}", overrides=common)}
    for objective in OTHERS:
        name = objective.partition("(")[0]
        overrides = {**common, **trusting, "phases.1.objective": objective}
        runs[name] = visavis.train("ncr-heads-flickr8k", out=out / f"{name.lower()}-{seed}", overrides=overrides)
    return runs


def separation(run: Trained) -> float:
    """How well a run's supervision tells right from misplaced training captions: the area under the ROC curve."""
    recipe, checkpoint = recipe_of(run.folder), Checkpoint.latest(run.folder)
    assert checkpoint is not None
    data = open_dataset(recipe.data.path)
    noisy = data.misplaced(recipe.data.misplaced, recipe.seed)
    right = (noisy.image_of == data.image_of)[noisy.split("train").caption_rows]
    return float(roc_auc_score(right, checkpoint.supervision["clean"].mean(0).numpy()))


def with_interval(differences: list[float]) -> str:
    """The mean of differences by seed, with its 95 % interval by Student's t where there are several."""
    mean, count = statistics.mean(differences), len(differences)
    if count == 1:
        return f"{mean:+.1f}"
    reach = student.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return f"{mean:+.1f} ({mean - reach:+.1f} to {mean + reach:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = storage.numbered_folder("runs/noise") if options.out is None else storage.new_folder(options.out)
    rsum: dict[str, list[float]] = {}
    areas: list[float] = []
    for seed in range(1, options.seeds + 1):
        runs = train_all(out, seed, options.share, options.threads)
        areas.append(separation(runs["NCR"]))
        for name, run in runs.items():
            assert run.test is not None
            rsum.setdefault(name, []).append(run.test.metrics["rsum"])
        sys.stderr.write(f"seed {seed}: {', '.join(f'{name} {values[-1]:.1f}' for name, values in rsum.items())}; AUC {areas[-1]:.3f}\n")
    sys.stdout.write("| objective | test RSUM | NCR above it | AUC, right against misplaced |\n|---|---|---|---|\n")
    for name, values in rsum.items():
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        above = "" if name == "NCR" else with_interval([own - other for own, other in zip(rsum["NCR"], values, strict=True)])
        area = f"{statistics.mean(areas):.3f} (least {min(areas):.3f})" if name == "NCR" else ""
        sys.stdout.write(f"| {name} | {statistics.mean(values):.1f}{spread} | {above} | {area} |\n")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"noise: {error}")
