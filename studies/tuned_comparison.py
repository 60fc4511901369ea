"""Does the default comparison, which tunes learning rates by a few tries, agree with a full grid of
learning rates?

    python studies/tuned_comparison.py [--recipe demo] [--data DIR] [--overrides epochs=3] [--seeds
    5] [--out runs/tuned-comparison]

Five objectives are compared three times on the same data: at the recipe's learning rate, with the
tries of ``visavis compare``, and with all seeds at each of eight rates. Without ``--data``, 500
synthetic scenes are written. The script prints the rates, the test RSUM, and the processor time of
each comparison without its report. It counts the pairs of objectives in another order than in the
full grid, among those that the full grid distinguishes. An interrupted study resumes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.experiments.comparison_result import Comparison
from visavis.research.experiments.jobs import Workers
from visavis.research.experiments.run_comparison import (
    plan_comparison,
    resume_comparison,
    start_comparison,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import parse_override

OBJECTIVES = (
    "TripletHN(margin=0.2)",
    "VLC(gamma=50)",
    "Unified(margin=0.2, gamma=50)",
    "NTXent()",
    "SSP()",
)
FACTORS = tuple(2.0**power for power in range(-4, 4))
RATE = "phases.0.optimizer.lr"


def compare(
    options: argparse.Namespace,
    name: str,
    overrides: dict[str, object],
    grid: list[str],
    *,
    tune: bool,
) -> tuple[Comparison, float]:
    """Run or resume a comparison. Returns it with its processor time, which is that of the last
    call if it was resumed.
    """
    folder = options.out / name
    started = time.process_time()
    arguments: dict[str, Any] = {
        "workers": Workers(num_workers=1),
        "progress": NoProgress(),
        "feedback": None,
    }
    if os.path.exists(folder / "plan.json"):
        result = resume_comparison(folder, options.seeds, **arguments)
    else:
        plan = plan_comparison(
            read_recipe(options.recipe, overrides),
            (OBJECTIVES, (), grid),
            options.seeds,
            tune=tune,
        )
        result = start_comparison(plan, folder, **arguments)
    return result, time.process_time() - started


def rsum_of(comparison: Comparison) -> dict[str, float]:
    """Mean test RSUM by objective, at its selected learning rate."""
    return {
        setting.choice: sum(run.measured_metrics["rsum"] for run in comparison.runs(setting))
        / len(comparison.runs(setting))
        for setting in comparison.selected
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--overrides", nargs="*", default=["epochs=3"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned-comparison"))
    options = parser.parse_args()
    overrides = dict(map(parse_override, options.overrides))
    if options.data is not None:
        overrides["data.path"] = str(options.data)
    elif options.recipe == "demo":
        overrides["data.path"] = str(options.out / "scenes")
        if not os.path.exists(options.out / "scenes"):
            write_synthetic_scenes(
                options.out / "scenes", num_train=500, num_val=100, num_test=200, seed=2027
            )
    rate = read_recipe(options.recipe, overrides).phases[0].optimizer.lr
    untuned, untuned_s = compare(options, "untuned", overrides, [], tune=False)
    tuned, tuned_s = compare(options, "tuned", overrides, [], tune=True)
    sys.stdout.write(
        f"Processor time: untuned {untuned_s:.0f} s, tuned {tuned_s:.0f} s, ratio "
        f"{tuned_s / untuned_s:.2f}\n"
    )
    sys.stdout.flush()
    full, full_s = compare(
        options, "grid", overrides, [f"{RATE}={[rate * factor for factor in FACTORS]}"], tune=False
    )
    sys.stdout.write(f"Processor time of the full grid: {full_s:.0f} s\n")
    rates = {
        setting.choice: setting.recipe_values["phases"][0]["optimizer"]["lr"]
        for setting in full.selected
    }
    results = [rsum_of(comparison) for comparison in (untuned, tuned, full)]
    for objective in OBJECTIVES:
        tried = next(one.learning_rate for one in tuned.rates if one.setting == objective)
        cells = ", ".join(
            f"{name} {result[objective]:.1f}"
            for name, result in zip(("untuned", "tuned", "grid"), results, strict=True)
        )
        sys.stdout.write(
            f"{objective}: rate {tried:.2g} (grid {rates[objective]:.2g}), test RSUM {cells}\n"
        )
    clear = {
        (test.a.split(f", {RATE}")[0], test.b.split(f", {RATE}")[0])
        for test in full.rsum_tests
        if test.verdict in ("higher", "lower")
    }
    for name, result in (("untuned", results[0]), ("tuned", results[1])):
        pairs = [
            (a, b) for a, b in itertools.combinations(OBJECTIVES, 2) if {(a, b), (b, a)} & clear
        ]
        wrong = [
            f"{a} and {b}"
            for a, b in pairs
            if (result[a] > result[b]) != (results[2][a] > results[2][b])
        ]
        sys.stdout.write(
            f"{name}: {len(wrong)} of {len(pairs)} pairs that the full grid distinguishes are in "
            f"another order{': ' if wrong else '.'}{', '.join(wrong)}\n"
        )


if __name__ == "__main__":
    main()
