"""Order and missing experts on synthetic clips: MMT against averages over time, and CE of three
experts against CE of one.

    python studies/synthetic_clips.py [--seeds 5] [--clips 1000] [--threads 1] [--out runs/clips]

Each test clip has a partner with the same frames in another order, and a caption chooses between
the two. A model that averages over time is right in 50 % of the cases (ties count half). Printed
for each recipe:

- that share for "order" (events change places, so the averages of all experts are equal) and
  "direction" (a clip backwards, so the averages of motion differ)
- the sum of text-to-video R@1, R@5 and R@10 for the captions of clips that lack an expert
- the test RSUM

CE's recipes differ only in their experts. MMT's recipe has more epochs, because order takes long to
learn. Values are mean and standard deviation over seeds, and differences by seed with their 95 %
interval. With --out, a study that was stopped, or had fewer seeds, resumes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from noise import with_interval

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.synthetic import ClipAnnotations, write_synthetic_clips
from visavis.models.batch_encoding import evaluation_mode
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.stop_signals import Stopped
from visavis.training.training_run import TrainingResult, prepare_training

TIE = 1e-6
RECIPES = ("mmt", "ce", "ce-appearance")
COMPARISONS = (
    ("mmt", "ce", "order"),
    ("ce", "ce-appearance", "missing"),
    ("ce", "ce-appearance", "rsum"),
)


@torch.no_grad()
def figures(run: TrainingResult, truth: ClipAnnotations) -> dict[str, float]:
    """The metrics of a run on the test split, in percent."""
    data_module, matcher = prepare_training(read_run_recipe(run.run))
    matcher.load_state_dict(visavis.load(run.run).matcher.state_dict())
    test = data_module.data.split("test")
    with evaluation_mode(matcher):
        scores = matcher.score(*data_module.encode(matcher, test)).numpy().T
    clip_of_caption = test.image_of
    captions = np.arange(len(test.captions))
    position_of_row = {row: i for i, row in enumerate(test.image_rows)}
    partner = np.array([position_of_row[truth.partner_of[row]] for row in test.image_rows])[
        clip_of_caption
    ]
    score_difference = scores[captions, clip_of_caption] - scores[captions, partner]
    accuracy = np.where(np.abs(score_difference) < TIE, 0.5, score_difference > 0)
    rows = test.image_rows[clip_of_caption]
    ranks = (scores >= scores[captions, clip_of_caption][:, None]).sum(1)
    missing = np.array([bool(truth.missing[row]) for row in rows])
    assert run.test is not None
    return {
        **{
            subset: 100 * float(accuracy[truth.subset[rows] == subset].mean())
            for subset in ("order", "direction")
        },
        "missing": sum(100 * float((ranks[missing] <= k).mean()) for k in (1, 5, 10)),
        "rsum": run.test.metrics["rsum"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clips", type=int, default=1000, help="Number of training clips.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or storage.create_numbered_folder("runs/clips")
    data = out / "scenes"
    figures_file = out / "figures.json"
    if not data.exists():
        write_synthetic_clips(data, num_train=options.clips, num_val=100, num_test=400)
    truth = ClipAnnotations.open(data)
    figures_by_run: dict[str, dict[str, float]] = (
        storage.read_json(figures_file, dict[str, Any]) if figures_file.exists() else {}
    )
    for run in (f"{name}-{seed}" for seed in range(1, options.seeds + 1) for name in RECIPES):
        if run in figures_by_run:
            continue
        started = time.perf_counter()
        name, _, seed = run.rpartition("-")
        settings = {"seed": int(seed), "training.threads": options.threads}
        storage.remove_folder(out / run)
        figures_by_run[run] = figures(
            visavis.train(f"synthetic-clips/{name}", data=data, out=out / run, overrides=settings),
            truth,
        )
        storage.write_json(figures_file, figures_by_run)
        values = ", ".join(f"{key} {value:.1f}" for key, value in figures_by_run[run].items())
        sys.stderr.write(f"{run}: {values} ({time.perf_counter() - started:.0f} s)\n")
    sys.stdout.write(
        table(
            {
                name: [figures_by_run[f"{name}-{seed}"] for seed in range(1, options.seeds + 1)]
                for name in RECIPES
            }
        )
    )


def table(runs_by_recipe: dict[str, list[dict[str, float]]]) -> str:
    """The metrics of each recipe, and the differences by seed."""
    lines = ["| | order | direction | missing expert | test RSUM |", "|---|---|---|---|---|"]
    for name, runs in runs_by_recipe.items():
        cells = []
        for key in ("order", "direction", "missing", "rsum"):
            values = [run[key] for run in runs]
            cells.append(
                f"{statistics.mean(values):.1f}"
                + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for first, second, key in COMPARISONS:
        differences = [
            first_run[key] - second_run[key]
            for first_run, second_run in zip(
                runs_by_recipe[first], runs_by_recipe[second], strict=True
            )
        ]
        lines.append(f"\n{first} above {second}, {key}: {with_interval(differences)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except (VisavisError, Stopped) as error:
        sys.exit(f"synthetic_clips: {error}")
