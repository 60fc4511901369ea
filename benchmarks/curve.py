"""The table of ``visavis indexes measure`` over the images of a run's data, by their cached
features.

With ``--items``, the images are repeated with noise to a larger collection.

    visavis train heads-flickr8k model.whiten_text=false "matryoshka_dims=[32,64,128,256]" seed=1
    training.threads=1 --out runs/matryoshka VISAVIS_DATA=... python benchmarks/curve.py
    runs/matryoshka [--items 200000]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from visavis.cli.console import print_tables
from visavis.core.progress import NoProgress
from visavis.data.words import tokenize
from visavis.models.base import get_vectors
from visavis.retrieval.build.compression import MEASURED_QUERIES, compare_encodings, noisy_queries
from visavis.training.runs.open_run import open_run, read_run_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--items",
        type=int,
        default=0,
        help="Number of images, by repetition with noise. 0: each image once.",
    )
    options = parser.parse_args()
    data_module, matcher = open_run(options.run, read_run_recipe(options.run), NoProgress())
    data = data_module.data
    visual, text = (
        get_vectors(matcher.first_stage_items(items)).numpy()
        for items in data_module.encode(matcher, data)
    )
    rows = (
        visual
        if not options.items
        else noisy_queries(np.resize(visual, (options.items, visual.shape[1])))
    )
    chosen = np.sort(
        np.random.default_rng(0).choice(len(data.images), MEASURED_QUERIES, replace=False)
    )
    first = [data.captions_of[image][0] for image in chosen]
    own = None if options.items else chosen.tolist()
    asked = f"captions, {np.mean([len(tokenize(data.captions[one])) for one in first]):.1f} words on average"
    print(f"{os.uname().nodename}: {torch.get_num_threads()} threads")
    report = compare_encodings(
        rows, text[first], matcher.matryoshka_dims[:-1], positives=own, query_source=asked
    )
    print_tables([report.table()])


if __name__ == "__main__":
    main()
