"""Latency of exported encoders: ONNX Runtime and torch.export compared with torch, at batch sizes 1
and 64.

The model has heads of random weights on MiniLM and on an image encoder. Preprocessing is not
measured. The three programs alternate, with the same number of threads. Prints the median of each
and its ratio to torch.

    python benchmarks/export.py [--encoder mobilenet-v2] [--repeats 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from visavis.models.base import get_vectors
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.image_text.global_matchers import Heads
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_tower_export import TracedTextEncoder
from visavis.training.export.traced_encoders import (
    TracedImageEncoder,
    example_pixels,
    trace_encoders,
)

TEXT = "two brown dogs run along a sandy beach near the water"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="scenes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    processor = Processor(
        EncoderSpec("visual", options.encoder), EncoderSpec("text", "minilm"), None
    )
    heads = Heads(
        Heads.Config(
            visual_input_dim=get_vectors(processor.visual_encoder.encode([blank_image()])).shape[
                -1
            ],
            text_input_dim=384,
            whiten_text=True,
        )
    )
    model = Retriever(heads, processor)
    started = time.perf_counter()
    programs = trace_encoders(model)
    print(
        f"{platform.node()} {platform.machine()}, {options.threads} threads, {options.encoder}: "
        f"traced in {time.perf_counter() - started:.0f} s"
    )
    print(
        f"{'encoder':8} {'batch':>5} {'torch ms':>9} {'ONNX ms':>9} {'export ms':>10} "
        f"{'ONNX/torch':>11} {'export/torch':>13}"
    )
    for side, module in (
        ("image", TracedImageEncoder(model).eval()),
        ("text", TracedTextEncoder(model).eval()),
    ):
        run_onnx = session(programs[side], options.threads)
        exported = programs[side].exported_program.module()
        for batch in (1, 64):
            inputs: tuple[Any, ...] = (example_pixels(model, batch),)
            if side == "text":
                items = processor.text_encoder.preprocess([TEXT] * batch)
                inputs = (get_vectors(items), items.mask)
            calls = [module, run_onnx, exported]
            times = alternate([partial(call, *inputs) for call in calls], options.repeats)
            torch_ms, onnx_ms, export_ms = (
                statistics.median(milliseconds) for milliseconds in times
            )
            ratios = f"{onnx_ms / torch_ms:11.2f} {export_ms / torch_ms:13.2f}"
            print(f"{side:8} {batch:5} {torch_ms:9.1f} {onnx_ms:9.1f} {export_ms:10.1f} {ratios}")


def session(program: Any, threads: int) -> Callable[..., Any]:
    """A traced encoder in ONNX Runtime, called with tensors."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "encoder.onnx")
        opened = onnxruntime.InferenceSession(Path(folder) / "encoder.onnx", settings)
    names = [one.name for one in opened.get_inputs()]
    return lambda *inputs: opened.run(
        None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    )


@torch.no_grad()
def alternate(calls: list[Callable[[], Tensor]], repeats: int) -> list[list[float]]:
    """Milliseconds of each call, one after the other in every repetition. The first repetition is
    not counted.
    """
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, measured in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if repeat:
                measured.append(1000 * (time.perf_counter() - started))
    return times


if __name__ == "__main__":
    main()
