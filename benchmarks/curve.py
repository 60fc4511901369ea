"""The curve of ``visavis index --curve`` over the pictures of a run's data by their cached features, perhaps repeated with noise to a larger collection.

visavis train heads-flickr8k "widths=[32,64,128,256]" seed=1 training.threads=1 --out runs/widths
VISAVIS_DATA=... python benchmarks/curve.py runs/widths [--items 200000]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from visavis.cli.output.retrieval import print_curve
from visavis.data.captions import tokenize
from visavis.models.base import vectors
from visavis.progress import Silent
from visavis.retrieval.ann import ASKED, perturbed
from visavis.retrieval.curve import curve_of
from visavis.runs.folder import open_run, recipe_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--items", type=int, default=0, help="Repeat the pictures with noise to so many; 0: once.")
    options = parser.parse_args()
    data_module, matcher = open_run(options.run, recipe_of(options.run), Silent())
    data = data_module.data
    visual, text = (vectors(matcher.first_stage(items)).numpy() for items in data_module.encode(matcher, data))
    rows = visual if not options.items else perturbed(np.resize(visual, (options.items, visual.shape[1])))
    pictures = np.sort(np.random.default_rng(0).choice(len(data.images), ASKED, replace=False))
    first = [data.captions_of[picture][0] for picture in pictures]
    own = None if options.items else pictures.tolist()
    asked = f"captions, {np.mean([len(tokenize(data.captions[one])) for one in first]):.1f} words on average"
    print(f"{os.uname().nodename}: {torch.get_num_threads()} threads")
    print_curve(curve_of(rows, text[first], matcher.widths[:-1], own=own, asked=asked))


if __name__ == "__main__":
    main()
