"""What a trained run retrieves among the test scenes, judged by their scene graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from visavis.data.scenes import Facts, Scene, SceneGraphs, draw, relevance, words
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_all
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SHOWN = 192
"""Side in pixels at which scenes are drawn again for the report."""


@dataclass(frozen=True)
class RetrievedScene:
    """One retrieved scene. fits: everything the query states is true of it. own: the query was written for it."""

    scene: Scene
    score: float
    fits: bool
    own: bool = False

    @cached_property
    def picture(self) -> Picture:
        """The scene, drawn again at ``SHOWN`` pixels a side."""
        return draw(self.scene, SHOWN)

    def describe(self) -> str:
        """The content of the scene in words."""
        things = [words.article(f"{thing.size} {thing.color} {thing.pattern} {thing.shape}") for thing in self.scene.things]
        return f"{words.join(things)} {words.PLACES[self.scene.background][0]}"


@dataclass(frozen=True)
class Retrieval:
    """A query and its top scenes, best first."""

    query: str
    scenes: tuple[RetrievedScene, ...]

    @property
    def num_fitting(self) -> int:
        return sum(scene.fits for scene in self.scenes)


class Gallery:
    """The test scenes of a data set, encoded by one run."""

    def __init__(self, run: Path, scenes: Path):
        data_module, matcher = open_run(run, recipe_of(run), Silent())
        self.model, self.test = Retriever(matcher, data_module.processor), data_module.data.split("test")
        self.graphs = SceneGraphs.open(scenes)
        self.scenes = [self.graphs.scenes[i] for i in self.test.image_rows]
        self.images, _ = data_module.encode(matcher, self.test)

    def search(self, query: str, facts: Facts, *, top: int = 5, own: int | None = None) -> Retrieval:
        """The top scenes for a sentence. facts: what it states. own: the index of the scene that it was written for."""
        scores = score_all(self.model.matcher, self.images, self.model.encode_text([query]))[:, 0]
        first = torch.argsort(scores, descending=True, stable=True)[:top].tolist()
        degrees = relevance([self.scenes[i] for i in first], [facts])[:, 0]
        scenes = (
            RetrievedScene(self.scenes[i], scores[i].item(), bool(degree == 1), i == own) for i, degree in zip(first, degrees, strict=True)
        )
        return Retrieval(query, tuple(scenes))

    def captions(self, count: int, *, seed: int = 0) -> list[Retrieval]:
        """The scenes retrieved for random test captions, each of another scene, none picked by its result."""
        rng = np.random.default_rng(seed)
        images = rng.choice(len(self.test.images), count, replace=False)
        chosen = [(int(rng.choice(self.test.captions_of[i])), int(i)) for i in images]
        facts = self.graphs.facts
        return [self.search(self.test.captions[c], facts[self.test.caption_rows[c]], own=i) for c, i in chosen]
