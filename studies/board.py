"""A board of small runs: objectives x models on synthetic scenes, synthetic clips and a part of
Flickr8k.

    VISAVIS_DATA=... python studies/board.py [--seeds 5] [--workers 1] [--out runs/board-study]

Each run takes one to two seconds of one core. The learning rates are those of the recipes and are
not tuned, so the board ranks objectives at equal budgets and not at their best. All settings have
seed 1 before any has seed 2. A study that was stopped resumes, and finished runs are not trained
again. The weights of a finished run are removed. Its recipe, record, result and ranks stay, and
``visavis papers board`` reads them into a page and a CSV file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.data_paths import resolve_path
from visavis.data.synthetic import write_synthetic_clips, write_synthetic_scenes
from visavis.research.experiments.jobs import Job, Workers
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import Recipe, build_recipe
from visavis.training.runs.open_run import with_absolute_paths
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped

OBJECTIVES = (
    "Triplet()",
    "TripletHN()",
    "TripletTopK()",
    "MaxMargin()",
    "VLC()",
    "NTXent()",
    "InfoNCE()",
    "Unified()",
    "SmoothAP()",
    "Goal()",
    "Circle()",
    "Sigmoid()",
)
TEXTS = "word_dim=64, embedding_dim=64"
MODELS = (
    f"VSE++({TEXTS}, word_pool='max')",
    f"VSE++({TEXTS}, word_pool='mean')",
    f"VSE++({TEXTS}, word_pool='max', bidirectional=True)",
    f"Heads({TEXTS}, num_filters=64, hidden_dim=128, dropout=0.1, word_dropout=0.1)",
)
CLIP_TEXTS = f"{TEXTS}, hidden_dim=64"
CLIP_MODELS = (
    f"CE({CLIP_TEXTS}, word_pool='last')",
    f"CE({CLIP_TEXTS}, word_pool='mean')",
    f"MMT({CLIP_TEXTS}, layers=1, feedforward_dim=64, attention_dropout=0.0)",
    f"MMT({CLIP_TEXTS}, layers=2, feedforward_dim=64, attention_dropout=0.0)",
)
TRAIN, VALIDATION, TEST = 300, 60, 200
"""Number of images or clips of each split."""
COMMON: dict[str, Any] = {
    "training.threads": 1,
    "training.batch_size": 64,
    "training.length_buckets": 8,
    "training.gradients_every": 0,
    "training.metric_batches": 1,
    "epochs": 3,
}
DATA_SETS = ("scenes", "clips", "flickr8k-part")
FEATURES = "backbone/flickr8k_mobilenet_v2_pool_fp16.npy"


def write_flickr8k_part(folder: Path) -> None:
    """Write the first images of each split of Flickr8k, with their captions and features."""
    listing = storage.read_json(resolve_path("flickr8k/dataset_flickr8k.json"), dict[str, Any])
    sizes = {"train": TRAIN, "val": VALIDATION, "test": TEST}
    images = [
        image
        for split, number in sizes.items()
        for image in [each for each in listing["images"] if each["split"] == split][:number]
    ]
    rows = [image["imgid"] for image in images]
    features = storage.read_array(resolve_path(FEATURES), dimensions=2)
    folder.mkdir(parents=True)
    storage.write_array(folder / "features.npy", np.ascontiguousarray(features[rows]))
    numbered = [{**image, "imgid": number} for number, image in enumerate(images)]
    # Last: the data set is complete.
    storage.write_json(
        folder / "dataset_flickr8k.json", {"dataset": "flickr8k", "images": numbered}
    )


def data_sets(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Recipe, tuple[str, ...]]]:
    """Write the data sets that do not exist. Yield the name, the recipe and the models of each."""
    scenes, clips, flickr8k = (folder / name for name in DATA_SETS)
    if scenes.name in names and not scenes.exists():
        write_synthetic_scenes(
            scenes, num_train=TRAIN, num_val=VALIDATION, num_test=TEST, size=48, seed=66
        )
    if clips.name in names and not clips.exists():
        write_synthetic_clips(clips, num_train=TRAIN, num_val=VALIDATION, num_test=TEST, seed=66)
    if flickr8k.name in names and not (flickr8k / "dataset_flickr8k.json").exists():
        storage.remove_folder(flickr8k)
        write_flickr8k_part(flickr8k)
    pooled = {
        "visual.features": str(flickr8k / "features.npy"),
        "visual.standardize": "sqrt_zscore",
    }
    for data, name, changes, models in (
        (scenes, "demo", {}, MODELS),
        (clips, "synthetic-clips/ce", {}, CLIP_MODELS),
        (flickr8k, "demo", {"visual.encoder": "mobilenet-v2", **pooled}, MODELS),
    ):
        if data.name in names:
            recipe = read_recipe(name, {"data.path": str(data), **COMMON, **changes})
            yield data.name, with_absolute_paths(recipe), models


def plan_jobs(out: Path, seeds: int, data: Sequence[str] = DATA_SETS) -> list[Job]:
    """The runs of all settings, seed by seed."""
    jobs = []
    settings = [
        (f"{name}-{objective.partition('(')[0].lower()}-{number}", recipe, objective, model)
        for name, recipe, models in data_sets(out / "data", data)
        for objective in OBJECTIVES
        for number, model in enumerate(models, 1)
    ]
    for seed in range(1, seeds + 1):
        for name, recipe, objective, model in settings:
            changes = {"objective": objective, "model": model, "seed": seed}
            values = build_recipe(recipe.to_dict(), changes, name).to_dict()
            jobs.append(Job(name, seed, values, out / "runs" / f"{name}-seed-{seed}"))
    return jobs


def main() -> None:
    """Train the runs that are missing, then make the board."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="Number of parallel runs.")
    parser.add_argument("--data", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    parser.add_argument("--out", type=Path, default=Path("runs/board-study"))
    parser.add_argument("--limit", type=int, default=0, help="Number of runs to make. 0: all.")
    options = parser.parse_args()
    out = options.out.absolute()
    jobs = plan_jobs(out, options.seeds, options.data)
    if options.limit:
        jobs = jobs[: options.limit]
    started = time.perf_counter()
    with Workers(num_workers=options.workers).start(1, NoProgress()) as run_jobs:
        for number, outcome in enumerate(run_jobs(jobs), 1):
            folder = RunFolder(outcome.folder)
            for part in (folder.model, folder.checkpoints):
                storage.remove_folder(part)
            rsum = outcome.failure or f"RSUM {outcome.measured_metrics['rsum']:.1f}"
            seconds = time.perf_counter() - started
            sys.stderr.write(
                f"{number}/{len(jobs)} {outcome.setting}, seed {outcome.seed}: {rsum} ({seconds:.0f} s)\n"
            )
    board = visavis.papers_board(out / "runs", out=storage.create_numbered_folder(out / "board"))
    sys.stdout.write(f"{board.folder}\n")


if __name__ == "__main__":
    try:
        main()
    except (VisavisError, Stopped) as error:
        sys.exit(f"board: {error}")
