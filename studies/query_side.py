"""Text sides on frozen item vectors against training both sides, on Flickr8k.

A first run reads half of the training images with English captions. Its image vectors are the
items. New captions describe the other half. One run trains the text side on the frozen items, the
other trains both sides and encodes all images again. Both start from the same weights and read the
same captions. The gain is the test RSUM above that of the start.

- ``english``: more captions in the same words, frozen MiniLM and a head.
- ``other words``: every word is replaced by another text, as in another language. Word embeddings
  are trained from scratch.
- ``raw``: no first run. The items are MobileNetV2 features of all training images, the start is a
  random ranking.

``distilled`` trains words from scratch with the scores of the whole ``heads-flickr8k``, on its
frozen image vectors, and measures the time of a text query on one core.

    VISAVIS_DATA=... OMP_NUM_THREADS=1 python studies/query_side.py [--seeds 1 2 3 4 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import visavis
from visavis.core.encoded import Encoded
from visavis.data import Dataset, open_dataset
from visavis.data.dataset_reader import resolve_path
from visavis.models.base import get_vectors
from visavis.training.recipes.data_module import prepare_training
from visavis.training.recipes.files import read_recipe

FEATURES = "backbone/flickr8k_mobilenet_v2_pool_fp16.npy"
HEADS, WORDS = "heads-flickr8k", "words-flickr8k/single"
SHARED = {"training.threads": 1, "training.metric_batches": 1, "evaluation.protocol": "plain"}
SMALL = {"model.embedding_dim": 512, "model.hidden_dim": 1024}


def other_word(word: str) -> str:
    """Replace a word by letters of its hash."""
    return "".join(chr(97 + byte % 26) for byte in hashlib.sha256(word.encode()).digest()[:6])


def write_part(
    data: Dataset, images: np.ndarray, folder: Path, features: np.ndarray, *, translate: bool
) -> dict[str, Any]:
    """Write a part of the data set, and return the overrides that name it."""
    part, sentences = data.take(images), list[str]()
    for caption in part.captions:
        words = caption.lower().split()
        sentences.append(" ".join(map(other_word, words)) if translate else caption)
    content = [
        {
            "filename": image.name,
            "split": image.split,
            "sentences": [{"raw": sentences[i]} for i in np.flatnonzero(part.image_of == number)],
        }
        for number, image in enumerate(part.images)
    ]
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps({"images": content}))
    np.save(folder / "features.npy", features[images])
    return {"data.path": str(folder), "visual.features": str(folder / "features.npy")}


@torch.inference_mode()
def write_items(run: Path, data: Dataset, features: np.ndarray, file: Path) -> Path:
    """Write the image vectors of a run for the whole data set, and their ids."""
    model = visavis.load(run, device="cpu")
    standardization = model.processor.standardization
    assert standardization is not None
    items = standardization(Encoded(torch.from_numpy(features.astype(np.float32))))
    np.save(file, get_vectors(model.matcher.eval().encode_visual(items)).numpy())
    file.with_suffix(".ids.txt").write_text("\n".join(image.name for image in data.images))
    return file


def new_text_side(first: Path, settings: dict[str, Any], folder: Path) -> Path:
    """Write a model with the image side of a run and new word embeddings for new captions."""
    module, matcher = prepare_training(read_recipe(WORDS, settings))
    model = visavis.load(first)
    matcher.visual.load_state_dict(model.matcher.visual.state_dict())  # type: ignore[union-attr, arg-type]
    matcher.eval()
    processor = module.processor
    object.__setattr__(processor, "standardization", model.processor.standardization)
    processor.save(matcher, folder)
    return folder


def query_time(run: Path, texts: list[str]) -> float:
    """Median time of one text query in ms."""
    model, times = visavis.load(run, device="cpu"), []
    model.encode_texts(texts[:5])
    for text in texts:
        start = time.perf_counter()
        model.encode_texts([text])
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def text_parameters(run: Path) -> int:
    """Parameters of the text side of a run, with its frozen encoder."""
    model = visavis.load(run)
    parts = model.matcher.parameters_by_part()
    head = sum(weight.numel() for part in ("text", "whitening") for _, weight in parts.get(part, ()))
    encoder = () if model.processor.text is None else model.processor.text_encoder.parameters()
    return head + sum(weight.numel() for weight in encoder)


class Study:
    """Runs of one seed in a folder."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.rsum = dict[str, float]()

    def train(self, name: str, recipe: str, **settings: Any) -> Path:
        """Train, or read the result of an earlier call, and return the run."""
        run = self.folder / f"{name}-{self.seed}"
        if not (run / "result.json").exists():
            index = settings.pop("index", None)
            visavis.train(
                recipe, out=run, index=index, overrides=SHARED | settings | {"seed": self.seed}
            )
        result = json.loads((run / "result.json").read_text())
        self.rsum[name] = result["rsum"]
        print(
            f"{name}, seed {self.seed}: test {result['rsum']:.1f}, validation "
            f"{result['validation_rsum']:.1f}, {result['seconds']:.0f} s",
            flush=True,
        )
        return run

    def gain(self, name: str, items: Path, recipe: str, start: Path | None, **both: Any) -> None:
        """Train the text side on items, and both sides, from one start."""
        started = {} if start is None else {"start_from": str(start)}
        text = {key: value for key, value in both.items() if not key.startswith("visual.")}
        self.train(f"{name}, text side", recipe, index=items, **text, **started)
        self.train(f"{name}, both sides", recipe, **both, **started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--out", type=Path, help="folder for the runs (default: removed at the end)"
    )
    parser.add_argument(
        "--only", nargs="+", default=["english", "other words", "raw", "distilled"]
    )
    options = parser.parse_args()
    data = open_dataset("flickr8k")
    features = np.load(resolve_path(FEATURES), mmap_mode="r")
    splits = np.array([image.split for image in data.images])
    train, held_out = np.flatnonzero(splits == "train"), np.flatnonzero(splits != "train")
    halves = [np.sort(np.concatenate([train[start::2], held_out])) for start in (0, 1)]
    shares, rows = dict[str, list[float]](), dict[str, list[list[float]]]()
    times, sizes = list[float](), list[int]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)

        def part(name: str, images: np.ndarray, *, translate: bool) -> dict[str, Any]:
            place = folder / name
            if place.exists():
                return {"data.path": str(place), "visual.features": str(place / "features.npy")}
            return write_part(data, images, place, features, translate=translate)

        [captions] = visavis.features("flickr8k", text="minilm")
        stored = {"text": {"features": str(captions.folder), "granularity": "pooled"}}
        old = stored | part("first-half", halves[0], translate=False)
        new = stored | part("second-half", halves[1], translate=False)
        other = part("second-half-other-words", halves[1], translate=True)
        whole = {"visual.features": str(resolve_path(FEATURES))}
        for seed in options.seeds:
            study = Study(folder, seed)
            if {"english", "other words"} & {*options.only}:
                first = study.train("start", HEADS, **SMALL, **old)
                items = write_items(first, data, features, folder / f"items-{seed}.npy")
            if "english" in options.only:
                study.gain("english", items, HEADS, first, **SMALL, **new)
            if "other words" in options.only:
                settings = SMALL | other
                start = folder / f"new-words-{seed}"
                if not start.exists():
                    new_text_side(first, SHARED | settings | {"seed": seed}, start)
                study.gain("other words", items, WORDS, start, **settings)
            if "raw" in options.only:
                study.gain("raw", Path(str(whole["visual.features"])), HEADS, None, **SMALL, **whole)
            for name, base in (("english", "start"), ("other words", ""), ("raw", "")):
                if f"{name}, text side" in study.rsum:
                    values = [
                        study.rsum.get(base, 0.0),
                        study.rsum[f"{name}, text side"],
                        study.rsum[f"{name}, both sides"],
                    ]
                    rows.setdefault(name, []).append(values)
                    shares.setdefault(name, []).append(
                        100 * (values[1] - values[0]) / (values[2] - values[0])
                    )
            if "distilled" in options.only:
                teacher = study.train("teacher", HEADS, **whole)
                items = write_items(teacher, data, features, folder / f"teacher-items-{seed}.npy")
                supervision = f"DistillationSupervision(teacher={str(teacher)!r}, weight=1.0)"
                student = study.train(
                    "distilled",
                    WORDS,
                    index=items,
                    **{"phases.0.supervision": supervision},
                )
                values = [study.rsum["teacher"], study.rsum["distilled"]]
                rows.setdefault("distilled", []).append(values)
                shares.setdefault("distilled", []).append(100 * values[1] / values[0])
                texts = list(data.split("test").captions[:300])
                times.append(query_time(student, texts))
                sizes = [text_parameters(run) for run in (teacher, student)]
    print("| setting | test RSUM | share |\n|---|---|---|")
    for name, values in rows.items():
        means = " to ".join(f"{statistics.mean(column):.1f}" for column in zip(*values, strict=True))
        spread = f"{min(shares[name]):.1f} to {max(shares[name]):.1f} %"
        print(f"| {name} | {means} | {statistics.mean(shares[name]):.1f} % ({spread}) |")
    if times:
        print(
            f"Text parameters: {sizes[0] / 1e6:.1f} million, distilled {sizes[1] / 1e6:.1f} million. "
            f"Median query: {min(times):.2f} to {max(times):.2f} ms."
        )


if __name__ == "__main__":
    main()
