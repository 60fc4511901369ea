"""Noisy correspondence: heads on Flickr8k with 40 % of the training captions next to wrong images,
NCR against TripletHN and Unified.

    VISAVIS_DATA=... python studies/noise.py [--seeds 3] [--share 0.4] [--threads 1] [--out
    runs/noise] [--weights]

For each seed, the same captions are mismatched for all. NCR and TripletHN start with the same
warm-up by Unified. The test split is not mismatched. Prints the test RSUM of each (mean and
standard deviation), the difference of NCR to each (mean of the differences by seed and its 95 %
interval), and how well NCR's probabilities separate correct training captions from mismatched ones
(area under the ROC curve). ``--weights`` compares learned weights with no weights on the same
captions, and prints how well the weights of pairs separate them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

import torch
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from torch import Tensor

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.data.noise import add_noise
from visavis.models.batch_encoding import evaluation_mode
from visavis.training.checkpoint import Checkpoint
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.supervision.learned_weights import WeightNetwork
from visavis.training.supervision.noisy_correspondence import training_batches
from visavis.training.training_run import TrainingResult, prepare_training

OTHERS = {
    "TripletHN": {"phases.1.objective": "TripletHN(margin=0.2)"},
    "TripletHN from the first step": {"objective": "TripletHN(margin=0.2)"},
    "Unified": {"objective": "Unified(margin=0.2, gamma=50)"},
}


def train_all(out: Path, seed: int, share: float, threads: int) -> dict[str, TrainingResult]:
    """One run of NCR, and one of each other objective by the same recipe, in which every caption is
    trusted.
    """
    common = {
        "seed": seed,
        "data.noise": f"ShuffledCaptions(share={share})",
        "training.threads": threads,
    }
    without_ncr = {f"phases.{phase}.supervision": "PairSupervision()" for phase in (0, 1)}
    runs = {"NCR": visavis.train("ncr-heads-flickr8k", out=out / f"ncr-{seed}", overrides=common)}
    for name, objective in OTHERS.items():
        folder = out / f"{name.lower().replace(' ', '-')}-{seed}"
        runs[name] = visavis.train(
            "ncr-heads-flickr8k", out=folder, overrides={**common, **without_ncr, **objective}
        )
    return runs


def train_weighted(out: Path, seed: int, share: float, threads: int) -> dict[str, TrainingResult]:
    """One run with learned weights, and one of the same recipe without."""
    common = {
        "seed": seed,
        "data.noise": f"ShuffledCaptions(share={share})",
        "training.threads": threads,
    }
    without = {**common, "phases.0.supervision": "PairSupervision()"}
    return {
        "learned weights": visavis.train(
            "learned-weights-heads-flickr8k", out=out / f"weights-{seed}", overrides=common
        ),
        "no weights": visavis.train(
            "learned-weights-heads-flickr8k", out=out / f"none-{seed}", overrides=without
        ),
    }


def separation(run: TrainingResult) -> float:
    """How well a run's supervision separates correct from mismatched training captions: the area
    under the ROC curve.
    """
    recipe = read_run_recipe(run.run)
    checkpoint = Checkpoint.latest(run.run / "checkpoint")
    assert checkpoint is not None
    data = open_dataset(recipe.data.path)
    assert recipe.data.noise is not None
    noisy = add_noise(data, recipe.data.noise, recipe.seed)
    is_correct = (noisy.image_of == data.image_of)[noisy.split("train").caption_rows]
    state = checkpoint.supervision
    clean_scores = state["clean"].mean(0) if "clean" in state else weights(recipe, checkpoint)
    return float(roc_auc_score(is_correct, clean_scores.numpy()))


@torch.no_grad()
def weights(recipe: Recipe, checkpoint: Checkpoint) -> Tensor:
    """The weight of each training caption with its image, in batches of about the training size, by
    the last model.
    """
    data_module, matcher = prepare_training(recipe)
    matcher.load_state_dict(checkpoint.weights)
    network = WeightNetwork(len(checkpoint.supervision["layers.0.bias"]))
    network.load_state_dict(checkpoint.supervision)
    loader = data_module.loader(data_module.data.split("train"))
    caption_weights = torch.empty(len(loader.data.captions))
    with evaluation_mode(matcher):
        for rows in training_batches(loader):
            images = loader.data.image_of[rows]
            scores = matcher.score(
                matcher.encode_visual(loader.visual.read(images)),
                matcher.encode_text(loader.text.read(rows)),
            )
            caption_weights[rows] = network(
                scores, torch.from_numpy(images[:, None] == images)
            ).diagonal()
    return caption_weights


def with_interval(differences: list[float]) -> str:
    """The mean of differences by seed, with its 95 % interval by Student's t if there are several."""
    mean = statistics.mean(differences)
    count = len(differences)
    if count == 1:
        return f"{mean:+.1f}"
    half_width = student.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return f"{mean:+.1f} ({mean - half_width:+.1f} to {mean + half_width:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="Compare learned weights with no weights, instead of NCR with others.",
    )
    options = parser.parse_args()
    out = (
        storage.create_numbered_folder("runs/noise")
        if options.out is None
        else storage.prepare_empty_folder(options.out)
    )
    rsum: dict[str, list[float]] = {}
    areas: list[float] = []
    for seed in range(1, options.seeds + 1):
        runs = (train_weighted if options.weights else train_all)(
            out, seed, options.share, options.threads
        )
        first = next(iter(runs))
        areas.append(separation(runs[first]))
        for name, run in runs.items():
            assert run.test is not None
            rsum.setdefault(name, []).append(run.test.metrics["rsum"])
        sys.stderr.write(
            f"seed {seed}: {', '.join(f'{name} {values[-1]:.1f}' for name, values in rsum.items())}, AUC {areas[-1]:.3f}\n"
        )
    sys.stdout.write(table(rsum, areas))


def table(rsum: dict[str, list[float]], areas: list[float]) -> str:
    """One row per objective: test RSUM over seeds, and the AUC of the first one."""
    first = next(iter(rsum))
    lines = [
        f"| | test RSUM | {first} above it | AUC, correct against mismatched |",
        "|---|---|---|---|",
    ]
    for name, values in rsum.items():
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        above = (
            ""
            if name == first
            else with_interval(
                [
                    first_rsum - rsum_value
                    for first_rsum, rsum_value in zip(rsum[first], values, strict=True)
                ]
            )
        )
        area = f"{statistics.mean(areas):.3f} (minimum {min(areas):.3f})" if name == first else ""
        lines.append(f"| {name} | {statistics.mean(values):.1f}{spread} | {above} | {area} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"noise: {error}")
