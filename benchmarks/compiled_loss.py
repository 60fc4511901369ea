"""Time of a loss and its gradient with and without ``torch.compile``, in one or several processes.

    python benchmarks/compiled_loss.py
    torchrun --nproc-per-node 2 benchmarks/compiled_loss.py --backend eager

Several processes compile no single graph. ``--backend eager`` divides the code into graphs without
generating code for them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from visavis import PairLoss
from visavis.objectives import Unified

STEPS = 15


def median_ms(loss: Callable[[Tensor, Tensor], Tensor], items: list[Tensor]) -> float:
    """Median time of a step in milliseconds."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss(*items).backward()
        times.append(time.perf_counter() - start)
    return sorted(times)[STEPS // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    items = [torch.randn(options.pairs, 512, requires_grad=True) for _ in range(2)]
    loss = PairLoss(Unified())
    plain = median_ms(loss, items)
    compiled = torch.compile(loss, fullgraph=num_processes == 1, backend=options.backend)
    start = sum(os.times()[:4])
    difference = abs(compiled(*items).item() - loss(*items).item())
    cpu_s = sum(os.times()[:4]) - start
    counters = torch._dynamo.utils.counters
    print(
        f"{num_processes} processes: {plain:.1f} ms, compiled {median_ms(compiled, items):.1f} ms, "
        f"compilation {cpu_s:.0f} s of processor time, difference {difference:.0e}, "
        f"{counters['stats']['unique_graphs']} graphs"
    )


if __name__ == "__main__":
    main()
