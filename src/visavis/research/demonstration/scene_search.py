"""Search of a trained run among the test scenes, with relevance by scene graphs, and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from visavis.core.progress import NoProgress
from visavis.data.synthetic import CaptionFacts, Scene, SceneGraphs, fact_relevance, render_scene
from visavis.data.synthetic import lexicon as words
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.research.reports.plotting import (
    LIGHT_THEME,
    PlotTheme,
    figure_to_png,
    new_figure,
    quote_shortened,
)
from visavis.training.runs.open_run import open_run, read_run_recipe

if TYPE_CHECKING:
    from PIL.Image import Image


SCENE_SIDE = 192
"""Side length in pixels at which scenes are rendered for the report."""


@dataclass(frozen=True)
class RetrievedScene:
    """A retrieved scene.

    Attributes:
        scene: Content of the scene.
        score: Cosine similarity to the query.
        relevant: Whether everything in the query is true of the scene.
        is_source: Whether the query is a caption of the scene.
    """

    scene: Scene
    score: float
    relevant: bool
    is_source: bool = False

    @cached_property
    def render(self) -> Image:
        """The scene, rendered with ``SCENE_SIDE`` pixels per side."""
        return render_scene(self.scene, SCENE_SIDE)

    def describe(self) -> str:
        """Return the content of the scene as text."""
        things = [
            words.with_article(f"{thing.size} {thing.color} {thing.pattern} {thing.shape}")
            for thing in self.scene.things
        ]
        return f"{words.join_phrases(things)} {words.BACKGROUND_PHRASES[self.scene.background][0]}"


@dataclass(frozen=True)
class SceneSearchResult:
    """A query and its top scenes.

    Attributes:
        query: Text of the query.
        scenes: Retrieved scenes, best first.
    """

    query: str
    scenes: tuple[RetrievedScene, ...]

    @property
    def num_relevant(self) -> int:
        """Number of relevant scenes."""
        return sum(scene.relevant for scene in self.scenes)


class SceneSearch:
    """The test scenes of a data set, encoded by one run.

    Args:
        run: Run folder.
        scenes: Folder of the synthetic scenes.
    """

    def __init__(self, run: Path, scenes: Path):
        data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
        self.model, self.test = (
            Retriever(matcher, data_module.processor),
            data_module.data.split("test"),
        )
        self.graphs = SceneGraphs.open(scenes)
        self.scenes = [self.graphs.scenes[i] for i in self.test.image_rows]
        self.images, _ = data_module.encode(matcher, self.test)

    def search(
        self, query: str, facts: CaptionFacts, *, top: int = 5, source: int | None = None
    ) -> SceneSearchResult:
        """Retrieve the top scenes for a text query.

        Args:
            query: Text of the query.
            facts: Content of the query.
            top: Number of scenes.
            source: Index of the scene of which the query is a caption. Default: none.

        Returns:
            The scenes, best first.
        """
        scores = score_all_pairs(self.model.matcher, self.images, self.model.encode_text([query]))[
            :, 0
        ]
        indices = torch.argsort(scores, descending=True, stable=True)[:top].tolist()
        relevance = fact_relevance([self.scenes[i] for i in indices], [facts])[:, 0]
        scenes = (
            RetrievedScene(self.scenes[i], scores[i].item(), bool(value == 1), i == source)
            for i, value in zip(indices, relevance, strict=True)
        )
        return SceneSearchResult(query, tuple(scenes))

    def captions(self, count: int, *, seed: int = 0) -> list[SceneSearchResult]:
        """Retrieve scenes for random test captions of different scenes.

        Args:
            count: Number of captions.
            seed: Seed of the random choice.

        Returns:
            A result for each caption.
        """
        rng = np.random.default_rng(seed)
        images = rng.choice(len(self.test.images), count, replace=False)
        chosen = [(int(rng.choice(self.test.captions_of[i])), int(i)) for i in images]
        facts = self.graphs.facts
        return [
            self.search(self.test.captions[c], facts[self.test.caption_rows[c]], source=i)
            for c, i in chosen
        ]


def plot_retrievals(
    retrievals: Sequence[SceneSearchResult], theme: PlotTheme = LIGHT_THEME
) -> bytes:
    """Plot each query above its top scenes, best on the left. Relevant scenes are framed and have a
    check mark.

    Args:
        retrievals: Queries with their scenes.
        theme: Colors.

    Returns:
        A PNG.
    """
    width, columns = 8.6, max(len(retrieval.scenes) for retrieval in retrievals)
    side, gap, head = (width - 0.24) / columns - 0.12, 0.12, 0.4
    height = len(retrievals) * (head + side + 0.16) + 0.42
    figure = new_figure(width, height, theme)
    for row, retrieval in enumerate(retrievals):
        top = height - 0.08 - row * (head + side + 0.16)
        figure.text(
            0.18 / width,
            (top - 0.27) / height,
            quote_shortened(retrieval.query),
            size=12.5,
            color=theme.foreground,
            va="baseline",
        )
        for column, scene in enumerate(retrieval.scenes):
            left, bottom = 0.18 + column * (side + gap), top - head - side
            axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
            axes.imshow(scene.render, interpolation="lanczos")
            axes.set(xticks=[], yticks=[])
            color = theme.positive if scene.is_source or scene.relevant else theme.grid
            for spine in axes.spines.values():
                spine.set(
                    color=color,
                    linewidth=4.0 if scene.is_source else 2.4 if scene.relevant else 1.0,
                )
            if scene.is_source or scene.relevant:
                badge = {
                    "boxstyle": "circle,pad=0.22",
                    "facecolor": color if scene.is_source else theme.background,
                    "edgecolor": color,
                    "linewidth": 1.6,
                }
                mark_color = theme.background if scene.is_source else color
                axes.text(
                    0.9,
                    0.1,
                    "✓",
                    transform=axes.transAxes,
                    size=11,
                    color=mark_color,
                    bbox=badge,
                    ha="center",
                    va="center",
                    weight="bold",
                )
    key = "filled check mark: the image of the caption      open check mark: another image of which the whole caption is true"
    figure.text(0.18 / width, 0.16 / height, key, size=9.5, color=theme.foreground, alpha=0.75)
    return figure_to_png(figure, colors=256)
