"""The gradient on its way from the scores to the parameters, for objectives and GOAL combinations,
on Flickr8k and on synthetic scenes.

    VISAVIS_DATA=... python studies/gradient_flow.py [--out runs/gradients] [--seeds 5]

Each run takes 120 steps of 128 pairs: half an epoch of Flickr8k, one and a half of the scenes. The
encoders are small. The learning rate is that of the recipe, the same for all objectives. Gradients
are recorded every 5 steps (``training.gradients_every``). A run is a line of
``docs/evidence/study/gradients.jsonl`` or ``gradients-scenes.jsonl``, and is not made again. A line
holds all records, and these metrics:

- ``early gradient``: the lowest share of the run, in percent of the share before training. The
  share is the norm of the tangent gradient of the normalized embeddings of both encoders, divided
  by the norm of the gradient of the scores. It shows what reaches the embeddings (Unified loss,
  sections 3.3 and 4.4), and does not depend on the scale of the loss.
- ``early gradient of 40 steps``: the same of the first 40 steps.
- ``factor``: the natural logarithm of the factor dx/dtheta that GOAL does not discuss, averaged
  over all records. The factor is the norm of the gradient of the parameters of both encoders,
  divided by that of the embeddings before normalization.
- ``factor growth``: the mean logarithm over the last 40 steps minus that of the first record.

``studies/claims.py`` reads them. The command also plots the records of Flickr8k for the docs.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from study import EVIDENCE, SCENES, SPEC, read_evidence, rounded, scenes_in, write_scenes_once

import visavis
from visavis.core import storage
from visavis.core.progress import NoProgress
from visavis.research.reports.gradient_flow import GradientFlow, plot_gradient_flow
from visavis.training.runs.run_folder import RunFolder

FIGURE = EVIDENCE.parents[1] / "images" / "gradients.png"
STEPS = 120
EARLY_STEPS = 40
EVERY = 5
OBJECTIVES = {
    "TripletHN": "TripletHN(margin=0.2)",
    "Unified": "Unified(margin=0.2, gamma=50)",
    "Goal nca con": "Goal(triplet='nca', pair='con')",
    "VLC": "VLC(gamma=50)",
    "Goal nca sig": "Goal(triplet='nca', pair='sig')",
    "Triplet": "Triplet(margin=0.2)",
}
SETTINGS = {
    "training.batch_size": 128,
    "training.batches_per_epoch": EARLY_STEPS,
    "training.gradients_every": EVERY,
    "training.checkpoint_s": 1e6,
    "training.threads": 1,
    "evaluation.validation_images": 100,
    "evaluation.test": "",
    "phases.0.epochs": STEPS // EARLY_STEPS,
}
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "gradients": ("study-flickr8k", {"model.embedding_dim": 256, "model.hidden_dim": 256}),
    "gradients-scenes": (SCENES, {"model.embedding_dim": 128}),
}


def norm_of(record: dict[str, float], name: str) -> float:
    """Norm over both encoders."""
    return math.hypot(record[f"visual_{name}"], record[f"text_{name}"])


def metrics_of(records: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of the records of a run."""
    shares = [norm_of(record, "tangent") / record["scores"] for record in records]
    factors = [
        math.log(norm_of(record, "parameters") / norm_of(record, "embedding")) for record in records
    ]
    early = [
        share
        for record, share in zip(records, shares, strict=True)
        if record["step"] <= EARLY_STEPS
    ]
    late = [
        factor
        for record, factor in zip(records, factors, strict=True)
        if record["step"] >= STEPS - EARLY_STEPS
    ]
    return {
        "early gradient": 100 * min(shares) / shares[0],
        "early gradient of 40 steps": 100 * min(early) / shares[0],
        "factor": statistics.fmean(factors),
        "factor growth": statistics.fmean(late) - factors[0],
    }


def train(experiment: str, name: str, seed: int, out: Path) -> dict[str, Any]:
    """Train a run, and return its line."""
    recipe: str | Path
    recipe, size = DATA[experiment]
    overrides = SETTINGS | size | {SPEC: OBJECTIVES[name]}
    given = overrides | {"seed": seed}
    if recipe == SCENES:
        recipe = Path(__file__).parent / SCENES
        given["data.path"] = str(scenes_in(out))
    run = out / f"{experiment}-{name.replace(' ', '-')}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    trained = visavis.train(recipe, overrides=given, out=run, progress=NoProgress())
    rows = RunFolder(run).read_log()
    records = [rounded(record) for row in rows for record in row.get("gradient_steps", ())]
    line = {
        "setting": name,
        "seed": seed,
        "overrides": overrides,
        "validation_rsum": rows[-1]["rsum"],
        "seconds": round(trained.seconds, 1),
        "counts": {},
        "metrics": rounded(metrics_of(records)),
        "gradients": {key: [record[key] for record in records] for key in records[0]},
    }
    shutil.rmtree(run)
    return line


def plot() -> None:
    """Plot the records of Flickr8k."""
    flows = []
    for line in read_evidence("gradients"):
        columns = line["gradients"]
        records = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        flows.append(GradientFlow(Path(), OBJECTIVES[line["setting"]], tuple(records)))
    storage.write_bytes(FIGURE, plot_gradient_flow(flows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_scenes_once(scenes_in(options.out))
    for seed in range(1, options.seeds + 1):
        for name in OBJECTIVES:
            for experiment in DATA:
                done = {(line["setting"], line["seed"]) for line in read_evidence(experiment)}
                if (name, seed) in done:
                    continue
                line = train(experiment, name, seed, options.out)
                storage.append_json_line(EVIDENCE / f"{experiment}.jsonl", line)
                sys.stderr.write(f"{experiment}, {name}, seed {seed}: {line['metrics']}\n")
    plot()


if __name__ == "__main__":
    main()
