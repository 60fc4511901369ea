"""Trainers of other libraries with losses of visavis: with one process, with two, and the
difference of their weights.

    python studies/peers.py [--only sentence-transformers ...]

Two processes share the rows of one, so gathered losses must train the same weights. Losses that
cannot be gathered are reported. A library that is not installed is skipped with one line. open_clip
needs torchvision, which the rest of the project does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parent / "peers"


class Peer(NamedTuple):
    """A script, its requirements, and its variants, each with whether two processes train the
    weights of one.
    """

    script: str
    packages: tuple[str, ...]
    variants: dict[str, bool]


PEERS = {
    "sentence-transformers": Peer(
        "sentence_transformers_sets.py",
        ("sentence_transformers", "accelerate", "datasets"),
        {
            "one set": True,
            "mini batches": True,
            "a learned scale": True,
            "a loss for each set": False,
            "one loss for both sets": False,
            "no gathering": False,
        },
    ),
    "transformers": Peer(
        "clip_trainer.py",
        ("transformers", "accelerate"),
        {"fixed margin": True, "temperature": True, "learned scale": True, "accumulation": True},
    ),
    "lightning": Peer(
        "lightning_steps.py",
        ("lightning", "transformers"),
        {"fixed margin": True, "learned scale": True},
    ),
    "open_clip": Peer("open_clip_training.py", ("open_clip", "torchvision"), {}),
    "pytorch-metric-learning": Peer(
        "metric_learning.py", ("pytorch_metric_learning", "sklearn"), {}
    ),
}


class RunOutput(NamedTuple):
    """The output and the weights of one run."""

    lines: list[str]
    weights: dict[str, torch.Tensor]


def run(script: str, processes: int, variant: str | None = None) -> RunOutput:
    """Run a script, under torchrun if there are several processes, for at most five minutes."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > 1
        else []
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        options = [] if variant is None else ["--way", variant, "--weights", str(weights)]
        command = [sys.executable, *launcher, str(FOLDER / script), *options]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)} exited with "
                f"{process.returncode}:\n{process.stdout}\n{process.stderr}"
            )
        return RunOutput(
            process.stdout.splitlines(), torch.load(weights) if weights.exists() else {}
        )


def largest_difference(one_process: RunOutput, two_processes: RunOutput) -> float:
    """The largest difference between the weights of two runs."""
    return max(
        (two_processes.weights[name].float() - weight.float()).abs().max().item()
        for name, weight in one_process.weights.items()
    )


def compare(script: str, variant: str, *, equal: bool) -> str:
    """One variant in one line: the losses, and, if it must equal one process, the difference of the
    weights of two.
    """
    two_processes = run(script, 2, variant)
    hashes = {line for line in two_processes.lines if line.startswith("weights ")}
    if len(hashes) != 1:
        raise RuntimeError(f"{script}, {variant}: the processes have different weights at the end.")
    (losses,) = (line for line in two_processes.lines if line.startswith("loss "))
    reported = sum(line.startswith("reported: ") for line in two_processes.lines)
    comparison = (
        f"two processes {largest_difference(run(script, 1, variant), two_processes):.0e} away from "
        "one"
        if equal
        else f"{reported} of 2 reported that they compare only their own rows"
    )
    return f"{variant}: {losses}, {comparison}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    for name in parser.parse_args().only:
        peer = PEERS[name]
        print(f"## {name}")
        missing = [
            package for package in peer.packages if importlib.util.find_spec(package) is None
        ]
        if missing:
            print(f"skipped: {', '.join(missing)} is not installed")
            continue
        for variant, equal in peer.variants.items():
            print(compare(peer.script, variant, equal=equal), flush=True)
        for processes in () if peer.variants else (1, 2):
            lines = [
                line
                for line in run(peer.script, processes).lines
                if re.match(r"[\w, ()=\"'-]+: ", line)
            ]
            print("\n".join([f"{processes} process{'es' * (processes > 1)}:", *lines]), flush=True)


if __name__ == "__main__":
    main()
