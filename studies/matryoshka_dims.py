"""Matryoshka dimensions: R@10 in both directions and RSUM on the test split, by the number of
dimensions kept.

visavis train heads-flickr8k model.whiten_text=false seed=1 training.threads=1 --out runs/plain
visavis train heads-flickr8k model.whiten_text=false "matryoshka_dims=[32,64,128,256]" seed=1
training.threads=1 --out runs/matryoshka VISAVIS_DATA=... python studies/matryoshka_dims.py
runs/plain runs/matryoshka --dims 32 64 128 256 1024
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.evaluation.protocols import get_protocols
from visavis.losses.pair_loss.batch_items import truncate_embeddings
from visavis.models.base import encode_unit_rows, get_vectors
from visavis.models.inference import device_score
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset
from visavis.training.runs.open_run import open_run, read_run_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 64, 128, 256, 1024])
    options = parser.parse_args()
    print(
        "| run | trained for | dimensions | i2t R@10 | t2i R@10 | RSUM |\n|---|---|---|---|---|---|"
    )
    for run in options.runs:
        recipe = read_run_recipe(run)
        data_module, matcher = open_run(run, recipe, NoProgress())
        split = data_module.data.split(recipe.evaluation.test)
        rules = get_protocols(recipe.evaluation.protocol)
        sides = [matcher.first_stage_items(items) for items in data_module.encode(matcher, split)]
        trained = ", ".join(map(str, matcher.matryoshka_dims)) or "all dimensions"
        for dims in options.dims:
            visual, text = (
                encode_unit_rows(get_vectors(truncate_embeddings(items, dims))) for items in sides
            )
            metrics = evaluate_dataset(visual, text, device_score(matcher), split, rules).metrics
            print(
                f"| {run.name} | {trained} | {dims:,} | {metrics['i2t_r10']:.1f} | "
                f"{metrics['t2i_r10']:.1f} | {metrics['rsum']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"matryoshka_dims: {error}")
