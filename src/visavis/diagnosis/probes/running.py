"""The probes of a run: minimal pairs scored by its best model, and its recalls on edited captions and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.minimal_pairs import MinimalPair, pairs_of_captions, with_typo
from visavis.data.reading import find_file
from visavis.data.scenes import MovingScenes, SceneGraphs
from visavis.data.scenes.minimal_pairs import scene_pairs
from visavis.data.scenes.style import STYLES, Style
from visavis.diagnosis.probes.pictures import EDITS
from visavis.diagnosis.probes.result import Cost, Probes, Slice, costs_of, slices_of
from visavis.errors import RunError
from visavis.evaluation import Evaluation, evaluate
from visavis.memory import Memory
from visavis.models.base import evaluating
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_from_cpu, score_listed_pairs
from visavis.progress import Progress
from visavis.runs.folder import open_run, recipe_of
from visavis.spec import whole_number
from visavis.training.data_module import first_images
from visavis.types import Encoded, concatenate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

AT_ONCE = 64
"""Pictures that are edited and encoded together."""


def probe_run(
    run: Path,
    images: int,
    progress: Progress,
    data: str | None = None,
    split: str | None = None,
    memory: Memory = None,
    *,
    harmless: bool = True,
) -> Probes:
    """Probe a run's best model on the first so many images of a split, of its own data or of others; 0: all.

    harmless: also edits that leave captions true and pictures recognizable. Raises RunError for a model that reads no new sentences,
    or where no caption could be edited.
    """
    recipe = recipe_of(run, data, memory)
    data_module, matcher = open_run(run, recipe, progress)
    if data_module.processor.stored_texts:
        raise RunError(f"{run} reads stored features of captions: no edited caption can be read, so that there is nothing to probe.")
    probed = first_images(data_module.data.split(split or recipe.evaluation.test), whole_number(images, "images", 0))
    model = Retriever(matcher, data_module.processor, memory=recipe.memory or None)
    visual, text = data_module.encode(matcher, probed)
    prober = _Prober(model, probed, visual, text, progress)
    folder = find_file(recipe.data.path)
    slices: tuple[Slice, ...] = ()
    if (folder / "clips.jsonl").is_file():
        source, slices = "the truth of the drawn clips", prober.partners(MovingScenes.open(folder))
    else:
        drawn = (folder / "scenes.jsonl").is_file()
        source = "the truth of the drawn scenes" if drawn else "lists of words, not looked at by anybody"
        pairs = _pairs_of_scenes(SceneGraphs.open(folder), probed) if drawn else pairs_of_captions(probed)
        slices = prober.pairs(pairs)
    if not slices:
        raise RunError(f"none of the captions of {len(probed.images):,} images of {probed.name} could be edited so that they become false.")
    costs, left_out = prober.harmless(stored=bool(recipe.visual.features)) if harmless else ((), ())
    kind = f"{recipe.model['kind']} on {recipe.visual.tower or recipe.visual.features}"
    return Probes(run, kind, probed.name, len(probed.images), source, slices, costs, left_out)


class _Prober:
    """A model with the images and captions that it is probed on, encoded as they are."""

    def __init__(self, model: Retriever, data: Dataset, visual: Encoded, text: Encoded, progress: Progress):
        self.model, self.data, self.visual, self.text, self.progress = model, data, visual, text, progress

    def pairs(self, pairs: list[MinimalPair]) -> tuple[Slice, ...]:
        """Both captions of each case against its image; every text is encoded once."""
        if not pairs:
            return ()
        texts = list(dict.fromkeys(text for pair in pairs for text in (pair.true, pair.edited)))
        place = {text: number for number, text in enumerate(texts)}
        encoded, images = self._texts(texts), torch.tensor([pair.image for pair in pairs])
        true, edited = (
            self._scores(images, encoded, torch.tensor([place[text] for text in chosen]))
            for chosen in ([pair.true for pair in pairs], [pair.edited for pair in pairs])
        )
        return slices_of(pairs, true, edited)

    def partners(self, truth: MovingScenes) -> tuple[Slice, ...]:
        """Of every caption, its clip against the partner, of which it is false and which shows the same frames in another order."""
        place = {image.name: number for number, image in enumerate(self.data.images)}
        known = {name: number for number, name in enumerate(truth.names)}
        partner = np.array([place.get(truth.names[truth.partner_of[known[image.name]]], -1) for image in self.data.images])
        kinds = np.array([truth.subset[known[image.name]] for image in self.data.images])
        image = self.data.image_of
        slices = []
        for kind, said in (("order", "order of events"), ("direction", "direction")):
            captions = np.flatnonzero((partner[image] >= 0) & (kinds[image] == kind))
            if len(captions):
                own, other = (
                    self._scores(torch.from_numpy(clips), self.text, torch.from_numpy(captions))
                    for clips in (image[captions], partner[image[captions]])
                )
                slices.append(Slice.of(said, own, other, same_words=True))
        return tuple(slices)

    def harmless(self, *, stored: bool) -> tuple[tuple[Cost, ...], tuple[str, ...]]:
        """What typos and edits of pictures cost, and a sentence where pictures cannot be edited. stored: features of images are read."""
        rng, first = np.random.default_rng(0), self.data.first_captions(1)
        texts = self._texts([*first.captions, *(with_typo(caption, rng) for caption in first.captions)])
        correct, typed = (
            self._evaluated(self.visual, some, first) for some in (texts[: len(first.captions)], texts[len(first.captions) :])
        )
        costs = costs_of("typos in captions", correct, typed)
        if stored or self.model.processor.visual is None:
            return costs, ("Pictures were not edited: the model reads stored features of images (visual.features).",)
        if any(image.bytes is None or image.is_clip for image in self.data.images):
            return costs, (f"Pictures were not edited: {self.data.name} has none, or clips.",)
        # before and after by the same way: pixels through the tower, not features that were stored
        before = self._evaluated(self._pictures(lambda picture: picture, "as they are"), self.text, self.data)
        for name, edit in EDITS.items():
            costs += costs_of(f"{name} pictures", before, self._evaluated(self._pictures(edit, name), self.text, self.data))
        return costs, ()

    def _pictures(self, edit: Callable[[Picture], Picture], said: str) -> Encoded:
        parts = []
        for start in range(0, len(self.data.images), AT_ONCE):
            some = self.data.images[start : start + AT_ONCE]
            parts.append(self.model.encode_visual([edit(image.open()) for image in some]))
            self.progress.work(f"pictures, {said}", start + len(some), len(self.data.images), 0.0)
        return concatenate(parts)

    def _texts(self, texts: list[str]) -> Encoded:
        return self.model.encode_text(texts, lambda done, total: self.progress.work("captions", done, total, 0.0))

    def _scores(self, images: Tensor, text: Encoded, texts: Tensor) -> np.ndarray:
        with evaluating(self.model.matcher):
            scores = score_listed_pairs(self.model.matcher, self.visual, text, images, texts, self.model.memory)
        return scores.double().numpy()

    def _evaluated(self, visual: Encoded, text: Encoded, data: Dataset) -> Evaluation:
        ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
        with evaluating(self.model.matcher):
            return evaluate(visual, text, score_from_cpu(self.model.matcher), *ids, memory=self.model.memory)


def _pairs_of_scenes(graphs: SceneGraphs, data: Dataset) -> list[MinimalPair]:
    """The cases of each scene, in the words in which its world is captioned."""
    style = _style_of(data)
    return [
        MinimalPair(pair.kind, image, pair.true.text, pair.edited.text)
        for image, row in enumerate(data.image_rows)
        for pair in scene_pairs(graphs.scenes[row], np.random.default_rng(int(row)), style)
    ]


def _style_of(data: Dataset) -> Style:
    """The style whose names of shapes the captions use most."""
    said = " ".join(data.captions).lower()
    return max(STYLES.values(), key=lambda style: sum(said.count(name) for names in style.shapes.values() for name in set(names)))
