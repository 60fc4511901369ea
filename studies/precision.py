"""Half precision in training: test RSUM of heads on Flickr8k with each objective in float32,
bfloat16 and float16.

Each objective trains small heads on 1,000 images for three epochs. Float32 has three seeds, half
precisions one. A result is outside if it is further from the mean of float32 than any of its seeds,
and further than three standard deviations of all seeds around their means.

    VISAVIS_DATA=... python studies/precision.py [--only OBJECTIVE ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import visavis
from visavis.objectives import CATALOG

GLOVE = "GradedSupervision(relevance='CBoW(vectors=\"glove/glove.6B.50d.captions.txt\")')"
SUPERVISION = {
    "Ladder": GLOVE,
    "GradedVLC": GLOVE,
    "AOQ": "OfflineNegativeSupervision(size=50)",
    "NCR": "NoisySupervision()",
}
SMALL = {
    "data.training_images": 1000,
    "epochs": 3,
    "training.batch_size": 128,
    "training.threads": 1,
    "training.metric_batches": 1,
    "model.hidden_dim": 512,
    "model.embedding_dim": 256,
    "evaluation.validation_images": 200,
}
PRECISIONS = {"float32": False, "bfloat16": True, "float16": "float16"}
SEEDS = (1, 2, 3)


def rsum(objective: str, precision: str, seed: int, folder: Path) -> float:
    """Train heads and return the test RSUM."""
    settings = SMALL | {
        "objective": f"{objective}()",
        "training.autocast": PRECISIONS[precision],
        "seed": seed,
    }
    if objective in SUPERVISION:
        settings["phases.0.supervision"] = SUPERVISION[objective]
    run = visavis.train(
        "heads-flickr8k", overrides=settings, out=folder / f"{objective}-{precision}-{seed}"
    )
    assert run.test is not None
    return run.test.metrics["rsum"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[kind.__name__ for kind in CATALOG])
    options = parser.parse_args()
    seeds = dict[str, list[float]]()
    half = dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        for objective in options.only:
            seeds[objective] = [rsum(objective, "float32", seed, Path(folder)) for seed in SEEDS]
            half[objective] = {
                name: rsum(objective, name, SEEDS[0], Path(folder))
                for name in ("bfloat16", "float16")
            }
            print(
                objective,
                [round(value, 1) for value in seeds[objective]],
                half[objective],
                flush=True,
            )
    deviation = statistics.mean(statistics.variance(values) for values in seeds.values()) ** 0.5
    print(
        "| objective | float32, three seeds | bfloat16 | float16 | outside |\n|---|---|---|---|---|"
    )
    for objective, values in seeds.items():
        mean = statistics.mean(values)
        farthest = max(abs(value - statistics.mean(values)) for value in values)
        outside = [
            name
            for name, value in half[objective].items()
            if abs(value - mean) > max(farthest, 3 * deviation)
        ]
        cells = " | ".join(f"{value:.1f}" for value in half[objective].values())
        print(
            f"| {objective} | {mean:.1f} ({min(values):.1f} to {max(values):.1f}) | {cells} | "
            f"{', '.join(outside) or 'none'} |"
        )
    print(f"Standard deviation over seeds, pooled over objectives: {deviation:.1f}")


if __name__ == "__main__":
    main()
