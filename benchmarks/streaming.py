"""A streamed training in two processes that is killed twice: every item once per epoch, and the
weights of an undisturbed training.

    python benchmarks/streaming.py [--items N] [--shards N] [--processes N] [--workers N] [--kills
    N]

Writes small images into shards of WebDataset, and trains a small model from pixels under torchrun.
A log of each process has the items of each step. Steps that are repeated after a kill must read the
same items.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def make_item(number: int) -> tuple[bytes, str]:
    """A PNG of 8 x 8 pixels with the number in one pixel, and its caption."""
    from PIL import Image

    name = list(COLORS)[number % 4]
    image = Image.new("RGB", (8, 8), COLORS[name])
    content = io.BytesIO()
    image.putpixel(
        (number % 8, number // 8 % 8), (number % 256, number // 256 % 256, number // 65536)
    )
    image.save(content, "PNG", compress_level=1)
    return content.getvalue(), f"a {name} square with a dot at {number % 8} {number // 8 % 8}"


def make_data(folder: Path, items: int, shards: int) -> None:
    import webdataset

    (folder / "val").mkdir(parents=True)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"train-{shard:03d}.tar")) as writer:
            for number in range(shard * items // shards, (shard + 1) * items // shards):
                image, caption = make_item(number)
                writer.write({"__key__": f"{number:08d}", "png": image, "txt": caption})
    lines = ["filename,caption,split"]
    for number in range(40):
        image, caption = make_item(number)
        (folder / "val" / f"{number}.png").write_bytes(image)
        lines.append(f"{number}.png,{caption},{'val' if number < 20 else 'test'}")
    (folder / "val" / "captions.csv").write_text("\n".join(lines))


def write_recipe(folder: Path, shards: int, batch_size: int, epochs: int, workers: int) -> Path:
    path = folder / "stream.toml"
    path.write_text(
        f"""name = "stream"
data = {{ path = "{folder / "val"}", stream = "{folder}/train-{{000..{shards - 1:03d}}}.tar", interleave = 8 }}
visual = {{ encoder = "small-cnn", granularity = "pixels", image_size = 16 }}
text = {{ encoder = "vocabulary", min_count = 1 }}
model = {{ kind = "VSE++", embedding_dim = 16, word_dim = 8, word_pool = "mean", region_pool = "mean" }}
training = {{ batch_size = {batch_size}, device = "cpu", metric_batches = 1, checkpoint_s = 5.0, threads = 1, workers = {workers} }}

[[phases]]
epochs = {epochs}
objective = "InfoNCE()"
"""
    )
    return path


def train(arguments: list[str]) -> None:
    """Run ``visavis train`` and append the items of each step to a file."""
    from visavis import cli
    from visavis.training.trainer import Trainer

    step = Trainer._step
    log = Path(os.environ["STREAM_LOG"])

    def logged(trainer: Any, batch: Any, steps: int) -> None:
        step(trainer, batch, steps)
        with open(f"{log}-{trainer.group.rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([trainer.state.step, batch.epoch, batch.images.tolist()]) + "\n")

    Trainer._step = logged  # type: ignore[assignment, method-assign]
    sys.argv = ["visavis", *arguments]
    cli.main()


def steps_of(log: Path) -> dict[tuple[int, str], list[list[int]]]:
    """Items of each step and process, once for each time that the step ran."""
    steps: dict[tuple[int, str], list[list[int]]] = {}
    for path in log.parent.glob(f"{log.name}-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                step, _, items = json.loads(line)
                steps.setdefault((step, path.stem), []).append(items)
    return steps


def launch(arguments: list[str], log: Path, processes: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        __file__,
        "--train",
        "--",
    ]
    environment = {**os.environ, "STREAM_LOG": str(log), "OMP_NUM_THREADS": "1"}
    with open(f"{log}.txt", "ab") as output:
        return subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def descendants(process: int) -> Iterator[int]:
    """All processes that a process started, which torchrun puts into sessions of their own."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        yield from descendants(int(child))
        yield int(child)


def run(folder: Path, recipe: Path, out: Path, processes: int, kills: list[int]) -> float:
    """Train, kill all processes after the given steps, and resume."""
    log = folder / f"{out.name}-log"
    start = time.perf_counter()
    arguments = ["train", str(recipe), "--out", str(out)]
    for kill in [*kills, None]:
        process = launch(arguments, log, processes)
        while process.poll() is None and (
            kill is None or max((step for step, _ in steps_of(log)), default=0) < kill
        ):
            time.sleep(1.0)
        if kill is None:
            if process.wait():
                raise SystemExit(Path(f"{log}.txt").read_text()[-3000:])
        elif process.returncode is None:
            for victim in [*descendants(process.pid), process.pid]:
                os.kill(victim, signal.SIGKILL)
            process.wait()
            print(f"killed at step {kill}", flush=True)
            arguments = ["train", "--resume", str(out)]
        else:
            raise SystemExit(Path(f"{log}.txt").read_text()[-3000:])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options, train_arguments = parser.parse_known_args()
    if options.train:
        train([argument for argument in train_arguments if argument != "--"])
        return
    import torch
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["VISAVIS_CACHE"] = str(folder / "cache")
        make_data(folder, options.items, options.shards)
        recipe = write_recipe(
            folder, options.shards, options.batch_size, options.epochs, options.workers
        )
        steps = -(-options.items // options.batch_size) * options.epochs
        kills = sorted(random.Random(1).sample(range(steps // 8, steps * 7 // 8), options.kills))
        seconds = {
            name: run(folder, recipe, folder / name, options.processes, at)
            for name, at in (("undisturbed", []), ("killed", kills))
        }
        logs = {name: steps_of(folder / f"{name}-log") for name in seconds}
        repeated = sum(len(runs) - 1 for runs in logs["killed"].values())
        assert all(runs.count(runs[0]) == len(runs) for runs in logs["killed"].values()), (
            "a repeated step read other items"
        )
        per_epoch = steps // options.epochs
        for name, log in logs.items():
            for epoch in range(options.epochs):
                items = sorted(
                    item
                    for (step, _), runs in log.items()
                    if epoch * per_epoch < step <= (epoch + 1) * per_epoch
                    for item in runs[0]
                )
                assert items == list(range(options.items)), (
                    f"{name}: an item is lost or repeated in epoch {epoch}"
                )
        weights = [load_file(folder / name / "model" / "model.safetensors") for name in seconds]
        equal = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
        print(
            f"{options.items:,} items in {options.shards} shards, {options.processes} processes "
            f"with {options.workers} workers each."
        )
        print(f"{steps} steps, killed at steps {kills}.")
        print(
            f"Every item exactly once per epoch, {repeated} repeated steps of a process with the "
            f"same items. Same weights: {equal}."
        )
        print(f"Seconds: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items())}")


if __name__ == "__main__":
    main()
