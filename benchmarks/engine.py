"""Time and memory of the row-block engine, compared with the matrix form of the same objective and
with other packages.

Each method runs in its own process on the same inputs. The processes take turns, and medians are
compared. Time is forward and backward. Memory is the peak beyond the two embeddings and their two
gradients. The ratio is matrix / engine: above 1, the engine is faster. ``plan`` compares the memory
that ``PairLoss.plan`` expects with the measured one. ``products`` compares the engine with its
matrix products alone. ``before`` compares the engine of another checkout with this one, as before /
now.

    python benchmarks/engine.py [--rows large small half huge plan products before others cuda]
    [--objectives NAME ...] [--size 8192] [--width 512]
                                [--threads 2] [--repeats 5] [--seed 0] [--before PATH_TO_ITS_SRC]
                                [--cuda-sizes N ...]

FULL=1 in the environment runs every objective at 65,536 in full, instead of 4,096 queries with the
time scaled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from visavis import PairLoss, Targets
from visavis.losses.pair_loss import cosine
from visavis.losses.targets import Factors
from visavis.models.device import has_native_bfloat16
from visavis.objectives import CATALOG, Objective, parse

FAMILIES = ("Unified", "VLC", "TripletHN")
# Queries of 65,536 that are measured for objectives without a family.
QUERIES = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--objectives", nargs="+", default=[kind.__name__ for kind in CATALOG])
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--huge-size", type=int, default=65536)
    parser.add_argument("--cuda-sizes", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--before", help="src folder of another checkout, for the row 'before'.")
    options = parser.parse_args()
    if options.worker:
        serve(options.worker)
        return
    print(
        f"D = {options.width}, {options.threads} threads, seed {options.seed}, median of "
        f"{options.repeats}, torch {torch.__version__}"
    )
    for row in options.rows:
        ROWS[row](options)


# Rows of the benchmark.


def large(options: argparse.Namespace) -> None:
    """Every objective at one large batch."""
    print(f"\nB = {options.size}, float32: each objective against the matrix form of itself")
    for name in options.objectives:
        line(
            options, name, [work("engine", name, options.size), work("matrix", name, options.size)]
        )
    print("  against the cross-entropy form of open_clip (all negatives, two softmaxes)")
    for name in ("VLC", "Unified"):
        line(
            options,
            name,
            [work("engine", name, options.size), work("open_clip", name, options.size)],
        )


def half(options: argparse.Namespace) -> None:
    """Products in bfloat16."""
    amx = "with AMX" if "amx_bf16" in cpu_flags() else "without AMX"
    print(
        f"\nB = {options.size}, autocast bfloat16 on a CPU {amx}, against the matrix form in "
        "float32"
    )
    for name in FAMILIES:
        line(
            options,
            name,
            [work("engine", name, options.size, half=True), work("matrix", name, options.size)],
        )


def small(options: argparse.Namespace) -> None:
    """Small batches, which must not become slower."""
    for size in (512, 1024):
        for captions in (1, 5):
            print(
                f"\nB = {size} images, {captions} caption{'s' if captions > 1 else ''} each, "
                "against the matrix form"
            )
            for name in options.objectives:
                works = [
                    work(method, name, size, captions=captions, times=5)
                    for method in ("engine", "matrix")
                ]
                line(options, name, works)


def huge(options: argparse.Namespace) -> None:
    """A batch whose matrix would need 17 GB."""
    full = bool(os.environ.get("FULL"))
    print(f"\nB = {options.huge_size}, float32 (once)")
    for name in options.objectives:
        queries = None if full or name in FAMILIES else min(QUERIES, options.huge_size)
        result = Worker(options, work("engine", name, options.huge_size, queries=queries)).run()
        factor = 1 if queries is None else options.huge_size / queries
        note = "" if queries is None else f"   scaled from {queries} queries per direction"
        print(f"  {name:18} {factor * result['seconds']:9.1f} s {memory(result)}{note}", flush=True)


def plan(options: argparse.Namespace) -> None:
    """Expected memory of a plan, and measured memory beyond embeddings and gradients."""
    for size in (4096, 8192, 16384):
        print(f"\nB = {size}, the memory that plan() expects and the measured peak")
        for name in options.objectives:
            worker = Worker(options, work("engine", name, size, in_use=True))
            measured = worker.run()["bytes"]
            worker.close()
            images = texts = torch.empty(size, 1)
            targets = Targets(
                query_ids=torch.arange(size),
                candidate_ids=torch.arange(size),
                **make_annotations(images, texts),
            )
            expected = PairLoss(parse(name)).plan(
                size, size, embedding_dim=options.width, targets=targets
            )
            print(
                f"  {name:18} {expected.path:6} {expected.expected_bytes / 1e6:7.0f} MB expected "
                f"{measured / 1e6:7.0f} MB measured"
                f" {expected.expected_bytes / measured:6.2f}",
                flush=True,
            )


def products(options: argparse.Namespace) -> None:
    """The engine compared with its three matrix products alone: the scores, and the gradients of
    both sides.
    """
    torch.set_num_threads(options.threads)
    compare_products(options, torch.float32)
    if has_native_bfloat16(torch.device("cpu")):
        compare_products(options, torch.bfloat16)


def compare_products(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Compare Unified with its products in a dtype, in turns."""
    generator = torch.Generator().manual_seed(options.seed)
    size = (options.size, options.width)
    images, texts = (torch.randn(size, generator=generator).requires_grad_() for _ in range(2))
    rows, columns = (normalize(items.detach()).to(dtype) for items in (images, texts))
    scores = torch.empty(options.size, options.size, dtype=dtype)
    gradient = torch.empty(size, dtype=dtype)
    loss = PairLoss(parse("Unified"))

    def multiply() -> None:
        torch.mm(rows, columns.T, out=scores)
        torch.mm(scores, columns, out=gradient)
        torch.mm(scores.T, rows, out=gradient)

    def step() -> None:
        images.grad = texts.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss(images, texts)
        value.backward()

    times = [[measured(work) for work in (multiply, step)] for _ in range(options.repeats + 1)][1:]
    ratios = [engine / alone for alone, engine in times]
    seconds = " and ".join(
        f"{statistics.median(column):.2f} s" for column in zip(*times, strict=True)
    )
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(
        f"\nB = {options.size}, {dtype}, three products and Unified: {seconds}, "
        f"{statistics.median(ratios):.3f}x ({spread})"
    )


def measured(work: Callable[[], None]) -> float:
    """The seconds of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def before(options: argparse.Namespace) -> None:
    """The engine of another checkout compared with this one."""
    if options.before is None:
        print("\n--before: missing. Pass the src folder of another checkout.")
        return
    print(f"\nB = {options.size}, before / now")
    for name in options.objectives:
        times = max(1, round(2e7 / options.size**2))
        line(
            options,
            name,
            [
                work("engine", name, options.size, times=times),
                work("engine", name, options.size, times=times, source=options.before),
            ],
        )


def others(options: argparse.Namespace) -> None:
    """Other packages."""
    print("\npytorch-metric-learning NT-Xent, B = 512, both directions")
    if importlib.util.find_spec("pytorch_metric_learning") is None:
        print("  not installed. Run pip install pytorch-metric-learning")
        return
    line(
        options,
        "NTXent",
        [work("engine", "NTXent", 512, times=5), work("metric_learning", "NTXent", 512)],
    )


def cuda(options: argparse.Namespace) -> None:
    """On a GPU: time and memory of large batches, next to the matrix form and, for VLC, to the
    cross-entropy form of open_clip.
    """
    if not torch.cuda.is_available():
        print("\nCUDA: no device here")
        return
    print(
        f"\n{torch.cuda.get_device_name()}: forward and backward, memory beyond embeddings and "
        "gradients"
    )
    changes = {"device": "cuda", "width": options.width, "seed": options.seed}
    for half in (False, True):
        print(f"\n{'autocast bfloat16' if half else 'float32'}")
        for size in options.cuda_sizes:
            for name in FAMILIES:
                methods = (
                    ["engine", "matrix"]
                    + ["compiled"] * (size == min(options.cuda_sizes))
                    + ["open_clip"] * (name == "VLC")
                )
                descriptions = [
                    f"{method} {on_gpu(options, work(method, name, size, half=half, **changes))}"
                    for method in methods
                ]
                print(f"  B = {size:7,} {name:10} {'   '.join(descriptions)}", flush=True)


def on_gpu(options: argparse.Namespace, work: dict[str, Any]) -> str:
    """Median time of a method on the GPU, its spread, its peak memory, and pairs per second."""
    torch.cuda.empty_cache()
    try:
        images, texts, image_ids, text_ids = batch(work)
        value = make_method(work, images, texts, image_ids, text_ids)
        for _ in range(2):
            run_once(value, images, texts, half=work["half"])
        before = memory_now(images.device)
        seconds = [
            run_once(value, images, texts, half=work["half"]) for _ in range(options.repeats)
        ]
    except torch.OutOfMemoryError:
        return "out of memory"
    extra = memory_peak(images.device) - before
    median = statistics.median(seconds)
    spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"
    return f"{median * 1e3:.1f} ms ({spread}) {extra / 1e9:.2f} GB {work['size'] / median / 1e3:,.0f}k pairs/s"


def run_once(
    value: Callable[[], Tensor | None], images: Tensor, texts: Tensor, *, half: bool
) -> float:
    """The seconds of one forward and backward pass on the device of the images."""
    images.grad = texts.grad = None
    synchronize(images.device)
    started = time.perf_counter()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        result = value()
    if result is not None:
        result.backward()
    synchronize(images.device)
    return time.perf_counter() - started


ROWS: dict[str, Callable[[argparse.Namespace], None]] = {
    row.__name__: row for row in (large, small, half, huge, plan, products, before, others, cuda)
}


def line(options: argparse.Namespace, name: str, works: list[dict[str, Any]]) -> None:
    """Run two methods in turns."""
    workers = [Worker(options, each) for each in works]
    rounds = [[worker.run() for worker in workers] for _ in range(options.repeats)]
    for worker in workers:
        worker.close()
    ours, theirs = (
        {
            "seconds": statistics.median(run["seconds"] for run in runs),
            "bytes": max(run["bytes"] for run in runs),
        }
        for runs in ([each[index] for each in rounds] for index in (0, 1))
    )
    ratio, cpu = (
        statistics.median(each[1][key] / each[0][key] for each in rounds)
        for key in ("seconds", "cpu")
    )
    names = ("now", "before") if works[1]["source"] else ("engine", works[1]["method"])
    columns = [f"{each['seconds'] * 1e3:10.1f} ms {memory(each)}" for each in (ours, theirs)]
    print(
        f"  {name:18} {names[0]} {columns[0]}   {names[1]} {columns[1]}   {ratio:6.2f} x "
        f"({cpu:.2f} of CPU time)",
        flush=True,
    )


def memory(result: dict[str, float]) -> str:
    return f"{result['bytes'] / 1e6:7.0f} MB"


# Processes of the benchmark.


def work(method: str, objective: str, size: int, **changes: Any) -> dict[str, Any]:
    defaults = {
        "captions": 1,
        "half": False,
        "queries": None,
        "times": 1,
        "device": "cpu",
        "source": None,
        "in_use": False,
    }
    return {"method": method, "objective": objective, "size": size} | defaults | changes


class Worker:
    """A process that runs one method on request."""

    def __init__(self, options: argparse.Namespace, work: dict[str, Any]) -> None:
        work |= {"width": options.width, "threads": options.threads, "seed": options.seed}
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        # Freed memory returns to the system, so that the peak counts memory in use and not what the
        # allocator keeps.
        if work["in_use"]:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
        if work["source"]:
            environment["PYTHONPATH"] = work["source"]
        command = [sys.executable, __file__, "--worker", json.dumps(work)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("A measuring process failed. See the lines above for the reason.")
        return json.loads(answer)

    def close(self) -> None:
        self.process.communicate()


def serve(work: dict[str, Any]) -> None:
    torch.set_num_threads(work["threads"])
    images, texts, image_ids, text_ids = batch(work)
    value = make_method(work, images, texts, image_ids, text_ids)
    device = torch.device(work["device"])
    warm_up = batch(
        work | {"size": min(work["size"], 2048)}
    )  # libraries are loaded, and hold the buffers that they keep
    result = make_method(work | {"queries": None}, *warm_up)()
    assert result is not None
    result.backward()
    del warm_up, result
    for _ in sys.stdin:
        images.grad = texts.grad = None
        before = memory_now(device)
        start = time.perf_counter()
        busy = time.process_time()
        for _ in range(work["times"]):
            images.grad = texts.grad = None
            with torch.autocast(device.type, torch.bfloat16, enabled=work["half"]):
                result = value()
            if result is not None:
                result.backward()
        synchronize(device)
        seconds, cpu = (
            (now - then) / work["times"]
            for now, then in ((time.perf_counter(), start), (time.process_time(), busy))
        )
        extra = memory_peak(device) - before - images.nbytes - texts.nbytes
        print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": extra}), flush=True)


def batch(work: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Texts are noisy copies of their images: cosines of positives about 0.3, of negatives about 0."""
    torch.manual_seed(work["seed"])
    image_ids = torch.arange(work["size"])
    text_ids = image_ids.repeat_interleave(work["captions"])
    images = torch.randn(len(image_ids), work["width"])
    texts = torch.randn(len(text_ids), work["width"]).mul_(3).add_(images[text_ids])
    device = work["device"]
    return (
        images.to(device).requires_grad_(),
        texts.to(device).requires_grad_(),
        image_ids.to(device),
        text_ids.to(device),
    )


def make_method(
    work: dict[str, Any], images: Tensor, texts: Tensor, image_ids: Tensor, text_ids: Tensor
) -> Callable[[], Tensor | None]:
    objective = parse(work["objective"])
    targets = Targets(
        query_ids=image_ids, candidate_ids=text_ids, **make_annotations(images, texts)
    )
    methods: dict[str, Callable[[], Callable[[], Tensor | None]]] = {
        "engine": lambda: lambda: PairLoss(objective)(images, texts, targets=targets),
        "matrix": lambda: lambda: objective(cosine(images, texts), targets),
        "compiled": lambda: compiled(objective, images, texts, targets),
        "open_clip": lambda: lambda: open_clip_form(images, texts),
        "metric_learning": lambda: metric_learning_form(images, texts, image_ids, text_ids),
    }
    if work["queries"] is not None:
        return lambda: some_queries(objective, images, texts, targets, work["queries"])
    return methods[work["method"]]()


def make_annotations(images: Tensor, texts: Tensor) -> dict[str, Any]:
    """Annotations of some objectives: relevance and margins of pairs as factors, scores of offline
    negatives.
    """
    sides = [torch.rand(len(items), 8, device=items.device) / 8**0.5 for items in (images, texts)]
    offline = {
        f"{side}_offline_scores": torch.rand(len(items), 2, device=items.device)
        for side, items in zip(("query", "candidate"), (images, texts), strict=True)
    }
    return {"relevance": Factors(*sides), "pair_margin": Factors(*sides)} | offline


def some_queries(
    objective: Objective, images: Tensor, texts: Tensor, targets: Targets, num_queries: int
) -> None:
    """Value and gradient of some queries per direction against all candidates."""
    from visavis.core.encoded import Vectors
    from visavis.core.process_group import ProcessGroup
    from visavis.losses.pair_loss.blocks import run_row_blocks
    from visavis.losses.pair_loss.scores import CosineScores

    rows = slice(0, num_queries)
    with torch.no_grad():
        scores = CosineScores(Vectors(images), Vectors(texts), None, ([True], [True]))
        block_rows = PairLoss(objective).plan(len(images), len(texts), targets=targets).block_rows
        one_process = ProcessGroup(images.device, distributed_group=False)
        run_row_blocks(
            objective,
            scores,
            (rows, rows),
            (targets[rows], targets.T[rows]),
            block_rows,
            one_process,
            needs_grad=True,
        )


def compiled(
    objective: Objective, images: Tensor, texts: Tensor, targets: Targets
) -> Callable[[], Tensor]:
    loss = torch.compile(PairLoss(objective))
    return lambda: loss(images, texts, targets=targets)


def open_clip_form(images: Tensor, texts: Tensor, scale: float = 50.0) -> Tensor:
    scores = scale * normalize(images, dim=-1) @ normalize(texts, dim=-1).T
    labels = torch.arange(len(images), device=images.device)
    return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2


def metric_learning_form(
    images: Tensor, texts: Tensor, image_ids: Tensor, text_ids: Tensor
) -> Callable[[], Tensor]:
    from pytorch_metric_learning.losses import NTXentLoss

    loss = NTXentLoss(temperature=0.1)
    return lambda: (
        (
            loss(images, image_ids, ref_emb=texts, ref_labels=text_ids)
            + loss(texts, text_ids, ref_emb=images, ref_labels=image_ids)
        )
        / 2
    )


def memory_now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Writing 5 resets the peak of resident memory.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else status("VmHWM")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def cpu_flags() -> str:
    with open("/proc/cpuinfo") as file:
        return file.read()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
