"""``python -m tests.inputs [KIND ...] [--seeds FIRST:LAST] [--count N] [--jobs N] [--out FOLDER]``"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.inputs.campaign import FINDINGS, OUTCOMES, Summary, describe, run_campaign
from tests.inputs.catalog import KINDS, find_kind


def write(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Read the inputs, and print the outcomes of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.inputs", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seeds", help="One seed, or FIRST:LAST without the last one.")
    parser.add_argument("--count", type=int, help="Number of inputs of each kind.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes.")
    parser.add_argument("--out", type=Path, help="Folder of inputs with findings.")
    parser.add_argument("--show", type=int, default=5, help="Findings that are shown per kind.")
    options = parser.parse_args()
    kinds = [find_kind(name) for name in options.kinds or KINDS]
    if options.seeds:
        first, _, last = options.seeds.partition(":")
        seeds = range(int(first), int(last or int(first) + 1))
    else:
        seeds = None
    started = time.perf_counter()
    widths = [max(map(len, KINDS)), *(max(8, len(name)) for name in OUTCOMES)]

    def line(cells: list[Any]) -> str:
        first, *others = (str(cell) for cell in cells)
        return "  ".join([first.ljust(widths[0]), *(cell.rjust(8) for cell in others)])

    write(line(["kind", "inputs", *OUTCOMES, "right", "wrong", "slowest", "MB"]))

    def row(name: str, summary: Summary) -> None:
        counts = [summary.counts[outcome] for outcome in OUTCOMES]
        write(
            line(
                [
                    name,
                    summary.counts.total(),
                    *counts,
                    summary.known["right"],
                    summary.known["wrong"],
                    f"{summary.slowest_s:.1f} s",
                    summary.memory // 2**20,
                ]
            )
        )

    def show(name: str, reply: dict[str, Any]) -> None:
        shown[name] += 1
        if shown[name] <= options.show:
            write(describe(name, reply))

    shown = Counter[str]()
    summaries = run_campaign(
        [(kind.name, seeds or range(options.count or kind.inputs)) for kind in kinds],
        jobs=options.jobs,
        saved=options.out,
        on_finding=show,
        on_kind=row,
    )
    total = Summary()
    for summary in summaries.values():
        total.counts += summary.counts
        total.known += summary.known
        total.slowest_s = max(total.slowest_s, summary.slowest_s)
        total.memory = max(total.memory, summary.memory)
    row("all", total)
    write(f"{time.perf_counter() - started:,.0f} s")
    return any(total.counts[outcome] for outcome in FINDINGS)


if __name__ == "__main__":
    sys.exit(main())
