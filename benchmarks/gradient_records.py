"""Cost of recording gradients (``training.gradients_every``): processor time of a step with and
without a record.

Steps with and without a record alternate, each pair on the same batch, so that other work on the
machine affects both. The added time is divided by the time of the steps between two records.

    VISAVIS_DATA=... python benchmarks/gradient_records.py study-flickr8k
    [--data scenes] [--pairs 40]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from visavis.evaluation.statistics import t_interval
from visavis.models.batch_encoding import device_of
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.settings import TrainingSettings
from visavis.training.runs.run_folder import RunFolder
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training


def measure(recipe: str, data: str | None, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of processor time of steps without a record, and of their pairs with one."""
    overrides = {} if data is None else {"data.path": data}
    read = read_recipe(Path(recipe) if recipe.endswith(".toml") else recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(*prepare_training(read), RunFolder(Path(folder) / "run"))
        trainer.start()
        step = trainer.train_step
        times = list[float](), list[float]()
        batches = trainer.train_loader.epoch(
            1, stop=min(pairs + 2, trainer.train_loader.num_batches), device=device_of(step.matcher)
        )
        for number, batch in enumerate(batches):
            # Each is first in half of the pairs.
            for is_recorded in (number % 2 == 0, number % 2 == 1):
                started = time.process_time()
                if is_recorded:
                    step.record_gradients()
                step.backward(batch, trainer.supervision.targets)
                step.step(1.0)
                step.recorded_gradients()
                if number > 1:  # the first steps make plans and allocate memory
                    times[is_recorded].append(time.process_time() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data", help="Data set. Default: as in the recipe.")
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = TrainingSettings.model_fields["gradients_every"].default
    print("| recipe | step | step with a record | cost of a record every 50 steps |")
    print("|---|---|---|---|")
    for recipe in options.recipes:
        plain, recorded = measure(recipe, options.data, options.pairs)
        mean = statistics.fmean(plain)
        added = [100 * (b - a) / mean / every for a, b in zip(plain, recorded, strict=True)]
        print(
            f"| {recipe} | {1000 * mean:.1f} ms | {1000 * statistics.fmean(recorded):.1f} ms | "
            f"{statistics.fmean(added):.2f} % ({t_interval(added)}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
