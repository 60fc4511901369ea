"""What people do every day, at the sizes that most people have: the start of commands, a small
evaluation, a training step of 256 pairs.

    python benchmarks/everyday.py [--rounds 5] [--rows NAME ...]

Commands run on synthetic scenes and a small model with a frozen MiniLM, in a temporary folder. Their
processor time, children included, is reported in seconds beyond that of ``python -c "import torch"``,
which runs in turns with them. Work inside a process is reported as the ratio to the same work in
plain torch, in turns on one thread. All values are medians, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import torch
from torch import Tensor

import visavis
from visavis.core.encoded import Encoded
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import evaluate

IMPORT_TORCH = ("-c", "import torch")
SERVE = "serve INDEX, until it answers"
POLL_SECONDS = 0.05
COMMANDS: dict[str, tuple[str, ...]] = {
    "search INDEX TEXT": ("search", "index", "a red circle"),
    "index, unchanged": ("index", "run", "scenes/images", "--out", "index"),
    "evaluate RUN": ("evaluate", "run"),
    "catalog objectives": ("catalog", "objectives"),
    "catalog recipes": ("catalog", "recipes"),
    "train --dry-run": ("train", "demo", "--data", "scenes", "--dry-run"),
    SERVE: ("serve", "index", "--port"),
}
EVALUATIONS = (500, 1000, 5000)
"""Images, each with five captions."""
DIM = 512


def prepare(folder: Path) -> None:
    """Write scenes, train a small model on them, and index the images."""
    write_synthetic_scenes(folder / "scenes", num_train=1000, num_val=100, num_test=100)
    model = {"model": "Heads(embedding_dim=64)", "epochs": 1, "training.batches_per_epoch": 4}
    texts = {"text.encoder": "minilm", "text.granularity": "pooled"}
    run = visavis.train(
        "demo", data=folder / "scenes", overrides=model | texts, out=folder / "run"
    ).run
    visavis.index(run, folder / "scenes" / "images", out=folder / "index")


def processor_seconds(arguments: tuple[str, ...], folder: Path) -> float:
    """Processor time of a Python process and its children. A server is ended when it answers."""
    # A process that cannot keep compiled code compiles all of it each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "serve" in arguments:
        serve_until_ready(arguments, folder)
    else:
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def serve_until_ready(arguments: tuple[str, ...], folder: Path) -> None:
    """Start a server at a free port, and end it when it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        [sys.executable, *arguments, str(port)], cwd=folder, stdout=quiet, stderr=quiet
    )
    try:
        while True:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/"):
                return
            if server.poll() is not None:
                raise RuntimeError(f"visavis serve ended with code {server.returncode}")
            time.sleep(POLL_SECONDS)
    finally:
        server.terminate()
        server.wait()


def time_command(name: str, folder: Path, rounds: int) -> str:
    """Seconds of a command beyond the import of torch."""
    command = ("-m", "visavis", *COMMANDS[name])
    processor_seconds(command, folder)  # warm-up: bytecode and caches
    base, seconds = list[float](), list[float]()
    for _ in range(rounds):
        base.append(processor_seconds(IMPORT_TORCH, folder))
        seconds.append(processor_seconds(command, folder))
    beyond = [took - torch_took for took, torch_took in zip(seconds, base, strict=True)]
    return f"{describe(beyond)} s beyond import torch ({statistics.median(base):.2f} s)"


def describe(values: list[float]) -> str:
    """Median, smallest and largest value."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def ratio(ours: Callable[[], object], plain: Callable[[], object], rounds: int) -> str:
    """Ratio of processor times of two functions that run in turns."""
    ratios = list[float]()
    for function in (ours, plain):
        function()
    for _ in range(rounds):
        times = list[float]()
        for function in (ours, plain):
            started = time.process_time()
            function()
            times.append(time.process_time() - started)
        ratios.append(times[0] / times[1])
    return f"{describe(ratios)} x plain torch"


def plain_recall(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """The ten best candidates of every query of both directions."""
    scores = images @ texts.T
    return scores.topk(10).indices, scores.T.topk(10).indices


def time_evaluation(num_images: int, rounds: int) -> str:
    """Evaluation of given embeddings, to ``topk(10)`` of both directions."""
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(num_images, DIM, generator=generator), dim=1)
    image_of = torch.arange(5 * num_images) // 5
    noise = torch.randn(5 * num_images, DIM, generator=generator)
    texts = torch.nn.functional.normalize(images[image_of] + 3 * noise / DIM**0.5, dim=1)

    def cosine(visual: Encoded, text: Encoded) -> Tensor:
        return visual.vectors @ text.vectors.T  # type: ignore[operator, union-attr]

    ids = torch.arange(num_images)
    return ratio(
        lambda: evaluate(Encoded(images), Encoded(texts), cosine, ids, image_of),
        lambda: plain_recall(images, texts),
        rounds,
    )


def main() -> None:
    """Print one line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: dict[str, Callable[[], str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in COMMANDS:
            rows[command] = lambda command=command: time_command(command, folder, options.rounds)  # type: ignore[misc]
        for size in EVALUATIONS:
            label = f"evaluation of {size:,} images, {5 * size:,} captions"
            rows[label] = lambda size=size: time_evaluation(size, options.rounds)  # type: ignore[misc]
        selected = [row for row in rows if not options.rows or row in options.rows]
        if any(row in COMMANDS for row in selected):
            prepare(folder)
        for row in selected:
            print(f"{row:<45} {rows[row]()}", flush=True)


if __name__ == "__main__":
    main()
