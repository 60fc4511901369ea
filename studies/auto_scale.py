"""Scales and margins of "auto" against grids, on three data sets.

    python studies/auto_scale.py --flickr8k DIR [--only dogs scenes clips] [--parameter gamma margin]
    [--seeds 5] [--workers 1] [--out runs/auto-scale]

The data are the worlds of ``timed_choice.py``: 700 images of dogs of Flickr8k, and 300 synthetic
scenes and 400 synthetic clips of seed 78. Each value of a grid, and "auto", gets the learning rate
that validation selects with the tries of `visavis compare`, and the same seeds. Prints the test RSUM
of each value, the numbers that "auto" measured, and the regret: the grid's best on test minus "auto",
as a mean over seeds with its 95 % interval. The best is the largest of several means, so the regret
is rather too large. Run the same command to resume.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from timed_choice import world_recipe

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.evaluation.statistics import spread_over_seeds
from visavis.training.runs.run_folder import RunFolder

DATASETS = ("dogs", "scenes", "clips")
GRIDS = {"gamma": (5, 10, 20, 40, 80, 160), "margin": (0.05, 0.1, 0.2, 0.4, 0.8)}
OBJECTIVES = {"gamma": ("Unified", "VLC"), "margin": ("Unified", "Triplet")}
AUTO = "auto"
SEED = 78


def spec(name: str, parameter: str, value: float | str) -> str:
    """An objective at a value."""
    return f"{name}({parameter}={value!r})"


def train_all(dataset: str, parameter: str, options: argparse.Namespace) -> visavis.Comparison:
    """Train all values of a parameter on a data set, or resume."""
    folder: Path = options.out / f"{dataset}-{parameter}"
    if folder.exists():
        return visavis.compare(resume=folder, seeds=options.seeds, workers=options.workers)
    data = options.out / f"{dataset}-data"
    recipe, overrides = world_recipe(dataset, data, options.flickr8k, SEED)
    return visavis.compare(
        recipe,
        objective=[
            spec(name, parameter, value)
            for name in OBJECTIVES[parameter]
            for value in (*GRIDS[parameter], AUTO)
        ],
        overrides=overrides,
        seeds=options.seeds,
        out=folder,
        workers=options.workers,
    )


def measured_value(parameter: str, folder: Path) -> float:
    """Value of a parameter that a run trained with."""
    result = storage.read_json(RunFolder(folder).result, dict[str, Any])
    value: float = getattr(visavis.parse(result["objective"]), parameter)
    return value


def table(dataset: str, parameter: str, comparison: visavis.Comparison) -> str:
    """Rows of Markdown: an objective on a data set."""
    runs = {setting.choice: comparison.runs(setting) for setting in comparison.settings}
    rsums = {
        name: {run.seed: run.measured_metrics["rsum"] for run in outcomes}
        for name, outcomes in runs.items()
    }
    means = {name: statistics.fmean(seeds.values()) for name, seeds in rsums.items()}
    rows = []
    for name in OBJECTIVES[parameter]:
        *grid, auto = (spec(name, parameter, value) for value in (*GRIDS[parameter], AUTO))
        best = max((one for one in grid if one in means), key=lambda one: means[one])
        differences = [
            rsums[best][seed] - rsum for seed, rsum in rsums[auto].items() if seed in rsums[best]
        ]
        values = [measured_value(parameter, run.folder) for run in runs[auto]]
        cells = [f"{means[one]:.1f}" if one in means else "failed" for one in (*grid, auto)]
        cells.append(f"{min(values):g} to {max(values):g}")
        spread = spread_over_seeds(differences)
        regret = f"{statistics.fmean(differences):.1f}"
        cells.append(regret if spread is None else f"{regret} ({spread})")
        rows.append(f"| {dataset}, {name} | {' | '.join(cells)} |\n")
    return "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flickr8k", type=Path, help="folder with flickr8k and backbone")
    parser.add_argument("--only", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--parameter", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/auto-scale"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for parameter in options.parameter:
        titles = [f"{parameter}", *map(str, GRIDS[parameter]), AUTO, "values of auto", "regret"]
        sys.stdout.write(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n")
        for dataset in options.only:
            sys.stdout.write(table(dataset, parameter, train_all(dataset, parameter, options)))
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"auto_scale: {error}")
    except KeyboardInterrupt:
        sys.exit("auto_scale: stopped. Run the same command to resume.")
