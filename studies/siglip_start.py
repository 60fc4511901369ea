"""SigLIP: how the start of scale and bias and the learning rate decide a training.

    VISAVIS_DATA=... python studies/siglip_start.py [--out runs/siglip-start] [--rows start rate tune]
    [--seeds 1]

A small SigLIP of ``transformers`` (width 64, two layers per encoder) starts from random weights and
trains for 320 steps with 64 pairs each on 512 photos of Flickr8k. Nothing here was measured with published
weights. Each group of rows changes one setting:

- start: the scale and bias at which ``Sigmoid`` starts, or ``InfoNCE``,
- rate: the learning rate of the right start,
- tune: fine-tuning of the first trained model on other photos for 80 steps, from its own scale and
  bias or from other ones.

Prints the loss of the untrained model, the mean loss of the last epoch, scale and bias at both ends,
and RSUM on the training photos, which shows whether the training works at all (random ranking: 6.2).
A model whose scores only hold the share of positives has the loss 5.15. Finished runs are used again
and stopped ones resume. A run takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clip_small import spread, train_once, write_clip_folder

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.models.clip.model import export_to_transformers

SIZE = 48
WIDTH = 64
MIN_COUNT = 8
SETTINGS: dict[str, Any] = {
    "data.training_images": 512,
    "training.batch_size": 64,
    "training.metric_batches": 1,
    "training.checkpoint_s": 20.0,
    "evaluation.validation": "train",
    "evaluation.test": "",
    "epochs": 8,
    "phases.0.optimizer": {
        "name": "AdamW",
        "lr": 1e-3,
        "weight_decay": 0.05,
        "betas": [0.9, 0.95],
        "layer_decay": 1.0,
    },
}
RIGHT = "Sigmoid(scale=10, bias=-10)"
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "start": {
        RIGHT: {},
        "Sigmoid(scale=1, bias=0)": {},
        "Sigmoid(scale=10, bias=0)": {},
        "Sigmoid(scale=100, bias=-10)": {},
        "Sigmoid(scale=100, bias=0)": {},
        "InfoNCE(tau=0.1)": {},
    },
    "rate": {f"{RIGHT} at {rate:g}": {"phases.0.optimizer.lr": rate} for rate in (3e-4, 3e-3)},
}
TUNED_STARTS = ("Sigmoid()", RIGHT, "Sigmoid(scale=100, bias=0)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/siglip-start"))
    groups = [*ROWS, "tune"]
    parser.add_argument("--rows", nargs="+", choices=groups, default=groups)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    encoder = initial_model(options.out)
    sys.stdout.write(
        "| setting | loss at start | last loss | scale | bias | RSUM |\n|---|---:|---:|---:|---:|---:|\n"
    )
    for group in options.rows:
        rows = ROWS.get(group) or {
            f"{start}, fine-tuned": {"phases.0.optimizer.lr": 3e-4, "epochs": 2, "tuned": True}
            for start in TUNED_STARTS
        }
        for name, overrides in rows.items():
            runs = [
                run_once(options.out, encoder, name, overrides, seed) for seed in seeds(options)
            ]
            sys.stdout.write(row(name, runs) + "\n")
            sys.stdout.flush()


def seeds(options: argparse.Namespace) -> Iterator[int]:
    yield from range(1, options.seeds + 1)


def initial_model(out: Path) -> Path:
    """The folder of the model with random weights."""
    folder = out / "begun"
    if not (folder / "preprocessor_config.json").exists():
        counts: dict[str, int] = {}
        for caption in open_dataset("flickr8k").split("train").captions:
            for word in re.findall(r"\w+|[^\w\s]+", caption.lower()):
                counts[word] = counts.get(word, 0) + 1
        words = sorted(word for word, count in counts.items() if count >= MIN_COUNT)
        shared = {
            "hidden_size": WIDTH,
            "num_attention_heads": 2,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
        }
        write_clip_folder(
            folder,
            words,
            shared | {"max_position_embeddings": 24, "projection_size": WIDTH},
            "Siglip",
            vision_config=shared | {"image_size": SIZE, "patch_size": 12},
        )
    return folder


def run_once(
    out: Path, encoder: Path, name: str, overrides: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Figures of a run: losses, scale and bias at start and end, and test RSUM."""
    overrides = dict(overrides)
    if overrides.pop("tuned", False):
        trained = out / f"{slug(RIGHT)}-1"
        encoder = out / "trained"
        if not encoder.exists():
            export_to_transformers(visavis.load(trained).matcher, encoder)
        seed += 100  # other captions and other images
    objective = re.split(r" at |, fine", name)[0]
    run = out / f"{slug(name)}-{seed}"
    given = {"visual.encoder": str(encoder), "text.encoder": str(encoder), "objective": objective}
    train_once("clip/full", run, Path("flickr8k"), SETTINGS | given | overrides | {"seed": seed})
    log = storage.read_json_lines(run / "metrics.jsonl", dict[str, Any])
    first = log[0]["health"]
    last = log[-1]["health"]
    return {
        "start": log[0]["train"]["loss"],
        "end": log[-1]["running_loss"],
        "scale": (first["scale"], last["scale"]),
        "bias": (first.get("bias"), last.get("bias")),
        "rsum": log[-1]["rsum"],
    }


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """Mean over seeds, RSUM with its standard deviation."""

    def ends(key: str) -> str:
        if runs[0][key][0] is None:
            return ""
        first, last = (statistics.mean(run[key][side] for run in runs) for side in (0, 1))
        return f"{first:.4g} -> {last:.4g}"

    losses = [f"{statistics.mean(run[key] for run in runs):.2f}" for key in ("start", "end")]
    rsum = spread(tuple(run["rsum"] for run in runs))
    return f"| {name} | {losses[0]} | {losses[1]} | {ends('scale')} | {ends('bias')} | {rsum} |"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(str(error))
