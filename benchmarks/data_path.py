"""The data path from JPEG files against another checkout, or against full decoding: training from
pixels, index, check and features.

    git worktree add ../old 72e789a python benchmarks/data_path.py [--old ../old/src] [--photos 400]
    [--size 1600 1200] [--repeats 3] [--epochs 3]
                                   [--only training workers index check features] [--images FOLDER]
                                   [--model RUN] [--queries FILE]

Without --old, this checkout is compared with itself, with full decoding in the place of the other.
``workers`` is a training that is compared with one whose images are read by threads.

Photos are smooth noise, or enlarged images of a folder, which differ as real photos do. Each
measurement is a process of its own, and both checkouts run in turn. Prints images per second of
this checkout, and the median ratios of seconds and of processor seconds to the other, with ranges.
Processor seconds hardly depend on other programs, but do not show what several cores save, and they
do not include worker processes.

Without --model, each checkout trains a small network for ``index``. If both index with the same
model, the script also prints how far their vectors agree, and their 10 best images for 100 random
means of vectors and for the texts of --queries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import visavis
from visavis.retrieval.open_index import open_index

KINDS = ("training", "workers", "index", "check", "features")


def write_photos(
    folder: Path, count: int, size: tuple[int, int], seed: int, images: Path | None
) -> None:
    """Write a data set of enlarged images, or of photos whose details shrink with their size, as in
    natural images.
    """
    random = np.random.default_rng(seed)
    width, height = size
    sources = [] if images is None else sorted(images.glob("*.jpg"))[:count]
    for i, source in enumerate(sources):
        with Image.open(source) as image:
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(
                folder / f"{i:05}.jpg", quality=85
            )
    for i in range(len(sources), count):
        pixels = np.full((height, width, 3), 128, np.float32)
        for cells, amplitude in ((4, 60), (16, 30), (64, 12), (256, 4)):
            noise = random.normal(0, amplitude, (cells, cells, 3)).clip(-127, 127) + 128
            pixels += (
                np.asarray(
                    Image.fromarray(noise.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC),
                    np.float32,
                )
                - 128
            )
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            folder / f"{i:05}.jpg", quality=85
        )
    splits = [
        "train" if i < 0.8 * count else "val" if i < 0.9 * count else "test" for i in range(count)
    ]
    lines = [
        json.dumps({"filename": f"{i:05}.jpg", "caption": f"photo {i % 9} of {i % 7}", "split": s})
        for i, s in enumerate(splits)
    ]
    (folder / "captions.jsonl").write_text("\n".join(lines))


def measure(
    kind: str, photos: Path, model: Path, out: Path, epochs: int, *, is_baseline: bool
) -> tuple[float, float]:
    """Return the seconds and the processor seconds per image, with full decoding or without workers
    for a baseline in this checkout.
    """
    decoding: dict[str, Any] = {"full_decoding": True} if is_baseline else {}
    count = len(list(photos.glob("*.jpg")))
    started = time.perf_counter()
    before = sum(os.times()[:4])
    if kind == "model":
        scenes = visavis.data_scenes(
            out.with_suffix(".scenes"), num_train=100, num_val=20, num_test=20
        )
        visavis.train("photos/pixels-words", data=scenes, out=out, overrides={"phases.0.epochs": 3})
    elif kind in ("training", "workers"):
        settings: dict[str, Any] = {"phases.0.epochs": epochs}
        if kind == "workers":
            settings["training.workers"] = 0 if is_baseline else os.cpu_count()
        elif is_baseline:
            settings["visual.full_decoding"] = True
        run = visavis.train("photos/pixels-words", data=photos, out=out, overrides=settings).run
        log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        read = epochs * round(0.8 * count)
        return float(log[-1]["time"]["training_s"]) / read, (sum(os.times()[:4]) - before) / read
    elif kind == "index":
        visavis.index(model, photos, out=out, **decoding)
    elif kind == "check":
        visavis.data_check(photos)
    else:
        visavis.features(photos, visual="scenes", out=out, **decoding)
    return (time.perf_counter() - started) / count, (sum(os.times()[:4]) - before) / count


def compare_indexes(old: Path, new: Path, texts: list[str]) -> str:
    """Compare the vectors of two indexes, and their 10 best images for random queries near the
    images and for texts.
    """
    indexes = [open_index(folder) for folder in (old, new)]
    vectors = []
    for index in indexes:
        rows = index.store.vectors(sorted(item.key for item in index.store.table().items()))
        assert isinstance(rows, np.ndarray)
        vectors.append(rows.astype(np.float64))
    cosines = (
        (vectors[0] * vectors[1]).sum(1)
        / np.linalg.norm(vectors[0], axis=1)
        / np.linalg.norm(vectors[1], axis=1)
    )
    # A random mean of a few images.
    queries = {
        "random queries": np.random.default_rng(0).dirichlet(np.full(len(cosines), 0.02), 100)
        @ vectors[0]
    }
    if texts:
        queries["texts"] = np.stack(indexes[0].model.encode_texts(texts)).astype(np.float64)
    parts = [
        f"cosine min {cosines.min():.5f}, median {np.median(cosines):.5f}, same 10 best images"
    ]
    for name, rows in queries.items():
        best = [
            [frozenset(row[:10].tolist()) for row in np.argsort(-rows @ part.T, axis=1)]
            for part in vectors
        ]
        num_equal = sum(old_best == new_best for old_best, new_best in zip(*best, strict=True))
        parts.append(f"for {num_equal} of {len(rows)} {name}")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--old",
        type=Path,
        help="folder src of the other checkout. Default: this one, with full decoding",
    )
    parser.add_argument("--photos", type=int, default=400)
    parser.add_argument("--size", type=int, nargs=2, default=(1600, 1200))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="of the trainings, whose start is included in their time",
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--images", type=Path, help="folder of .jpg files to enlarge instead of noise"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="run whose model indexes. Default: a small network trained on scenes",
    )
    parser.add_argument(
        "--queries",
        type=Path,
        help="file with a text query in each line, for the comparison of indexes",
    )
    parser.add_argument("--baseline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        kind, *paths = options.measure
        photos, model, out = map(Path, paths)
        print(
            "seconds",
            *measure(kind, photos, model, out, options.epochs, is_baseline=options.baseline),
        )
        return
    queries = options.queries.read_text().splitlines() if options.queries else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "photos").mkdir()
        write_photos(folder / "photos", options.photos, tuple(options.size), 0, options.images)
        this = Path(visavis.__file__).parents[1]
        sources = {"old": options.old.resolve() if options.old else this, "new": this}
        models = dict.fromkeys(sources, options.model and options.model.resolve())

        def run(kind: str, name: str, out: Path) -> list[float]:
            """Measure in a new process with the code of a checkout."""
            paths = map(str, (folder / "photos", models[name] or "", out))
            baseline = ["--baseline"] if name == "old" and not options.old else []
            command = [
                sys.executable,
                __file__,
                "--measure",
                kind,
                *paths,
                f"--epochs={options.epochs}",
                *baseline,
            ]
            environment = os.environ | {"PYTHONPATH": str(sources[name])}
            # The encoder of a given model can be in the cache. Indexing stores nothing there.
            if not (options.model and kind == "index"):
                environment["VISAVIS_CACHE"] = str(folder / f"cache-{out.name}")
            result = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return [float(value) for value in result.stdout.split("seconds ")[1].split()]

        if "index" in options.only and not options.model:
            # An old checkout may not read the model files of this one.
            for name in sources if options.old else ("new",):
                models[name] = folder / f"model-{name}"
                run("model", name, folder / f"model-{name}")
            models = models if options.old else dict.fromkeys(sources, models["new"])
        # Decoding has no setting in data check.
        for kind in (
            kind for kind in options.only if kind != ("workers" if options.old else "check")
        ):
            seconds: dict[str, list[list[float]]] = {"old": [], "new": []}
            for number in range(options.repeats):
                for name in sources:
                    seconds[name].append(run(kind, name, folder / f"{kind}-{name}-{number}"))
            ratios = np.array(seconds["old"]) / np.array(seconds["new"])
            rate = 1 / statistics.median(value for value, _ in seconds["new"])
            texts = [
                f"{np.median(part):.2f}x ({part.min():.2f} to {part.max():.2f})"
                for part in ratios.T
            ]
            print(f"{kind}: {rate:.1f} images/s, seconds {texts[0]}, processor seconds {texts[1]}")
            if kind == "index" and models["old"] == models["new"]:
                print(
                    "  " + compare_indexes(folder / "index-old-0", folder / "index-new-0", queries)
                )


if __name__ == "__main__":
    main()
