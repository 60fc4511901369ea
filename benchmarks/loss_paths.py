"""Processor time of both paths of PairLoss, forward and backward, and the path that is chosen.

    python benchmarks/loss_paths.py [--objectives NAME ...] [--sizes 64 256 512 1024 2048 4096 8192]
                                    [--captions 1 5] [--threads 1] [--seed 0]

Sizes are numbers of captions. The smallest of the repetitions is printed, in milliseconds. "-": the
matrix needs more than 8 GB.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.losses.pair_loss import plan as planner
from visavis.losses.targets import Factors
from visavis.objectives import CATALOG, Objective

DIM = 512
MAX_MATRIX_BYTES = 8e9
SECONDS_PER_CELL = 1.0


def make_targets(kind: type[Objective], images: int, captions_per_image: int) -> Targets:
    """Targets by ids, with the annotations that the objective requires."""
    captions = images * captions_per_image
    annotations: dict[str, Any] = {}
    if "relevance" in kind.used_annotations:
        sides = [normalize(torch.rand(number, 16)) for number in (images, captions)]
        annotations["relevance"] = Factors(*sides)
    if kind.__name__ == "NCR":
        margins = [0.2 * torch.rand(number, 4) for number in (images, captions)]
        annotations["pair_margin"] = Factors(*margins)
    if "query_offline_scores" in kind.used_annotations:
        annotations["query_offline_scores"] = torch.rand(images, 1)
        annotations["candidate_offline_scores"] = torch.rand(captions, 1)
    image_of = torch.arange(captions) // captions_per_image
    return Targets(query_ids=torch.arange(images), candidate_ids=image_of, **annotations)


def milliseconds(loss: PairLoss, images: Tensor, texts: Tensor, targets: Targets) -> float:
    """Smallest processor time of forward and backward."""
    times = list[float]()
    while len(times) < 2 or sum(times) < SECONDS_PER_CELL:
        images.grad = texts.grad = None
        start = time.process_time()
        loss(images, texts, targets=targets).backward()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objectives", nargs="+", default=[kind.__name__ for kind in CATALOG])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--captions", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = {kind.__name__: kind for kind in CATALOG}
    print(
        f"{DIM} dimensions, float32, {options.threads} threads, seed {options.seed}, torch "
        f"{torch.__version__}"
    )
    print(f"{'objective':17}{'captions':>9}{'per image':>10}{'dense':>10}{'blocks':>10}  chosen")
    for captions_per_image in options.captions:
        for name in options.objectives:
            for size in options.sizes:
                torch.manual_seed(options.seed)
                count = max(size // captions_per_image, 1)
                targets = make_targets(kinds[name], count, captions_per_image)
                images = torch.randn(count, DIM)
                texts = images.repeat_interleave(captions_per_image, 0) + torch.randn(
                    count * captions_per_image, DIM
                )
                images = (images + torch.randn(count, DIM)).requires_grad_()
                texts.requires_grad_()
                objective = kinds[name]()
                inputs = planner.PlanInputs(
                    objective,
                    (targets, targets.T),
                    images.nbytes + texts.nbytes,
                    torch.device("cpu"),
                    2**33,
                )
                blocks = planner.blocks_plan(inputs)
                dense = planner.dense_plan(inputs)
                cells = []
                for plan in (dense, blocks):
                    if plan.path == "dense" and plan.expected_bytes > MAX_MATRIX_BYTES:
                        cells.append("-")
                        continue
                    loss = PairLoss(objective)
                    with patch.object(planner, "choose_plan", return_value=plan):
                        time_ms = milliseconds(loss, images, texts, targets)
                    cells.append(f"{time_ms:.1f}")
                chosen = planner.choose_plan(inputs).path
                print(
                    f"{name:17}{len(texts):9}{captions_per_image:10}{cells[0]:>10}{cells[1]:>10}"
                    f"  {chosen}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
