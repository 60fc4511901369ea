"""Cost of changing files through an object that tests replace: its calls in an index and a training,
and the processor time that a call takes longer than without the object.

    python benchmarks/disk_calls.py [--images 400]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import visavis
from visavis.core import storage
from visavis.data.synthetic import write_synthetic_scenes

CALLS = 1_000_000
METHODS = [name for name in vars(storage.Disk) if not name.startswith("_")]


class CountingDisk(storage.Disk):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            self.calls[name] += 1
        return super().__getattribute__(name)


class EmptyDisk(storage.Disk):
    """A disk whose call does nothing, so that only the way to it takes time."""

    def sync_path(self, path: Path) -> None:
        return


def nothing(path: Path) -> None:
    """What ``EmptyDisk`` calls, without an object."""


def extra_ns() -> float:
    """Nanoseconds that a call takes longer through the disk. The best of five measurements."""
    path = Path("a")
    with storage.replaced_disk(EmptyDisk()):
        through = min(
            timeit.repeat(lambda: storage.current_disk().sync_path(path), number=CALLS, repeat=5)
        )
    direct = min(timeit.repeat(lambda: nothing(path), number=CALLS, repeat=5))
    return (through - direct) / CALLS * 1e9


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=400)
    images = parser.parse_args().images
    extra = extra_ns()
    print(f"a call takes {extra:.0f} ns longer through the disk")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        scenes = write_synthetic_scenes(
            root / "scenes", num_train=images, num_val=40, num_test=60, captions_per_image=3
        )
        commands: dict[str, Callable[[], Any]] = {
            "training": lambda: visavis.train("demo", data=scenes, out=root / "run"),
            "index": lambda: visavis.index(root / "run", scenes / "images", out=root / "index"),
        }
        for name, command in commands.items():
            disk = CountingDisk()
            started = time.process_time()
            with storage.replaced_disk(disk):
                command()
            seconds = time.process_time() - started
            calls = disk.calls.total()
            share = 100 * calls * extra / 1e9 / seconds
            print(f"{name}: {calls:,} calls in {seconds:.1f} s of processor time, {share:.5f} %")


if __name__ == "__main__":
    main()
