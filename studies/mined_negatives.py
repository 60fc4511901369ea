"""Mined hard negatives against random batches, at the same number of steps, on Flickr8k and on
scenes with planted copies.

    python studies/mined_negatives.py [--out runs/mined] [--seeds 3] [--data flickr8k scenes]

For each seed, a model is trained with random batches. It mines the training split. Then the recipe
is trained again from random weights, with the same batches and steps, and the mined negatives in
each batch:

- ``ids``: only captions of the same image are excluded.
- ``filter``: negatives with at most 95 % of the score of the positive (the default of ``visavis
  mine``).
- ``guide``: the same by the scores of the model of the next seed.
- ``large batch``: random batches with the mean size of the extended ones, at the same number of
  steps.

On scenes, a tenth of the training images have a copy under another name, compressed again, with two
of the five captions. These captions describe the original as well, so they are false negatives. The
share of lists with one of them is printed.

Prints the test RSUM of each seed, the mean difference to random batches and its 95 % interval
(paired t). Finished runs are used again.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import stats

import visavis
from visavis.core import storage
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.training.supervision.mined_negatives import MinedBatches, MinedNegatives

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    # A quarter of the widths and two thirds of the epochs of the recipe, to train 15 models in half
    # an hour of one core.
    "flickr8k": (
        "heads-flickr8k",
        {
            "training.threads": 1,
            "model.hidden_dim": 1024,
            "model.embedding_dim": 512,
            "epochs": 6,
            "training.batch_size": 256,
        },
    ),
    "scenes": ("demo-unified", {"training.threads": 1, "epochs": 6}),
}
NUM_COPIES = 100


def write_scenes_with_copies(folder: Path) -> Path:
    """Write synthetic scenes, and copies of a tenth of the training images that take over two
    captions of their original.
    """
    write_synthetic_scenes(folder, num_train=1000, num_val=200, num_test=400, seed=5)
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    copied = set(
        np.random.default_rng(0)
        .permutation([i for i, line in enumerate(lines) if line["split"] == "train"])[:NUM_COPIES]
        .tolist()
    )
    content = []
    for number, line in enumerate(lines):
        if number in copied:
            with Image.open(folder / line["filename"]) as image:
                encoded = io.BytesIO()
                image.convert("RGB").save(encoded, "JPEG", quality=60)
            name = f"copy-{number}.jpg"
            storage.write_bytes(folder / name, encoded.getvalue())
            content.append({"filename": name, "captions": line["captions"][3:], "split": "train"})
            line = line | {"captions": line["captions"][:3]}
        content.append(line)
    storage.write_text(
        folder / "captions.jsonl", "".join(json.dumps(line) + "\n" for line in content)
    )
    return folder


def train(recipe: str, out: Path, data: Path | None, changes: dict[str, Any]) -> float:
    """Train unless it is done, and return the test RSUM."""
    if not (out / "result.json").exists():
        visavis.train(recipe, data=data, out=out, overrides=changes)
    return float(storage.read_json(out / "result.json", dict[str, Any])["rsum"])


def share_of_copies(file: Path, data: Path) -> float:
    """Share of the captions of copied images whose list of negatives has the other one of original
    and copy.
    """
    split = open_dataset(data).split("train")
    mined = MinedNegatives.read(file, split)
    number = {image.name: i for i, image in enumerate(split.images)}
    originals = [image.name for image in open_dataset(data).images]
    pairs: dict[int, int] = {}
    for name, row in number.items():
        if name.startswith("copy-"):
            # The original follows its copy in the list.
            original = number[originals[originals.index(name) + 1]]
            pairs |= {row: original, original: row}
    captions = [i for i, image in enumerate(split.image_of.tolist()) if image in pairs]
    return statistics.mean(
        float((mined.negative_images[i] == pairs[int(split.image_of[i])]).any()) for i in captions
    )


def extended_size(file: Path, data: str | Path, batch_size: int) -> int:
    """Mean number of captions of a batch with mined negatives."""
    split = open_dataset(data).split("train")
    random = np.random.default_rng(0)
    batches = MinedBatches(split, MinedNegatives.read(file, split), 1)
    sizes = []
    for _ in range(20):
        captions = random.permutation(len(split.captions))[:batch_size]
        sizes.append(len(batches.add_negatives(split.image_of[captions], captions, random)[1]))
    return round(statistics.mean(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mined"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(
            f"--seeds: expected at least 2, got {options.seeds}. Set a larger number, because the "
            "guide is the model of another seed."
        )
    torch.set_num_threads(1)
    for name in options.data:
        recipe, changes = RECIPES[name]
        folder = options.out / name
        data = None if name == "flickr8k" else folder / "data"
        if data is not None and not data.exists():
            write_scenes_with_copies(data)
        rsum: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            run = folder / f"random-{seed}"
            rsum.setdefault("random", []).append(train(recipe, run, data, changes | {"seed": seed}))
        settings = storage.read_toml(folder / "random-0" / "run.toml")
        batch_size = settings["training"]["batch_size"]
        epochs = settings["phases"][0]["epochs"]
        for seed in range(options.seeds):
            run, guide = (
                folder / f"random-{number}" for number in (seed, (seed + 1) % options.seeds)
            )
            for variant, mining in (
                ("ids", {"max_ratio": 0.0}),
                ("filter", {}),
                ("guide", {"guide": guide}),
            ):
                file = (folder / f"{variant}-{seed}.safetensors").resolve()
                if not file.exists():
                    report = visavis.data_mine(run, out=file, **mining)
                    dropped = ", ".join(
                        f"{each.direction} {100 * each.dropped:.1f} %" for each in report.directions
                    )
                    sys.stdout.write(f"{name}, seed {seed}, {variant}: dropped {dropped}\n")
                if data is not None:
                    sys.stdout.write(
                        f"{name}, seed {seed}, {variant}: lists with a copy "
                        f"{100 * share_of_copies(file, data):.1f} %\n"
                    )
                supervision = {
                    "phases.0.supervision": f"MinedNegativeSupervision(file='{file}')",
                    "seed": seed,
                }
                rsum.setdefault(variant, []).append(
                    train(recipe, folder / f"{variant}-{seed}", data, changes | supervision)
                )
            size = extended_size(
                folder / f"filter-{seed}.safetensors", data or "flickr8k", batch_size
            )
            # The same number of steps: an epoch has fewer batches.
            captions = len(open_dataset(data or "flickr8k").split("train").captions)
            longer = round(epochs * (captions // batch_size) / (captions // size))
            large = {"training.batch_size": size, "epochs": longer, "seed": seed}
            sys.stdout.write(
                f"{name}, seed {seed}: extended batches have {size} captions instead of "
                f"{batch_size}, for {longer} epochs\n"
            )
            rsum.setdefault("large batch", []).append(
                train(recipe, folder / f"large-{seed}", data, changes | large)
            )
        for variant, values in rsum.items():
            text = (
                f"{name}, {variant}: RSUM "
                + ", ".join(f"{value:.1f}" for value in values)
                + f", mean {statistics.mean(values):.1f}"
            )
            if variant != "random":
                differences = np.array(values) - np.array(rsum["random"])
                half = (
                    stats.t.ppf(0.975, len(values) - 1)
                    * differences.std(ddof=1)
                    / len(values) ** 0.5
                )
                text += f", difference {differences.mean():+.1f} ({differences.mean() - half:+.1f} to {differences.mean() + half:+.1f})"
            sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
