"""Robustness probes of a run: minimal pairs scored by its best model, and recall on edited captions and images."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from PIL.Image import Image
from PIL.ImageFilter import GaussianBlur
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import resolve_path
from visavis.errors import RunError
from visavis.evaluation import Evaluation, evaluate
from visavis.memory_budget import MemoryLimit
from visavis.models.base import evaluation_mode
from visavis.models.inference import device_score, score_indexed_pairs
from visavis.models.retriever import Retriever
from visavis.progress import Progress
from visavis.recipes.data_module import first_images
from visavis.robustness.caption_edits import MinimalPair, add_typo, make_minimal_pairs
from visavis.robustness.probe_results import ProbeReport, ProbeResult, RecallChange, recall_changes, results_by_kind
from visavis.runs.open_run import open_run, read_run_recipe
from visavis.spec import validate_int
from visavis.synthetic import ClipAnnotations, SceneGraphs
from visavis.synthetic.lexicon import STYLES
from visavis.synthetic.minimal_pairs import make_scene_pairs
from visavis.types import Encoded, collect_batches, concatenate

BLUR_RADIUS = 0.02
"""Standard deviation of the blur, as a share of the shorter side."""
CROPPED_SIDE = 0.8
"""Share of both sides that a central crop keeps."""
JPEG_QUALITY = 10
"""JPEG quality, from 1 to 95."""
IMAGE_BATCH_SIZE = 64
"""Number of images that are edited and encoded together."""


def _blur(image: Image) -> Image:
    return image.filter(GaussianBlur(BLUR_RADIUS * min(image.size)))


def _crop(image: Image) -> Image:
    width, height = image.size
    left, top = round((1 - CROPPED_SIDE) / 2 * width), round((1 - CROPPED_SIDE) / 2 * height)
    return image.crop((left, top, width - left, height - top))


def _compress(image: Image) -> Image:
    raw = io.BytesIO()
    image.convert("RGB").save(raw, "jpeg", quality=JPEG_QUALITY)
    return Pillow.open(raw).convert("RGB")


IMAGE_EDITS: dict[str, Callable[[Image], Image]] = {
    "blurred": _blur,
    "cropped": _crop,
    "JPEG": _compress,
    "gray": lambda image: image.convert("L").convert("RGB"),
}
"""Edits that keep images recognizable, by name."""


def probe_run(
    run: Path,
    images: int,
    progress: Progress,
    data: str | None = None,
    split: str | None = None,
    memory: MemoryLimit = None,
    *,
    with_edits: bool = True,
) -> ProbeReport:
    """Probe the best model of a run.

    Args:
        run: Run folder.
        images: Number of images, the first ones of the split. 0 for all.
        progress: Receives the progress.
        data: Another data set than that of the run.
        split: Name of the split. Default: the test split of the recipe.
        memory: Memory for blocks of scores.
        with_edits: Also measure recall after edits that keep captions true and images recognizable.

    Returns:
        The results.

    Raises:
        RunError: If the model cannot read new captions, or no caption can be edited.
    """
    recipe = read_run_recipe(run, data, memory)
    data_module, matcher = open_run(run, recipe, progress)
    if data_module.processor.stored_text_features:
        raise RunError(f"{run}: expected a model that encodes captions, got one that reads stored text features. Probe another run.")
    probed = first_images(data_module.data.split(split or recipe.evaluation.test), validate_int(images, "images", 0))
    model = Retriever(matcher, data_module.processor, memory=recipe.memory or None)
    inputs = _ProbeInputs(model, probed, *data_module.encode(matcher, probed), progress)
    source, results = _probe_captions(inputs, resolve_path(recipe.data.path))
    if not results:
        raise RunError(
            f"{probed.name}: expected a caption that can be edited, got none in {len(probed.images):,} images. Probe more images."
        )
    changes, skipped = _probe_edits(inputs, stored_features=bool(recipe.visual.features)) if with_edits else ((), ())
    kind = f"{recipe.model['kind']} on {recipe.visual.encoder or recipe.visual.features}"
    return ProbeReport(run, kind, probed.name, len(probed.images), source, results, changes, skipped)


@dataclass(frozen=True, eq=False)
class _ProbeInputs:
    """A model with the probed data set, encoded without edits."""

    model: Retriever
    data: Dataset
    visual: Encoded
    text: Encoded
    progress: Progress

    def encode_texts(self, texts: list[str]) -> Encoded:
        """Encode texts. Those that are captions of the data set are encoded already, and half of the texts of a probe are."""
        row_of = {caption: row for row, caption in enumerate(self.data.captions)}
        encoded = [self.text]
        if new := [text for text in dict.fromkeys(texts) if text not in row_of]:
            row_of |= {text: row for row, text in enumerate(new, len(self.text))}
            encoded.append(self.model.encode_text(new, lambda done, total: self.progress.update("captions", done, total, 0.0)))
        return collect_batches(encoded)[torch.tensor([row_of[text] for text in texts])]

    def encode_images(self, edit: Callable[[Image], Image], name: str) -> Encoded:
        parts = []
        for start in range(0, len(self.data.images), IMAGE_BATCH_SIZE):
            batch = self.data.images[start : start + IMAGE_BATCH_SIZE]
            parts.append(self.model.encode_visual([edit(image.open()) for image in batch]))
            self.progress.update(f"images, {name}", start + len(batch), len(self.data.images), 0.0)
        return concatenate(parts)

    def score_pairs(self, images: Tensor, text: Encoded, texts: Tensor) -> np.ndarray:
        with evaluation_mode(self.model.matcher):
            scores = score_indexed_pairs(self.model.matcher, self.visual, text, images, texts, self.model.memory)
        return scores.double().numpy()

    def evaluate(self, visual: Encoded, text: Encoded, data: Dataset) -> Evaluation:
        ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
        with evaluation_mode(self.model.matcher):
            return evaluate(visual, text, device_score(self.model.matcher), *ids, memory=self.model.memory)


def _probe_captions(inputs: _ProbeInputs, folder: Path) -> tuple[str, tuple[ProbeResult, ...]]:
    """By what edited captions are false, and the accuracies."""
    if os.path.isfile(folder / "clips.jsonl"):
        return "the ground truth of the synthetic clips", _probe_clip_partners(inputs, ClipAnnotations.open(folder))
    if os.path.isfile(folder / "scenes.jsonl"):
        return "the ground truth of the synthetic scenes", _probe_pairs(inputs, _scene_pairs(SceneGraphs.open(folder), inputs.data))
    return "word lists, not checked by people", _probe_pairs(inputs, make_minimal_pairs(inputs.data))


def _probe_pairs(inputs: _ProbeInputs, pairs: list[MinimalPair]) -> tuple[ProbeResult, ...]:
    """Score both captions of each minimal pair against its image. Every text is encoded once."""
    if not pairs:
        return ()
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.true, pair.edited)))
    number = {text: i for i, text in enumerate(texts)}
    encoded, images = inputs.encode_texts(texts), torch.tensor([pair.image for pair in pairs])
    true, edited = (
        inputs.score_pairs(images, encoded, torch.tensor([number[text] for text in captions]))
        for captions in ([pair.true for pair in pairs], [pair.edited for pair in pairs])
    )
    return results_by_kind(pairs, true, edited)


def _probe_clip_partners(inputs: _ProbeInputs, truth: ClipAnnotations) -> tuple[ProbeResult, ...]:
    """Score each caption against its clip and the partner clip, which shows the same frames in another order."""
    data = inputs.data
    probed = {image.name: i for i, image in enumerate(data.images)}
    annotated = {name: i for i, name in enumerate(truth.names)}
    partner = np.array([probed.get(truth.names[truth.partner_of[annotated[image.name]]], -1) for image in data.images])
    subsets = np.array([truth.subset[annotated[image.name]] for image in data.images])
    image_of = data.image_of
    results = []
    for subset, title in (("order", "order of events"), ("direction", "direction")):
        captions = np.flatnonzero((partner[image_of] >= 0) & (subsets[image_of] == subset))
        if len(captions):
            true, other = (
                inputs.score_pairs(torch.from_numpy(clips), inputs.text, torch.from_numpy(captions))
                for clips in (image_of[captions], partner[image_of[captions]])
            )
            results.append(ProbeResult.from_scores(title, true, other, same_words=True))
    return tuple(results)


def _probe_edits(inputs: _ProbeInputs, *, stored_features: bool) -> tuple[tuple[RecallChange, ...], tuple[str, ...]]:
    """Recall changes by typos and image edits, and a sentence if images cannot be edited."""
    rng, first = np.random.default_rng(0), inputs.data.first_captions(1)
    texts = inputs.encode_texts([*first.captions, *(add_typo(caption, rng) for caption in first.captions)])
    correct, with_typos = (
        inputs.evaluate(inputs.visual, part, first) for part in (texts[: len(first.captions)], texts[len(first.captions) :])
    )
    changes = recall_changes("typos in captions", correct, with_typos)
    if stored_features or inputs.model.processor.visual is None:
        return changes, ("Images were not edited: the model reads stored image features (visual.features).",)
    if any(image.location is None or image.is_video for image in inputs.data.images):
        return changes, (f"Images were not edited: {inputs.data.name} has no image files, or clips.",)
    # Both evaluations encode pixels: stored features can differ from those of the encoder.
    before = inputs.evaluate(inputs.encode_images(lambda image: image, "unchanged"), inputs.text, inputs.data)
    for name, edit in IMAGE_EDITS.items():
        after = inputs.evaluate(inputs.encode_images(edit, name), inputs.text, inputs.data)
        changes += recall_changes(f"{name} images", before, after)
    return changes, ()


def _scene_pairs(graphs: SceneGraphs, data: Dataset) -> list[MinimalPair]:
    """Minimal pairs of each scene, in the style whose shape names are the most frequent in the captions of the data set."""
    captions = " ".join(data.captions).lower()
    style = max(STYLES.values(), key=lambda style: sum(captions.count(name) for names in style.shapes.values() for name in set(names)))
    return [
        MinimalPair(pair.kind, image, pair.true.text, pair.edited.text)
        for image, row in enumerate(data.image_rows)
        for pair in make_scene_pairs(graphs.scenes[row], np.random.default_rng(int(row)), style)
    ]
