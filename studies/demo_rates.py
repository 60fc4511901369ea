"""Learning rates of the demo: each of its objectives at each rate of one grid, on other scenes,
chosen by validation RSUM.

    python studies/demo_rates.py [--out runs/demo-rates]

All objectives get the same budget: the rates, seeds and scenes of
``visavis.research.demo_run``, the batches and epochs of the demo. The scenes differ from those
of the demo, so the demo's table compares objectives on scenes that are new to all of them. Prints
the validation RSUM of each, mean and standard deviation over seeds. The best mean of each row is in
bold. Its rate is that of the objective in the recipe ``demo-objectives``. Takes about 20 minutes on
one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.demo_run import (
    LEARNING_RATES,
    TUNING_SCENE_SEED,
    TUNING_SEEDS,
    DemoSettings,
)

NUM_VAL = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = (
        storage.create_numbered_folder("runs/demo-rates")
        if options.out is None
        else storage.prepare_empty_folder(options.out)
    )
    write_synthetic_scenes(
        out / "scenes",
        num_train=DemoSettings().num_train,
        num_val=NUM_VAL,
        num_test=0,
        seed=TUNING_SCENE_SEED,
    )
    reached: dict[str, dict[float, list[float]]] = {}
    for recipe in DemoSettings().recipes:
        reached[recipe] = {
            lr: [validation_rsum(recipe, lr, seed, out) for seed in TUNING_SEEDS]
            for lr in LEARNING_RATES
        }
    sys.stdout.write(table(reached))


def validation_rsum(recipe: str, lr: float, seed: int, out: Path) -> float:
    """The best validation RSUM of a run."""
    overrides = {"phases.0.optimizer.lr": lr, "seed": seed}
    trained = visavis.train(
        recipe, data=out / "scenes", out=out / f"{recipe}-{lr:g}-{seed}", overrides=overrides
    )
    sys.stderr.write(f"{recipe} at {lr:g}, seed {seed}: {trained.validation_rsum:.1f}\n")
    return trained.validation_rsum


def table(reached: dict[str, dict[float, list[float]]]) -> str:
    """The validation RSUM of each recipe by rate, the best mean in bold."""
    lines = [
        f"| | {' | '.join(f'{lr:g}' for lr in LEARNING_RATES)} |",
        "|---" * (len(LEARNING_RATES) + 1) + "|",
    ]
    for recipe, by_rate in reached.items():
        means = {lr: statistics.mean(values) for lr, values in by_rate.items()}
        best = max(means, key=means.__getitem__)
        cells = {
            lr: f"{mean:.1f} ± {statistics.stdev(by_rate[lr]):.1f}" for lr, mean in means.items()
        }
        lines.append(
            f"| {recipe} | {' | '.join(f'**{cell}**' if lr == best else cell for lr, cell in cells.items())} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"demo_rates: {error}")
