"""Effect of the number of steps per model on ``visavis data audit``: the list of mislabeled pairs,
and the learning curve.

    python studies/audit_steps.py DATA [--encoder mobilenet-v2] [--steps 100 200 400 1600] [--noise
    0.05] [--seed 0]

For each limit of steps, prints two lines. The first is on data with a share of its training
captions moved to other images: the length of the list, the share of the moved captions that it
contains, the share of moved captions in it, and among as many first ones as were moved. The second
is the learning curve of the unchanged data. Each has the processor time of one thread, which is
short for cached models.
"""

from __future__ import annotations

import argparse
import sys
import time

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.research.audit import audit_part, run_audit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--encoder", default="mobilenet-v2")
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 200, 400, 1600])
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run_audit.MIN_PARALLEL_STEPS = sys.maxsize  # one process, whose time is measured
    data = open_dataset(options.data)
    pairs = {
        (data.images[image].name, caption)
        for image, caption in zip(data.image_of, data.captions, strict=True)
    }
    settings = {"visual.encoder": options.encoder, "seed": options.seed, "training.threads": 1}
    for steps in options.steps:
        audit_part.MAX_STEPS = steps
        for part, noise in (("mislabeled", options.noise), ("learning_curve", 0.0)):
            started = time.process_time()
            audit = visavis.data_audit(
                options.data,
                recipe="photos/frozen-minilm",
                overrides={**settings, "data.noise": f"ShuffledCaptions(share={noise})"},
                parts=[part],
            )
            seconds = time.process_time() - started
            if audit.mislabeled_pairs is not None:
                moved = [
                    (suspect.image, suspect.caption) not in pairs
                    for suspect in audit.mislabeled_pairs.suspects
                ]
                num_moved = round(
                    noise * sum(data.images[image].split == "train" for image in data.image_of)
                )
                recall = sum(moved) / num_moved
                precision_of_first = sum(moved[:num_moved]) / num_moved
                result = f"{len(moved)} listed, {recall:.1%} of the moved ones, {sum(moved) / len(moved):.1%} moved, {precision_of_first:.1%} of the first"
            elif audit.learning_curve is not None:
                result = ". ".join(map(str, audit.learning_curve.axes))
            sys.stdout.write(f"{steps} steps, {seconds:.0f} s: {result}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
