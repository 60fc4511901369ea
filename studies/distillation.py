"""Distillation on Flickr8k: heads with a quarter of the parameters, with and without a teacher.

For each seed, one recipe trains the teacher, the same recipe with smaller heads trains a student
on pairs alone, one with the teacher's scores next to the objective, and one on these scores alone.

    VISAVIS_DATA=... python studies/distillation.py [--seeds 1 2 3] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import visavis
from visavis.models import Matcher

RECIPE = "heads-flickr8k"
SMALL = {"model.embedding_dim": 512, "model.hidden_dim": 1024}
SHARED = {"training.threads": 1}


def parameters(run: Path) -> int:
    matcher: Matcher = visavis.load(run).matcher
    return sum(parameter.numel() for parameter in matcher.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--out", type=Path, help="folder for the runs (default: removed at the end)"
    )
    options = parser.parse_args()
    rsum = dict[str, list[float]]()
    sizes = dict[str, int]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)

        def train(name: str, seed: int, **settings: str | int) -> Path:
            result = visavis.train(
                RECIPE, out=folder / f"{name}-{seed}", overrides=SHARED | settings | {"seed": seed}
            )
            assert result.test is not None
            rsum.setdefault(name, []).append(result.test.metrics["rsum"])
            sizes[name] = parameters(result.run)
            print(f"{name}, seed {seed}: {rsum[name][-1]:.1f}", flush=True)
            return result.run

        for seed in options.seeds:
            teacher = train("teacher", seed)
            supervised = {
                "phases.0.supervision": f"DistillationSupervision(teacher={str(teacher)!r})"
            }
            train("student", seed, **SMALL)
            train("student with teacher", seed, **SMALL, **supervised)
            train(
                "student of teacher alone",
                seed,
                **SMALL,
                **supervised,
                **{"phases.0.objective": "Distillation()"},
            )
    print("| model | parameters | test RSUM | share of the teacher's |\n|---|---|---|---|")
    for name, values in rsum.items():
        shares = [value / best for value, best in zip(values, rsum["teacher"], strict=True)]
        print(
            f"| {name} | {sizes[name] / 1e6:.1f} million | {statistics.mean(values):.1f} "
            f"({min(values):.1f} to {max(values):.1f}) | {100 * min(shares):.1f} to "
            f"{100 * max(shares):.1f} % |"
        )


if __name__ == "__main__":
    main()
