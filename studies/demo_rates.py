"""The demo's learning rates: each of its objectives at each rate of one grid, on another world, chosen by validation RSUM.

    python studies/demo_rates.py [--out runs/demo-rates]

All objectives get the same budget: the rates, seeds and scenes of ``visavis.demonstration.rates``, the batches and epochs of the demo.
The scenes are others than those that the demo draws, so that what the demo's table compares is new to all of them. Printed: the
validation RSUM of each, mean and standard deviation over seeds; in bold the best mean of each row, whose rate is the objective's in the
recipe ``demo-objectives``. About 20 minutes on one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import visavis
from visavis import storage
from visavis.data.scenes import write_scenes
from visavis.demonstration.rates import NUM_VAL, RATES, SEEDS, WORLD
from visavis.demonstration.running import Plan
from visavis.errors import VisavisError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = storage.numbered_folder("runs/demo-rates") if options.out is None else storage.new_folder(options.out)
    write_scenes(out / "scenes", num_train=Plan().num_train, num_val=NUM_VAL, num_test=0, seed=WORLD)
    reached: dict[str, dict[float, list[float]]] = {}
    for recipe in Plan().recipes:
        reached[recipe] = {lr: [validation_rsum(recipe, lr, seed, out) for seed in SEEDS] for lr in RATES}
    sys.stdout.write(table(reached))


def validation_rsum(recipe: str, lr: float, seed: int, out: Path) -> float:
    """The best validation RSUM of a run."""
    overrides = {"phases.0.optimizer.lr": lr, "seed": seed}
    trained = visavis.train(recipe, data=out / "scenes", out=out / f"{recipe}-{lr:g}-{seed}", overrides=overrides)
    sys.stderr.write(f"{recipe} at {lr:g}, seed {seed}: {trained.validation_rsum:.1f}\n")
    return trained.validation_rsum


def table(reached: dict[str, dict[float, list[float]]]) -> str:
    """The validation RSUM of each recipe by rate, the best mean in bold."""
    lines = [f"| | {' | '.join(f'{lr:g}' for lr in RATES)} |", "|---" * (len(RATES) + 1) + "|"]
    for recipe, by_rate in reached.items():
        means = {lr: statistics.mean(values) for lr, values in by_rate.items()}
        best = max(means, key=means.__getitem__)
        cells = {lr: f"{mean:.1f} ± {statistics.stdev(by_rate[lr]):.1f}" for lr, mean in means.items()}
        lines.append(f"| {recipe} | {' | '.join(f'**{cell}**' if lr == best else cell for lr, cell in cells.items())} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"demo_rates: {error}")
