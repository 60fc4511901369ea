"""What the first numbers of a model's vectors find alone: R@10 both ways and RSUM on the test split of runs, at several widths.

visavis train heads-flickr8k seed=1 training.threads=1 --out runs/plain
visavis train heads-flickr8k "widths=[32,64,128,256]" seed=1 training.threads=1 --out runs/widths
VISAVIS_DATA=... python studies/widths.py runs/plain runs/widths --widths 32 64 128 256 1024
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from visavis.engine.widths import cut
from visavis.errors import VisavisError
from visavis.evaluation.of_data import evaluate_data
from visavis.evaluation.protocols import all_named
from visavis.models.base import unit, vectors
from visavis.models.scoring import score_from_cpu
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256, 1024])
    options = parser.parse_args()
    print("| run | trained for | width | i2t R@10 | t2i R@10 | RSUM |\n|---|---|---|---|---|---|")
    for run in options.runs:
        recipe = recipe_of(run)
        data_module, matcher = open_run(run, recipe, Silent())
        split, rules = data_module.data.split(recipe.evaluation.test), all_named(recipe.evaluation.protocol)
        sides = [matcher.first_stage(items) for items in data_module.encode(matcher, split)]
        trained = ", ".join(map(str, matcher.widths)) or "whole vectors"
        for width in options.widths:
            short = [unit(vectors(cut(items, width))) for items in sides]
            found = evaluate_data(*short, score_from_cpu(matcher), split, rules).metrics
            print(
                f"| {run.name} | {trained} | {width:,} | {found['i2t_r10']:.1f} | {found['t2i_r10']:.1f} | {found['rsum']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"widths: {error}")
