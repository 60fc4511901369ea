"""NCR against Unified on four kinds of wrong captions, single model and ensemble apart.

    VISAVIS_DATA=... python studies/noise_kinds.py [--seeds 5] [--share 0.4] [--images 2000] [--out
    runs/noise-kinds]

Both methods have the model, the batches, the ten epochs and the learning rate of the study
(``study-ncr-10.toml``), and keep the best of ten epochs by the validation split, which has no wrong
captions. For each seed, the same captions are wrong for both.

All runs have the same training images, a part of those of Flickr8k.

- single model: the first network of NCR, or one network of Unified
- ensemble: the mean of the scores of both networks of NCR, or of two networks of Unified that were
  trained by themselves

Each run is a line of ``results.jsonl`` in the folder. A finished run is not trained again. Prints
the test RSUM (mean and standard deviation over seeds), and the difference of NCR to Unified with its
95 % interval, paired by seed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from noise import with_interval

import visavis
from visavis.core import storage
from visavis.core.errors import RunError, VisavisError
from visavis.data.data_paths import resolve_path
from visavis.data.noise import CATALOG
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder

CLEAN = "none"
KINDS = (CLEAN, *(kind.__name__ for kind in CATALOG if kind.__name__ != "NoiseIndex"))
NCR_RECIPE = str(Path(__file__).with_name("study-ncr-10.toml"))
RATE = 2e-3
"""Learning rate of both methods, which the tuning of the study chose for each."""
SECOND_NETWORK_SEED = 1000
"""Added to the seed of the second network of Unified."""


def train(kind: str, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one method on one kind of noise. Returns its line of results."""
    noise = "" if kind == CLEAN else f"{kind}(share={options.share}, seed={seed})"
    common: dict[str, Any] = {
        "data.path": str(options.out / "data"),
        "data.noise": noise,
        "training.threads": 1,
        "phases.0.optimizer.lr": RATE,
    }
    folder = options.out / f"{kind}-{method}-{seed}"
    # A run that was stopped is trained from its start.
    for part in (folder, folder.with_name(f"{folder.name}-second")):
        storage.remove_folder(part)
    if method == "NCR":
        own: dict[str, Any] = {"phases.1.optimizer.lr": RATE, "seed": seed}
        runs = [visavis.train(NCR_RECIPE, out=folder, overrides=common | own)]
        both = visavis.papers_evaluate(folder, average=True)
    else:
        own = {"epochs": 10, "objective": "Unified(margin=0.2, gamma=25)"}
        runs = [
            visavis.train("study-flickr8k", out=out, overrides=common | own | {"seed": run_seed})
            for out, run_seed in (
                (folder, seed),
                (folder.with_name(f"{folder.name}-second"), seed + SECOND_NETWORK_SEED),
            )
        ]
        both = visavis.evaluate([run.run for run in runs])
    assert runs[0].test is not None
    return {
        "kind": kind,
        "method": method,
        "seed": seed,
        "noise_index": RunRecord.read(RunFolder(runs[0].run).environment).noise_index,
        "single": round(runs[0].test.metrics["rsum"], 3),
        "ensemble": round(both.metrics["rsum"], 3),
        "best_step": runs[0].best_step,
    }


def write_data(folder: Path, images: int) -> None:
    """Write Flickr8k with fewer training images. The others are in a split that nothing reads, so
    that the rows of stored features stay.
    """
    source = resolve_path("flickr8k")
    if (folder / "dataset_flickr8k.json").exists():
        return
    content = storage.read_json(source / "dataset_flickr8k.json", dict[str, Any])
    train = [image for image in content["images"] if image["split"] == "train"]
    kept = np.random.default_rng(0).permutation(len(train))[:images]
    for row in np.setdiff1d(np.arange(len(train)), kept):
        train[row]["split"] = "unused"
    folder.mkdir(parents=True)
    for archive in source.glob("*.tar"):
        shutil.copy(archive, folder)
    storage.write_json(folder / "dataset_flickr8k.json", content)


def table(lines: list[dict[str, Any]]) -> str:
    """One row per kind of noise and number of networks."""
    rows = [
        "| captions on wrong images | networks | NCR | Unified | NCR above it |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(line["kind"] for line in lines):
        for networks in ("single", "ensemble"):
            by_seed: dict[str, dict[int, float]] = {
                method: {
                    line["seed"]: line[networks]
                    for line in lines
                    if (line["kind"], line["method"]) == (kind, method)
                }
                for method in ("NCR", "Unified")
            }
            seeds = sorted(set.intersection(*map(set, by_seed.values())))
            if not seeds:
                continue
            cells = []
            for values in by_seed.values():
                of_seeds = [values[seed] for seed in seeds]
                spread = f" ± {statistics.stdev(of_seeds):.1f}" if len(seeds) > 1 else ""
                cells.append(f"{statistics.mean(of_seeds):.1f}{spread}")
            above = with_interval(
                [by_seed["NCR"][seed] - by_seed["Unified"][seed] for seed in seeds]
            )
            rows.append(f"| {kind} | {networks} | {cells[0]} | {cells[1]} | {above} |")
    return "\n".join([*rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--out", type=Path, default=Path("runs/noise-kinds"))
    options = parser.parse_args()
    options.out = options.out.absolute()
    write_data(options.out / "data", options.images)
    results = options.out / "results.jsonl"
    lines: list[dict[str, Any]] = (
        storage.read_json_lines(results, dict[str, Any]) if results.exists() else []
    )
    finished = {(line["kind"], line["method"], line["seed"]) for line in lines}
    for seed in range(1, options.seeds + 1):
        for kind in options.kinds:
            for method in ("NCR", "Unified"):
                if (kind, method, seed) not in finished:
                    lines.append(train(kind, method, seed, options))
                    storage.append_json_line(results, lines[-1])
                    sys.stderr.write(f"{lines[-1]}\n")
            indices = {
                line["noise_index"]
                for line in lines
                if (line["kind"], line["seed"]) == (kind, seed)
            }
            if len(indices) != 1:
                raise RunError(
                    f"{kind}, seed {seed}: expected one noise index for both methods, got {indices}."
                )
    sys.stdout.write(table(lines))


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"noise_kinds: {error}")
