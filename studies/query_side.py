"""Text sides on frozen item vectors against training both sides, on Flickr8k.

A first run reads half of the training images with English captions. Its image vectors are the
items. New captions describe the other half. One run trains the text side on the frozen items, the
other trains both sides and encodes all images again. Both start from the same weights and read the
same captions. The gain is the test RSUM above that of the start.

- ``english``: more captions in the same words, frozen MiniLM and a head.
- ``other words``: every word is replaced by another text, as in another language. Word embeddings
  are trained from scratch.
- ``more captions``: the first run reads one caption of each training image, the others all five.
- ``raw``: no first run. The items are MobileNetV2 features of all training images, the start is a
  random ranking.

``distilled`` trains new word embeddings with the scores of a run of frozen MiniLM and a head, on
its frozen image vectors, and measures the time of a text query on one core.

    VISAVIS_DATA=... OMP_NUM_THREADS=1 python studies/query_side.py [--seeds 1 2 3 4 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import visavis
from visavis.core.encoded import Encoded
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.metrics.ranking import random_rsum
from visavis.models.base import get_vectors
from visavis.training.recipes.files import read_recipe
from visavis.training.training_run import prepare_training

FEATURES = "backbone/flickr8k_mobilenet_v2_pool_fp16.npy"
HEADS, WORDS = "heads-flickr8k", "words-flickr8k/single"
SHARED = {"training.threads": 1, "training.metric_batches": 1, "evaluation.protocol": "plain"}
# Sizes that train in half a minute on one core.
SMALL = {
    "model.embedding_dim": 256,
    "model.hidden_dim": 512,
    "epochs": 6,
    "evaluation.validation_images": 300,
}
# The runs with which each setting starts.
BASES = {"english": "start", "other words": "", "more captions": "one caption", "raw": ""}
SMALL_WORDS = SMALL | {"model.num_filters": 128, "model.word_dim": 64}


def other_word(word: str) -> str:
    """Replace a word by letters of its hash."""
    return "".join(chr(97 + byte % 26) for byte in hashlib.sha256(word.encode()).digest()[:6])


def write_part(
    data: Dataset, images: np.ndarray, folder: Path, features: np.ndarray, *, translate: bool
) -> None:
    """Write a part of the data set with its image features."""
    part = data.take(images)
    sentences = list[str]()
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


def new_text_side(first: Path, settings: dict[str, Any], folder: Path) -> None:
    """Write a model with the image side of a run and new word embeddings for new captions."""
    module, matcher = prepare_training(read_recipe(WORDS, settings))
    model = visavis.load(first)
    matcher.get_submodule("visual").load_state_dict(
        model.matcher.get_submodule("visual").state_dict()
    )
    standardization = model.processor.standardization
    replace(module.processor, standardization=standardization).save(matcher, folder)


def query_time(run: Path, texts: list[str]) -> float:
    """Median time of one text query in ms."""
    model = visavis.load(run, device="cpu")
    times = []
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
    head = sum(
        weight.numel() for part in ("text", "whitening") for _, weight in parts.get(part, ())
    )
    encoder = () if model.processor.text is None else model.processor.text_encoder.parameters()
    return head + sum(weight.numel() for weight in encoder)


class Study:
    """Runs and results of one seed after the other, in a folder.

    Args:
        folder: Folder of the runs. Finished ones are kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.seed = 0
        self.rsum = dict[str, list[float]]()
        self.data = open_dataset("flickr8k")
        self.features = np.load(resolve_path(FEATURES))
        self.sizes = list[int]()
        self.times = list[float]()
        splits = np.array([image.split for image in self.data.images])
        train = np.flatnonzero(splits == "train")
        held_out = np.flatnonzero(splits != "train")
        halves = [np.sort(np.concatenate([train[start::2], held_out])) for start in (0, 1)]
        [captions] = visavis.features("flickr8k", text="minilm")
        self.stored = {"text": {"features": str(captions.folder), "granularity": "pooled"}}
        self.old = self.stored | self.part("first-half", halves[0])
        self.new = self.stored | self.part("second-half", halves[1])
        self.other = self.part("second-half-other-words", halves[1], translate=True)
        self.whole = {"visual.features": str(resolve_path(FEATURES))}

    def part(self, name: str, images: np.ndarray, *, translate: bool = False) -> dict[str, Any]:
        """Write a part of the data set once."""
        place = self.folder / name
        if not place.exists():
            write_part(self.data, images, place, self.features, translate=translate)
        return {"data.path": str(place), "visual.features": str(place / "features.npy")}

    def train(
        self, name: str, recipe: str, settings: dict[str, Any], index: Path | None = None
    ) -> Path:
        """Train, or use the run of an earlier call, and return its folder."""
        run = self.folder / f"{name}-{self.seed}"
        if (run / "run.toml").exists() and not (run / "result.json").exists():
            visavis.train(resume=run)
        elif not run.exists():
            overrides = SHARED | settings | {"seed": self.seed}
            visavis.train(recipe, out=run, index=index, overrides=overrides)
        result = json.loads((run / "result.json").read_text())
        self.rsum.setdefault(name, []).append(result["rsum"])
        print(f"{name}, seed {self.seed}: {result['rsum']:.1f}", flush=True)
        return run

    def compare(self, name: str, items: Path, recipe: str, both: dict[str, Any]) -> None:
        """Train the text side on items, and both sides."""
        text = {key: value for key, value in both.items() if not key.startswith("visual.")}
        self.train(f"{name}, text side", recipe, text, items)
        self.train(f"{name}, both sides", recipe, both)

    def run_seed(self, seed: int, settings: list[str]) -> None:
        """Train all runs of a seed."""
        self.seed = seed
        if "english" in settings or "other words" in settings:
            first = self.train("start", HEADS, SMALL | self.old)
            items = write_items(first, self.data, self.features, self.folder / f"items-{seed}.npy")
        if "english" in settings:
            self.compare("english", items, HEADS, {"start_from": str(first)} | SMALL | self.new)
        if "other words" in settings:
            words = SMALL_WORDS | self.other
            start = self.folder / f"new-words-{seed}"
            if not start.exists():
                new_text_side(first, SHARED | words | {"seed": seed}, start)
            self.compare("other words", items, WORDS, {"start_from": str(start)} | words)
        if "more captions" in settings:
            whole = SMALL | self.stored | self.whole
            first = self.train("one caption", HEADS, whole | {"data.training_captions": 1})
            file = self.folder / f"one-caption-items-{seed}.npy"
            items = write_items(first, self.data, self.features, file)
            self.compare("more captions", items, HEADS, {"start_from": str(first)} | whole)
        if "raw" in settings:
            self.compare("raw", resolve_path(FEATURES), HEADS, SMALL | self.whole)
        if "distilled" in settings:
            self.distill()

    def distill(self) -> None:
        """Train a teacher, and a small text side with its scores."""
        teacher = self.train("teacher", HEADS, self.whole)
        file = self.folder / f"teacher-items-{self.seed}.npy"
        items = write_items(teacher, self.data, self.features, file)
        supervision = f"DistillationSupervision(teacher={str(teacher)!r})"
        changes = {"phases.0.supervision": supervision}
        student = self.train("distilled", WORDS, changes, items)
        self.train("without teacher", WORDS, {}, items)
        self.times.append(query_time(student, list(self.data.split("test").captions[:300])))
        self.sizes = [text_parameters(run) for run in (teacher, student)]

    def print_results(self) -> None:
        """Print a table of gains, and the distilled text encoder."""
        rsum = {name: np.array(values) for name, values in self.rsum.items()}
        print(
            "| setting | start | text side | both sides | share of the gain |\n|---|---|---|---|---|"
        )
        for name, base in BASES.items():
            if f"{name}, text side" not in rsum:
                continue
            text = rsum[f"{name}, text side"]
            both = rsum[f"{name}, both sides"]
            start = rsum.get(base, np.full(len(text), random_rsum([5] * 1000)[0]))
            share = 100 * (text - start) / (both - start)
            print(
                f"| {name} | {start.mean():.1f} | {text.mean():.1f} | {both.mean():.1f} | "
                f"{share.mean():.1f} % ({share.min():.1f} to {share.max():.1f}) |"
            )
        if self.times:
            teacher, student, alone = (
                rsum[name] for name in ("teacher", "distilled", "without teacher")
            )
            share = 100 * student / teacher
            large, small = self.sizes
            print(
                f"Distilled: {student.mean():.1f} of {teacher.mean():.1f}, {share.mean():.1f} % "
                f"({share.min():.1f} to {share.max():.1f}). Text parameters: {small / 1e6:.2f} of "
                f"{large / 1e6:.2f} million. Median query: {statistics.median(self.times):.2f} ms. "
                f"Without the teacher: {alone.mean():.1f}."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--out", type=Path, help="folder for the runs (default: removed at the end)"
    )
    parser.add_argument("--only", nargs="+", default=[*BASES, "distilled"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        study = Study(options.out or Path(temporary))
        for seed in options.seeds:
            study.run_seed(seed, options.only)
        study.print_results()


if __name__ == "__main__":
    main()
