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
from visavis.core.progress import NoProgress
from visavis.data import Dataset, open_dataset
from visavis.data.dataset_reader import resolve_path
from visavis.training.recipes.data_module import prepare_training
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe

FEATURES = "backbone/flickr8k_mobilenet_v2_pool_fp16.npy"
HEADS, WORDS = "heads-flickr8k", "words-flickr8k/single"
SHARED = {"training.threads": 1, "training.metric_batches": 1}


def other_word(word: str) -> str:
    """Replace a word by letters of its hash."""
    return "".join(chr(97 + byte % 26) for byte in hashlib.sha256(word.encode()).digest()[:6])


def write_part(
    data: Dataset, images: np.ndarray, folder: Path, features: np.ndarray, *, translate: bool
) -> dict[str, Any]:
    """Write a part of the data set, and return the overrides that name it."""
    part, words = data.take(images), other_word if translate else str
    sentences = [" ".join(map(words, caption.lower().split())) for caption in part.captions]
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


def write_items(run: Path, whole: dict[str, Any], file: Path) -> Path:
    """Write the image vectors of a run for the whole data set, and their ids."""
    recipe = read_recipe(run / "run.toml", whole)
    module, matcher = open_run(run, recipe, NoProgress())
    vectors = module.encode(matcher, module.data)[0].vectors
    assert isinstance(vectors, torch.Tensor)
    np.save(file, vectors.numpy())
    names = [image.name for image in module.data.images]
    file.with_suffix(".ids.txt").write_text("\n".join(names))
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
