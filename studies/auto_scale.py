"""Scales of "auto" against a grid of scales, on three data sets.

    VISAVIS_DATA=... python studies/auto_scale.py [--only flickr8k scenes clips] [--seeds 3]
    [--out runs/auto-scale]

Trains `Unified` and `VLC` at each gamma of the grid and at gamma "auto": small heads on Flickr8k,
and the recipe of the demo and CE from scratch on synthetic scenes and clips of 1,000 test images
each. All runs of a data set take the same learning rate. Prints the test RSUM of each gamma, mean
and standard deviation over seeds, the gamma that each seed chose, and the regret: the mean of the
grid's best minus that of "auto". The grid's best is chosen on test, so the regret is rather too
large. Run the same command to resume. A run takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.training.runs.run_folder import RunFolder

GRID = (5, 10, 20, 40, 60, 100, 200)
OBJECTIVES = ("Unified", "VLC")
NUM_VAL = 500
NUM_TEST = 1000
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "flickr8k": ("study-flickr8k", {"phases.0.optimizer.lr": 2e-3}),
    "scenes": ("demo", {}),
    "clips": ("synthetic-clips/ce", {"epochs": 6}),
}
"""Recipe of each data set, and its overrides."""


def spec(name: str, gamma: int | None) -> str:
    """An objective at a scale. None: "auto"."""
    return f"{name}(gamma={('auto' if gamma is None else gamma)!r})"


def train_all(dataset: str, out: Path, seeds: int) -> Path:
    """Train all settings of a data set, or resume, and return the folder of the comparison."""
    recipe, overrides = RECIPES[dataset]
    data = None
    if dataset != "flickr8k":
        data = out / f"{dataset}-data"
        if not data.exists():
            visavis.data_scenes(data, clips=dataset == "clips", num_val=NUM_VAL, num_test=NUM_TEST)
    folder = out / dataset
    if folder.exists():
        visavis.compare(resume=folder, seeds=seeds, workers=1)
    else:
        visavis.compare(
            recipe,
            objective=[spec(name, gamma) for name in OBJECTIVES for gamma in (*GRID, None)],
            data=data,
            overrides=overrides,
            tune=False,
            seeds=seeds,
            out=folder,
            workers=1,
        )
    return folder


def read_runs(folder: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Test RSUM and gamma of each run of a comparison, by objective and by the gamma that was asked
    for.
    """
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in sorted((folder / "runs").iterdir()):
        files = RunFolder(run)
        if not files.result.exists():
            continue
        result = storage.read_json(files.result, dict[str, Any])
        record = storage.read_json(files.environment, dict[str, Any])
        objective: Any = visavis.parse(result["objective"])
        asked = "auto" if record.get("auto") else f"{objective.gamma:g}"
        key = type(objective).__name__, asked
        results.setdefault(key, []).append((result["rsum"], objective.gamma))
    return results


def table(dataset: str, folder: Path) -> str:
    """Rows of Markdown: an objective on a data set."""
    results = read_runs(folder)
    rows = []
    for name in OBJECTIVES:
        means = {
            asked: statistics.mean(rsum for rsum, _ in runs)
            for (objective, asked), runs in results.items()
            if objective == name
        }
        cells = [f"{means[f'{gamma}']:.1f}" if f"{gamma}" in means else "" for gamma in GRID]
        automatic = results.get((name, "auto"), [])
        if automatic:
            chosen = ", ".join(f"{gamma:g}" for _, gamma in automatic)
            best = max(mean for asked, mean in means.items() if asked != "auto")
            cells += [f"{means['auto']:.1f}", chosen, f"{best - means['auto']:.1f}"]
        rows.append(f"| {dataset}, {name} | {' | '.join(cells)} |\n")
    return "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/auto-scale"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [*(f"{gamma}" for gamma in GRID), "auto", "gamma of auto", "regret"]
    sys.stdout.write(f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n")
    for dataset in options.only:
        sys.stdout.write(table(dataset, train_all(dataset, options.out, options.seeds)))


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"auto_scale: {error}")
    except KeyboardInterrupt:
        sys.exit("auto_scale: stopped. Run the same command to resume.")
