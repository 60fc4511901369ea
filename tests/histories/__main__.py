"""Run histories: ``python -m tests.histories SEED`` or ``FIRST:STOP``. A failing seed prints the
command that replays it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.histories.history import run_history

SEEDS_PER_TASK = 25


def run_seeds(seeds: range) -> tuple[list[tuple[int, list[str]]], Counter[str]]:
    """The violations of some seeds, and how often each operation happened."""
    failed = []
    counts = Counter[str]()
    for seed in seeds:
        history = run_history(seed)
        counts.update(history.counts)
        counts["step"] += history.scheduler.steps
        counts["power loss"] += history.scheduler.num_power_losses
        counts["crash"] += sum(client.num_crashes for client in history.scheduler.clients)
        if history.scheduler.problems:
            failed.append((seed, history.scheduler.problems))
    return failed, counts


def main() -> None:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="a seed, or FIRST:STOP")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--stop", action="store_true", help="stop at the first violation")
    parser.add_argument("--log", action="store_true", help="print each step")
    options = parser.parse_args()
    first, _, stop = options.seeds.partition(":")
    if not stop:
        history = run_history(int(first), log=print if options.log else None)
        print(*(history.scheduler.problems or ["no violation"]), sep="\n")
        print(dict(sorted(history.counts.items())))
        sys.exit(bool(history.scheduler.problems))
    seeds = range(int(first), int(stop))
    tasks = [
        seeds[start : start + SEEDS_PER_TASK] for start in range(0, len(seeds), SEEDS_PER_TASK)
    ]
    started = time.perf_counter()
    num_failed = 0
    counts = Counter[str]()
    if options.processes == 1 or options.stop:
        found = map(run_seeds, tasks)
    else:
        pool = ProcessPoolExecutor(options.processes)
        found = pool.map(run_seeds, tasks)
    for failed, own in found:
        counts.update(own)
        for seed, problems in failed:
            num_failed += 1
            print(f"python -m tests.histories {seed}\n  {problems[0]}", flush=True)
        if options.stop and failed:
            sys.exit(1)
    print(
        f"{len(seeds):,} seeds, {num_failed} with violations, {time.perf_counter() - started:.0f} s"
    )
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main()
