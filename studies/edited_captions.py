"""Training with edited captions: the accuracy on edited captions that it gains, and the recall that it
costs.

    VISAVIS_DATA=... python studies/edited_captions.py [--data scenes] [--images 2000] [--seeds 3]
    [--per-caption 1] [--out runs/edited-captions]

Trains with pairs alone and with ``EditedCaptionSupervision``, by the same recipe and seeds, and
probes both on the whole test split. ``--data flickr8k`` takes the recipe ``study-flickr8k`` with five
epochs and ``--images`` training images, another folder the recipe ``demo``. The edits of the probe
have another seed than those of the training. In scenes they follow from the ground truth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from noise import with_interval
from noise_kinds import write_data

import visavis
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.papers.probes import ProbeReport, probe_run

PLAIN, EDITED = "pairs", "with edited captions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="scenes")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--per-caption", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/edited-captions"))
    options = parser.parse_args()
    out = options.out.absolute()
    recipe, settings = "demo", dict[str, Any]()
    data = options.data
    if data == "flickr8k":
        data = str(out / "data")
        write_data(out / "data", options.images)
        recipe, settings = "study-flickr8k", {"epochs": 5}
    methods = {
        PLAIN: {},
        EDITED: {
            "phases.0.supervision": f"EditedCaptionSupervision(per_caption={options.per_caption})"
        },
    }
    rsum: dict[str, list[float]] = {name: [] for name in methods}
    reports: dict[str, list[ProbeReport]] = {name: [] for name in methods}
    for seed in range(1, options.seeds + 1):
        for number, (name, own) in enumerate(methods.items()):
            overrides = settings | own | {"seed": seed, "training.threads": 1}
            folder = out / f"{recipe}-{number}-{seed}"
            run = visavis.train(recipe, data=data, out=folder, overrides=overrides)
            assert run.test is not None
            rsum[name].append(run.test.metrics["rsum"])
            reports[name].append(probe_run(folder, 0, NoProgress(), with_edits=False))
            sys.stderr.write(
                f"seed {seed}, {name}: RSUM {rsum[name][-1]:.1f}, edits {reports[name][-1].percent:.1f} %\n"
            )
    sys.stdout.write(table(rsum, reports))


def table(rsum: dict[str, list[float]], reports: dict[str, list[ProbeReport]]) -> str:
    """One row for RSUM, for all edits and for each kind: means over seeds, and the difference."""
    measured = {"test RSUM": rsum}
    measured["all edits"] = {name: [one.percent for one in each] for name, each in reports.items()}
    for position, first in enumerate(reports[PLAIN][0].results):
        measured[f"{first.title} ({first.num_pairs})"] = {
            name: [one.results[position].percent for one in each] for name, each in reports.items()
        }
    lines = [f"| | {PLAIN} | {EDITED} | difference |", "|---|---|---|---|"]
    for title, values in measured.items():
        cells = [f"{statistics.mean(values[name]):.1f}" for name in (PLAIN, EDITED)]
        difference = with_interval(
            [after - before for before, after in zip(values[PLAIN], values[EDITED], strict=True)]
        )
        lines.append(f"| {title} | {cells[0]} | {cells[1]} | {difference} |")
    report = reports[PLAIN][0]
    lines.append(
        f"\nWithout the image: n-grams {report.ngram_percent:.1f} %, learned {report.learned_percent:.1f} %"
    )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"edited_captions: {error}")
