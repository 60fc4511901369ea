"""The demo: draw synthetic scenes, train three objectives, compare them, search, and write a
report.

Its folder has ``report.html``, ``table.md``, ``table.json``, ``retrieval.png``, ``curves.png``,
``demo.json`` (runs and durations), ``scenes/`` (a data set) and a run folder for each training.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.data_uris import jpeg_uri
from visavis.core.environment import package_versions, quote_argument, shell_command
from visavis.core.errors import RunError
from visavis.core.progress import BarsOnly, NoProgress, Progress
from visavis.core.stopping import kept_if_stopped
from visavis.core.table_formats import format_markdown, format_text
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import (
    CaptionFacts,
    Scene,
    SceneGraphs,
    fact_relevance,
    render_scene,
    write_synthetic_scenes,
)
from visavis.data.synthetic import lexicon as words
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.research.experiments.jobs import Job, RunOutcome, Workers
from visavis.research.experiments.setting_results import SettingResults
from visavis.research.reports.html_report import (
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    TrainingCurve,
    figure_to_png,
    new_figure,
    plot_training_curves,
    quote_shortened,
    render_report,
    with_own_style,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe, with_absolute_paths
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped

if TYPE_CHECKING:
    from PIL.Image import Image


# The learning rates of the demo's recipes were selected by studies/demo_rates.py with the same
# budget for each objective.
LEARNING_RATES = (3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
TUNING_SEEDS = (1, 2, 3)
TUNING_SCENE_SEED = 1
"""Seed of the scenes on which the learning rates were selected. The demo draws other scenes."""


DEMO_QUERIES = (
    ("a yellow square", CaptionFacts(({"shape": "square", "color": "yellow"},))),
    ("a checkered circle", CaptionFacts(({"pattern": "checkered", "shape": "circle"},))),
    ("a red shape on a wooden table", CaptionFacts(({"color": "red"},), background="table")),
)
"""Text queries of the demo with their content. Like the recipes, they were selected on other scenes
than those of the demo.
"""
NUM_SHOWN_CAPTIONS = 5
OBJECTIVE_NOTES = {
    "TripletHN": "pushes only the hardest negative of a batch",
    "VLC": "pushes all negatives, harder ones more: a softmax",
    "Unified": "a softmax over the negatives with the margin of a triplet loss",
}
SCENE_SIDE = 192
"""Side length in pixels at which scenes are rendered for the report."""


@dataclass(frozen=True)
class DemoSettings:
    """Size of a demo.

    Attributes:
        num_train: Scenes of the training split.
        num_val: Scenes of the validation split.
        num_test: Scenes of the test split.
        recipes: Recipe of each compared objective.
        seeds: Training seeds of each objective.
        scene_seed: Seed of the scenes. It must not be ``TUNING_SCENE_SEED``.
        overrides: Overrides of all recipes.
    """

    num_train: int = 1500
    num_val: int = 200
    num_test: int = 500
    recipes: tuple[str, ...] = ("demo-triplet-hn", "demo-vlc", "demo-unified")
    seeds: tuple[int, ...] = (1, 2)
    scene_seed: int = 2026
    overrides: dict[str, Any] = field(default_factory=dict)


def run_demo(
    out: str | Path | None, progress: Progress, settings: DemoSettings | None = None
) -> Path:
    """Run the demo in a new folder, by default ``runs/demo-<n>``, and return the folder."""
    folder = (
        storage.create_numbered_folder("runs/demo")
        if out is None
        else storage.prepare_empty_folder(out)
    )
    progress.message(f"All files of the demo are written to {folder}")
    sentence = f"{folder} has the finished parts. visavis demo starts again in another folder."
    with kept_if_stopped(lambda: sentence):
        try:
            _run_stages(folder, progress, settings or DemoSettings())
        except Stopped as stopped:
            # The process ends as without the workers, which had caught the signal.
            signal.raise_signal(stopped.signal)
            raise KeyboardInterrupt from None
    return folder


def _run_stages(folder: Path, progress: Progress, settings: DemoSettings) -> None:
    scenes = folder / "scenes"
    seconds = dict[str, float]()
    sizes = {f"num_{name}": vars(settings)[f"num_{name}"] for name in ("train", "val", "test")}

    @contextmanager
    def stage(name: str, activity: str) -> Iterator[float]:
        """Report the start of a stage, and record its duration."""
        progress.message(f"{len(seconds) + 1} of 4  {activity}")
        started = time.perf_counter()
        yield started
        seconds[name] = round(time.perf_counter() - started, 1)

    activity = f"drawing {sum(sizes.values()):,} scenes and writing five captions for each"
    with stage("drawing", activity) as started:
        write_synthetic_scenes(
            scenes,
            **sizes,
            seed=settings.scene_seed,
            on_progress=lambda done, total: progress.update(
                "scenes", done, total, done / (time.perf_counter() - started)
            ),
        )
    with stage("features", "encoding the images with the shipped encoder, once for all runs"):
        recipe = read_recipe(settings.recipes[0], dict(settings.overrides))
        cache_features(
            open_dataset(scenes),
            EncoderSpec("visual", "scenes", recipe.visual.granularity),  # type: ignore[arg-type]
            on_progress=lambda *done: progress.update("images", *done),
        )
    activity = f"training {len(settings.recipes)} objectives with {len(settings.seeds)} seeds each"
    with stage("training", activity):
        runs = _train(folder, progress, settings)
    activity = f"comparing on {settings.num_test:,} test scenes, searching, writing the report"
    with stage("report", activity):
        rates = {
            _objective_name(name): read_recipe(name).phases[-1].optimizer.lr
            for name in settings.recipes
        }
        listed = ", ".join(f"{name} {lr:g}" for name, lr in rates.items())
        note = (
            f"Learning rates: {listed}. Each is the best of the same {len(LEARNING_RATES)} from "
            f"{LEARNING_RATES[0]:g} to {LEARNING_RATES[-1]:g} by "
            f"the mean validation RSUM of {len(TUNING_SEEDS)} seeds on other synthetic scenes"
        )
        measured = {
            name: [
                (run.measured_metrics, run.conditions)
                for run in group
                if run.conditions is not None
            ]
            for name, group in runs.items()
        }
        compared = SettingResults.from_runs(measured, note)
        table = format_text(compared.table(row_notes=compared.spread_kinds))
        progress.message(f"\n{table}\n{compared.caption()}\n")
        best = max(
            (run for group in runs.values() for run in group), key=lambda run: run.validation_rsum
        )
        scene_search = SceneSearch(best.folder, scenes)
        searches = [scene_search.search(query, facts) for query, facts in DEMO_QUERIES]
        captions = scene_search.captions(NUM_SHOWN_CAPTIONS)
        results = DemoResults(scenes, runs, best, compared, captions, searches, seconds)
        write_demo_report(results, folder)
    for search in searches:
        progress.message(
            f"        “{search.query}”: {search.num_relevant} of the top {len(search.scenes)} "
            "images are relevant"
        )
    progress.message(
        f"\nReport: {folder / 'report.html'}  ({sum(seconds.values()):.0f} s in total)"
    )
    progress.message(
        f"Search the images: {shell_command()} search {best.folder} 'two stars in the snow'"
    )


def _train(folder: Path, progress: Progress, settings: DemoSettings) -> dict[str, list[RunOutcome]]:
    """Train all runs in parallel processes, each exactly as ``visavis train RECIPE --data
    .../scenes seed=...``.
    """
    jobs = []
    runs = dict[str, list[RunOutcome]]()
    data = {"data.path": os.path.realpath(folder / "scenes")}
    for recipe in settings.recipes:
        name = _objective_name(recipe)
        for seed in settings.seeds:
            overrides = {**settings.overrides, **data, "seed": seed}
            values = with_absolute_paths(read_recipe(recipe, overrides)).to_dict()
            jobs.append(Job(name, seed, values, folder / f"{name.lower()}-{seed}"))
        runs[name] = []
    with Workers().start(threads=1, progress=BarsOnly(progress)) as run_jobs:
        for number, run in enumerate(run_jobs(jobs), 1):
            if run.failure:
                raise RunError(run.failure)
            runs[run.setting].append(run)
            rsum, recall = (run.measured_metrics[metric] for metric in ("rsum", "t2i_r1"))
            progress.message(
                f"        {run.setting}, seed {run.seed}: RSUM {rsum:.1f}, text to image R@1 "
                f"{recall:.1f} %  ({run.seconds:.0f} s)"
            )
            progress.update("runs", number, len(jobs), 0.0)
    return {name: sorted(finished, key=lambda run: run.seed) for name, finished in runs.items()}


def _objective_name(recipe: str) -> str:
    """Name of a recipe's objective."""
    return type(read_recipe(recipe).phases[-1].objective).__name__


@dataclass(frozen=True)
class DemoResults:
    """Results of a finished demo.

    Attributes:
        scenes: Folder of the synthetic scenes.
        runs: Runs by the name of their objective.
        best: Run with the highest validation RSUM.
        compared: Comparison of the objectives.
        captions: Images that the best run retrieved for random test captions.
        searches: Images that the best run retrieved for text queries.
        seconds: Duration of each stage.
    """

    scenes: Path
    runs: Mapping[str, Sequence[RunOutcome]]
    best: RunOutcome
    compared: SettingResults
    captions: Sequence[SceneSearchResult]
    searches: Sequence[SceneSearchResult]
    seconds: Mapping[str, float]


def write_demo_report(results: DemoResults, folder: Path) -> None:
    """Write the tables, plots and the report of a demo. ``report.html`` is written last."""
    storage.write_text(folder / "table.md", format_markdown(results.compared.table("setting")))
    storage.write_json(folder / "table.json", results.compared.to_json())
    summary = {
        "best_run": results.best.folder.name,
        "runs": {name: [run.folder.name for run in runs] for name, runs in results.runs.items()},
        "searches": {search.query: search.num_relevant for search in results.searches},
        "seconds": dict(results.seconds),
        "threads": torch.get_num_threads(),
        "versions": package_versions(),
    }
    storage.write_json(folder / "demo.json", summary)
    logs = [
        TrainingCurve(name, RunFolder(run.folder).read_log())
        for name, runs in results.runs.items()
        for run in runs
    ]
    retrieval = ThemedImage.draw(
        partial(plot_retrievals, results.captions), folder / "retrieval.png"
    )
    curves = ThemedImage.draw(partial(plot_training_curves, logs), folder / "curves.png")
    # How far the order of the rows can be trusted.
    widths = sorted(
        (spread.high - spread.low, row.name)
        for row in results.compared.rows
        if (spread := row.spread("rsum"))
    )
    certainty = "One seed does not show whether a difference is due to chance."
    if widths:
        lowest, stable = widths[0]
        highest, unstable = widths[-1]
        certainty = (
            f"RSUM differs between seeds by {lowest:.1f} ({stable}) to {highest:.1f} ({unstable}). "
            "Smaller differences between objectives may be due to chance."
        )
    ranks = []
    for result in results.captions:
        sources = [rank for rank, scene in enumerate(result.scenes, 1) if scene.is_source]
        found = f"at rank {sources[0]}" if sources else "is not among them"
        ranks.append(f"“{result.query}”: its image {found}")
    num_shown = len(results.captions[0].scenes)
    page = render_report(
        "demo",
        results=results,
        conditions=results.compared.conditions,
        num_seeds=len(next(iter(results.runs.values()))),
        threads=torch.get_num_threads(),
        results_table=results.compared.table("objective", row_notes=OBJECTIVE_NOTES),
        order=", then ".join(
            f"{row.name} {row.mean('rsum'):.1f}"
            for row in sorted(results.compared.rows, key=lambda row: -row.mean("rsum"))
        ),
        spread=certainty,
        retrieval=retrieval,
        retrieval_alt=f"Captions with the top {num_shown} images. {'; '.join(ranks)}.",
        searches=results.searches,
        scene_uri=lambda scene: jpeg_uri(scene.render, quality=88),
        curves=curves,
        run=quote_argument(results.best.folder),
        scenes=quote_argument(results.scenes),
        stages=", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items()),
        run_names=", ".join(run.folder.name for runs in results.runs.values() for run in runs),
    )
    storage.write_text(folder / "report.html", page)  # last, so that a report is always complete


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
        self.model = Retriever(matcher, data_module.processor)
        self.test = data_module.data.split("test")
        self.graphs = SceneGraphs.open(scenes)
        self.scenes = [self.graphs.scenes[i] for i in self.test.image_rows]
        self.images, _ = data_module.encode(matcher, self.test)

    def search(
        self, query: str, facts: CaptionFacts, *, top: int = 5, source: int | None = None
    ) -> SceneSearchResult:
        """Retrieve the top scenes for a text query with known content, best first. ``source`` is
        the scene whose caption the query is.
        """
        scores = score_all_pairs(self.model.matcher, self.images, self.model.encode_text([query]))[
            :, 0
        ]
        # Ties keep the order of the data.
        indices = torch.argsort(scores, descending=True, stable=True)[:top].tolist()
        relevance = fact_relevance([self.scenes[i] for i in indices], [facts])[:, 0]
        scenes = (
            RetrievedScene(self.scenes[i], scores[i].item(), bool(value == 1), i == source)
            for i, value in zip(indices, relevance, strict=True)
        )
        return SceneSearchResult(query, tuple(scenes))

    def captions(self, count: int, *, seed: int = 0) -> list[SceneSearchResult]:
        """Retrieve scenes for random test captions of different scenes."""
        rng = np.random.default_rng(seed)
        images = rng.choice(len(self.test.images), count, replace=False)
        chosen = [(int(rng.choice(self.test.captions_of[i])), int(i)) for i in images]
        facts = self.graphs.facts
        return [
            self.search(self.test.captions[c], facts[self.test.caption_rows[c]], source=i)
            for c, i in chosen
        ]


@with_own_style
def plot_retrievals(
    retrievals: Sequence[SceneSearchResult], theme: PlotTheme = LIGHT_THEME
) -> bytes:
    """Plot each query above its top scenes, best on the left. Relevant scenes are framed and have a
    check mark.
    """
    # All lengths are in inches.
    width = 8.6
    columns = max(len(retrieval.scenes) for retrieval in retrievals)
    side = (width - 0.24) / columns - 0.12
    gap = 0.12
    head = 0.4
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
            left = 0.18 + column * (side + gap)
            bottom = top - head - side
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
