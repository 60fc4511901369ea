"""Training on several processes and with large batches: predictions from the formulas of the
engine, and measurements.

    python benchmarks/scaling.py [--rows formulas measured trainer chunks settings gpu] [--threads N]

- ``formulas``: memory, bytes on the wire and time per step of the loss for 1 to 1,024 devices and
  up to 1,048,576 pairs.
- ``measured``: the same quantities for 1, 2 and 4 processes of this machine over gloo, next to the
  formulas.
- ``trainer``: throughput of the trainer on cached features, relative to a minimal training loop in
  the same run.
- ``chunks``: peak memory of a step with 8,192 images in chunks of 256, relative to a step with 256
  images.
- ``settings``: processor time of a training step of a small CLIP with frozen layers, and with an
  average of the weights, relative to a step without them.
- ``gpu``: throughput and peak memory of training a CLIP ViT-B/32 from pixels on one GPU, by
  precision and memory setting.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import normalize

sys.path.append(str(Path(__file__).parents[1] / "studies"))
from clip_small import write_clip_folder

import visavis
from visavis import PairLoss, Targets
from visavis.core.process_group import ProcessGroup
from visavis.data.synthetic import write_synthetic_scenes
from visavis.losses.pair_loss.batch_items import encode_in_chunks
from visavis.objectives import VLC
from visavis.training.optimizer import make_optimizer
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

DIMENSIONS, BYTES = 512, 4
PRODUCTS = 4
"""Matrix products of a training step for VLC in tiles: the scores in each of two passes, and the
gradients of both sides.
"""
DEVICE_FLOPS, LINK_BYTES_PER_S = 2e14, 5e10
"""An assumed accelerator: 200 TFLOP/s in half precision and 50 GB/s between machines."""


def predicted(pairs: int, world_size: int) -> dict[str, float]:
    """Bytes of memory per process, bytes that each process receives, and floating-point operations
    per process.
    """
    items = 2 * pairs * DIMENSIONS * BYTES
    gathered = items * (world_size - 1) / world_size
    plan = PairLoss(VLC(), memory="40GiB").plan(
        pairs // world_size, pairs, embedding_dim=DIMENSIONS, device="cuda"
    )
    # An all-reduce over a ring receives the gradients of all candidates about twice.
    reduced = 2 * items * (world_size - 1) / world_size
    return {
        "memory": 2 * items + plan.expected_bytes,
        "wire": gathered + reduced,
        "flop": PRODUCTS * 2 * (pairs / world_size) * pairs * DIMENSIONS,
    }


def print_formulas() -> None:
    print(
        f"{'pairs':>9} {'devices':>8} {'GB/device':>10} {'GB received':>12} {'compute s':>10} "
        f"{'network s':>10}  first limit"
    )
    for pairs in (2**14, 2**17, 2**20):
        for world_size in (1, 8, 64, 1024):
            values = predicted(pairs, world_size)
            compute = values["flop"] / DEVICE_FLOPS
            network = values["wire"] / LINK_BYTES_PER_S
            limit = "network" if network > compute else "compute"
            numbers = f"{values['memory'] / 1e9:10.2f} {values['wire'] / 1e9:12.2f} {compute:10.4f} {network:10.4f}"
            print(f"{pairs:9,} {world_size:8,} {numbers}  {limit}")


def measure_process(
    rank: int, world_size: int, rendezvous: str, batch_sizes: list[int], threads: int
) -> None:
    """Time steps of the loss, and count the bytes that collectives deliver to this process."""
    torch.set_num_threads(threads)
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
    received = [0]

    def counted(method: Callable[..., object], copies: float) -> Callable[..., object]:
        def call(group: ProcessGroup, tensor: Tensor) -> object:
            received[0] += int(tensor.numel() * tensor.element_size() * copies)
            return method(group, tensor)

        return call

    ProcessGroup.all_gather = counted(ProcessGroup.all_gather, world_size - 1)  # type: ignore[method-assign, assignment]
    ring = 2 * (world_size - 1) / world_size
    ProcessGroup.all_reduce_sum = counted(ProcessGroup.all_reduce_sum, ring)  # type: ignore[method-assign, assignment]
    for pairs in batch_sizes:
        part = slice(rank * pairs // world_size, (rank + 1) * pairs // world_size)
        torch.manual_seed(0)
        images, texts = (
            normalize(torch.randn(pairs, DIMENSIONS), dim=-1)[part].requires_grad_()
            for _ in range(2)
        )
        ids = torch.arange(pairs)[part]
        loss = PairLoss(VLC(), gather=world_size > 1)
        seconds = list[float]()
        for _ in range(4):
            received[0] = 0
            started = time.perf_counter()
            loss(images, texts, ids).backward()
            seconds.append(time.perf_counter() - started)
        if rank == 0:
            expected = predicted(pairs, world_size)["wire"]
            ratio = "" if world_size == 1 else f", {received[0] / expected:.2f} of the formula"
            median = statistics.median(seconds[1:])
            print(
                f"{pairs:6,} pairs, {world_size} processes: {median:.2f} s, "
                f"{received[0] / 1e6:,.1f} MB received{ratio}",
                flush=True,
            )


def print_measured(threads: int) -> None:
    for world_size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, f"{folder}/rendezvous", [1024, 4096, 16384], threads)
            spawn(measure_process, args=arguments, nprocs=world_size)


def print_trainer(steps: int = 12, repetitions: int = 5) -> None:
    """Compare ``Trainer._step`` with a loop that calls the same model, loss and optimizer without a
    trainer.
    """
    with tempfile.TemporaryDirectory() as folder:
        scenes = write_synthetic_scenes(
            Path(folder) / "scenes", num_train=600, num_val=20, num_test=20, size=48
        )
        values = {
            "data.path": str(scenes),
            "training.batch_size": 1024,
            "visual.encoder": "scenes",
            "visual.standardize": "",
        }
        values |= {
            "model": "VSE++(embedding_dim=256, word_dim=64, word_pool='mean')",
            "text": {"encoder": "vocabulary", "granularity": "tokens"},
        }
        recipe = read_recipe("photos/frozen-words", values)
        trainer = Trainer(*prepare_training(recipe), RunFolder(Path(folder) / "run"))
        trainer._begin_phase({})
        matcher = trainer.matcher
        loss = trainer.train_step.loss
        optimizer = make_optimizer(trainer.matcher, recipe.phases[0])
        batches = [batch for epoch in range(1, 10) for batch in trainer.train_loader.epoch(epoch)][
            :steps
        ]

        def bare() -> None:
            matcher.train()
            for batch in batches:
                visual = matcher.encode_visual(batch.visual)
                text = matcher.encode_text(batch.text)
                targets = Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids)
                value = loss(
                    matcher.first_stage_items(visual),
                    matcher.first_stage_items(text),
                    targets=targets,
                )
                value.backward()
                nn.utils.clip_grad_norm_(matcher.parameters(), 2.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        def trained() -> None:
            for batch in batches:
                trainer._step(batch, len(batches))

        ratios = []
        for _ in range(repetitions):
            seconds = []
            for run in (bare, trained):
                started = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - started)
            ratios.append(seconds[0] / seconds[1])
        print(
            f"trainer: {statistics.median(ratios):.3f} of the throughput of a bare loop "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


class SmallVisionTransformer(nn.Module):
    """A vision transformer of 5.4 million parameters for images of 64 x 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        self.positions = nn.Parameter(torch.zeros(64, 192))
        layer = nn.TransformerEncoderLayer(
            192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return normalize(
            self.layers(self.patches(pixels).flatten(2).mT + self.positions).mean(1), dim=-1
        )


def measure_chunks(images: int, chunk_size: int, results: list[float]) -> None:
    """One step over some images, and its peak of resident memory above that before the step, in a
    process of its own.
    """
    encoder = SmallVisionTransformer()
    loss = PairLoss(VLC())
    pixels = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (images, 3, 64, 64), np.uint8)
    )
    texts = normalize(torch.randn(images, 192), dim=-1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()

    def encode(chunk: Tensor) -> Tensor:
        result: Tensor = encoder(chunk.float() / 255)
        return result

    encoded = encode_in_chunks(encode, pixels.split(chunk_size)) if chunk_size else encode(pixels)
    value = loss(encoded, texts)
    value.backward()
    results += [
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        time.perf_counter() - started,
    ]


def print_chunks() -> None:
    peaks = {}
    for images, chunk_size in ((256, 0), (8192, 256)):
        with multiprocessing.Manager() as manager:
            results = manager.list()
            process = multiprocessing.get_context("spawn").Process(
                target=measure_chunks, args=(images, chunk_size, results)
            )
            process.start()
            process.join()
            peaks[images], seconds = results
        print(
            f"{images:,} images, chunks of {chunk_size or images}: {peaks[images]:,.0f} MiB above "
            f"the start, {seconds:.0f} s",
            flush=True,
        )
    print(f"8,192 images take {peaks[8192] / peaks[256]:.2f} times the memory of 256")


GPU_TRAININGS: dict[str, dict[str, object]] = {
    "float32": {},
    "bfloat16": {"autocast": True},
    "float16": {"autocast": "float16"},
    "bfloat16, compiled": {"autocast": True, "compile": True},
    "bfloat16, checkpointed activations": {"autocast": True, "activation_checkpointing": True},
    "bfloat16, batch 4,096 in chunks of 512": {
        "autocast": True,
        "batch_size": 4096,
        "chunk_size": 512,
    },
}


STEP_SETTINGS: dict[str, dict[str, Any]] = {
    "nothing frozen": {},
    "half of the layers frozen": {"phases.0.frozen_layers": {"visual": 2, "text": 2}},
    "all layers frozen": {"phases.0.frozen_layers": {"visual": 4, "text": 4}},
    "average of the weights": {"training.ema_decay": 0.999},
}


def print_settings(repetitions: int = 20) -> None:
    """Take steps of all settings in turn, on the same batch."""
    with tempfile.TemporaryDirectory() as folder:
        scenes = write_synthetic_scenes(
            Path(folder) / "scenes", num_train=64, num_val=4, num_test=4, captions_per_image=1
        )
        clip = Path(folder) / "clip"
        words = sorted(set(re.findall(r"\w+", (scenes / "captions.jsonl").read_text().lower())))
        encoder = {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
        }
        write_clip_folder(
            clip,
            words,
            encoder | {"max_position_embeddings": 48},
            vision_config=encoder | {"image_size": 64, "patch_size": 8},
            projection_dim=128,
        )
        values = {
            "data.path": str(scenes),
            "visual.encoder": str(clip),
            "text.encoder": str(clip),
            "training.batch_size": 8,
        }
        trainers = {}
        for name, settings in STEP_SETTINGS.items():
            recipe = read_recipe("clip/full", values | settings)
            run = Path(folder) / name
            run.mkdir()
            trainers[name] = Trainer(*prepare_training(recipe), RunFolder(run))
            trainers[name].start()
        batch = next(iter(trainers["nothing frozen"].train_loader.epoch(1)))
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(repetitions):
            for name, trainer in trainers.items():
                started = time.process_time()
                trainer.train_step.backward(batch, trainer.supervision.targets)
                trainer.train_step.step(1.0)
                seconds[name].append(time.process_time() - started)
        reference = statistics.median(seconds["nothing frozen"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(f"{name:28} {1000 * median:6.0f} ms, ratio {median / reference:.2f}", flush=True)


def print_gpu(images: int = 4096, epochs: int = 6) -> None:
    """Train for some epochs with each setting. The first epoch, in which workers start and blocks
    are compiled, does not count.
    """
    if not torch.cuda.is_available():
        print("gpu: no device here")
        return
    print(
        f"{torch.cuda.get_device_name()}, CLIP ViT-B/32, {images:,} images of 96 x 96 pixels "
        "enlarged to 224 x 224, batch 1,024"
    )
    with tempfile.TemporaryDirectory() as folder:
        scenes = write_synthetic_scenes(
            Path(folder) / "scenes", num_train=images, num_val=100, num_test=100
        )
        clip = Path(folder) / "clip"
        words = sorted(set(re.findall(r"\w+", (scenes / "captions.jsonl").read_text().lower())))
        write_clip_folder(clip, words, {"vocab_size": 49408})
        for name, settings in GPU_TRAININGS.items():
            values = {
                "data.path": str(scenes),
                "visual.encoder": str(clip),
                "text.encoder": str(clip),
                "phases.0.epochs": epochs,
            }
            training = {
                "batch_size": 1024,
                "captions_per_image": 1,
                "metric_batches": 1,
                "checkpoint_s": 600.0,
                **settings,
            }
            torch.cuda.reset_peak_memory_stats()
            values |= {f"training.{key}": value for key, value in training.items()}
            run = visavis.train(
                "clip/full", overrides=values, out=Path(folder) / name.replace(" ", "-")
            ).run
            times = [
                json.loads(line)["time"] for line in RunFolder(run).log.read_text().splitlines()
            ]
            first = times[1]
            last = times[-1]
            seconds = last["training_s"] - first["training_s"]
            waiting = sum(time["data_wait_s"] for time in times[2:]) / seconds
            speed = images * (epochs - 1) / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{name:40} {speed:8,.0f} pairs/s, {waiting:.0%} waiting for data, peak {peak:.1f} "
                "GiB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["formulas", "measured", "trainer", "chunks"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{arguments.threads} threads, seed 0"
    )
    printers = {
        "formulas": print_formulas,
        "measured": lambda: print_measured(arguments.threads),
        "trainer": print_trainer,
        "chunks": print_chunks,
        "settings": print_settings,
        "gpu": print_gpu,
    }
    for row in arguments.rows:
        printers[row]()


if __name__ == "__main__":
    main()
