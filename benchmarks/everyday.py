"""What people do every day, at the sizes that most people have: the start of commands, a
comparison, a training step of 256 pairs with its validation, a small evaluation, a single query.

    OMP_NUM_THREADS=1 python benchmarks/everyday.py [--rounds 5] [--rows NAME ...]

Commands run on synthetic scenes and a small model with a frozen MiniLM, in a temporary folder. Their
processor time, children included, is reported in seconds beyond that of ``python -c "import torch"``,
which runs in turns with them. Work inside a process is reported as the ratio to the same work in
plain torch, in turns on one thread. A comparison of two objectives and three seeds is compared with
the same six trainings in one process, and a single query with the best of faiss (flat), numpy and,
if it is installed, USearch (exact). All values are medians, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import visavis
from visavis.core.encoded import Encoded
from visavis.core.run_context import RunContext
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import evaluate
from visavis.models.base import get_vectors
from visavis.retrieval.stores.exact_search import ExactSearch, Int8Pass
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

IMPORT_TORCH = ("-c", "import torch")
COMMANDS: dict[str, tuple[str, ...]] = {
    "index, unchanged": ("index", "run", "scenes/images", "--out", "index"),
    "evaluate RUN": ("evaluate", "run"),
    "catalog objectives": ("catalog", "objectives"),
    "catalog recipes": ("catalog", "recipes"),
    "train --dry-run": ("train", "demo", "--data", "scenes", "--dry-run"),
}
EVALUATIONS = (500, 1000, 5000)
"""Images, each with five captions."""
QUERIES = (10_000, 100_000, 1_000_000)
"""Vectors that a single query is compared with."""
COLLECTIONS = (300, 1000, 3000)
BATCHES = (64, 256, 1024)
"""Photos and pairs per batch for `--growth`."""
DIM = 512
VISUAL_DIM = 1280
TEXT_DIM = 384
BATCH = 256
STEPS = 30
TRAININGS = """
import visavis
for objective in ("Unified()", "VLC()"):
    for seed in (1, 2, 3):
        visavis.train("demo", data="scenes", out=f"trainings/{objective}-{seed}", overrides={
            "model": "Heads(embedding_dim=64)", "epochs": 3, "training.batches_per_epoch": 100,
            "text.encoder": "minilm", "text.granularity": "pooled", "training.threads": 1,
            "phases.0.objective": objective, "seed": seed})
"""
COMPARISON = (
    *("-m", "visavis", "compare", "demo", "--data", "scenes", "--out", "comparison"),
    *("--objective", "Unified()", "--objective", "VLC()", "--seeds", "3", "--no-tune"),
    *("--workers", "1", "model=Heads(embedding_dim=64)", "epochs=3"),
    *("training.batches_per_epoch=100", "text.encoder=minilm", "text.granularity=pooled"),
)
HEADS = """
name = "heads"
data = {{ path = "{folder}" }}
visual = {{ granularity = "pooled", features = "{folder}/images.npy", standardize = "sqrt_zscore" }}
text = {{ granularity = "pooled", features = "{folder}/texts.npy" }}
training = {{ batch_size = {batch}, clip_norm = 2.0, threads = 1 }}
[model]
kind = "Heads"
embedding_dim = 512
hidden_layers = 1
hidden_dim = 512
dropout = 0.2
input_dropout = 0.1
whiten_text = true
[[phases]]
epochs = 3
objective = "Unified(margin=0.2, gamma=50)"
optimizer = {{ name = "AdamW", lr = 1.5e-3, weight_decay = 1e-4, no_decay = [] }}
"""


def prepare(folder: Path, num_train: int = 1000, num_test: int = 100) -> None:
    """Write scenes, train a small model on them, and index the images."""
    write_synthetic_scenes(
        folder / "scenes", num_train=num_train, num_val=num_test, num_test=num_test
    )
    model = {"model": "Heads(embedding_dim=64)", "epochs": 1, "training.batches_per_epoch": 4}
    texts = {"text.encoder": "minilm", "text.granularity": "pooled"}
    run = visavis.train(
        "demo", data=folder / "scenes", overrides=model | texts, out=folder / "run"
    ).run
    visavis.index(run, folder / "scenes" / "images", out=folder / "index")


def processor_seconds(arguments: tuple[str, ...], folder: Path) -> float:
    """Processor time of a Python process and its children."""
    # A process that cannot keep compiled code compiles all of it each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_command(name: str, folder: Path, rounds: int) -> str:
    """Seconds of a command beyond the import of torch."""
    command = ("-m", "visavis", *COMMANDS[name])
    processor_seconds(command, folder)  # warm-up: bytecode and caches
    base = list[float]()
    seconds = list[float]()
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


def time_comparison(folder: Path, rounds: int) -> str:
    """A comparison with its report, to six trainings."""
    ratios = list[float]()
    for _ in range(rounds):
        for name in ("comparison", "trainings"):
            shutil.rmtree(folder / name, ignore_errors=True)
        took = [processor_seconds(command, folder) for command in (COMPARISON, ("-c", TRAININGS))]
        ratios.append(took[0] / took[1])
    return f"{describe(ratios)} x six trainings of 300 steps"


def open_trainer(folder: Path, batch: int = BATCH) -> Trainer:
    """A training of small heads on random features, with 5,000 images and five captions each."""
    random = np.random.default_rng(0)
    count = 7000
    splits = ["train"] * 5000 + ["val"] * 1000 + ["test"] * 1000
    images = [
        {
            "filename": f"{number}.jpg",
            "split": split,
            "sentences": [{"raw": f"a dog {number} {caption}"} for caption in range(5)],
        }
        for number, split in enumerate(splits)
    ]
    folder.mkdir()
    (folder / "dataset_random.json").write_text(json.dumps({"images": images}))
    shared = random.standard_normal((count, 32), np.float32)
    for name, rows, dim in (
        ("images", shared, VISUAL_DIM),
        ("texts", shared.repeat(5, 0), TEXT_DIM),
    ):
        features = rows @ random.standard_normal((32, dim), np.float32)
        features += random.standard_normal(features.shape, np.float32)
        np.save(folder / f"{name}.npy", features.astype(np.float16))
    (folder / "heads.toml").write_text(HEADS.format(folder=folder, batch=batch))
    module, matcher = prepare_training(read_recipe(folder / "heads.toml"), RunContext())
    trainer = Trainer(module, matcher, RunFolder(folder / "run"))
    trainer.start()
    return trainer


def plain_steps(trainer: Trainer) -> Callable[[], None]:
    """The same training steps as a loop over tensors in memory."""
    loader = trainer.train_loader
    model = copy.deepcopy(trainer.matcher)
    image_of = torch.from_numpy(loader.data.image_of)
    images, texts = (
        get_vectors(source.read(np.arange(len(items))))
        for source, items in ((loader.visual, loader.data.images), (loader.text, image_of))
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, weight_decay=1e-4, fused=True)

    def direction(scores: Tensor, positive: Tensor) -> Tensor:
        query, candidate = positive.nonzero(as_tuple=True)
        sums = (50 * scores).masked_fill(positive, -torch.inf).logsumexp(1)
        return softplus(sums[query] + 50 * (0.2 - scores[query, candidate])).sum() / 50

    def run() -> None:
        model.train()
        order = torch.randperm(len(image_of))
        for captions in order[: STEPS * BATCH].split(BATCH):
            ids = image_of[captions]
            visual = normalize(model.visual(images[ids]), dim=1)  # type: ignore[operator]
            text = normalize(model.text(model.whitening(texts[captions])), dim=1)  # type: ignore[operator]
            scores = visual @ text.T
            positive = ids[:, None] == ids
            loss = direction(scores, positive) + direction(scores.T, positive.T)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 2.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def time_training(folder: Path, rounds: int) -> str:
    """Training steps, to a loop in plain torch, and a validation that saves the model."""
    trainer = open_trainer(folder / "features")

    def steps() -> None:
        for batch in trainer.train_loader.epoch(0, stop=STEPS):
            trainer._step(batch, STEPS)

    steps_ratio = ratio(steps, plain_steps(trainer), 2 * rounds)
    seconds = list[float]()
    for _ in range(rounds + 1):
        trainer.state.best_rsum = -1.0  # so that the model is saved
        started = time.process_time()
        trainer._validate()
        seconds.append(time.process_time() - started)
    return f"{steps_ratio}, validation {describe(seconds[1:])} s"


def unit_rows(num_rows: int) -> np.ndarray:
    """Random unit vectors."""
    rows = np.random.default_rng(0).standard_normal((num_rows, DIM), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def time_query(num_rows: int, rounds: int) -> str:
    """The exact top ten of one query, to the fastest other exact search."""
    import faiss

    random = np.random.default_rng(1)
    rows = unit_rows(num_rows)
    exact = ExactSearch(rows, coarse=Int8Pass.from_vectors(rows))
    flat = faiss.IndexFlatIP(DIM)
    flat.add(rows)
    faiss.omp_set_num_threads(1)

    def by_numpy(query: np.ndarray) -> np.ndarray:
        scores = rows @ query[0]
        best = np.argpartition(-scores, 10)[:10]
        return best[np.argsort(-scores[best])]

    others: dict[str, Callable[[np.ndarray], object]] = {
        "faiss": lambda query: flat.search(query, 10),
        "numpy": by_numpy,
    }
    with suppress(ImportError):
        from usearch.index import search

        others["USearch"] = lambda query: search(rows, query[0], 10, "ip", exact=True, threads=1)
    methods = {"visavis": lambda query: exact.search(query, 10)} | others
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(4 * rounds + 1):
        query = rows[number : number + 1] + 0.02 * random.standard_normal((1, DIM), np.float32)
        for name, method in methods.items():
            started = time.process_time()
            method(query)
            if number:
                times[name].append(time.process_time() - started)
    best = min(others, key=lambda name: statistics.median(times[name]))
    ratios = [ours / other for ours, other in zip(times["visavis"], times[best], strict=True)]
    return f"{describe(ratios)} x {best} ({1000 * statistics.median(times[best]):.1f} ms)"


def plain_recall(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """The ten best candidates of every query of both directions."""
    scores = images @ texts.T
    return scores.topk(10).indices, scores.T.topk(10).indices


def evaluations(num_images: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Evaluation of given embeddings, and ``topk(10)`` of both directions."""
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(num_images, DIM, generator=generator), dim=1)
    image_of = torch.arange(5 * num_images) // 5
    noise = torch.randn(5 * num_images, DIM, generator=generator)
    texts = torch.nn.functional.normalize(images[image_of] + 3 * noise / DIM**0.5, dim=1)

    def cosine(visual: Encoded, text: Encoded) -> Tensor:
        return visual.vectors @ text.vectors.T  # type: ignore[operator, union-attr]

    ids = torch.arange(num_images)
    return (
        lambda: evaluate(Encoded(images), Encoded(texts), cosine, ids, image_of),
        lambda: plain_recall(images, texts),
    )


def describe_growth(sizes: tuple[int, ...], seconds: list[float]) -> str:
    """Seconds at each size, and the exponent of a power law through them."""
    exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    times = ", ".join(f"{size:,}: {took:.4g} s" for size, took in zip(sizes, seconds, strict=True))
    return f"exponent {exponent:5.2f} ({times})"


def growth_rows(folder: Path, rounds: int) -> Iterator[tuple[str, str]]:
    """Each row at three sizes."""
    commands = [name for name in COMMANDS if not name.startswith(("catalog", "train"))]
    beyond: dict[str, list[float]] = {name: [] for name in commands}
    for size in COLLECTIONS:
        place = folder / str(size)
        prepare(place, num_train=4 * size // 5, num_test=size // 10)
        for name in commands:
            command = ("-m", "visavis", *COMMANDS[name])
            took = [processor_seconds(command, place) for _ in range(rounds + 1)][1:]
            torch_took = [processor_seconds(IMPORT_TORCH, place) for _ in range(rounds)]
            beyond[name].append(statistics.median(took) - statistics.median(torch_took))
        shutil.rmtree(place)
    for name, seconds in beyond.items():
        yield f"{name}, images", describe_growth(COLLECTIONS, seconds)
    functions: list[tuple[str, tuple[int, ...], Callable[[int], Callable[[], object]]]] = [
        ("evaluation, images", EVALUATIONS, lambda size: evaluations(size)[0]),
        ("one query, vectors", QUERIES, exact_query),
        ("30 training steps, pairs", BATCHES, lambda size: steps(folder / f"batch-{size}", size)),
    ]
    for name, sizes, function_of in functions:
        seconds = list[float]()
        for size in sizes:
            function = function_of(size)
            took = list[float]()
            for _ in range(rounds + 1):
                started = time.process_time()
                function()
                took.append(time.process_time() - started)
            seconds.append(statistics.median(took[1:]))
        yield name, describe_growth(sizes, seconds)


def exact_query(num_rows: int) -> Callable[[], object]:
    """The exact top ten of one query."""
    rows = unit_rows(num_rows)
    exact = ExactSearch(rows, coarse=Int8Pass.from_vectors(rows))
    return lambda: exact.search(rows[:1], 10)


def steps(folder: Path, batch: int) -> Callable[[], object]:
    """Training steps of small heads."""
    trainer = open_trainer(folder, batch)

    def run() -> None:
        for pairs in trainer.train_loader.epoch(0, stop=STEPS):
            trainer._step(pairs, STEPS)

    return run


def main() -> None:
    """Print one line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--growth", action="store_true", help="each row at three sizes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: dict[str, Callable[[], str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.growth:
            for row, result in growth_rows(folder, options.rounds):
                print(f"{row:<35} {result}", flush=True)
            return
        for command in COMMANDS:
            rows[command] = lambda command=command: time_command(command, folder, options.rounds)  # type: ignore[misc]
        for size in EVALUATIONS:
            label = f"evaluation of {size:,} images, {5 * size:,} captions"
            rows[label] = lambda size=size: ratio(*evaluations(size), options.rounds)  # type: ignore[misc]
        rows["compare, 2 objectives x 3 seeds"] = lambda: time_comparison(folder, options.rounds)
        rows["training step, 256 pairs"] = lambda: time_training(folder, options.rounds)
        for size in QUERIES:
            label = f"one query, {size:,} vectors"
            rows[label] = lambda size=size: time_query(size, options.rounds)  # type: ignore[misc]
        selected = [row for row in rows if not options.rows or row in options.rows]
        if any(row in COMMANDS or row.startswith("compare") for row in selected):
            prepare(folder)
        for row in selected:
            print(f"{row:<45} {rows[row]()}", flush=True)


if __name__ == "__main__":
    main()
